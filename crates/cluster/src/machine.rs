//! This machine's memory, GPUs and programs, queried from the system; every value may be absent.

use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use paceline_base::Bytes;
use paceline_process::Process;

/// Time limit of a queried program. `nvidia-smi` takes 2 s on machines whose driver is not kept
/// loaded.
const ASK_LIMIT: Duration = Duration::from_secs(10);
/// Poll interval for its exit.
const POLL: Duration = Duration::from_millis(10);
const ANSWER_BYTES_MAX: u64 = 64 << 10;

/// Smallest block that the C library maps separately, and most bytes that it keeps at the end of an
/// arena. By default the first freed block of 8 MB raises the threshold, so that such blocks are
/// kept. Six requests of 8 MB then left 50 MB, and a trim returned 14. With this bound they left
/// 13, and a trim returned all (two cores, November 2026). Smaller blocks are not mapped: each 4
/// KiB of a mapping costs a page fault.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const LARGE_BYTES: i32 = 1 << 20;

/// Makes the allocator return large blocks to the system when they are freed. For servers, whose
/// requests may be large; call it once, at the start.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
pub fn keep_no_large_blocks() {
    // SAFETY: takes no pointers; the allocator locks its own state.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE_BYTES);
        libc::mallopt(libc::M_TRIM_THRESHOLD, LARGE_BYTES);
    }
}

/// Other systems do this by themselves.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub const fn keep_no_large_blocks() {}

/// Returns freed memory of this process to the system. The C library keeps free memory between used
/// blocks, tens of megabytes after long requests. Cost: a walk over free blocks, about a
/// millisecond.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
pub fn give_back_free_memory() {
    // SAFETY: takes no pointers; the allocator locks its own state.
    unsafe { libc::malloc_trim(0) };
}

/// Other systems do this by themselves.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub const fn give_back_free_memory() {}

/// Standard output of `program`, if it succeeds in time. It runs in an empty folder: in the user's,
/// Python would take a folder `pip/` for pip.
pub fn ask(program: &str, arguments: &[&str]) -> Option<String> {
    let folder = tempfile::tempdir().ok()?;
    let mut command = Command::new(program);
    command.args(arguments).current_dir(folder.path());
    command.env("PYTHONSAFEPATH", "1");
    command.stdin(Stdio::null()).stderr(Stdio::null());
    let mut child = Process::start(command.stdout(Stdio::piped())).ok()?;
    let out = child.take_stdout()?;
    let reader = std::thread::spawn(move || {
        let mut text = String::new();
        let read = out.take(ANSWER_BYTES_MAX).read_to_string(&mut text);
        read.is_ok().then_some(text)
    });
    let start = Instant::now();
    while !child.has_ended() {
        if start.elapsed() > ASK_LIMIT {
            return None; // which kills it
        }
        std::thread::sleep(POLL);
    }
    let ending = child.reap();
    reader.join().ok().flatten().filter(|_| ending.is_success())
}

/// The first line of what `program` prints.
pub fn first_line(program: &str, arguments: &[&str]) -> Option<String> {
    let text = ask(program, arguments)?;
    let line = text.lines().map(str::trim).find(|line| !line.is_empty())?;
    Some(line.to_owned())
}

/// A line of Linux's `/proc/self/status` without its name; `None` on other systems.
pub fn own_status(name: &str) -> Option<String> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.strip_prefix(':')?.trim().to_owned())
}

/// Peak memory of this process in bytes, including mapped file pages. `None` if the system does not
/// report it.
pub fn peak_memory_bytes() -> Option<u64> {
    let kib: u64 = own_status("VmHWM")?.strip_suffix(" kB")?.parse().ok()?;
    Some(kib << 10)
}

/// Memory of this process in bytes now, including file pages; `None` if the system does not report
/// it.
pub fn memory_bytes() -> Option<u64> {
    let kib: u64 = own_status("VmRSS")?.strip_suffix(" kB")?.parse().ok()?;
    Some(kib << 10)
}

/// Main memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MainMemory {
    pub total: Bytes,
    /// Memory available to programs, if the system reports it.
    pub available: Option<Bytes>,
}

/// Memory available to programs; all memory if the system does not report it.
pub fn available() -> Option<Bytes> {
    memory().map(|memory| memory.available.unwrap_or(memory.total))
}

/// This machine's memory.
pub fn memory() -> Option<MainMemory> {
    if let Ok(text) = std::fs::read_to_string("/proc/meminfo") {
        return parse_meminfo(&text);
    }
    let total = first_line("sysctl", &["-n", "hw.memsize"])?.parse().ok()?;
    Some(MainMemory {
        total: Bytes(total),
        available: None,
    })
}

fn parse_meminfo(text: &str) -> Option<MainMemory> {
    let field = |name: &str| -> Option<Bytes> {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        Some(Bytes(kib << 10))
    };
    Some(MainMemory {
        total: field("MemTotal:")?,
        available: field("MemAvailable:"),
    })
}

/// A GPU of NVIDIA's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MachineGpu {
    pub name: String,
    pub memory: Bytes,
}

/// NVIDIA's GPUs, as their driver lists them.
pub fn nvidia() -> Vec<MachineGpu> {
    let query = [
        "--query-gpu=name,memory.total",
        "--format=csv,noheader,nounits",
    ];
    let text = ask("nvidia-smi", &query).unwrap_or_default();
    text.lines().filter_map(parse_gpu).collect()
}

fn parse_gpu(line: &str) -> Option<MachineGpu> {
    let (name, mib) = line.rsplit_once(',')?;
    Some(MachineGpu {
        name: name.trim().to_owned(),
        memory: Bytes(mib.trim().parse::<u64>().ok()?.checked_mul(1 << 20)?),
    })
}

/// Memory of this machine's first GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuMemory {
    pub total: Bytes,
    /// The most that programs can have now.
    pub limit: Bytes,
    /// `iogpu.wired_limit_mb` that leaves the system what it needs, where that is more than the
    /// limit: Apple silicon only.
    pub raised_mb: Option<u64>,
}

/// Memory of this machine's first GPU; `None` where the system names none.
pub fn gpu_memory() -> Option<GpuMemory> {
    if cfg!(all(target_os = "macos", target_arch = "aarch64")) {
        let read = |key| first_line("sysctl", &["-n", key])?.parse::<u64>().ok();
        return Some(of_apple(read("hw.memsize")?, read("iogpu.wired_limit_mb")));
    }
    let query = [
        "--query-gpu=memory.total,memory.free",
        "--format=csv,noheader,nounits",
    ];
    parse_gpu_memory(&first_line("nvidia-smi", &query)?)
}

/// GPU memory of Apple silicon with `total` bytes. Without a user's limit (0 or none), Metal
/// permits three quarters of totals over 36 GB, and two thirds of others. `plan`'s catalogue of
/// hardware has the same rule. The system and other programs need an eighth, and not less than 4
/// GiB.
fn of_apple(total: u64, wired_limit_mb: Option<u64>) -> GpuMemory {
    let own = wired_limit_mb.filter(|mb| *mb > 0).map(|mb| mb << 20);
    let usual = match total > 36 << 30 {
        true => total / 4 * 3,
        false => total / 3 * 2,
    };
    let limit = own.unwrap_or(usual).min(total);
    let most = total.saturating_sub((total / 8).max(4 << 30));
    GpuMemory {
        total: Bytes(total),
        limit: Bytes(limit),
        raised_mb: (most > limit).then_some(most >> 20),
    }
}

fn parse_gpu_memory(line: &str) -> Option<GpuMemory> {
    let mib = |text: &str| {
        Some(Bytes(
            text.trim().parse::<u64>().ok()?.checked_mul(1 << 20)?,
        ))
    };
    let (total, free) = line.split_once(',')?;
    Some(GpuMemory {
        total: mib(total)?,
        limit: mib(free)?,
        raised_mb: None,
    })
}

/// Major and minor version of the C library.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
pub fn system_version() -> Option<(u32, u32)> {
    // SAFETY: takes nothing, and returns a static string that ends with a zero byte.
    let text = unsafe { std::ffi::CStr::from_ptr(libc::gnu_get_libc_version()) };
    parse_version(text.to_str().ok()?)
}

/// Major and minor version of macOS; `None` on other systems without glibc.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub fn system_version() -> Option<(u32, u32)> {
    let text = ask("sw_vers", &["-productVersion"]).filter(|_| cfg!(target_os = "macos"));
    parse_version(text?.trim())
}

/// The first two numbers of a version such as `15.7.1`.
fn parse_version(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.split('.').map(|part| part.parse().ok());
    let major = numbers.next()??;
    Some((major, numbers.next().unwrap_or(Some(0))?))
}

/// Major version of the newest CUDA that NVIDIA's driver runs.
pub fn cuda_major() -> Option<u32> {
    parse_cuda_major(&ask("nvidia-smi", &[])?)
}

fn parse_cuda_major(text: &str) -> Option<u32> {
    let (_, rest) = text.split_once("CUDA Version: ")?;
    rest.split(|c: char| !c.is_ascii_digit())
        .next()?
        .parse()
        .ok()
}

/// Thunderbolt ports or controllers that the system shows.
pub fn thunderbolt() -> usize {
    if cfg!(target_os = "macos") {
        let text = ask("networksetup", &["-listallhardwareports"]).unwrap_or_default();
        let ports = text
            .lines()
            .filter(|line| line.starts_with("Hardware Port: Thunderbolt"));
        return ports.count();
    }
    let domains = std::fs::read_dir(Path::new("/sys/bus/thunderbolt/devices"));
    let names = domains
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.file_name());
    names
        .filter(|name| name.to_string_lossy().starts_with("domain"))
        .count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_come_from_programs_that_end_well() {
        assert_eq!(
            first_line("sh", &["-c", "echo; echo ' a '; echo b"]).as_deref(),
            Some("a")
        );
        assert_eq!(first_line("sh", &["-c", "echo a; exit 3"]), None);
        assert_eq!(first_line("sh", &["-c", "echo a >&2"]), None);
        assert_eq!(first_line("/nonexistent/program", &[]), None);
    }

    #[test]
    fn memory_is_read_from_the_kernels_table() {
        let text = "MemTotal:       24000000 kB\nMemFree: 1 kB\nMemAvailable:   1000 kB\n";
        let memory = parse_meminfo(text).unwrap();
        assert_eq!(memory.total, Bytes(24_000_000 << 10));
        assert_eq!(memory.available, Some(Bytes(1000 << 10)));
        for text in ["", "MemTotal: x kB", "MemTotal: 5", "MemTotalX: 5 kB"] {
            assert_eq!(parse_meminfo(text), None, "{text}");
        }
        assert!(memory_of_this_machine_is_sound());
    }

    /// Metal lends a share of main memory, unless the user has set another.
    #[test]
    fn the_gpus_memory_is_what_the_system_lends() {
        const GIB: u64 = 1 << 30;
        for (gib, limit_mb, lent, raised_mb) in [
            (64, Some(0), 48 * GIB, Some(56 << 10)),
            (64, None, 48 * GIB, Some(56 << 10)),
            (64, Some(58_000), 58_000 << 20, None),
            (24, Some(0), 16 * GIB, Some(20 << 10)),
            (8, None, 8 * GIB / 3 * 2, None),
            (8, Some(1 << 40), 8 * GIB, None),
        ] {
            let memory = of_apple(gib * GIB, limit_mb);
            let expected = GpuMemory {
                total: Bytes(gib * GIB),
                limit: Bytes(lent),
                raised_mb,
            };
            assert_eq!(memory, expected, "{gib} GiB, {limit_mb:?}");
        }
        let nvidia = parse_gpu_memory("81559, 80994").unwrap();
        let mib = [nvidia.total.0, nvidia.limit.0].map(|bytes| bytes >> 20);
        assert_eq!((mib, nvidia.raised_mb), ([81_559, 80_994], None));
        for line in ["", "[N/A], [N/A]", "5"] {
            assert_eq!(parse_gpu_memory(line), None, "{line}");
        }
    }

    fn memory_of_this_machine_is_sound() -> bool {
        memory().is_none_or(|memory| memory.total.0 > 1 << 28)
    }

    #[test]
    fn gpus_are_read_from_nvidias_list() {
        let gpu = parse_gpu("NVIDIA H200, 143771").unwrap();
        assert_eq!(
            (gpu.name.as_str(), gpu.memory),
            ("NVIDIA H200", Bytes(143_771 << 20))
        );
        for line in ["", "no comma", "name, [N/A]", "name, 99999999999999999999"] {
            assert_eq!(parse_gpu(line), None, "{line}");
        }
        let text = "| NVIDIA-SMI 580.1  Driver Version: 580.1  CUDA Version: 13.0  |";
        assert_eq!(parse_cuda_major(text), Some(13));
        assert_eq!(parse_cuda_major("CUDA Version: N/A"), None);
        assert_eq!(parse_cuda_major(""), None);
    }

    #[test]
    fn versions_have_two_numbers() {
        for (text, version) in [
            ("2.35", Some((2, 35))),
            ("15.7.1", Some((15, 7))),
            ("26", Some((26, 0))),
            ("2.x", None),
            ("", None),
        ] {
            assert_eq!(parse_version(text), version, "{text:?}");
        }
        assert_eq!(
            system_version().is_some(),
            cfg!(any(target_env = "gnu", target_os = "macos"))
        );
    }
}
