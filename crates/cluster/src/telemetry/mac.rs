//! Macs: cores, power and heat by IOReport and SMC, as `macmon` reads them, without root.

use super::TelemetrySample;
#[cfg(target_os = "macos")]
use super::{Gpu, files::SystemFiles};

/// Milliseconds of a reading on a Mac: IOReport's counters are means over them.
#[cfg(target_os = "macos")]
const LOOK_MS: u32 = 100;

/// The sensors of this Mac; nothing elsewhere, and for recorded machines.
#[derive(Default, derive_more::Debug)]
#[debug("Mac")]
pub(super) struct Mac {
    #[cfg(target_os = "macos")]
    sampler: Option<macmon::Sampler>,
}

#[cfg(target_os = "macos")]
impl Mac {
    /// Opens the sensors, if the files are this machine's.
    pub(super) fn open(files: &SystemFiles) -> Self {
        let is_real = files.0.as_os_str() == "/";
        let sampler = is_real.then(macmon::Sampler::new).and_then(Result::ok);
        Self { sampler }
    }

    /// Fills in the sensors' values. Blocks for a tenth of a second.
    pub(super) fn fill(&mut self, sample: &mut TelemetrySample) {
        let metrics = self
            .sampler
            .as_mut()
            .map(|sampler| sampler.get_metrics(LOOK_MS));
        let Some(Ok(metrics)) = metrics else { return };
        sample.cpu_busy = Some(metrics.cpu_active_ratio.into());
        // From the lowest kind of core to the highest.
        let cores = metrics.cpu_tiers.iter().flat_map(|tier| &tier.cores);
        sample.core_busy = cores.map(|core| core.active_ratio.into()).collect();
        sample.cpu_mhz = metrics.cpu_tiers.last().map(|tier| tier.freq_mhz.into());
        let memory = &metrics.memory;
        sample.memory_bytes = Some(memory.ram_total);
        sample.memory_available_bytes = Some(memory.ram_total.saturating_sub(memory.ram_usage));
        sample.swap_bytes = Some(memory.swap_total).filter(|bytes| *bytes > 0);
        sample.swap_used_bytes = sample.swap_bytes.map(|_| memory.swap_usage);
        let degrees = [metrics.temp.cpu_temp_avg, metrics.temp.gpu_temp_avg];
        // A missing sensor is absent, or reads 0.
        let known = degrees.into_iter().flatten().map(f64::from);
        let known = known.filter(|c| (1.0..150.0).contains(c));
        sample.temperature_c = known.reduce(f64::max);
        sample.package_watts = Some(f64::from(metrics.cpu_power + metrics.ane_power));
        sample.gpus.push(Gpu {
            name: "Apple GPU".to_owned(),
            busy: Some(metrics.gpu_active_ratio.into()),
            watts: Some(metrics.gpu_power.into()),
            ..Gpu::default()
        });
    }
}

/// Whether the battery is discharging, and its charge, from the output of `pmset -g batt`. `None`
/// for a Mac without one.
pub(super) fn battery(text: &str) -> Option<(bool, f64)> {
    let is_used = text.lines().next()?.contains("'Battery Power'");
    let line = text.lines().find(|line| line.contains("InternalBattery"))?;
    let (before, _) = line.split_once('%')?;
    let digits = before.rsplit(|c: char| !c.is_ascii_digit()).next()?;
    let percent: u8 = digits.parse().ok().filter(|percent| *percent <= 100)?;
    Some((is_used, f64::from(percent) / 100.0))
}

/// Other systems report in files.
#[cfg(not(target_os = "macos"))]
impl Mac {
    pub(super) const fn open(_files: &super::files::SystemFiles) -> Self {
        Self {}
    }

    pub(super) const fn fill(&mut self, _sample: &mut TelemetrySample) {}
}

#[cfg(test)]
mod tests {
    use super::battery;

    #[test]
    fn a_battery_is_read_from_what_pmset_prints() {
        let text = |from: &str, charge: &str| {
            format!(
                "Now drawing from '{from}'\n -InternalBattery-0 (id=4653155)\t{charge}; \
                 discharging; 5:13 remaining present: true\n"
            )
        };
        assert_eq!(battery(&text("Battery Power", "9%")), Some((true, 0.09)));
        assert_eq!(battery(&text("AC Power", "100%")), Some((false, 1.0)));
        assert_eq!(battery("Now drawing from 'AC Power'\n"), None);
        assert_eq!(battery(&text("Battery Power", "999%")), None);
        assert_eq!(battery(&text("Battery Power", "?%")), None);
        assert_eq!(battery(""), None);
    }
}
