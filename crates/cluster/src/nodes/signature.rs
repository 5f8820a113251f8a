//! Signatures by a node's static key, for messages that others forward, such as in the shared map.
//!
//! A static key is an X25519 key, which is for key agreement only. XEdDSA signs with it: it uses
//! the same secret scalar on the Edwards form of the curve, with the point of even x. Ed25519's
//! equation verifies the signature.
//!
//! ```text
//! public  32 bytes, whose hash is the node's id
//! bytes   R (32), s (32): s B = R + SHA-512(R, A, message) A
//! ```
//! Source: T. Perrin, The XEdDSA and VXEdDSA Signature Schemes, revision 1, section 3.

use std::fmt;

use curve25519_dalek::scalar::clamp_integer;
use curve25519_dalek::{EdwardsPoint, MontgomeryPoint, Scalar};
use paceline_base::{hex, unhex};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha512};
use zeroize::Zeroizing;

use super::NodeId;
use super::identity::{Error, Identity, id_of};

/// The prefix that separates the hash of a nonce from other hashes: 2^256 - 2, little-endian.
const NONCE_PREFIX: [u8; 32] = {
    let mut prefix = [0xff; 32];
    prefix[0] = 0xfe;
    prefix
};

/// Signs messages of a node, and checks those of others.
pub trait Signer: Send + Sync + fmt::Debug {
    /// The node that signs.
    fn id(&self) -> NodeId;

    /// Signs a message.
    fn sign(&self, message: &[u8]) -> Result<Signature, Error>;

    /// Whether the node `by` signed exactly this message.
    fn is_of(&self, signature: &Signature, by: NodeId, message: &[u8]) -> bool;
}

impl Signer for Identity {
    fn id(&self) -> NodeId {
        Self::id(self)
    }

    fn sign(&self, message: &[u8]) -> Result<Signature, Error> {
        Self::sign(self, message)
    }

    fn is_of(&self, signature: &Signature, by: NodeId, message: &[u8]) -> bool {
        signature.is_of(by, message)
    }
}

/// A signature, with the signer's public key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Signature {
    /// The node's public key, in hexadecimal digits.
    public: String,
    /// The signature, in hexadecimal digits.
    bytes: String,
}

impl Identity {
    /// Signs a message. Two signatures of one message differ.
    pub fn sign(&self, message: &[u8]) -> Result<Signature, Error> {
        let mut random = Zeroizing::new([0; 64]);
        let drawn = getrandom::fill(&mut *random);
        drawn.map_err(|error| Error::Random(std::io::Error::other(error)))?;
        let bytes = sign(self.private(), message, &random);
        Ok(Signature {
            public: hex(self.public()),
            bytes: hex(&bytes),
        })
    }
}

impl Signature {
    /// A signature of a [`Signer`] that needs no public key, such as a simulated one.
    pub const fn simulated(bytes: String) -> Self {
        let public = String::new();
        Self { public, bytes }
    }

    /// Its bytes, in hexadecimal digits.
    pub fn digits(&self) -> &str {
        &self.bytes
    }

    /// Whether the node `by` signed exactly this message.
    pub fn is_of(&self, by: NodeId, message: &[u8]) -> bool {
        let read = || -> Option<([u8; 32], [u8; 64])> {
            let public = unhex(&self.public)?.try_into().ok()?;
            Some((public, unhex(&self.bytes)?.try_into().ok()?))
        };
        read().is_some_and(|(public, bytes)| {
            id_of(&public) == by && is_valid(&public, message, &bytes)
        })
    }
}

/// SHA-512 of all parts, modulo the group's order.
fn number(parts: &[&[u8]]) -> Scalar {
    let mut hash = Sha512::new();
    parts.iter().for_each(|part| hash.update(part));
    let wide: [u8; 64] = hash.finalize().into();
    Scalar::from_bytes_mod_order_wide(&wide)
}

fn sign(private: &[u8; 32], message: &[u8], random: &[u8; 64]) -> [u8; 64] {
    let own = Scalar::from_bytes_mod_order(clamp_integer(*private));
    let point = EdwardsPoint::mul_base(&own).compress().to_bytes();
    // The verifier knows the point up to its sign and uses the even one.
    let is_odd = point[31] & 0x80 != 0;
    let own = if is_odd { -own } else { own };
    let mut public = point;
    public[31] &= 0x7f;
    let secret = Zeroizing::new(own.to_bytes());
    let nonce = number(&[&NONCE_PREFIX, &*secret, message, random]);
    let first = EdwardsPoint::mul_base(&nonce).compress().to_bytes();
    let second = nonce + number(&[&first, &public, message]) * own;
    let mut bytes = [0; 64];
    bytes[..32].copy_from_slice(&first);
    bytes[32..].copy_from_slice(&second.to_bytes());
    bytes
}

fn is_valid(public: &[u8; 32], message: &[u8], bytes: &[u8; 64]) -> bool {
    let Some(point) = MontgomeryPoint(*public).to_edwards(0) else {
        return false;
    };
    let (mut first, mut second) = ([0; 32], [0; 32]);
    first.copy_from_slice(&bytes[..32]);
    second.copy_from_slice(&bytes[32..]);
    let second: Option<Scalar> = Scalar::from_canonical_bytes(second).into();
    let Some(second) = second else {
        return false;
    };
    let even = point.compress().to_bytes();
    let hash = number(&[&first, &even, message]);
    let expected = EdwardsPoint::vartime_double_scalar_mul_basepoint(&-hash, &point, &second);
    expected.compress().to_bytes() == first
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_signer_and_the_message_pass() {
        // Keys of both signs of x.
        for _ in 0..8 {
            let (one, two) = (Identity::random().unwrap(), Identity::random().unwrap());
            let signature = one.sign(b"root 7").unwrap();
            assert!(signature.is_of(one.id(), b"root 7"));
            assert!(!signature.is_of(one.id(), b"root 8"));
            assert!(!signature.is_of(two.id(), b"root 7"));
            let text = serde_json::to_string(&signature).unwrap();
            let read: Signature = serde_json::from_str(&text).unwrap();
            assert_eq!(read, signature);
        }
    }

    #[test]
    fn every_flipped_bit_is_noticed() {
        let one = Identity::random().unwrap();
        let signature = one.sign(b"root").unwrap();
        let bytes = unhex(&signature.bytes).unwrap();
        for bit in 0..bytes.len() * 8 {
            let mut other = bytes.clone();
            other[bit / 8] ^= 1 << (bit % 8);
            let other = Signature {
                bytes: hex(&other),
                ..signature.clone()
            };
            assert!(!other.is_of(one.id(), b"root"), "bit {bit}");
        }
        for bytes in ["", "zz", "00"] {
            let other = Signature {
                bytes: bytes.to_owned(),
                ..signature.clone()
            };
            assert!(!other.is_of(one.id(), b"root"), "{bytes:?}");
        }
    }
}
