//! The limits of a template's process.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Memory beside the program itself. The largest prompt that a rendering may write has 16 MiB; it
/// is there as JSON, as values, as text and as JSON again.
pub(super) const MEMORY_BYTES: u64 = 192 << 20;

/// Address space beside that: allocators reserve 64 MiB for each thread that allocates, of which
/// they use little. There are three threads.
const RESERVED_BYTES: u64 = 3 * (64 << 20);

/// The longest time for one rendering on a machine that does nothing else.
pub(super) const COMPUTING: Duration = Duration::from_secs(2);

/// Share of it for the end of a process with all its memory, which takes some 50 ms.
const ENDING: Duration = Duration::from_millis(100);

/// Open files: the control channel, standard output and error, and what `/proc` is read with.
const FILES: u64 = 16;

/// Length of a clock tick of `/proc/self/stat`, on every architecture (`USER_HZ`).
const TICK_MS: u64 = 10;

/// Sets all limits but that of computing. They hold until the process ends.
///
/// # Errors
/// The system's error when it refuses a limit.
pub(super) fn set() -> io::Result<()> {
    limit(Resource::Core, 0)?;
    limit(Resource::Nofile, FILES)?;
    limit(Resource::Fsize, 0)?;
    // The memory that is in use now belongs to the program: its own data and stacks.
    if let Some(data) = status_bytes("VmData:") {
        limit(Resource::Data, data + MEMORY_BYTES)?;
    }
    if let Some(all) = status_bytes("VmSize:") {
        limit(Resource::As, all + MEMORY_BYTES + RESERVED_BYTES)?;
    }
    Ok(())
}

/// The time that this process may compute.
pub(super) struct Clock {
    /// `/proc/self/stat`, which has the computing time used; opened before the process may open no
    /// more files.
    stat: Option<File>,
}

impl Clock {
    pub(super) fn open() -> Self {
        let stat = File::open("/proc/self/stat").ok();
        Self { stat }
    }

    /// Allows 0.9 to 1.9 s of computing from now on; the kernel ends the process after it by
    /// SIGXCPU.
    pub(super) fn allow(&self) {
        let Some(computed) = self.computed() else {
            return; // the parent's deadline holds
        };
        let hard = getrlimit(Resource::Cpu).maximum;
        let new = Rlimit {
            current: Some(end_s(computed)),
            maximum: hard,
        };
        let _ = setrlimit(Resource::Cpu, new); // a lower limit of the user's stays
    }

    /// How long this process has computed; `None` where the system does not say.
    fn computed(&self) -> Option<Duration> {
        let mut bytes = [0; 1024];
        let len = self.stat.as_ref()?.read_at(&mut bytes, 0).ok()?;
        let text = std::str::from_utf8(&bytes[..len]).ok()?;
        // The name, second of the fields, may hold spaces and brackets.
        let rest = text.get(text.rfind(')')? + 2..)?;
        let mut fields = rest.split(' ').skip(11);
        let mut ticks = || fields.next()?.parse::<u64>().ok();
        Some(Duration::from_millis((ticks()? + ticks()?) * TICK_MS))
    }
}

/// The kernel's limit for a rendering that begins when the process has `computed` so long: it
/// counts whole seconds of the process's life.
const fn end_s(computed: Duration) -> u64 {
    computed
        .saturating_add(COMPUTING.saturating_sub(ENDING))
        .as_secs()
}

fn limit(resource: Resource, value: u64) -> io::Result<()> {
    let value = getrlimit(resource)
        .maximum
        .map_or(value, |hard| value.min(hard));
    let new = Rlimit {
        current: Some(value),
        maximum: Some(value),
    };
    Ok(setrlimit(resource, new)?)
}

/// A line of Linux's `/proc/self/status`, which is in KiB; `None` on other systems.
fn status_bytes(name: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rendering_ends_before_its_time_is_over() {
        for (computed_ms, end) in [(0, 1), (90, 1), (100, 2), (999, 2), (1000, 2), (1100, 3)] {
            let computed = Duration::from_millis(computed_ms);
            assert_eq!(end_s(computed), end, "{computed_ms}");
            let allowed = Duration::from_secs(end) - computed;
            assert!(allowed <= COMPUTING - ENDING && allowed > Duration::from_millis(900));
        }
    }

    #[test]
    fn linux_tells_what_a_process_uses() {
        let is_linux = cfg!(target_os = "linux");
        assert_eq!(Clock::open().computed().is_some(), is_linux);
        assert_eq!(status_bytes("VmData:").is_some(), is_linux);
        assert_eq!(status_bytes("VmNothing:"), None);
    }
}
