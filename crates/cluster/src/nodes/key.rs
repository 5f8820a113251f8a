//! The cluster key: a shared secret that makes a node a member. Other machines cannot read the
//! cluster's traffic.
//!
//! A *token* is its form for people and scripts: `plc1-`, 64 hexadecimal digits, `-` and 8 digits
//! of a checksum, which detects truncated and mistyped tokens.
use std::io;
use std::path::Path;

use paceline_base::{hex, unhex};
use sha2::{Digest, Sha256};
use zeroize::Zeroizing;

use super::identity::{Error, read_secret, write_secret};

/// Prefix of every token.
pub const TOKEN_PREFIX: &str = "plc1-";

/// A cluster's key. Overwritten when dropped, and only printed as a requested token.
#[derive(Clone, PartialEq, Eq, derive_more::Debug)]
#[debug("ClusterKey(..)")]
pub struct ClusterKey(Zeroizing<[u8; 32]>);

/// The text is no token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotAToken {
    #[error("not a cluster token: it should begin with {TOKEN_PREFIX} and have 78 characters")]
    Form,
    #[error("the cluster token is damaged: its checksum does not match")]
    Checksum,
}

impl ClusterKey {
    /// A new one.
    pub fn random() -> Result<Self, Error> {
        let mut bytes = Zeroizing::new([0; 32]);
        getrandom::fill(&mut *bytes).map_err(|error| Error::Random(io::Error::other(error)))?;
        Ok(Self(bytes))
    }

    /// The key of these bytes.
    pub fn new(bytes: [u8; 32]) -> Self {
        Self(Zeroizing::new(bytes))
    }

    /// Loads the key from the file at `path`; creates it if there is none.
    ///
    /// # Errors
    /// The file cannot be read or written, or others can read it.
    pub fn open(path: &Path) -> Result<Self, Error> {
        if let Some(bytes) = read_secret(path)? {
            return Ok(Self(bytes));
        }
        let made = Self::random()?;
        made.save(path)?;
        Ok(made)
    }

    /// Writes it to `path`, replacing an existing one.
    pub fn save(&self, path: &Path) -> Result<(), Error> {
        write_secret(path, &*self.0)
    }

    /// The secret itself.
    pub fn bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Derives a key for another purpose, from which this one cannot be computed.
    pub fn derive(&self, purpose: &str) -> [u8; 32] {
        // The key has a fixed length, so the inputs of different purposes are distinct.
        let hash = Sha256::new().chain_update(*self.0).chain_update(purpose);
        hash.finalize().into()
    }

    /// Public name of the cluster, which does not reveal the key: eight hexadecimal digits.
    pub fn name(&self) -> String {
        hex(&self.derive("paceline cluster name")[..4])
    }

    /// The key for people and scripts, on one line. Secret.
    pub fn token(&self) -> Zeroizing<String> {
        let check = hex(&self.derive("paceline token")[..4]);
        Zeroizing::new(format!("{TOKEN_PREFIX}{}-{check}", hex(&*self.0)))
    }

    /// The key of a token, white space around it ignored.
    pub fn from_token(text: &str) -> Result<Self, NotAToken> {
        let text = text
            .trim()
            .strip_prefix(TOKEN_PREFIX)
            .ok_or(NotAToken::Form)?;
        let (key, _) = text.split_once('-').ok_or(NotAToken::Form)?;
        let bytes = unhex(key).map(Zeroizing::new).ok_or(NotAToken::Form)?;
        let bytes = <[u8; 32]>::try_from(bytes.as_slice()).map_err(|_| NotAToken::Form)?;
        let key = Self::new(bytes);
        if key.token().strip_prefix(TOKEN_PREFIX) != Some(text) {
            return Err(NotAToken::Checksum);
        }
        Ok(key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_come_back_and_damaged_ones_are_refused() {
        let key = ClusterKey::random().unwrap();
        let token = key.token();
        assert_eq!(token.len(), 78);
        assert_eq!(
            ClusterKey::from_token(&format!(" {}\n", *token)),
            Ok(key.clone())
        );
        for at in TOKEN_PREFIX.len()..token.len() {
            let mut bytes = token.as_bytes().to_vec();
            bytes[at] = if bytes[at] == b'0' { b'1' } else { b'0' };
            let text = String::from_utf8(bytes).unwrap();
            assert!(ClusterKey::from_token(&text).is_err(), "{at}");
            assert!(ClusterKey::from_token(&token[..at]).is_err(), "{at}");
        }
        for bad in ["", "plc1-", "plc1--", "plc2-00-00", "plc1-ä-00"] {
            assert_eq!(ClusterKey::from_token(bad), Err(NotAToken::Form), "{bad}");
        }
    }

    #[test]
    fn a_key_is_kept_and_not_printed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cluster-key");
        let key = ClusterKey::open(&path).unwrap();
        assert_eq!(ClusterKey::open(&path).unwrap(), key);
        let other = ClusterKey::random().unwrap();
        other.save(&path).unwrap();
        assert_eq!(ClusterKey::open(&path).unwrap(), other);
        assert_ne!(key.name(), other.name());
        assert_ne!(key.derive("a"), key.derive("b"));
        assert_eq!(format!("{key:?}"), "ClusterKey(..)");
    }
}
