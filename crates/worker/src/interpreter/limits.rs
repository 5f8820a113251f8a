//! The limits of a template's process.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Memory on top of the program itself. The largest prompt of a rendering has 16 MiB and exists as
/// JSON, as values, as text and as JSON again.
pub(super) const MEMORY_BYTES: u64 = 192 << 20;

/// Further address space: allocators reserve 64 MiB for each allocating thread and use little of
/// it. There are three threads.
const RESERVED_BYTES: u64 = 3 * (64 << 20);

/// The longest time for one rendering on an otherwise idle machine.
pub(super) const COMPUTING: Duration = Duration::from_secs(2);

/// Part of it for the exit of a process with all its memory, which takes some 50 ms.
const ENDING: Duration = Duration::from_millis(100);

/// Open files: the control channel, standard output and error, and the files of `/proc`.
const FILES: u64 = 16;

/// Length of a clock tick of `/proc/self/stat`, on every architecture (`USER_HZ`).
const TICK_MS: u64 = 10;

/// Sets all limits except that of CPU time. They hold until the process ends.
pub(super) fn set() -> io::Result<()> {
    limit(Resource::Core, 0)?;
    limit(Resource::Nofile, FILES)?;
    limit(Resource::Fsize, 0)?;
    // The memory in use now belongs to the program: its own data and stacks.
    if let Some(data) = status_bytes("VmData:") {
        limit(Resource::Data, data + MEMORY_BYTES)?;
    }
    if let Some(all) = status_bytes("VmSize:") {
        limit(Resource::As, all + MEMORY_BYTES + RESERVED_BYTES)?;
    }
    Ok(())
}

pub(super) struct CpuTimeLimit {
    /// `/proc/self/stat`, which has the CPU time used; opened before the sandbox forbids opening
    /// files.
    stat: Option<File>,
}

impl CpuTimeLimit {
    pub(super) fn open() -> Self {
        let stat = File::open("/proc/self/stat").ok();
        Self { stat }
    }

    /// Allows 0.9 to 1.9 s of CPU time from now on; after that the kernel ends the process by
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

    /// CPU time of this process so far; `None` if the system does not report it.
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

/// The kernel's limit for a rendering that begins at `computed` CPU time: it counts whole seconds
/// since the process started.
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
        assert_eq!(CpuTimeLimit::open().computed().is_some(), is_linux);
        assert_eq!(status_bytes("VmData:").is_some(), is_linux);
        assert_eq!(status_bytes("VmNothing:"), None);
    }
}
