//! Destinations of queue pairs, encoded as by JACCL.

use super::abi::Gid;
use super::verbs::Destination;

/// Bytes of a destination: lid, queue pair number, first packet number (4 each), padding, GID.
/// JACCL sends its C struct from a little-endian machine.
pub(super) const DESTINATION_BYTES: usize = 32;

pub(super) fn encode(destination: &Destination) -> [u8; DESTINATION_BYTES] {
    let mut bytes = [0; DESTINATION_BYTES];
    let numbers = [destination.lid.into(), destination.pair, destination.packet];
    let (room, _) = bytes.as_chunks_mut();
    for (slot, number) in room.iter_mut().zip(numbers) {
        *slot = number.to_le_bytes();
    }
    bytes[16..].copy_from_slice(&destination.gid.0);
    bytes
}

pub(super) fn decode(bytes: &[u8; DESTINATION_BYTES]) -> Destination {
    let word = |at: usize| {
        let word = bytes[at..].first_chunk();
        word.map_or(0, |word| u32::from_le_bytes(*word))
    };
    let gid = bytes[16..].first_chunk();
    Destination {
        // A lid has 16 bits; JACCL sends it in 32.
        lid: u16::try_from(word(0)).unwrap_or(0),
        pair: word(4),
        packet: word(8),
        gid: gid.copied().map_or(Gid::default(), Gid),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn destinations_are_jaccls_thirty_two_bytes() {
        let mut gid = Gid::default();
        gid.0[10..].copy_from_slice(&[0xff, 0xff, 192, 168, 0, 1]);
        let destination = Destination {
            lid: 0x0102,
            pair: 0x0304_0506,
            packet: 7,
            gid,
        };
        let bytes = encode(&destination);
        let mut expected = vec![2, 1, 0, 0, 6, 5, 4, 3, 7, 0, 0, 0, 0, 0, 0, 0];
        expected.extend([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 192, 168, 0, 1]);
        assert_eq!(bytes.as_slice(), expected);
        assert_eq!(decode(&bytes), destination);
    }
}
