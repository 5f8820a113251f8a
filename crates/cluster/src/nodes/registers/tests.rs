//! Tests of the map without members.

use proptest::prelude::*;

use super::super::HybridTimestamp;
use super::*;

fn node(number: u8) -> NodeId {
    NodeId([number; 16])
}

fn write(by: u8, epoch: u64, ms: u64, value: Option<&str>) -> Register {
    let (count, node) = (0, node(by));
    Register {
        epoch,
        stamp: HybridTimestamp { ms, count, node },
        value: value.map(str::to_owned),
    }
}

fn named(name: &str) -> RegisterKey {
    RegisterKey::Named(name.to_owned())
}

impl Registers {
    /// Merges a write as one of another node; true if it changed something.
    fn take(&mut self, key: RegisterKey, register: Register, now_ms: u64) -> bool {
        let before = self.root;
        let signature = Some(Signature::simulated(String::new()));
        self.insert(key, register, signature, now_ms);
        self.root != before
    }
}

fn contents(map: &Registers) -> Vec<(RegisterKey, Register)> {
    map.iter().map(|(k, r)| (k.clone(), r.clone())).collect()
}

#[test]
fn the_later_write_wins_and_an_epoch_over_both() {
    let mut map = Registers::default();
    let key = RegisterKey::Record(RecordId(7));
    assert!(map.take(key.clone(), write(1, 0, 10, Some("a")), 0));
    assert!(!map.take(key.clone(), write(2, 0, 9, Some("b")), 0));
    let higher = write(2, 0, 10, Some("c"));
    assert!(map.take(key.clone(), higher, 0), "the higher node");
    let later = write(1, 1, 1, Some("d"));
    assert!(map.take(key.clone(), later, 0), "the higher epoch");
    assert!(!map.take(key.clone(), write(1, 0, 99, None), 0));
    assert_eq!(map.get(&key), Some("d"));
    assert!(map.take(key.clone(), write(1, u64::MAX, 2, None), 0));
    assert_eq!(map.get(&key), None);
    assert!(map.register(&key).is_some());
}

#[test]
fn each_entry_is_written_by_those_with_the_right() {
    let map = Registers::default();
    let (own, other) = (node(1), node(2));
    let facts = |id: NodeId| named(&format!("paths/{id}"));
    let state = RegisterKey::Report(RecordId(1));
    for (key, by_own, by_other, deleted_by_other) in [
        (RegisterKey::Node(own), true, false, true),
        (facts(own), true, false, true),
        (RegisterKey::api_key(own, "k"), true, false, true),
        (RegisterKey::ApiKey("k".to_owned()), false, false, false),
        (named("files/00"), true, true, true),
        (RegisterKey::Revoked(other), true, false, false),
        (state, true, true, true),
    ] {
        let admits = |by, value| map.admits(&key, &write(by, 0, 1, value));
        let found = [admits(1, Some("1")), admits(2, Some("1")), admits(2, None)];
        assert_eq!(found, [by_own, by_other, deleted_by_other], "{key:?}");
        let has_epochs = matches!(key, RegisterKey::Report(_));
        assert_eq!(map.admits(&key, &write(1, 1, 1, Some("1"))), has_epochs);
    }
    let long = "x".repeat(VALUE_BYTES_MAX + 1);
    assert!(!map.admits(&named("a"), &write(1, 0, 1, Some(&long))));
    assert!(!map.admits(&named(&long), &write(1, 0, 1, Some("1"))));
    // A revocation is not taken back.
    let revoked = RegisterKey::Revoked(node(3));
    assert!(!map.admits(&revoked, &write(1, 0, 2, None)));
}

#[test]
fn an_epoch_far_above_all_others_does_not_win() {
    let mut map = Registers::default();
    let key = RegisterKey::Record(RecordId(7));
    map.take(key.clone(), write(1, 3, 1, Some("a")), 0);
    for epoch in [u64::MAX, u64::MAX - 1, EPOCH_JUMP_MAX + 4] {
        map.take(key.clone(), write(9, epoch, 2, Some("bad")), 0);
        assert_eq!(map.get(&key), Some("a"), "{epoch}");
    }
    // Neither do its own writes one after the other.
    assert!(map.would_win(&key, &write(2, 4, 3, Some("b"))));
    map.take(key.clone(), write(2, 4, 3, Some("b")), 0);
    assert_eq!(map.get(&key), Some("b"));
}

#[test]
fn only_the_owner_reports_on_a_record() {
    let mut map = Registers::default();
    let id = RecordId(7);
    let record = |owner: u8| format!("{{\"nodes\":[\"{}\"]}}", node(owner));
    let (key, state) = (RegisterKey::Record(id), RegisterKey::Report(id));
    map.take(key.clone(), write(1, 1, 1, Some(&record(2))), 0);
    map.take(state.clone(), write(9, 8, 9, Some("bad")), 0);
    assert_eq!(map.get(&state), None);
    map.take(state.clone(), write(2, 1, 2, Some("ready")), 0);
    map.take(state.clone(), write(3, 2, 3, Some("next")), 0);
    map.take(state.clone(), write(9, 9, 9, None), 0);
    assert_eq!(map.get(&state), Some("ready"));
    map.take(key, write(3, 2, 3, Some(&record(3))), 0);
    assert_eq!(map.get(&state), Some("next"));
}

#[test]
fn what_a_revoked_writer_hid_wins_again() {
    let mut map = Registers::default();
    let key = RegisterKey::Record(RecordId(7));
    map.take(key.clone(), write(1, 1, 1, Some("a")), 0);
    map.take(named("x"), write(9, 0, 1, Some("bad")), 0);
    map.take(key.clone(), write(9, u64::MAX, 2, None), 0);
    assert_eq!(map.get(&key), None);
    map.take(RegisterKey::Revoked(node(9)), write(2, 0, 3, Some("{}")), 5);
    assert_eq!((map.get(&key), map.get(&named("x"))), (Some("a"), None));
    map.take(named("y"), write(9, 0, 4, Some("late")), 6);
    assert_eq!(map.get(&named("y")), None);
    // Its slots go after a day; what it hid before stays.
    map.forget(6 + HIDDEN_MS);
    assert_eq!(map.usage.get(&node(9)), None);
    assert_eq!(map.get(&key), Some("a"));
    // A node that never saw the bad writes has the same map.
    let mut other = Registers::default();
    other.take(key, write(1, 1, 1, Some("a")), 0);
    other.take(RegisterKey::Revoked(node(9)), write(2, 0, 3, Some("{}")), 0);
    assert_eq!(map.root(), other.root());
}

#[test]
fn a_writer_fills_its_own_part_only_and_can_be_revoked() {
    let mut map = Registers::default();
    map.set_own(node(1));
    let full = "x".repeat(VALUE_BYTES_MAX);
    for number in 0..2 * WRITER_REGISTERS_MAX as u64 {
        map.take(
            named(&number.to_string()),
            write(9, 0, number, Some(&full)),
            0,
        );
        let target = NodeId(std::array::from_fn(|i| number.to_le_bytes()[i % 8]));
        map.take(
            RegisterKey::Revoked(target),
            write(9, 0, number, Some("{}")),
            0,
        );
    }
    let usage = map.usage[&node(9)];
    assert!(
        usage.fits(WRITER_REGISTERS_MAX, WRITER_BYTES_MAX),
        "{usage:?}"
    );
    assert_eq!(map.all, usage);
    assert_eq!(map.claims(node(9)), CLAIMS_MAX);
    let latest = (2 * WRITER_REGISTERS_MAX - 1).to_string();
    assert!(map.get(&named(&latest)).is_some(), "the latest stay");
    // Three more fill the map: this node's revocation has room all the same.
    for by in 6..9 {
        for number in 0..200 {
            let key = named(&format!("{by} {number}"));
            map.take(key, write(by, 0, number, Some(&full)), 0);
        }
    }
    assert!(map.all.fits(REGISTERS_MAX, BYTES_MAX), "{:?}", map.all);
    assert!(!map.admits(&named("own"), &write(1, 0, 1, Some(&full))));
    assert!(map.take(RegisterKey::Revoked(node(9)), write(1, 0, 1, Some("{}")), 0));
    assert!(map.revoked().contains(&node(9)));
    map.forget(HIDDEN_MS);
    assert!(map.admits(&named("own"), &write(1, 0, 1, Some(&full))));
}

#[test]
fn an_own_write_beyond_the_quota_is_refused() {
    let mut map = Registers::default();
    map.set_own(node(1));
    for number in 0..WRITER_REGISTERS_MAX as u64 {
        assert!(map.take(named(&number.to_string()), write(1, 0, 1, Some("1")), 0));
    }
    assert!(!map.admits(&named("more"), &write(1, 0, 1, Some("1"))));
    assert!(map.admits(&named("0"), &write(1, 0, 2, Some("2"))), "known");
}

#[test]
fn tombstones_and_hidden_slots_go_in_time() {
    let mut map = Registers::default();
    map.take(named("a"), write(1, 0, 1, Some("1")), 1);
    map.take(named("a"), write(2, 0, 2, None), 2);
    map.forget(TOMBSTONE_MS + 3);
    assert_eq!((contents(&map), map.root()), (Vec::new(), 0));
    assert_eq!(map.all, Usage::default(), "the hidden slot does not win");
}

#[test]
fn differences_are_found_by_marks() {
    let (mut one, mut two) = (Registers::default(), Registers::default());
    let state = |id| RegisterKey::Report(RecordId(id));
    for id in 0..5 {
        one.take(state(id), write(1, 0, id, Some("1")), 0);
        two.take(state(id + 2), write(1, 0, id + 2, Some("1")), 0);
    }
    let (beyond, missing) = one.beyond(&two.marks());
    let keys: Vec<RegisterKey> = beyond.into_iter().map(|entry| entry.key).collect();
    assert_eq!(keys, [0, 1].map(state));
    assert_eq!(missing, 2);
    assert_eq!(one.beyond(&one.marks()), (Vec::new(), 0));
    let saved = Registers::from_saved(one.saved());
    assert_eq!(
        (contents(&saved), saved.root()),
        (contents(&one), one.root())
    );
}

proptest! {
    /// Copies with the same writes are equal, for any order and repetition.
    #[test]
    fn order_does_not_matter(
        writes in prop::collection::vec((0_u64..6, 0_u8..4, 0_u64..2, 0_u64..4), 0..40),
    ) {
        // A node never uses a timestamp twice, so the value is a function of it.
        let each = writes.iter().map(|&(id, by, epoch, ms)| {
            let value = ((id + ms + epoch) % 3 != 0).then_some("v");
            match id {
                4 | 5 => {
                    let revoked = RegisterKey::Revoked(node((id + ms) as u8 % 4));
                    (revoked, write(by, 0, ms, Some("{}")))
                }
                id => (RegisterKey::Report(RecordId(id)), write(by, epoch, ms, value)),
            }
        });
        let (mut one, mut two) = (Registers::default(), Registers::default());
        for (key, register) in each.clone() {
            one.take(key, register, 0);
        }
        for (key, register) in each.clone().rev().chain(each) {
            two.take(key, register, 0);
        }
        prop_assert_eq!(contents(&one), contents(&two));
        prop_assert_eq!(one.revoked(), two.revoked());
        prop_assert_eq!(one.root(), two.root());
    }
}
