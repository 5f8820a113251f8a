//! Both ends of a session, with a stream between them that accepts and returns arbitrarily few
//! bytes.

use super::super::key::KEY_BYTES;
use super::*;

/// Accepts at most `most` bytes per call, and none on every other call.
struct PartialWriter<'a> {
    wire: &'a mut Vec<u8>,
    most: usize,
    full: bool,
}

impl Write for PartialWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.full = !self.full;
        if self.full {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let count = bytes.len().min(self.most);
        self.wire.extend_from_slice(&bytes[..count]);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns at most `most` bytes per call; empty means that a read would block.
struct PartialReader<'a> {
    wire: &'a [u8],
    most: usize,
}

impl Read for PartialReader<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = into.len().min(self.most).min(self.wire.len());
        let (now, later) = self.wire.split_at(count);
        if count == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        into[..count].copy_from_slice(now);
        self.wire = later;
        Ok(count)
    }
}

fn bytes(count: usize) -> Vec<u8> {
    (0..count)
        .map(|i| (i * 31 + i / 251).to_le_bytes()[0])
        .collect()
}

/// Writes all of `head` and `body`, offering the rest again as callers do.
fn write_all(from: &NoiseSession, wire: &mut Vec<u8>, most: usize, head: &[u8], body: &[u8]) {
    let mut sink = PartialWriter {
        wire,
        most,
        full: false,
    };
    let (total, mut gone) = (head.len() + body.len(), 0);
    while gone < total {
        let (head, body) = rest(head, body, gone);
        gone += from.write(&mut sink, head, body).unwrap();
    }
}

#[test]
fn payload_comes_back_however_it_is_cut() {
    let lengths = [
        1,
        2,
        51,
        52,
        4096,
        RECORD_BYTES - 52,
        RECORD_BYTES,
        3 * RECORD_BYTES + 7,
    ];
    for (most, part) in [
        (usize::MAX, usize::MAX),
        (1000, 777),
        (13, 5),
        (40_000, 33_000),
    ] {
        let (from, to) = pair(b"a test");
        let mut wire = Vec::new();
        let mut sent = Vec::new();
        for length in lengths
            .into_iter()
            .filter(|length| *length < 20_000 || most > 500)
        {
            let body = bytes(length);
            let head = &body[..length.min(52)];
            write_all(&from, &mut wire, most, head, &body);
            write_all(&from, &mut wire, most, &[], &body);
            sent.extend([head, &body[..], &body[..]].concat());
        }
        assert!(
            !wire.windows(40).any(|part| part == &sent[60..100]),
            "it is in the clear"
        );
        let mut source = PartialReader {
            wire: &wire,
            most: 9999,
        };
        let (mut got, mut into) = (Vec::new(), vec![0; part.min(100_000)]);
        while got.len() < sent.len() {
            let before = got.len();
            let peeked = to.peek(&mut source, &mut [0; 3]).unwrap();
            let count = to.read(&mut source, &mut into).unwrap();
            assert!(peeked == 0 || count > 0, "what was seen is gone");
            got.extend_from_slice(&into[..count]);
            assert!(
                got.len() > before || !to.is_filled(),
                "a record stays behind"
            );
        }
        assert!(got == sent, "most {most}, part {part}");
        assert!(!to.is_filled() && !to.is_garbled());
    }
}

#[test]
fn another_key_or_hello_is_known_from_the_first_message() {
    let [right, wrong] = [1, 2].map(|byte| GroupKey::new([byte; KEY_BYTES]));
    let (_, message) = begin(&right, b"hello").unwrap();
    assert_eq!(
        accept_handshake(&wrong, b"hello", &message).err(),
        Some(WrongKey)
    );
    assert_eq!(
        accept_handshake(&right, b"hullo", &message).err(),
        Some(WrongKey)
    );
    let (_, reply) = accept_handshake(&right, b"hello", &message).unwrap();
    // A reply to another handshake is invalid for this one.
    let (other, _) = begin(&right, b"hello").unwrap();
    assert_eq!(other.end(&reply).err(), Some(WrongKey));
    let (own, message) = begin(&right, b"hello").unwrap();
    let (_, mut reply) = accept_handshake(&right, b"hello", &message).unwrap();
    reply[40] ^= 1;
    assert_eq!(own.end(&reply).err(), Some(WrongKey));
}

#[test]
fn a_recorded_hello_is_answered_but_cannot_be_gone_on_with() {
    let key = GroupKey::new([1; KEY_BYTES]);
    let (shaking, message) = begin(&key, b"hello").unwrap();
    let (first, reply) = accept_handshake(&key, b"hello", &message).unwrap();
    let dialler = shaking.end(&reply).unwrap();
    let mut proof = Vec::new();
    dialler.write(&mut proof, &[1], &[]).unwrap();
    assert_eq!(first.read(&mut &proof[..], &mut [0]), Ok(1));
    let (again, _) = accept_handshake(&key, b"hello", &message).unwrap();
    assert_eq!(again.read(&mut &proof[..], &mut [0]), Err(Closed));
    assert!(again.is_garbled());
}

/// Number of bytes delivered from three altered records of 10 bytes.
fn delivered(change: impl Fn(&mut Vec<u8>)) -> usize {
    let (from, to) = pair(b"");
    let mut wire = Vec::new();
    for part in bytes(30).chunks(10) {
        from.write(&mut wire, &[], part).unwrap();
    }
    change(&mut wire);
    let (mut wire, mut into, mut count) = (&wire[..], [0; 64], 0);
    while let Ok(more @ 1..) = to.read(&mut wire, &mut into[count..]) {
        count += more;
    }
    assert_eq!(into[..count], bytes(30)[..count]);
    count
}

#[test]
fn records_that_are_changed_end_the_connection() {
    const EACH: usize = 10 + LENGTH_BYTES + TAG_BYTES;
    assert_eq!(delivered(|_| {}), 30);
    for at in 0..3 * EACH {
        let flipped = delivered(|wire| wire[at] ^= 0x10);
        assert_eq!(flipped, at / EACH * 10, "byte {at}");
    }
    let lost = delivered(|wire| drop(wire.drain(..EACH)));
    let twice = delivered(|wire| wire.extend_from_within(..EACH));
    let repeated = delivered(|wire| {
        let first = wire[..EACH].to_vec();
        wire.splice(EACH..2 * EACH, first);
    });
    let swapped = delivered(|wire| wire[EACH..].rotate_left(EACH));
    let cut = delivered(|wire| wire.truncate(2 * EACH + 5));
    assert_eq!((lost, twice, repeated, swapped, cut), (0, 30, 10, 10, 20));
    // Invalid lengths: too short for a tag or a payload, too long for the buffer.
    for length in [0, 15, 16, RECORD_BYTES + TAG_BYTES + 1, 65_535] {
        let length = u16::try_from(length).unwrap().to_le_bytes();
        assert_eq!(delivered(|wire| wire[..2].copy_from_slice(&length)), 0);
    }
}

#[test]
fn what_goes_back_is_no_record_of_the_other_direction() {
    let (one, other) = pair(b"");
    let mut wire = Vec::new();
    one.write(&mut wire, &[], &[1, 2, 3]).unwrap();
    assert_eq!(one.read(&mut &wire[..], &mut [0; 9]), Err(Closed));
    assert_eq!(other.read(&mut &wire[..], &mut [0; 9]), Ok(3));
}

#[test]
fn any_bytes_are_refused() {
    let mut random = 7_u64;
    for length in (0..300).chain([5000, 70_000]) {
        let bytes: Vec<u8> = (0..length)
            .map(|_| {
                random = random
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                random.to_le_bytes()[7]
            })
            .collect();
        parse(&bytes);
    }
}
