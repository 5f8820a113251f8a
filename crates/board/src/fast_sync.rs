//! Fast sync: waits for Apple's GPUs without the system, by MLX's variable [`FAST_SYNC`].
//!
//! ```text
//! selftest --fast-sync --10,000 crossings without a hang--> qualified (engine-rates.json)
//! up, run:  qualified, or --fast-sync --> on, unless a GPU hung with it
//! a hang    --the worker notes it (fast-sync-hang) and ends--> off in all later processes
//! ```
//!
//! Tensor splits wait for a GPU twice a layer. The system wakes a waiting processor some 150 us
//! late. Without it a wait takes 4 us, but GPUs have hung until a restart of the machine.
//!
//! [`FAST_SYNC`]: paceline_mlx::FAST_SYNC

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use crate::engines::{KeptRates, MeasuredDevice};

/// Crossings without a hang that qualify a machine.
pub const CROSSINGS: usize = 10_000;

/// How MLX waits for a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GpuWait {
    /// By the system.
    Usual,
    Fast,
}

/// The choice of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyncChoice {
    /// Its own wait, also where nothing is qualified or a GPU hung: measurements.
    Always(GpuWait),
    /// Fast waits, unless a GPU hung with them.
    Asked,
    /// The environment's choice, else fast waits where a device is qualified for them; unless a
    /// GPU hung.
    Qualified,
}

/// Facts of this machine about fast sync.
#[derive(Debug)]
pub struct FastSync {
    note: PathBuf,
    rates: KeptRates,
}

/// The file that notes a hang, in paceline's folder.
pub(crate) fn hang_note(home: &Path) -> PathBuf {
    home.join("fast-sync-hang")
}

impl FastSync {
    /// By the files of paceline's folder.
    pub fn new(home: &Path) -> Self {
        Self {
            note: hang_note(home),
            rates: KeptRates::new(home),
        }
    }

    /// How MLX waits in a process whose environment has `variable`.
    pub fn decide(&self, choice: SyncChoice, variable: Option<&OsStr>) -> GpuWait {
        let is_fast = match choice {
            SyncChoice::Always(wait) => return wait,
            SyncChoice::Asked => true,
            SyncChoice::Qualified => {
                variable.map_or_else(|| self.rates.is_qualified(), |value| value == "1")
            }
        };
        match is_fast && !self.has_hung() {
            true => GpuWait::Fast,
            false => GpuWait::Usual,
        }
    }

    /// Whether a GPU hung with fast waits since a device was qualified.
    pub fn has_hung(&self) -> bool {
        self.note.exists()
    }

    /// Qualifies `device`, whose crossings take so long, and forgets hangs before.
    pub fn qualify(&self, device: MeasuredDevice, crossing_ns: u64) -> std::io::Result<()> {
        if self.has_hung() {
            std::fs::remove_file(&self.note)?;
        }
        self.rates.qualify(device, crossing_ns);
        Ok(())
    }

    /// Notes a hang, or another reason not to wait fast.
    pub fn note_hang(&self, reason: &str) -> std::io::Result<()> {
        std::fs::write(&self.note, format!("{reason}\n"))
    }
}

#[cfg(test)]
mod tests {
    use super::SyncChoice::{Always, Asked, Qualified};
    use super::*;

    #[test]
    fn waits_are_fast_where_they_are_asked_for_or_qualified_until_a_hang() {
        let home = tempfile::tempdir().unwrap();
        let sync = FastSync::new(home.path());
        let fast = |choice, variable: Option<&str>| {
            sync.decide(choice, variable.map(OsStr::new)) == GpuWait::Fast
        };
        assert!(!fast(Qualified, None) && fast(Qualified, Some("1")) && fast(Asked, Some("0")));
        let device = MeasuredDevice {
            version: "0.32.2".into(),
            backend: "metal".into(),
            name: None,
        };
        sync.qualify(device.clone(), 4_000).unwrap();
        assert!(fast(Qualified, None) && !fast(Qualified, Some("0")));
        sync.note_hang("mlx hangs").unwrap();
        assert!(!fast(Qualified, None) && !fast(Qualified, Some("1")) && !fast(Asked, None));
        assert!(fast(Always(GpuWait::Fast), None) && !fast(Always(GpuWait::Usual), Some("1")));
        sync.qualify(device, 4_000).unwrap();
        assert!(
            fast(Qualified, None) && fast(Asked, None),
            "qualified again"
        );
    }
}
