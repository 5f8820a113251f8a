//! This process: its program, its parent, and the signals that it must ignore.

use std::ffi::c_int;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use tempfile::TempDir;

use crate::machine::own_status;

/// Whether the parent set a signal to ignored, as `nohup` does; `false` if the system does not
/// report it.
pub fn ignores(signal: c_int) -> bool {
    let mask = own_status("SigIgn").and_then(|mask| u64::from_str_radix(&mask, 16).ok());
    mask.is_some_and(|mask| mask & (1 << (signal - 1)) != 0)
}

/// Ends this process after any end of its parent. The parent holds the other end of standard input
/// and writes nothing there. It started this process from a long-lived thread. On Linux that
/// thread's end kills this process, because a stopped process does not notice the end of its input.
pub fn end_with_parent() -> io::Result<()> {
    #[cfg(target_os = "linux")]
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    let wait = || {
        // An error of standard input is its end, too.
        let _ = io::copy(&mut io::stdin(), &mut io::sink());
        std::process::exit(1);
    };
    let thread = std::thread::Builder::new().name("parent".to_owned());
    thread.spawn(wait).map(drop)
}

/// The path of this program, to start more processes of it. Valid even after an update replaced or
/// removed the file.
///
/// On Linux this is the kernel's own link to the running program. Elsewhere it is a hard link to
/// the file, made at the first call. If that fails (the folder for temporary files is on another
/// disk), it is the file itself.
///
/// # Errors
/// The system does not know the running program.
pub fn own_program() -> io::Result<PathBuf> {
    if cfg!(target_os = "linux") && Path::new(KERNELS_LINK).exists() {
        return Ok(KERNELS_LINK.into());
    }
    static LINKED: OnceLock<Option<(TempDir, PathBuf)>> = OnceLock::new();
    let program = std::env::current_exe()?;
    let linked = LINKED.get_or_init(|| second_name(&program).ok());
    Ok(linked.as_ref().map_or(program, |(_, path)| path.clone()))
}

/// In a forked child before `exec` this is still the parent's program.
const KERNELS_LINK: &str = "/proc/self/exe";

/// A hard link to `program` in a temporary folder, which keeps its bytes.
fn second_name(program: &Path) -> io::Result<(TempDir, PathBuf)> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("paceline");
    std::fs::hard_link(program, &path)?;
    Ok((folder, path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_name_outlives_the_first() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("program");
        std::fs::write(&program, "old").unwrap();
        let Ok((_kept, path)) = second_name(&program) else {
            eprintln!("SKIPPED a_second_name_outlives_the_first: no hard links here");
            return;
        };
        std::fs::remove_file(&program).unwrap();
        std::fs::write(&program, "new").unwrap();
        assert_eq!(std::fs::read_to_string(path).unwrap(), "old");
        assert!(own_program().unwrap().exists());
    }

    #[test]
    fn linux_tells_the_peak() {
        let peak = crate::machine::peak_memory_bytes();
        assert_eq!(peak.is_some(), cfg!(target_os = "linux"));
        assert!(
            peak.is_none_or(|peak| (1 << 20..1 << 40).contains(&peak)),
            "{peak:?}"
        );
        // SIGKILL cannot be ignored.
        assert!(!ignores(9));
    }
}
