//! Tests of the ring that need no model checker. They are in a file of their own because
//! `tests/loom.rs` compiles the ring alone.

use crate::ring::{Counters, Ring};

#[test]
fn bytes_come_out_in_order() {
    let mut memory = vec![0_u64; 64];
    let counters = Box::new(Counters::new());
    // SAFETY: the memory outlives the ring, has 64 bytes and is zero.
    let ring = unsafe { Ring::new(&raw const *counters, memory.as_mut_ptr().cast(), 64) };
    let (mut sent, mut got, mut next) = (0_u8, 0_u8, 0_usize);
    for round in 0..1000_usize {
        let bytes: Vec<u8> = (0..round % 90)
            .map(|i| sent.wrapping_add(u8::try_from(i).unwrap()))
            .collect();
        let (head, body) = bytes.split_at(bytes.len() / 3);
        let count = ring.write(head, body);
        assert!(count == bytes.len() || !ring.has_room());
        sent = sent.wrapping_add(u8::try_from(count).unwrap());
        let mut into = vec![0; (round * 7) % 50];
        let count = ring.read(&mut into);
        for byte in &into[..count] {
            assert_eq!(*byte, got, "byte {next}");
            got = got.wrapping_add(1);
            next += 1;
        }
    }
    assert!(next > 10_000, "{next} bytes went through");
}
