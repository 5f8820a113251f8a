//! Tests of a member, stepped by hand; whole clusters of them are in the crate `sim`.

use super::super::HybridTimestamp;
use super::super::Register;
use super::*;
use crate::testing::SimulatedSigner;

fn id(number: u8) -> NodeId {
    NodeId([number; 16])
}

fn at(ms: u64) -> Now {
    Now {
        since_start: Duration::from_millis(ms),
        wall_ms: 1_800_000_000_000 + ms,
    }
}

fn member(number: u8) -> Membership {
    let signer = Arc::new(SimulatedSigner(id(number)));
    Membership::new(signer, Registers::default(), Pace::default(), 1, at(0))
}

fn link(member: &mut Membership, other: u8, ms: u64) -> Vec<Action> {
    let linked = Event::Linked {
        id: id(other),
        target: None,
    };
    member.step(at(ms), linked)
}

/// An entry with the signature of the node that its timestamp names.
fn signed(key: RegisterKey, register: Register) -> SignedEntry {
    let signer = SimulatedSigner(register.stamp.node);
    let signature = signer.sign(&SignedEntry::message(&key, &register));
    SignedEntry {
        signature: signature.unwrap(),
        key,
        register,
    }
}

/// A write of node `by`, the `count`th of its first millisecond.
fn entry(key: RegisterKey, by: u8, count: u32, value: Option<&str>) -> SignedEntry {
    let (ms, node) = (at(0).wall_ms, id(by));
    let register = Register {
        epoch: 0,
        stamp: HybridTimestamp { ms, count, node },
        value: value.map(str::to_owned),
    };
    signed(key, register)
}

fn receive(member: &mut Membership, from: u8, entries: Vec<SignedEntry>) -> Vec<Action> {
    let (from, message) = (id(from), GossipMessage::Entries { entries });
    member.step(at(1), Event::Received { from, message })
}

fn lives(actions: &[Action]) -> Vec<(u8, Life)> {
    let life = |action: &Action| match action {
        Action::Life(id, life) => Some((id.0[0], *life)),
        _ => None,
    };
    actions.iter().filter_map(life).collect()
}

fn gossip(
    member: &mut Membership,
    from: u8,
    about: u8,
    incarnation: u64,
    life: Life,
) -> Vec<Action> {
    let rumour = Rumour {
        id: id(about),
        incarnation,
        life,
    };
    let message = GossipMessage::Gossip {
        rumours: vec![rumour],
    };
    let from = id(from);
    member.step(at(10), Event::Received { from, message })
}

/// Only one node had the news of a death, and none of the objection.
#[test]
fn an_old_rumour_of_a_death_is_answered_with_the_objection() {
    let mut one = member(1);
    link(&mut one, 2, 0);
    link(&mut one, 3, 0);
    gossip(&mut one, 2, 3, 5, Life::Alive);
    let answered = gossip(&mut one, 2, 3, 4, Life::Dead);
    let rumour = Rumour {
        id: id(3),
        incarnation: 5,
        life: Life::Alive,
    };
    let (to, message) = (
        id(2),
        GossipMessage::Gossip {
            rumours: vec![rumour],
        },
    );
    assert_eq!(answered, [Action::Send { to, message }]);
    assert_eq!(
        lives(&gossip(&mut one, 2, 3, 5, Life::Dead)),
        [(3, Life::Dead)]
    );
    let told = one.step(at(400), Event::Tick);
    let says = |action: &Action| match action {
        Action::Send {
            message: GossipMessage::Ping { rumours, .. },
            ..
        } => rumours.iter().any(|it| it.life == Life::Dead),
        _ => false,
    };
    assert!(told.iter().any(says), "{told:?}");
}

/// Answers every ping after `took` ms, from `from` to `until`, and none later; returns whether the
/// node counts as slow then.
fn answers(one: &mut Membership, took: u64, (from, until): (u64, u64)) -> Option<Duration> {
    let mut asked = Vec::new();
    for ms in from..until {
        let mut acted = Vec::new();
        if one.next_wake() <= at(ms).since_start {
            acted = one.step(at(ms), Event::Tick);
        }
        let pings = acted.into_iter().filter_map(|action| match action {
            Action::Send {
                message: GossipMessage::Ping { seq, root, .. },
                ..
            } => Some((ms + took, seq, root)),
            _ => None,
        });
        asked.extend(pings);
        let due = asked.extract_if(.., |(at, ..)| *at <= ms);
        let due: Vec<_> = due.collect();
        for (_, seq, root) in due {
            let (from, rumours) = (id(2), Vec::new());
            let message = GossipMessage::Ack { seq, root, rumours };
            one.step(at(ms), Event::Received { from, message });
        }
    }
    one.peers().next().unwrap().slow
}

#[test]
fn a_node_is_slow_while_its_answers_stay_late() {
    let mut one = member(1);
    link(&mut one, 2, 0);
    assert_eq!(answers(&mut one, 100, (1, 6000)), None, "in time");
    assert_eq!(answers(&mut one, 150, (6000, 7100)), None, "a busy moment");
    let slow = answers(&mut one, 150, (7100, 10_100));
    assert_eq!(slow, Some(Duration::from_millis(150)));
    assert_eq!(one.life(id(2)), Life::Alive);
    assert!(answers(&mut one, 5, (10_100, 11_000)).is_some(), "not yet");
    assert_eq!(answers(&mut one, 5, (11_000, 14_000)), None);
}

#[test]
fn a_node_objects_to_rumours_of_its_death() {
    let mut one = member(1);
    link(&mut one, 2, 0);
    let before = one.incarnation;
    assert_eq!(
        gossip(&mut one, 2, 1, before - 1, Life::Dead),
        [],
        "an old rumour"
    );
    let actions = gossip(&mut one, 2, 1, before, Life::Suspect);
    let [
        Action::Send {
            message: GossipMessage::Gossip { rumours },
            ..
        },
    ] = &actions[..]
    else {
        panic!("{actions:?}");
    };
    let [rumour] = rumours[..] else {
        panic!("{rumours:?}")
    };
    assert_eq!((rumour.id, rumour.life), (id(1), Life::Alive));
    assert!(rumour.incarnation > before);
}

#[test]
fn only_a_higher_incarnation_brings_a_node_back() {
    let mut one = member(1);
    link(&mut one, 2, 0);
    link(&mut one, 3, 0);
    assert_eq!(
        lives(&gossip(&mut one, 2, 3, 7, Life::Suspect)),
        [(3, Life::Suspect)]
    );
    assert_eq!(lives(&gossip(&mut one, 2, 3, 7, Life::Alive)), []);
    assert_eq!(
        lives(&gossip(&mut one, 2, 3, 8, Life::Alive)),
        [(3, Life::Alive)]
    );
    assert_eq!(
        lives(&gossip(&mut one, 2, 9, 8, Life::Dead)),
        [],
        "a stranger"
    );
}

#[test]
fn hostile_messages_change_nothing_and_hold_no_memory() {
    let mut one = member(1);
    link(&mut one, 2, 0);
    let far = HybridTimestamp {
        ms: u64::MAX,
        count: u32::MAX,
        node: id(2),
    };
    let register = Register {
        epoch: 0,
        stamp: far,
        value: Some("{}".into()),
    };
    let entries = vec![signed(RegisterKey::Node(id(2)), register)];
    assert_eq!(receive(&mut one, 2, entries), []);
    for number in 0..5000_u64 {
        let bytes = std::array::from_fn(|i| number.to_le_bytes()[i % 8]);
        one.step(at(1), Event::Found(DialTarget::Node(NodeId(bytes))));
        one.step(at(1), Event::Found(DialTarget::Peer(number.to_string())));
    }
    assert!(one.peers().count() <= PEERS_MAX);
    let dialled = one.step(at(60_000), Event::Tick);
    assert!(dialled.len() < 4000, "{}", dialled.len());
    let stranger = Event::Received {
        from: id(99),
        message: GossipMessage::PingFor { id: id(2) },
    };
    assert_eq!(one.step(at(1), stranger), [], "no session, no word");
}

/// A member may declare another one dead only in ways to which that one can object.
#[test]
fn no_member_kills_another_for_good() {
    let mut one = member(1);
    link(&mut one, 2, 0);
    link(&mut one, 3, 0);
    assert_eq!(gossip(&mut one, 2, 3, u64::MAX, Life::Dead), []);
    assert_eq!(
        gossip(&mut one, 2, 1, u64::MAX, Life::Dead),
        [],
        "no objection is higher"
    );
    let latest = at(10).wall_ms + INCARNATION_AHEAD_MAX;
    let killed = gossip(&mut one, 2, 3, latest, Life::Dead);
    assert_eq!(lives(&killed), [(3, Life::Dead)]);
    link(&mut one, 3, 10);
    let back = gossip(&mut one, 3, 3, latest + 1, Life::Alive);
    assert_eq!(lives(&back), [(3, Life::Alive)], "its own word");
}

/// A machine's clock is hours ahead at first, and then set.
#[test]
fn a_node_that_started_with_a_wrong_clock_is_suspected_and_objects() {
    let mut one = member(1);
    link(&mut one, 2, 0);
    link(&mut one, 3, 0);
    let far = at(36_000_000).wall_ms;
    assert_eq!(lives(&gossip(&mut one, 3, 3, far, Life::Alive)), []);
    let suspected = gossip(&mut one, 2, 3, far, Life::Suspect);
    assert_eq!(lives(&suspected), [(3, Life::Suspect)]);
    // Others' rumours of its own earlier start.
    let objects = gossip(&mut one, 2, 1, far, Life::Dead);
    let is_higher = |action: &Action| match action {
        Action::Send {
            message: GossipMessage::Gossip { rumours },
            ..
        } => (rumours[0].id, rumours[0].incarnation) == (id(1), far + 1),
        _ => false,
    };
    assert!(objects.iter().any(is_higher), "{objects:?}");
}

#[test]
fn a_revocation_that_no_known_member_signed_is_refused() {
    let mut one = member(1);
    link(&mut one, 2, 0);
    link(&mut one, 3, 0);
    let mut takes = |entries| receive(&mut one, 2, entries).contains(&Action::Unlink(id(3)));
    let revoked = |by| entry(RegisterKey::Revoked(id(3)), by, 1, Some("{}"));
    assert!(!takes(vec![revoked(4)]), "nobody knows it");
    let mut forged = revoked(4);
    forged.register.stamp.node = id(2);
    let known = [2, 4].map(|by| entry(RegisterKey::Node(id(by)), by, 1, Some("{}")));
    assert!(!takes([&known[..], &[forged]].concat()));
    assert!(!takes(vec![entry(
        RegisterKey::Revoked(id(3)),
        3,
        2,
        Some("{}")
    )]));
    assert!(takes(vec![revoked(4)]));
}

/// Node 2 is a member and writes what it likes about node 3, node 1 and node 4, which is away.
#[test]
fn no_member_writes_in_the_name_of_another() {
    let mut one = member(1);
    let facts = |member: &mut Membership, number: u8| {
        let key = RegisterKey::Node(id(number));
        let value = Some(format!("\"{number}\""));
        member.step(
            at(0),
            Event::Write {
                key,
                epoch: 0,
                value,
            },
        );
    };
    facts(&mut one, 1);
    link(&mut one, 2, 0);
    link(&mut one, 3, 0);
    let theirs = [3, 4].map(|by| {
        let value = format!("\"{by}\"");
        entry(RegisterKey::Node(id(by)), by, 0, Some(&value))
    });
    receive(&mut one, 3, theirs.to_vec());
    gossip(&mut one, 3, 4, at(0).wall_ms, Life::Dead);
    let before = one.map().root();

    for (count, number) in [1, 3, 4].into_iter().enumerate() {
        let key = RegisterKey::Node(id(number));
        let mut forged = vec![entry(key.clone(), 2, 2, Some("\"bad\""))];
        // Another epoch, another writer, another value or another key than the writer signed.
        let mut high = entry(key.clone(), number, 3, Some("\"bad\""));
        high.register.epoch = u64::MAX;
        forged.push(signed(key.clone(), high.register));
        let mut theirs = entry(key.clone(), 2, 4, Some("\"bad\""));
        theirs.register.stamp.node = id(number);
        forged.push(theirs);
        let mut value = entry(key.clone(), number, 0, Some("\"old\""));
        value.register.stamp.count = 5 + count as u32;
        value.register.value = Some("\"bad\"".to_owned());
        forged.push(value);
        let mut other = entry(RegisterKey::Node(id(2)), 2, 6, Some("\"bad\""));
        other.key = key.clone();
        forged.push(other);
        receive(&mut one, 2, forged);
        assert_eq!(one.map().get(&key), Some(&*format!("\"{number}\"")));
    }
    assert_eq!(one.map().root(), before);

    // It may delete the facts of a dead node only.
    let delete = |number| entry(RegisterKey::Node(id(number)), 2, 9, None);
    let deleted = [1, 3, 4].map(delete).to_vec();
    receive(&mut one, 2, vec![delete(4)]);
    let early = one.map().get(&RegisterKey::Node(id(4)));
    assert!(early.is_some(), "it may object");
    let message = GossipMessage::Entries { entries: deleted };
    let from = id(2);
    let actions = one.step(at(2010), Event::Received { from, message });
    for (number, stays) in [(1, true), (3, true), (4, false)] {
        let found = one.map().get(&RegisterKey::Node(id(number)));
        assert_eq!(found.is_some(), stays, "{number}");
    }
    // Node 1 writes its facts again, so that nodes that took the deletion have them.
    let written = actions.iter().any(|action| match action {
        Action::Send {
            message: GossipMessage::Entries { entries },
            ..
        } => entries[0].key == RegisterKey::Node(id(1)) && entries[0].register.value.is_some(),
        _ => false,
    });
    assert!(written, "{actions:?}");
}

/// In one message node 2 revokes another node than before, and deletes the facts of the first one.
#[test]
fn the_facts_of_a_node_whose_revocation_ends_are_not_deleted() {
    let mut one = member(1);
    link(&mut one, 2, 0);
    link(&mut one, 3, 0);
    let facts = |by| entry(RegisterKey::Node(id(by)), by, 0, Some("{}"));
    let revoked = |of, count| entry(RegisterKey::Revoked(id(of)), 2, count, Some("{}"));
    receive(&mut one, 2, vec![facts(2), facts(3), revoked(3, 5)]);
    assert_eq!(one.map().get(&RegisterKey::Node(id(3))), None, "hidden");
    let delete = entry(RegisterKey::Node(id(3)), 2, 9, None);
    receive(&mut one, 2, vec![delete.clone(), revoked(4, 4), delete]);
    assert!(one.map().get(&RegisterKey::Node(id(3))).is_some());
}

#[test]
fn a_single_revocation_is_confirmed_after_a_day() {
    let mut one = member(1);
    link(&mut one, 2, 0);
    let known = entry(RegisterKey::Node(id(2)), 2, 0, Some("{}"));
    let claims = [3, 4].map(|of| entry(RegisterKey::Revoked(id(of)), 2, u32::from(of), Some("{}")));
    receive(&mut one, 2, [&[known][..], &claims].concat());
    let revoked = |one: &Membership| one.map().revoked().iter().map(|id| id.0[0]).collect();
    let found: Vec<u8> = revoked(&one);
    assert_eq!(found, [3], "each further one needs a second signer");
    let day = HIDDEN_MS + 2;
    one.step(at(day), Event::Tick);
    let found: Vec<u8> = revoked(&one);
    assert_eq!(found, [3, 4], "node 1 has signed the first one");
}
