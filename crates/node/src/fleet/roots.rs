//! Roots of hash trees in the shared map, each signed by a node that has read the whole file.
//!
//! ```text
//! weights/SHA256 -> {"bytes":N,"header":N,"root":"..","by":"node","signature":{..}}
//! ```
//! The hub only gives a file's SHA-256, which cannot verify a range. A node that has the file, and
//! has verified it, computes the root and signs it. Every other node fetches ranges from any node
//! and verifies each by the root.

use paceline_cluster::nodes::agent::Agent;
use paceline_cluster::nodes::{NodeId, RegisterKey, Registers, Signature};
use serde::{Deserialize, Serialize};

use paceline_store::verified::tree::{Tree, shown};

/// Largest file, or model, in bytes: ten times the largest known model. Groups stay below 128 MiB.
pub(super) const BYTES_MAX: u64 = 16 << 40;

/// A file's root with the signature of the node that computed it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct FileRoot {
    /// Length of the file.
    pub(super) bytes: u64,
    /// Bytes before its weights.
    pub(super) header: u64,
    /// BLAKE3 of the file, in hexadecimal digits.
    pub(super) root: String,
    /// The node that read the file and signed the root.
    pub(super) by: NodeId,
    signature: Signature,
}

/// A root that this node verifies a file by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct KnownRoot {
    /// Length of the file.
    pub(super) bytes: u64,
    /// Bytes before its weights.
    pub(super) header: u64,
    /// BLAKE3 of the file, in hexadecimal digits.
    pub(super) root: String,
    /// Bytes of weights in all files of its model, which determine the sampled pages of each.
    pub(super) weights: u64,
    /// The node that signed it, or the manifest that contains it.
    pub(super) by: Option<NodeId>,
}

impl KnownRoot {
    /// Whether its node may still sign roots.
    pub(super) fn is_trusted(&self, map: &Registers) -> bool {
        let is_revoked = |by: NodeId| map.get(&RegisterKey::Revoked(by)).is_some();
        !self.by.is_some_and(is_revoked)
    }
}

impl From<FileRoot> for KnownRoot {
    fn from(signed: FileRoot) -> Self {
        Self {
            bytes: signed.bytes,
            header: signed.header,
            root: signed.root,
            weights: signed.bytes.saturating_sub(signed.header),
            by: Some(signed.by),
        }
    }
}

/// Register of a file's root.
pub(super) fn key(sha256: &str) -> RegisterKey {
    RegisterKey::Named(format!("weights/{sha256}"))
}

/// The signed message: the file, its length, and its root.
fn message(sha256: &str, (bytes, header): (u64, u64), root: &str) -> Vec<u8> {
    format!("paceline weights 1\n{sha256}\n{bytes}\n{header}\n{root}\n").into_bytes()
}

impl FileRoot {
    /// Signs the root of a file whose SHA-256 this node has verified.
    pub(super) fn sign(
        agent: &Agent,
        sha256: &str,
        tree: &Tree,
        header: u64,
    ) -> Result<Self, String> {
        let (bytes, root) = (tree.groups.bytes, shown(tree.root()));
        let signed = agent.sign(&message(sha256, (bytes, header), &root));
        Ok(Self {
            bytes,
            header,
            root,
            by: agent.id(),
            signature: signed.map_err(|error| error.to_string())?,
        })
    }

    /// Verifies that a node that is not revoked signed it for the file with this SHA-256.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(super) fn check(&self, map: &Registers, sha256: &str) -> Result<(), String> {
        let Self { bytes, by, .. } = self;
        if map.get(&RegisterKey::Revoked(*by)).is_some() {
            return Err(format!("the root of its weights is of node {by}, revoked"));
        }
        if *bytes > BYTES_MAX || self.header > *bytes {
            return Err(format!(
                "its weights have {bytes} bytes, {} of them a header: {BYTES_MAX} are the most",
                self.header
            ));
        }
        let signed = message(sha256, (*bytes, self.header), &self.root);
        match self.signature.is_of(*by, &signed) {
            true => Ok(()),
            false => Err(format!("node {by} has not signed the root of its weights")),
        }
    }

    /// Publishes the root to the cluster, unless the map has it and an instance uses the file.
    /// Otherwise it is written again, which protects a root that is needed soon from garbage
    /// collection.
    ///
    /// # Errors
    /// The map is full.
    pub(super) fn publish(&self, agent: &Agent, sha256: &str) -> Result<(), String> {
        let map = agent.map();
        let is_known =
            of(&map, sha256).is_ok_and(|it| (it.bytes, &it.root) == (self.bytes, &self.root));
        if is_known && paceline_fleet::rules::collect::files(&map).contains(sha256) {
            return Ok(());
        }
        let text = serde_json::to_string(self).expect("a record is JSON");
        let written = agent.write(key(sha256), 0, Some(text));
        written.map_err(|error| error.to_string())
    }
}

/// The root of a file, by its SHA-256.
///
/// # Errors
/// There is none, or it is invalid.
pub(super) fn of(map: &Registers, sha256: &str) -> Result<FileRoot, String> {
    let text = map.get(&key(sha256));
    let text = text.ok_or_else(|| "no node has told the root of its weights".to_owned())?;
    let rooted: FileRoot = serde_json::from_str(text).map_err(|error| error.to_string())?;
    rooted.check(map, sha256).map(|()| rooted)
}

/// Reads `bytes` as a record, for fuzzing.
pub(super) fn parse(bytes: &[u8]) {
    if let Ok(rooted) = serde_json::from_slice::<FileRoot>(bytes) {
        let _: Result<(), String> = rooted.check(&Registers::default(), "");
    }
}
