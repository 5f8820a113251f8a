//! Several nodes in one process over loopback, each with its own home.

mod api_keys;
mod reachability;
mod strangers;

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::sync::mpsc::channel;

use serde_json::json;
use tempfile::TempDir;

use super::super::{pairing, session};
use super::*;
use crate::nodes::discovery::{DiscoveredNode, DiscoveryMethod};
use crate::nodes::member::{ENTRIES_MAX, GossipMessage};
use crate::nodes::registers::{EPOCH_UNWANTED, SignedEntry, VALUE_BYTES_MAX};
use crate::nodes::{ClusterKey, HybridTimestamp, RecordId, Register};
use api_keys::{MemoryKeyFile, with_keys};
use strangers::refused;

/// Longest wait of these tests, reached only if something hangs.
const PATIENCE: Duration = Duration::from_secs(60);

struct TestNode {
    agent: Agent,
    home: TempDir,
}

impl Drop for TestNode {
    fn drop(&mut self) {
        self.agent.stop();
    }
}

fn config(home: &Path, name: &str, peers: &[u16]) -> Config {
    let facts = NodeFacts {
        name: name.to_owned(),
        cores: 4,
        ..NodeFacts::default()
    };
    let mut config = Config::new(home, facts);
    config.port = 0;
    config.discovery = Discovery::Peers;
    config.peers = peers
        .iter()
        .map(|port| format!("127.0.0.1:{port}"))
        .collect();
    config.work = |map, own| {
        let is_record = |key: &RegisterKey| matches!(key, RegisterKey::Record(_));
        let mut live = map.iter().filter(|(key, _)| is_record(key));
        let own = own.to_string();
        let names = |it: &Register| it.value.as_ref().is_some_and(|it| it.contains(&own));
        live.any(|(_, it)| names(it)).then(|| "work".to_owned())
    };
    config
}

fn node(name: &str, key: &ClusterKey, peers: &[u16]) -> TestNode {
    let home = tempfile::tempdir().unwrap();
    join_at_rest(home.path(), key).unwrap();
    let agent = Agent::start(config(home.path(), name, peers)).unwrap();
    TestNode { agent, home }
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(
            start.elapsed() < PATIENCE,
            "{what}: not within {PATIENCE:?}"
        );
        thread::sleep(Duration::from_millis(5));
    }
}

fn lives(agent: &Agent) -> Vec<String> {
    let nodes = agent.nodes().into_iter();
    let living = nodes.filter(|node| node.state == Life::Alive && node.linked);
    living.map(|node| node.facts.name).collect()
}

fn cluster(names: &[&str]) -> Vec<TestNode> {
    let key = ClusterKey::random().unwrap();
    let mut nodes: Vec<TestNode> = Vec::new();
    for name in names {
        let peers: Vec<u16> = nodes
            .first()
            .map(|node| node.agent.port())
            .into_iter()
            .collect();
        nodes.push(node(name, &key, &peers));
    }
    let mut names = names.to_vec();
    names.sort_unstable();
    for node in &nodes {
        // A node is alive before its facts arrive. Until then its name comes from its id.
        until("all meet and know the names", || {
            let mut seen = lives(&node.agent);
            seen.sort_unstable();
            seen == names
        });
    }
    nodes
}

#[test]
fn nodes_meet_through_one_peer_and_see_one_die() {
    let mut nodes = cluster(&["one", "two", "three"]);
    let seen = lives(&nodes[0].agent);
    assert_eq!(seen, ["one", "three", "two"], "the own one first");
    let dead = nodes.pop().unwrap();
    let id = dead.agent.id();
    assert!(matches!(
        nodes[0].agent.forget("three"),
        Err(Error::Lives { .. })
    ));
    drop(dead);
    for node in &nodes {
        until("the death is seen", || node.agent.life(id) == Life::Dead);
    }
    assert_eq!(nodes[0].agent.forget("three").unwrap(), id);
    until("it is forgotten", || nodes[1].agent.nodes().len() == 2);
    assert!(matches!(
        nodes[1].agent.find("three"),
        Err(Error::NoNode { .. })
    ));
    let two = nodes.pop().unwrap();
    assert_eq!(two.agent.name(id), "three", "records may still name it");
    two.agent.stop();
    let again = Agent::start(config(two.home.path(), "three", &[])).unwrap();
    assert_eq!(again.name(id), format!("three-{}", &id.to_string()[..4]));
    again.stop();
}

#[test]
fn a_revoked_node_is_dead_to_all_and_its_channels_end() {
    let nodes = cluster(&["one", "two", "three"]);
    let (one, id) = (&nodes[0].agent, nodes[2].agent.id());
    let (keep, kept) = channel();
    nodes[2]
        .agent
        .serve("silent", move |channel| keep.send(channel).unwrap());
    let silent = nodes[1].agent.open(id, "silent", PATIENCE).unwrap();
    let _held = kept.recv_timeout(PATIENCE).unwrap();
    assert!(matches!(one.revoke("one"), Err(Error::Itself)));
    assert!(matches!(one.revoke("four"), Err(Error::NoNode { .. })));
    assert_eq!(one.revoke("three").unwrap().id, id);
    for node in &nodes[..2] {
        until("it is cut off", || node.agent.life(id) == Life::Dead);
    }
    assert!(silent.recv(1, PATIENCE).is_err(), "its node was revoked");
    assert_eq!(one.forget("three").unwrap(), id);
    until("it is forgotten", || nodes[1].agent.nodes().len() == 2);
    // It may know of its revocation and not dial by itself.
    assert!(nodes[2].agent.open(one.id(), "silent", PATIENCE).is_err());
    assert_eq!(refused(one)[0].0, "node_revoked");
}

/// The old key admits members that were offline, but neither the revoked node nor new ones.
#[test]
fn a_revocation_changes_the_key_and_reaches_nodes_that_were_away() {
    let nodes = cluster(&["one", "two", "three", "four"]);
    let (one, two) = (&nodes[0].agent, &nodes[1].agent);
    let (old, four) = (one.token(), nodes[3].agent.id());
    nodes[3].agent.stop();
    until("four is dead", || one.life(four) == Life::Dead);
    one.serve("silent", |_| {});
    two.serve("silent", |_| {});
    one.revoke("three").unwrap();
    assert_ne!(*one.token(), *old);
    // Works whether or not node two has the new key yet.
    two.open(one.id(), "silent", PATIENCE).unwrap();
    one.open(two.id(), "silent", PATIENCE).unwrap();
    until("two has the new key", || two.token() == one.token());

    let again = |name: &str, home: &Path| Agent::start(config(home, name, &[one.port()])).unwrap();
    let back = again("four", nodes[3].home.path());
    until("four has the new key", || back.token() == one.token());
    until("four is back", || one.life(four) == Life::Alive);
    back.stop();
    let kept = again("four", nodes[3].home.path());
    assert_eq!(kept.token(), one.token(), "it is on its disk");
    kept.stop();

    let key = ClusterKey::from_token(&old).unwrap();
    let stranger = node("five", &key, &[one.port()]);
    let told = || stranger.agent.problems().join("; ");
    until("five hears why", || told().contains("key has changed"));
    assert_eq!(lives(&stranger.agent), ["five"], "{}", told());
    assert_eq!(nodes[2].agent.token(), old, "three is told nothing");
}

/// A member with a former key may send a key, and nothing else. Any other peer does not even get
/// the name of the answering node.
#[test]
fn a_former_key_opens_nothing_but_the_service_of_the_new_one() {
    let nodes = cluster(&["one", "two", "three"]);
    let (one, two) = (&nodes[0].agent, &nodes[1]);
    let former = ClusterKey::from_token(&one.token()).unwrap();
    let (keep, kept) = channel();
    one.serve("silent", move |channel| keep.send(channel).unwrap());
    two.agent.stop();
    let id = two.agent.id();
    until("two is dead", || one.life(id) == Life::Dead);
    one.revoke("three").unwrap();

    let mut hello = two.agent.inner.hello();
    hello.boot += 1;
    let place = SocketAddr::from((Ipv4Addr::LOCALHOST, one.port()));
    let seen = Mutex::new(Vec::new());
    let dial = |identity: &Identity, purpose| {
        let judge = |_: NodeId, hello: &Hello| {
            lock(&seen).push((hello.name.clone(), hello.build.clone()));
            None
        };
        let own = session::Own {
            identity,
            key: &former,
            hello: &hello,
            judge: &judge,
        };
        session::dial(own, place, purpose, PATIENCE)
    };
    let member = NodeFolder::new(two.home.path()).identity().unwrap();
    assert_eq!(member.id(), two.agent.id());
    let link = dial(&member, Purpose::Control).unwrap();
    let heard = link.recv(1 << 20, PATIENCE);
    assert!(matches!(
        heard,
        Err(session::Error::Closed | session::Error::Broken(_))
    ));
    for service in ["silent", paths::SERVICE, diagnostics::SERVICE] {
        let session = dial(&member, Purpose::Service).unwrap();
        let refused = super::channel::ask(session, service, PATIENCE).unwrap_err();
        let Error::NoService { reason, .. } = refused else {
            panic!("{service}: {refused}");
        };
        assert_eq!(reason, rekey::OUTDATED, "{service}");
    }
    let session = dial(&member, Purpose::Service).unwrap();
    super::channel::ask(session, rekey::SERVICE, PATIENCE).unwrap();

    let stranger = Identity::random().unwrap();
    for purpose in [Purpose::Control, Purpose::Service] {
        let refused = dial(&stranger, purpose).unwrap_err();
        assert!(refused.to_string().contains("key has changed"), "{refused}");
    }
    let name = facts::shown("", one.id());
    assert!(
        lock(&seen)
            .iter()
            .all(|told| *told == (name.clone(), String::new()))
    );
    assert!(kept.try_recv().is_err(), "the service was not reached");
}

/// Earlier versions saved the map without signatures.
#[test]
fn a_map_of_an_earlier_version_keeps_revocations_and_own_entries() {
    let key = ClusterKey::random().unwrap();
    let home = tempfile::tempdir().unwrap();
    join_at_rest(home.path(), &key).unwrap();
    let own = NodeFolder::new(home.path()).identity().unwrap().id();
    let [gone, other] = [3, 4].map(|byte| NodeId([byte; 16]));
    let entry = |key: RegisterKey, node: NodeId, epoch: u64| {
        let stamp = json!({"ms": 5, "count": 0, "node": node});
        json!([key, {"epoch": epoch, "stamp": stamp, "value": "{}"}])
    };
    let named = |name: &str| RegisterKey::Named(name.to_owned());
    let saved = json!([
        entry(RegisterKey::Revoked(gone), other, 3),
        entry(RegisterKey::Record(RecordId(7)), own, 2),
        entry(named("mine"), own, 3),
        entry(named("theirs"), other, 0),
        entry(RegisterKey::ApiKey("k1".to_owned()), own, 0),
        entry(RegisterKey::ApiKey("k2".to_owned()), other, 0),
    ]);
    let folder = home.path().join("node");
    std::fs::write(folder.join("map.json"), saved.to_string()).unwrap();
    let file = Arc::new(MemoryKeyFile::default());
    for id in ["k1", "k2"] {
        lock(&file.0).insert(id.to_owned(), "admin".to_owned());
    }
    let one = with_keys(home, &file);
    let two = node("two", &key, &[one.agent.port()]);
    let has_all = |agent: &Agent| {
        let map = agent.map();
        let keys = [RegisterKey::Record(RecordId(7)), named("mine")];
        let keys = keys
            .into_iter()
            .chain(["k1", "k2"].map(|id| RegisterKey::api_key(own, id)));
        let mut keys = keys.chain([RegisterKey::Revoked(gone)]);
        keys.all(|key| map.get(&key).is_some()) && map.get(&named("theirs")).is_none()
    };
    until("the other node has all", || has_all(&two.agent));
    let keys = lock(&file.0).clone().into_values().collect::<Vec<_>>();
    assert_eq!(keys, ["admin", "user"], "another node's key is no admin's");
}

#[test]
fn channels_carry_messages_both_ways_and_end_with_their_peer() {
    let mut nodes = cluster(&["one", "two"]);
    nodes[1].agent.serve("echo", |channel| {
        while let Ok(Some(message)) = channel.recv(1 << 20, PATIENCE) {
            channel.send(&message).unwrap();
        }
    });
    let (keep, kept) = channel();
    nodes[1]
        .agent
        .serve("silent", move |channel| keep.send(channel).unwrap());
    let (one, two) = (nodes[0].agent.clone(), nodes[1].agent.id());
    let echo = one.open(two, "echo", PATIENCE).unwrap();
    assert_eq!((echo.peer(), echo.service()), (two, "echo"));
    for length in [0, 1, 40_000, 1 << 20] {
        let message = vec![length as u8; length];
        echo.send(&message).unwrap();
        assert!(
            echo.recv(1 << 20, PATIENCE).unwrap() == Some(message),
            "{length}"
        );
    }
    assert!(echo.recv(1, Duration::from_millis(5)).unwrap().is_none());
    let error = one.open(two, "none", PATIENCE).unwrap_err().to_string();
    assert_eq!(error, "two: this node has no service \"none\"");
    let error = one.open(NodeId([7; 16]), "echo", PATIENCE).unwrap_err();
    assert!(matches!(error, Error::NoAddress { .. }), "{error}");
    let silent = one.open(two, "silent", PATIENCE).unwrap();
    let held = kept.recv_timeout(PATIENCE).unwrap();
    assert_eq!(held.peer(), one.id());
    drop(nodes.pop());
    assert!(silent.recv(1, PATIENCE).is_err(), "its node stopped");
    assert!(held.send(b"x").is_err());
}

#[test]
fn the_map_is_shared_watched_and_kept_on_disk() {
    let nodes = cluster(&["one", "two"]);
    let (one, two) = (&nodes[0].agent, &nodes[1].agent);
    let key = RegisterKey::Record(RecordId(7));
    let mut watch = two.watch();
    one.write(key.clone(), 3, Some("[1]".to_owned())).unwrap();
    until("the write arrives", || {
        watch.wait(Duration::from_millis(100));
        two.map().get(&key) == Some("[1]")
    });
    assert!(matches!(
        two.write(key.clone(), 2, None),
        Err(Error::MapRefuses)
    ));
    two.stop();
    assert!(!watch.wait(PATIENCE), "it has stopped");
    let home = nodes[1].home.path();
    let again = Agent::start(config(home, "two", &[])).unwrap();
    assert_eq!(again.map().get(&key), Some("[1]"));
    assert_eq!(again.id(), two.id());
    again.stop();
}

#[test]
fn a_node_that_is_about_to_go_says_so() {
    let nodes = cluster(&["one", "two"]);
    let (one, two) = (&nodes[0].agent, &nodes[1].agent);
    let seen = || one.find("two").unwrap().facts.leaving;
    assert!(!seen() && !two.is_leaving());
    two.set_leaving(true);
    until("it is told", seen);
    two.set_leaving(false);
    until("it stays", || !seen());
    two.set_leaving(true);
    let (key, id) = (lock(&two.inner.state).key.clone(), one.id());
    two.leave().unwrap();
    assert!(!two.is_leaving(), "it is alone now");
    // A beacon of the former cluster, that the listening thread passes on only now.
    let heard = DiscoveredNode {
        id,
        addr: SocketAddr::from((Ipv4Addr::LOCALHOST, one.port())),
        how: DiscoveryMethod::Beacon4,
        asks: false,
    };
    assert!(!two.inner.handle_discovered(heard, &key));
    assert_eq!(two.nodes().len(), 1);
    until("it is gone", || one.nodes().len() == 1);
}

#[test]
fn revocations_at_once_leave_one_key() {
    let nodes = cluster(&["one", "two", "three", "four", "five"]);
    let (one, two) = (&nodes[0].agent, &nodes[1].agent);
    // The second revocation comes before node two knows the first, so node two draws a key itself.
    one.revoke("three").unwrap();
    assert!(one.revoke("four").unwrap().needs_second);
    two.revoke("five").unwrap();
    two.revoke("four").unwrap();
    until("both have one key", || two.token() == one.token());
    let told = |agent: &Agent| lock(&agent.inner.state).stale.is_empty();
    until("nobody is told any more", || told(one) && told(two));
    // Node two may have sent node three its key before it knew of three's revocation.
    let has_it = |node: &TestNode| node.agent.token() == one.token();
    until("no revoked node has the key", || {
        two.token() == one.token() && !nodes[2..].iter().any(has_it)
    });
}

/// A node that joined after key changes does not know their count.
#[test]
fn a_newcomer_can_revoke_too() {
    let nodes = cluster(&["one", "two", "three"]);
    let (one, two) = (&nodes[0].agent, &nodes[1].agent);
    one.revoke("three").unwrap();
    until("two has the new key", || two.token() == one.token());
    let key = ClusterKey::from_token(&one.token()).unwrap();
    let [four, five] = ["four", "five"].map(|name| node(name, &key, &[one.port()]));
    for agent in [one, two, &four.agent, &five.agent] {
        until("newcomers are met", || lives(agent).len() == 4);
    }
    four.agent.revoke("five").unwrap();
    assert_ne!(*four.agent.token(), *key.token());
    for agent in [one, two] {
        let has_it = || agent.token() == four.agent.token();
        until("it has the newest key", has_it);
    }
}

#[test]
fn newcomers_without_a_code_or_with_a_wrong_one_are_counted() {
    let nodes = cluster(&["one"]);
    let (one, at) = (
        &nodes[0].agent,
        format!("127.0.0.1:{}", nodes[0].agent.port()),
    );
    let home = tempfile::tempdir().unwrap();
    let join = |text: &str| {
        let code = pairing::Code::parse(text).unwrap();
        assert!(join_by_code_at_rest(home.path(), &code, Some(&at)).is_err());
        refused(one)[0].0
    };
    assert_eq!(join("000000"), "join_not_invited");
    let is_ones = one.invite().unwrap().shown() == "111-111";
    let wrong = if is_ones { "222222" } else { "111111" };
    assert_eq!(join(wrong), "join_wrong_code");
}

#[test]
fn nodes_join_by_code_and_are_refused_where_others_would_be_cut_off() {
    let (one, two) = (cluster(&["one"]), cluster(&["two"]));
    let (one, two) = (&one[0].agent, &two[0].agent);
    let peer = format!("127.0.0.1:{}", one.port());
    let no_code = pairing::Code::parse("123456").unwrap();
    let error = two.join_by_code(&no_code, Some(&peer)).unwrap_err();
    assert!(
        matches!(error, Error::Pairing(pairing::Error::NotInvited)),
        "{error}"
    );
    let code = one.invite().unwrap();
    let (id, own) = (RecordId(7), two.id());
    let text = json!({ "nodes": [own] }).to_string();
    two.write(RegisterKey::Record(id), 1, Some(text)).unwrap();
    // Neither node has an address of the other besides the pairing connection, so the newcomer gets
    // the other's control port.
    let joined = two.join_by_code(&code, Some(&peer)).unwrap();
    assert_eq!(
        (joined.already, joined.met),
        (false, vec!["one".to_owned()])
    );
    until("it is seen", || lives(one).len() == 2);
    assert_eq!(one.cluster(), two.cluster());
    let epoch = |agent: &Agent| {
        let map = agent.map();
        map.register(&RegisterKey::Record(id)).map(|it| it.epoch)
    };
    until("its record came along", || epoch(one) == Some(1));
    let again = two.join_by_code(&code, Some(&peer)).unwrap_err();
    assert!(matches!(again, Error::HasMembers { .. }), "{again}");
    let error = two
        .join(&ClusterKey::random().unwrap())
        .unwrap_err()
        .to_string();
    assert_eq!(
        error,
        "this node is in a cluster with one, which it would lose: `paceline leave` takes it out"
    );
    let owns = two.leave().unwrap_err();
    assert!(matches!(owns, Error::HasWork { .. }), "{owns}");
    two.write(RegisterKey::Record(id), EPOCH_UNWANTED, None)
        .unwrap();
    two.leave().unwrap();
    until("it is gone", || one.nodes().len() == 1);
    assert_ne!(one.cluster(), two.cluster());
}

#[test]
fn the_command_line_reaches_its_node() {
    let nodes = cluster(&["one"]);
    let home = nodes[0].home.path();
    let mut reports = Vec::new();
    let ask = |command: &str, arguments| local::ask(home, command, arguments, PATIENCE, |_| {});
    let answer = ask("nodes", json!({})).unwrap();
    assert_eq!(answer["nodes"][0]["name"], "one");
    assert_eq!(answer["nodes"][0]["found_by"], "self");
    assert_eq!(answer["nodes"][0]["state"], "alive");
    assert_eq!(answer["nodes"][0]["cores"], 4);
    let token = ask("token", json!({})).unwrap()["token"]
        .as_str()
        .unwrap()
        .to_owned();
    assert_eq!(
        ClusterKey::from_token(&token).unwrap().token().as_str(),
        token
    );
    nodes[0].agent.serve_local("load", |arguments, progress| {
        progress(json!(1));
        progress(json!(2));
        Ok(json!({ "got": arguments }))
    });
    let loaded = local::ask(home, "load", json!("x"), PATIENCE, |value| {
        reports.push(value)
    });
    assert_eq!(
        (loaded.unwrap(), reports),
        (json!({"got": "x"}), vec![json!(1), json!(2)])
    );
    let error = ask("fly", json!({})).unwrap_err().to_string();
    assert_eq!(
        error,
        "the node has no command \"fly\"; is it an older version?"
    );
    let error = ask("forget", json!({"node": "two"}))
        .unwrap_err()
        .to_string();
    assert_eq!(error, "no node of this cluster is called \"two\"");
    let mode = std::fs::metadata(home.join("node/socket"))
        .unwrap()
        .permissions();
    assert_eq!(
        std::os::unix::fs::PermissionsExt::mode(&mode) & 0o777,
        0o600
    );
    nodes[0].agent.stop();
    assert!(matches!(ask("nodes", json!({})), Err(local::Error::NotUp)));
    assert_eq!(*token_at_rest(home).unwrap(), token);
}
