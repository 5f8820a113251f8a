//! Macs: cores, power and heat by IOReport and SMC, as `macmon` reads them, without root.

use super::Sample;
#[cfg(target_os = "macos")]
use super::{Gpu, files::Files};

/// Milliseconds that a look at a Mac takes: IOReport's counters are means over them.
#[cfg(target_os = "macos")]
const LOOK_MS: u32 = 100;

/// The sensors of this Mac; nothing elsewhere, and for recorded machines.
#[derive(Default)]
pub(super) struct Mac {
    #[cfg(target_os = "macos")]
    sampler: Option<macmon::Sampler>,
}

impl std::fmt::Debug for Mac {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Mac")
    }
}

#[cfg(target_os = "macos")]
impl Mac {
    /// Opens the sensors, where the files are this machine's.
    pub(super) fn open(files: &Files) -> Self {
        let is_real = files.0.as_os_str() == "/";
        let sampler = is_real.then(macmon::Sampler::new).and_then(Result::ok);
        Self { sampler }
    }

    /// Fills in what the sensors tell. Blocks for a tenth of a second.
    pub(super) fn fill(&mut self, sample: &mut Sample) {
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
        // A sensor that is not there is none, or reads 0.
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

/// Other systems tell in files.
#[cfg(not(target_os = "macos"))]
impl Mac {
    pub(super) const fn open(_files: &super::files::Files) -> Self {
        Self {}
    }

    pub(super) const fn fill(&mut self, _sample: &mut Sample) {}
}
