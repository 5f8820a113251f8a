//! The group key, and the policy without one.
use std::io;
use std::net::SocketAddr;

use zeroize::Zeroizing;

/// Bytes of a [`GroupKey`]: those of a pre-shared key in the Noise framework.
pub const KEY_BYTES: usize = 32;

/// A secret shared by all ranks of a group. A process with the key may become a rank; no other
/// process can read or change the group's traffic.
///
/// It must be random and never a password: recorded traffic allows offline guessing. Overwritten
/// when dropped and never printed.
#[derive(Clone, derive_more::Debug)]
#[debug("GroupKey(..)")]
pub struct GroupKey(Zeroizing<[u8; KEY_BYTES]>);

impl GroupKey {
    /// A key of these bytes. The caller overwrites its own copy.
    pub fn new(bytes: [u8; KEY_BYTES]) -> Self {
        Self(Zeroizing::new(bytes))
    }

    /// A new key from the system's random numbers.
    pub fn random() -> io::Result<Self> {
        let mut bytes = Zeroizing::new([0; KEY_BYTES]);
        getrandom::fill(&mut *bytes).map_err(io::Error::other)?;
        Ok(Self(bytes))
    }

    /// The secret bytes, to pass them to another rank.
    pub fn bytes(&self) -> &[u8; KEY_BYTES] {
        &self.0
    }
}

/// Which processes may read and write the group's traffic. The same on all ranks.
#[derive(Clone, Debug, Default)]
pub enum Protection {
    /// Nothing is encrypted, and a rank joins only if all addresses are loopback.
    #[default]
    Loopback,
    /// Every connection is authenticated and encrypted with this key, over loopback too.
    Key(GroupKey),
    /// Nothing is encrypted, on any network: every host on it can read and change everything.
    Plaintext,
}

impl Protection {
    pub(super) const fn key(&self) -> Option<&GroupKey> {
        match self {
            Self::Key(key) => Some(key),
            Self::Loopback | Self::Plaintext => None,
        }
    }

    /// The first of `addrs` that needs a key.
    pub(super) fn bars(&self, mut addrs: impl Iterator<Item = SocketAddr>) -> Option<SocketAddr> {
        match self {
            Self::Loopback => addrs.find(|addr| !addr.ip().to_canonical().is_loopback()),
            Self::Key(_) | Self::Plaintext => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_not_printed() {
        let protection = Protection::Key(GroupKey::new([0x5a; KEY_BYTES]));
        assert_eq!(format!("{protection:?}"), "Key(GroupKey(..))");
        let [one, two] = [(); 2].map(|()| GroupKey::random().unwrap());
        assert_ne!(one.bytes(), two.bytes());
    }

    #[test]
    fn only_loopback_goes_without_a_word() {
        let bars = |protection: &Protection, addrs: &[&str]| {
            let addrs = addrs.iter().map(|addr| addr.parse().unwrap());
            protection.bars(addrs).map(|addr| addr.to_string())
        };
        let key = Protection::Key(GroupKey::new([0; KEY_BYTES]));
        let own = [
            "127.0.0.1:1",
            "[::1]:2",
            "127.9.9.9:3",
            "[::ffff:127.0.0.1]:4",
        ];
        assert_eq!(bars(&Protection::Loopback, &own), None);
        for other in [
            "10.0.0.7:1",
            "0.0.0.0:1",
            "[::]:1",
            "[fe80::1]:1",
            "[::ffff:1.2.3.4]:1",
        ] {
            let addrs = ["127.0.0.1:1", other];
            assert_eq!(bars(&Protection::Loopback, &addrs), Some(other.to_owned()));
            assert_eq!(bars(&Protection::Plaintext, &addrs), None);
            assert_eq!(bars(&key, &addrs), None);
        }
    }
}
