//! The model hub as the last source of bytes that no node of the cluster has.
//!
//! ```text
//! hub/SHA256 -> {"repo":"owner/name","revision":"COMMIT","file":"m.gguf","bytes":N,"sha256":".."}
//! ```
//! A node that loads a model from its store publishes the file's origin to the cluster. A node that
//! finds no other source reads the bytes from the same commit. It verifies them as from any source:
//! groups by the hash tree, a whole file by its SHA-256.
use std::ops::Range;
use std::path::Path;

use paceline_base::CallbackError;
use paceline_cluster::nodes::agent::Agent;
use paceline_cluster::nodes::{RegisterKey, Registers};
use serde::{Deserialize, Serialize};

use paceline_store::verified::partial_file::VerifiedPartial;

/// A file on the hub, at one commit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, derive_more::Display)]
#[display("{} of {} at {}", self.file, self.repo, self.revision)]
pub struct HubOrigin {
    /// `owner/name`.
    pub repo: String,
    pub revision: String,
    /// Path inside the repository.
    pub file: String,
    /// Length of the file.
    pub bytes: u64,
    /// SHA-256 of the file, in hexadecimal digits.
    pub sha256: String,
}

/// Receives the number of bytes fetched; false ends the fetch.
pub type FetchProgress<'a> = dyn Fn(u64) -> bool + Sync + 'a;

/// Receives the next bytes of a file; false ends the read.
pub type ByteSink<'a> = dyn FnMut(&[u8]) -> bool + 'a;

/// Client of the hub on this machine. Its calls block, each with its own deadlines.
pub trait ModelHub: Send + Sync {
    /// The origin of the file at `path`; `None` for the user's own files.
    fn origin(&self, path: &Path) -> Option<HubOrigin>;

    /// Downloads a whole file to `path`, resumes an earlier download, and verifies the result.
    ///
    /// # Errors
    /// Why the download failed; there is no file at `path` then.
    fn whole(
        &self,
        origin: &HubOrigin,
        path: &Path,
        came: &FetchProgress<'_>,
    ) -> Result<(), CallbackError>;

    /// Reads the bytes `span` of a file, in order, until `take` returns false. Does not verify
    /// them.
    ///
    /// # Errors
    /// Why the rest is unavailable.
    fn read(
        &self,
        origin: &HubOrigin,
        span: Range<u64>,
        take: &mut ByteSink<'_>,
    ) -> Result<(), CallbackError>;
}

/// Register of a file's origin.
pub(super) fn key(sha256: &str) -> RegisterKey {
    RegisterKey::Named(format!("hub/{sha256}"))
}

/// The published origin of a file, by its SHA-256.
pub(super) fn of(map: &Registers, sha256: &str) -> Option<HubOrigin> {
    let origin: HubOrigin = serde_json::from_str(map.get(&key(sha256))?).ok()?;
    let HubOrigin {
        repo,
        revision,
        file,
        ..
    } = &origin;
    // It is shown to people, and another node wrote it.
    let is_plain = |text: &String| !text.contains(char::is_control);
    let is_plain = [repo, revision, file].into_iter().all(is_plain);
    (is_plain && origin.sha256 == sha256).then_some(origin)
}

/// Reads `bytes` as a record, for fuzzing.
pub(super) fn parse(bytes: &[u8]) {
    let _ = serde_json::from_slice::<HubOrigin>(bytes);
}

impl HubOrigin {
    /// Publishes it to the cluster, as [`FileRoot::publish`](super::rooted::Rooted::publish) does.
    /// If the map is full it is skipped: then only nodes are sources.
    pub(super) fn publish(&self, agent: &Agent) {
        let map = agent.map();
        let is_known = of(&map, &self.sha256).as_ref() == Some(self);
        if is_known && paceline_fleet::rules::collect::files(&map).contains(&self.sha256) {
            return;
        }
        let text = serde_json::to_string(self).expect("a record is JSON");
        let _: Result<(), _> = agent.write(key(&self.sha256), 0, Some(text));
        agent.save();
    }
}

/// Message for a model without a source, with the command that brings it to the node `own`. `nodes`
/// and `hub` are the reasons of either; `hub` is `None` if no origin is known.
pub(super) fn unavailable(
    (model, own): (&str, &str),
    (nodes, hub): (&str, Option<&str>),
) -> String {
    let hub = match hub {
        Some(reason) => format!("the hub does not give it: {reason}"),
        None => "it is not known from which file of the hub it came".to_owned(),
    };
    format!(
        "{nodes}; {hub}; `paceline pull {model} --to {own}` brings it, on a machine of the cluster \
         that reaches the hub or has the file"
    )
}

/// Fetches a run of groups and stores each after verification by the tree. `came` receives the
/// number of bytes stored.
pub(super) fn fill(
    hub: &dyn ModelHub,
    origin: &HubOrigin,
    partial: &VerifiedPartial,
    run: &Range<u64>,
    came: &FetchProgress<'_>,
) -> Result<(), String> {
    let mut filling = GroupFiller {
        partial,
        left: run.clone(),
        group: Vec::new(),
    };
    let mut ended = None;
    let mut take = |bytes: &[u8]| match filling.take(bytes) {
        Ok(kept) if came(kept) => true,
        Ok(_) => {
            ended = Some("nobody waits for it any more".to_owned());
            false
        }
        Err(reason) => {
            ended = Some(reason);
            false
        }
    };
    let read = hub.read(origin, partial.groups().span(run), &mut take);
    ended.map_or(read.map_err(|error| error.to_string()), Err)?;
    match filling.left.is_empty() {
        true => Ok(()),
        false => Err("it gave too few bytes".to_owned()),
    }
}

/// Collects the bytes of consecutive groups as they arrive.
struct GroupFiller<'a> {
    partial: &'a VerifiedPartial,
    /// The groups that are not complete yet.
    left: Range<u64>,
    /// Received bytes of the first incomplete group.
    group: Vec<u8>,
}

impl GroupFiller<'_> {
    /// Takes the next bytes; returns the number of bytes stored.
    fn take(&mut self, mut bytes: &[u8]) -> Result<u64, String> {
        let mut kept = 0;
        while !bytes.is_empty() && !self.left.is_empty() {
            let index = self.left.start;
            let span = self.partial.groups().span(&(index..index + 1));
            let lacks = (span.end - span.start) as usize - self.group.len();
            let (now, later) = bytes.split_at(lacks.min(bytes.len()));
            self.group.extend_from_slice(now);
            bytes = later;
            if now.len() == lacks {
                self.keep(index, &span)?;
                kept += span.end - span.start;
            }
        }
        Ok(kept)
    }

    fn keep(&mut self, index: u64, span: &Range<u64>) -> Result<(), String> {
        let path = self.partial.path.display();
        let taken = self.partial.take(index, &self.group);
        match taken.map_err(|error| format!("{path}: {error}"))? {
            true => {
                self.group.clear();
                self.left.start += 1;
                Ok(())
            }
            false => Err(format!(
                "it gave wrong bytes at {}..{}",
                span.start, span.end
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use paceline_cluster::nodes::{HybridTimestamp, NodeId, Register};

    use super::*;

    #[test]
    fn an_origin_is_of_its_file_and_can_be_shown() {
        let sha256 = "a".repeat(64);
        let right = HubOrigin {
            repo: "own/repo".to_owned(),
            revision: "main".to_owned(),
            file: "m.gguf".to_owned(),
            bytes: 5,
            sha256: sha256.clone(),
        };
        let told = |origin: &HubOrigin| {
            let stamp = HybridTimestamp {
                ms: 1,
                count: 0,
                node: NodeId([1; 16]),
            };
            let value = serde_json::to_string(origin).ok();
            let register = Register {
                epoch: 0,
                stamp,
                value,
            };
            of(
                &Registers::from_entries([(key(&sha256), register)]),
                &sha256,
            )
        };
        assert_eq!(told(&right), Some(right.clone()));
        let other = HubOrigin {
            sha256: "b".repeat(64),
            ..right.clone()
        };
        let odd = HubOrigin {
            file: "m\u{1b}[2J".to_owned(),
            ..right
        };
        assert_eq!((told(&other), told(&odd)), (None, None));
    }
}
