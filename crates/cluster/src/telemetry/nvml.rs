//! NVIDIA's graphics processors, by NVML, which is opened at run time if the driver has it.

use super::Gpu;
use super::files::SystemFiles;

/// NVML of this machine; absent without a driver, and for recorded machines.
#[derive(Debug)]
pub(super) struct Nvml {
    #[cfg(target_os = "linux")]
    library: Option<nvml_wrapper::Nvml>,
}

#[cfg(target_os = "linux")]
impl Nvml {
    /// Opens it, if the files are this machine's. Takes some tens of milliseconds.
    pub(super) fn open(files: &SystemFiles) -> Self {
        let is_real = files.0.as_os_str() == "/";
        // Debian's driver package has only the numbered name.
        let open = || {
            nvml_wrapper::Nvml::builder()
                .lib_path("libnvidia-ml.so.1".as_ref())
                .init()
        };
        let library = is_real.then(open).and_then(Result::ok);
        Self { library }
    }

    /// All processors that NVML sees.
    pub(super) fn gpus(&self) -> Vec<Gpu> {
        let Some(nvml) = &self.library else {
            return Vec::new();
        };
        let devices = 0..nvml.device_count().unwrap_or(0);
        devices
            .filter_map(|index| gpu(&nvml.device_by_index(index).ok()?))
            .collect()
    }
}

#[cfg(target_os = "linux")]
fn gpu(device: &nvml_wrapper::Device<'_>) -> Option<Gpu> {
    use nvml_wrapper::bitmasks::device::ThrottleReasons;
    use nvml_wrapper::enum_wrappers::device::TemperatureSensor;
    let memory = device.memory_info().ok();
    let slow = ThrottleReasons::SW_POWER_CAP
        | ThrottleReasons::HW_SLOWDOWN
        | ThrottleReasons::SW_THERMAL_SLOWDOWN
        | ThrottleReasons::HW_THERMAL_SLOWDOWN
        | ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN;
    let reasons = device.current_throttle_reasons().ok();
    let temperature = device.temperature(TemperatureSensor::Gpu).ok();
    Some(Gpu {
        name: device.name().ok()?,
        busy: device
            .utilization_rates()
            .ok()
            .map(|rates| f64::from(rates.gpu) / 100.0),
        memory_bytes: memory.as_ref().map(|memory| memory.total),
        memory_used_bytes: memory.as_ref().map(|memory| memory.used),
        watts: device.power_usage().ok().map(|mw| f64::from(mw) / 1e3),
        temperature_c: temperature.map(f64::from),
        throttled: reasons.map(|reasons| reasons.intersects(slow)),
    })
}

/// Other systems have no NVML.
#[cfg(not(target_os = "linux"))]
impl Nvml {
    pub(super) const fn open(_files: &SystemFiles) -> Self {
        Self {}
    }

    pub(super) const fn gpus(&self) -> Vec<Gpu> {
        Vec::new()
    }
}
