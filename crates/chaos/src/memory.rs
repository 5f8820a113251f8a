//! Memory exhaustion of a process, by a Linux control group that refuses its next page. The kernel
//! then kills it, as on a machine with full memory. Needs root.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use rustix::process::Pid;

/// Mount points of groups that limit memory: version 2 has one tree, version 1 one for memory.
const ROOTS: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/memory"];

/// The file with a group's limit in bytes, in versions 2 and 1.
const BOUNDS: [&str; 2] = ["memory.max", "memory.limit_in_bytes"];

/// A control group whose processes get no further page. It is removed on drop if it has no process
/// left.
#[derive(Debug)]
pub(crate) struct MemoryCgroup {
    folder: PathBuf,
}

impl MemoryCgroup {
    /// Makes a group as close to this process's own as the system allows.
    ///
    /// # Errors
    /// A system without memory control groups, or without permission to make one.
    pub(crate) fn new() -> Result<Self> {
        let own = fs::read_to_string("/proc/self/cgroup").context("no control groups")?;
        let group = places(&own).iter().find_map(|place| Self::below(place));
        group.context("no control group bounds memory here")
    }

    fn below(place: &Path) -> Option<Self> {
        let folder = place.join(format!("paceline-chaos-{}", std::process::id()));
        fs::create_dir(&folder).ok()?;
        let group = Self { folder };
        // A folder that does not limit memory has no such file.
        let mut bounds = BOUNDS.iter().map(|name| group.folder.join(name));
        let bound = bounds.find(|file| file.exists())?;
        fs::write(bound, "0").ok()?;
        Some(group)
    }

    /// Moves processes in. They keep their pages.
    pub(crate) fn take(&self, pids: &[Pid]) -> io::Result<()> {
        for pid in pids {
            fs::write(self.members(), pid.as_raw_nonzero().to_string())?;
        }
        Ok(())
    }

    /// Whether all of its processes have ended.
    pub(crate) fn is_empty(&self) -> io::Result<bool> {
        Ok(fs::read_to_string(self.members())?.trim().is_empty())
    }

    fn members(&self) -> PathBuf {
        self.folder.join("cgroup.procs")
    }
}

impl Drop for MemoryCgroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.folder); // one that still has processes stays
    }
}

/// Folders below which a group may limit memory, this process's own first. `own` is the text of
/// `/proc/self/cgroup`: lines of a number, controllers and a path. In version 2 a group with
/// processes cannot delegate controllers, so the groups above it are candidates too.
fn places(own: &str) -> Vec<PathBuf> {
    let mut places = Vec::new();
    for line in own.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else {
            continue;
        };
        let root = match controllers {
            "" => ROOTS[0],
            "memory" => ROOTS[1],
            _ => continue,
        };
        let place = Path::new(root).join(path.trim_start_matches('/'));
        let above = place.ancestors().take_while(|it| it.starts_with(root));
        places.extend(above.map(Path::to_owned));
    }
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_looked_for_from_the_own_one_upwards() {
        let all = [
            "/sys/fs/cgroup/a.slice/b",
            "/sys/fs/cgroup/a.slice",
            "/sys/fs/cgroup",
        ];
        assert_eq!(places("0::/a.slice/b\n"), all.map(PathBuf::from));
        let mixed = "9:name=systemd:/\n4:memory:/job\n1:cpu:/job\n0::/\n";
        let all = [
            "/sys/fs/cgroup/memory/job",
            "/sys/fs/cgroup/memory",
            "/sys/fs/cgroup",
        ];
        assert_eq!(places(mixed), all.map(PathBuf::from));
        assert!(places("nonsense\n").is_empty());
    }

    #[test]
    fn a_folder_that_bounds_nothing_is_no_group() {
        let place = tempfile::tempdir().unwrap();
        assert!(MemoryCgroup::below(place.path()).is_none());
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0, "none stays");
    }
}
