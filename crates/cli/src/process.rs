//! What the system knows about this process.

use std::ffi::c_int;

/// A line of Linux's `/proc/self/status` without its name; `None` on other systems.
fn status(name: &str) -> Option<String> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.strip_prefix(':')?.trim().to_owned())
}

/// The most memory that was in use at a time, file pages that were looked at included; `None`
/// where the system does not say.
pub(crate) fn peak_memory_bytes() -> Option<u64> {
    let kib: u64 = status("VmHWM")?.strip_suffix(" kB")?.parse().ok()?;
    Some(kib << 10)
}

/// Whether the parent wants a signal ignored, as `nohup` does; `false` where the system does not
/// say.
pub(crate) fn ignores(signal: c_int) -> bool {
    let mask = status("SigIgn").and_then(|mask| u64::from_str_radix(&mask, 16).ok());
    mask.is_some_and(|mask| mask & (1 << (signal - 1)) != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn linux_tells_the_peak() {
        let peak = peak_memory_bytes();
        assert_eq!(peak.is_some(), cfg!(target_os = "linux"));
        assert!(
            peak.is_none_or(|peak| (1 << 20..1 << 40).contains(&peak)),
            "{peak:?}"
        );
        // SIGKILL cannot be ignored.
        assert!(!ignores(9));
    }
}
