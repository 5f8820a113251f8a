//! A model's file that still arrives, as a worker reads it.
//!
//! The worker's machine fetches what the worker asks for, and notes each group that is here in the
//! file beside the model's ([`HAVE`]). The worker looks there before it reads, and asks for what is
//! missing. It packs one matrix while the next ones arrive.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use paceline_formats::gguf::Gguf;
use paceline_formats::tensor::{Absent, Arrivals};
use paceline_model::{Shard, Source};

use crate::Error;
use crate::fleet::partial::{FILE, HAVE};
use crate::fleet::tree::Groups;

/// How often a worker looks whether bytes have come; a group takes half a millisecond at 1 Gbit/s.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// Longest wait in which nothing comes at all. The machine gives up sooner and says why.
const SILENCE: Duration = Duration::from_secs(60);

/// First byte and end of a part of the file.
pub(crate) type Part = (u64, u64);

/// Asks the machine for parts of the model's file; must not block for long.
pub(crate) type Ask = dyn Fn(Vec<Part>) + Send + Sync;

/// Whether a file may lack parts.
pub(crate) fn is_partial(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending == FILE)
}

/// Opens a model. Weights of a file that still arrives are waited for when they are read, and asked
/// for by `ask`.
///
/// # Errors
/// As [`Source::open`], and what the system says.
pub(crate) fn open(path: &Path, ask: Arc<Ask>) -> Result<Source, Error> {
    if !is_partial(path) {
        return Ok(Source::open(path)?);
    }
    let arriving = Arriving::new(path, ask).map_err(|source| Error::System {
        what: "look which parts of the model are here",
        source,
    })?;
    let file = Gguf::open_arriving(path, Arc::new(arriving));
    Ok(Source::Gguf(file.map_err(paceline_model::Error::from)?))
}

/// Parts of a file that a rank reads whole and alone, in the order in which it does: they can be
/// fetched ahead. None where ranks share layers, as each reads rows of most matrices.
pub(crate) fn ahead(source: &Source, shard: &Shard) -> Vec<Part> {
    let Source::Gguf(file) = source else {
        return Vec::new();
    };
    if shard.stage_ranks().len() != 1 {
        return Vec::new();
    }
    let named = |prefix: String| {
        let own = file
            .tensors()
            .filter(move |it| it.name().starts_with(&prefix));
        own.filter_map(|tensor| tensor.range())
    };
    let first = shard.embeds().then(|| named("token_embd.".to_owned()));
    let last = shard.has_head().then(|| named("output".to_owned()));
    let layers = shard
        .layers
        .clone()
        .flat_map(|i| named(format!("blk.{i}.")));
    let all = first.into_iter().flatten().chain(layers);
    joined(all.chain(last.into_iter().flatten()))
}

/// Parts with those that touch made one.
fn joined(ranges: impl Iterator<Item = Range<usize>>) -> Vec<Part> {
    // Tensors begin at multiples of 32, or of what the file says: the padding is nothing.
    const PADDING: u64 = 4096;
    let mut parts: Vec<Part> = Vec::new();
    for range in ranges {
        let (start, end) = (range.start as u64, range.end as u64);
        match parts.last_mut() {
            Some(part) if (part.1..=part.1 + PADDING).contains(&start) => part.1 = end,
            _ => parts.push((start, end)),
        }
    }
    parts
}

/// The state of a file that arrives.
struct Arriving {
    file: String,
    groups: Groups,
    have: File,
    /// By group: whether it is known to be here.
    there: Vec<AtomicBool>,
    ask: Arc<Ask>,
}

impl Arriving {
    fn new(path: &Path, ask: Arc<Ask>) -> io::Result<Self> {
        let groups = Groups::of(std::fs::metadata(path)?.len());
        let have = File::open(path.with_extension(HAVE))?;
        let there = (0..groups.count()).map(|_| AtomicBool::new(false));
        Ok(Self {
            file: path.display().to_string(),
            groups,
            have,
            there: there.collect(),
            ask,
        })
    }

    fn is_here(&self, groups: &Range<u64>) -> bool {
        let own = &self.there[groups.start as usize..groups.end as usize];
        own.iter().all(|there| there.load(Ordering::Acquire))
    }

    /// Looks which of the groups are here by now.
    fn look(&self, groups: &Range<u64>) -> io::Result<()> {
        let mut told = vec![0; (groups.end - groups.start) as usize];
        self.have.read_exact_at(&mut told, groups.start)?;
        for (index, told) in groups.clone().zip(told) {
            if told != 0 {
                self.there[index as usize].store(true, Ordering::Release);
            }
        }
        Ok(())
    }

    /// When any byte of the file came last.
    fn changed(&self) -> Option<SystemTime> {
        self.have.metadata().and_then(|facts| facts.modified()).ok()
    }

    fn wait_for(&self, groups: &Range<u64>, bytes: Part) -> Result<(), String> {
        let look = || self.look(groups).map_err(|error| error.to_string());
        look()?;
        if self.is_here(groups) {
            return Ok(());
        }
        (self.ask)(vec![bytes]);
        let (mut last, mut since) = (self.changed(), Instant::now());
        while !self.is_here(groups) {
            if since.elapsed() > SILENCE {
                return Err(format!("nothing came for {} s", SILENCE.as_secs()));
            }
            std::thread::sleep(LOOK_EVERY);
            look()?;
            let changed = self.changed();
            if changed != last {
                (last, since) = (changed, Instant::now());
            }
        }
        Ok(())
    }
}

impl Arrivals for Arriving {
    fn wait(&self, range: Range<usize>) -> Result<(), Absent> {
        let bytes = (range.start as u64, range.end as u64);
        let groups = self.groups.around(&(bytes.0..bytes.1));
        if self.is_here(&groups) {
            return Ok(());
        }
        self.wait_for(&groups, bytes).map_err(|reason| Absent {
            file: self.file.clone(),
            range,
            reason,
        })
    }
}

impl std::fmt::Debug for Arriving {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} as it arrives", self.file)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use paceline_base::lock;

    use super::*;

    #[test]
    fn parts_are_asked_for_once_and_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.shard");
        let each = Groups::of(0).each as usize;
        std::fs::write(&path, vec![0; 3 * each]).unwrap();
        let have = path.with_extension(HAVE);
        std::fs::write(&have, [1, 0, 0]).unwrap();
        let asked: Arc<Mutex<Vec<Part>>> = Arc::default();
        let (own, told) = (Arc::clone(&asked), have.clone());
        let ask = move |parts: Vec<Part>| {
            lock(&own).extend(parts);
            std::fs::write(&told, [1, 1, 0]).unwrap(); // the machine has fetched it
        };
        let arriving = Arriving::new(&path, Arc::new(ask)).unwrap();
        arriving.wait(0..each).unwrap();
        assert!(lock(&asked).is_empty(), "it is here");
        arriving.wait(each - 1..each + 1).unwrap();
        arriving.wait(each..each + 9).unwrap();
        assert_eq!(*lock(&asked), [(each as u64 - 1, each as u64 + 1)]);
        arriving.wait(7..7).unwrap();
        assert!(is_partial(&path) && !is_partial(&have));
    }

    #[test]
    fn parts_that_touch_are_one() {
        let ranges = [0..10, 32..64, 10_000..10_001, 64..70];
        let parts = joined(ranges.into_iter());
        assert_eq!(parts, [(0, 64), (10_000, 10_001), (64, 70)]);
    }
}
