//! Several nodes in one process over loopback, each with its own home.

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

/// The node "one" of `home`, with API keys in `file`.
fn with_keys(home: tempfile::TempDir, file: &Arc<MemoryKeyFile>) -> TestNode {
    let mut config = config(home.path(), "one", &[]);
    config.keys = Some(Arc::clone(file) as Arc<dyn KeyFile>);
    TestNode {
        agent: Agent::start(config).unwrap(),
        home,
    }
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
fn a_wrong_key_learns_nothing_and_is_told_nothing() {
    let one = node("one", &ClusterKey::random().unwrap(), &[]);
    let two = node("two", &ClusterKey::random().unwrap(), &[one.agent.port()]);
    until("it was tried", || !two.agent.problems().is_empty());
    let problems = two.agent.problems().join(" ");
    assert!(
        problems.contains("is it in this cluster? `paceline join` lets it in"),
        "{problems}"
    );
    assert!(!problems.contains("one"), "{problems}");
    for node in [&one, &two] {
        assert_eq!(node.agent.nodes().len(), 1);
    }
    let from = Some(IpAddr::from([127, 0, 0, 1]));
    assert_eq!(refused(&one.agent), [("node_wrong_key", from)]);
    assert_eq!(two.agent.refusals(), [], "it has refused no connection");
}

/// The next refusals due for a node's log, without their counts.
fn refused(agent: &Agent) -> Vec<(&'static str, Option<IpAddr>)> {
    let mut told = Vec::new();
    until("a refusal is told", || {
        told = agent.refusals();
        !told.is_empty()
    });
    let pair = |refusal: &Refusal| (refusal.cause, refusal.from);
    told.iter().map(pair).collect()
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
fn a_copied_home_is_refused_by_name() {
    let nodes = cluster(&["one"]);
    let copy = tempfile::tempdir().unwrap();
    std::fs::create_dir(copy.path().join("node")).unwrap();
    for file in ["identity", "cluster-key"] {
        let from = nodes[0].home.path().join("node").join(file);
        std::fs::copy(from, copy.path().join("node").join(file)).unwrap();
    }
    let twin = Agent::start(config(copy.path(), "twin", &[nodes[0].agent.port()])).unwrap();
    until("both are told", || {
        let told = |agent: &Agent| agent.problems().join(" ").contains("its home was copied");
        told(&twin) && told(&nodes[0].agent)
    });
    twin.stop();
    let error = Agent::start(config(nodes[0].home.path(), "one", &[])).unwrap_err();
    assert!(matches!(error, Error::Running { .. }), "{error}");
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

/// A key file in memory.
#[derive(Default)]
struct MemoryKeyFile(Mutex<BTreeMap<String, String>>);

impl KeyFile for MemoryKeyFile {
    fn read(&self) -> io::Result<BTreeMap<String, String>> {
        Ok(lock(&self.0).clone())
    }

    fn write(&self, entries: &BTreeMap<String, String>) -> io::Result<()> {
        *lock(&self.0) = entries.clone();
        Ok(())
    }

    fn restrict(&self, _: &str, entry: &str) -> Option<String> {
        Some(entry.replace("admin", "user"))
    }
}

#[test]
fn api_keys_are_adopted_and_revoked_everywhere() {
    let key = ClusterKey::random().unwrap();
    let files = [
        Arc::new(MemoryKeyFile::default()),
        Arc::new(MemoryKeyFile::default()),
    ];
    lock(&files[0].0).insert("k1".into(), "admin".into());
    let homes = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let mut agents: Vec<Agent> = Vec::new();
    for (home, file) in homes.iter().zip(&files) {
        join_at_rest(home.path(), &key).unwrap();
        let peers: Vec<u16> = agents.first().map(Agent::port).into_iter().collect();
        let mut config = config(home.path(), "n", &peers);
        config.keys = Some(Arc::clone(file) as Arc<dyn KeyFile>);
        agents.push(Agent::start(config).unwrap());
    }
    let has = |entry: &str| lock(&files[1].0).get("k1").is_some_and(|it| it == entry);
    until("it is adopted without its rights", || has("user"));
    lock(&files[1].0).insert("k1".into(), "admin".into());
    let acts = Mutex::new(Vec::new());
    until("its rights are allowed and kept", || {
        lock(&acts).extend(agents[1].acts());
        lock(&acts).contains(&ClusterAct::KeyAllowed("k1".into()))
    });
    assert!(has("admin"));
    lock(&files[1].0).remove("k1");
    until("it is revoked", || lock(&files[0].0).is_empty());
    agents.iter().for_each(Agent::stop);
}

#[test]
fn ways_are_measured_told_and_used() {
    let nodes = cluster(&["one", "two"]);
    let (one, two) = (&nodes[0].agent, &nodes[1].agent);
    let is_known = |path: &super::super::paths::Path| path.up && path.bytes_per_s.is_some();
    until("both have measured", || {
        one.paths(one.id()).iter().any(is_known) && two.paths(two.id()).iter().any(is_known)
    });
    until("each knows what the other measured", || {
        one.paths(two.id()).iter().any(is_known) && two.paths(one.id()).iter().any(is_known)
    });
    let told = one.nodes_and_ways();
    let ways: Vec<&str> = told[1]
        .paths
        .iter()
        .map(|way| way.to_name.as_str())
        .collect();
    assert!(ways.contains(&"one"), "{told:?}");
    let used = one.paths(one.id());
    assert_eq!(
        used.iter().filter(|path| path.preferred).count(),
        1,
        "{used:?}"
    );
    for (from, to, port) in [(one, two, two.port()), (two, one, one.port())] {
        for knower in [one, two] {
            let route = knower.route(from.id(), to.id()).unwrap();
            assert_eq!(route.port(), port);
        }
    }
    let wanted = super::super::paths::PathProbe::Bandwidth;
    one.measure(&[one.id(), two.id(), NodeId([9; 16])], wanted);
    assert_eq!(one.route(one.id(), NodeId([9; 16])), None);
}

#[test]
fn a_clock_that_is_off_is_refused_by_name_and_examined() {
    let key = ClusterKey::random().unwrap();
    let (one, home) = (node("one", &key, &[]), tempfile::tempdir().unwrap());
    join_at_rest(home.path(), &key).unwrap();
    let mut late = config(home.path(), "late", &[one.agent.port()]);
    late.clock_ahead_ms = 90_000;
    let late = Agent::start(late).unwrap();
    until("both are told", || {
        let told = |agent: &Agent| {
            agent
                .problems()
                .join(" ")
                .contains(" s apart, allowed are 60 s")
        };
        told(&late) && told(&one.agent)
    });
    let mut found = Vec::new();
    let host = format!("127.0.0.1:{}", late.port());
    one.agent.examine(&host, |finding| found.push(finding));
    let wrong: Vec<_> = found.iter().filter(|finding| !finding.ok).collect();
    assert_eq!(wrong.len(), 1, "{found:?}");
    assert_eq!(wrong[0].test, Test::Clock);
    assert!(wrong[0].found.contains("late is 90 s ahead"), "{wrong:?}");
    late.stop();
}

#[test]
fn two_nodes_that_reach_each_other_have_open_ports() {
    let nodes = cluster(&["one", "two"]);
    let mut found = Vec::new();
    let host = format!("127.0.0.1:{}", nodes[1].agent.port());
    nodes[0].agent.examine(&host, |finding| found.push(finding));
    for test in [
        Test::Control,
        Test::Clock,
        Test::Membership,
        Test::ControlBack,
        Test::Data,
        Test::DataBack,
        Test::Mtu,
    ] {
        let finding = found.iter().find(|finding| finding.test == test);
        assert!(
            finding.is_some_and(|finding| finding.ok),
            "{test:?}: {found:?}"
        );
    }
    let tests: Vec<Test> = found.iter().map(|finding| finding.test).collect();
    assert!(tests.contains(&Test::Multicast) && tests.contains(&Test::MulticastBack));
    let mut found = Vec::new();
    nodes[0]
        .agent
        .examine("127.0.0.1:1", |finding| found.push(finding));
    assert_eq!(
        (found.len(), found[0].test, found[0].ok),
        (1, Test::Control, false)
    );
    assert!(found[0].found.contains("refuses"), "{found:?}");
    let mut found = Vec::new();
    nodes[0]
        .agent
        .examine("no.such.host.invalid", |finding| found.push(finding));
    assert_eq!((found.len(), found[0].test), (1, Test::Address));
}

/// The loopback interface acts as the data interface. Data ports use its first address; the control
/// ports are reached at another address.
#[test]
fn data_ports_are_tested_at_the_interface_for_data() {
    if !cfg!(target_os = "linux") {
        eprintln!(
            "SKIPPED data_ports_are_tested_at_the_interface_for_data: 127.0.0.2 is no address here"
        );
        return;
    }
    let key = ClusterKey::random().unwrap();
    let kept_apart = |name: &str, peers: &[u16]| {
        let home = tempfile::tempdir().unwrap();
        join_at_rest(home.path(), &key).unwrap();
        let mut config = config(home.path(), name, peers);
        config.data_interface = Some("lo".to_owned());
        let agent = Agent::start(config).unwrap();
        TestNode { agent, home }
    };
    let one = kept_apart("one", &[]);
    let two = kept_apart("two", &[one.agent.port()]);
    until("they meet", || {
        lives(&one.agent).len() == 2 && lives(&two.agent).len() == 2
    });
    let mut found = Vec::new();
    let host = format!("127.0.0.2:{}", two.agent.port());
    one.agent.examine(&host, |finding| found.push(finding));
    for test in [Test::Control, Test::Data, Test::DataBack] {
        let finding = found.iter().find(|finding| finding.test == test);
        assert!(
            finding.is_some_and(|finding| finding.ok),
            "{test:?}: {found:?}"
        );
    }
}

/// Main memory of this process in bytes; 0 if the system does not report it.
fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = status
        .split(' ')
        .nth(1)
        .and_then(|pages| pages.parse().ok());
    pages.unwrap_or(0_u64) * 4096
}

/// Malformed handshakes of every kind, from a seed: the node neither fails nor grows, and still
/// admits members.
#[test]
fn ten_thousand_malformed_handshakes_leave_a_node_as_it_was() {
    use std::io::Write;

    let nodes = cluster(&["one"]);
    let at = SocketAddr::from(([127, 0, 0, 1], nodes[0].agent.port()));
    let mut random = paceline_base::SplitMix64::new(26);
    let mut batter = |count: usize| {
        for _ in 0..count {
            let mut bytes: Vec<u8> = match random.next() % 4 {
                0 => Vec::new(),
                1 => b"PLnode2c".to_vec(),
                2 => b"PLnode2s".to_vec(),
                _ => pairing::PREFACE.to_vec(),
            };
            let length = (random.next() % 300) as usize;
            let claimed = random.next() as u16;
            bytes.extend(claimed.to_le_bytes());
            bytes.extend((0..length).map(|_| random.next() as u8));
            // A busy node closes the connection.
            if let Ok(mut stream) = std::net::TcpStream::connect_timeout(&at, PATIENCE) {
                let _ = stream.write_all(&bytes);
            }
        }
    };
    batter(1000);
    let before = resident_bytes();
    batter(9000);
    let grown = resident_bytes().saturating_sub(before);
    // Other tests of this program run meanwhile and use far less than this.
    assert!(grown < 256 << 20, "it grew by {grown} bytes");
    let key = lock(&nodes[0].agent.inner.state).key.clone();
    let other = node("other", &key, &[nodes[0].agent.port()]);
    until("a member gets in", || lives(&nodes[0].agent).len() == 2);
    drop(other);
}

#[test]
fn silent_strangers_neither_keep_a_member_out_nor_use_up_a_code() {
    let key = ClusterKey::random().unwrap();
    let one = node("one", &key, &[]);
    let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, one.agent.port()));
    let code = one.agent.invite().unwrap();
    let hold = |first: &[u8]| {
        use std::io::Write as _;
        let mut stream = std::net::TcpStream::connect(addr).unwrap();
        stream.write_all(first).unwrap();
        stream
    };
    // More than there are slots, and more prefaces of newcomers than the code has tries.
    let mut held: Vec<_> = (0..100).map(|_| hold(b"")).collect();
    held.extend((0..20).map(|_| hold(&pairing::PREFACE)));
    let two = node("two", &key, &[one.agent.port()]);
    until("they meet", || lives(&two.agent).len() == 2);
    let paired = pairing::guest(addr, &code, PATIENCE);
    assert_eq!(paired.unwrap(), key);
    drop(held);
}

/// A member that sends what it likes over its session with a node, and answers pings.
struct BadMember {
    identity: Identity,
    session: Arc<session::NodeSession>,
    count: u32,
}

impl BadMember {
    fn join(node: &TestNode) -> Self {
        let inner = &node.agent.inner;
        let (key, mut hello) = (lock(&inner.state).key.clone(), inner.hello());
        let identity = Identity::random().unwrap();
        (hello.name, hello.boot) = ("bad".to_owned(), 7);
        let own = session::Own {
            identity: &identity,
            key: &key,
            hello: &hello,
            judge: &|_, _| None,
        };
        let place = SocketAddr::from((Ipv4Addr::LOCALHOST, node.agent.port()));
        let session = session::dial(own, place, Purpose::Control, PATIENCE).unwrap();
        let session = Arc::new(session);
        let answering = Arc::clone(&session);
        thread::spawn(move || {
            while let Ok(Some(bytes)) = answering.recv(16 << 20, PATIENCE) {
                let message = serde_json::from_slice(&bytes).unwrap();
                if let GossipMessage::Ping { seq, root, .. } = message {
                    let rumours = Vec::new();
                    let answer = GossipMessage::Ack { seq, root, rumours };
                    let _ = answering.send(&serde_json::to_vec(&answer).unwrap());
                }
            }
        });
        let (count, facts) = (0, NodeFacts::default());
        let mut member = Self {
            identity,
            session,
            count,
        };
        let facts = serde_json::to_string(&facts).unwrap();
        let own = RegisterKey::Node(member.identity.id());
        let entry = member.entry(own, 0, Some(&facts));
        member.send(vec![entry]);
        member
    }

    /// An entry with its signature.
    fn entry(&mut self, key: RegisterKey, epoch: u64, value: Option<&str>) -> SignedEntry {
        self.count += 1;
        let ms = now(Instant::now()).wall_ms + 50_000;
        let (count, node) = (self.count, self.identity.id());
        let register = Register {
            epoch,
            stamp: HybridTimestamp { ms, count, node },
            value: value.map(str::to_owned),
        };
        let signature = self.identity.sign(&SignedEntry::message(&key, &register));
        SignedEntry {
            signature: signature.unwrap(),
            key,
            register,
        }
    }

    /// Fills its part of the map, then writes about the nodes `others` and makes an admin's key.
    /// Returns the last entry, which is allowed.
    fn attack(&mut self, others: [NodeId; 2]) -> RegisterKey {
        let id = self.identity.id();
        let long = "x".repeat(VALUE_BYTES_MAX);
        let fill = (0..140).map(|number| {
            let key = RegisterKey::Named(format!("fill/{number}"));
            self.entry(key, 0, Some(&long))
        });
        let mut entries: Vec<SignedEntry> = fill.collect();
        entries.push(self.entry(RegisterKey::Node(id), 0, Some("{}")));
        entries.push(self.entry(RegisterKey::api_key(id, "bad"), 0, Some("admin")));
        let owned = Some("{\"name\":\"owned\"}");
        for other in others {
            for key in [
                RegisterKey::Node(other),
                RegisterKey::api_key(other, "mine"),
                RegisterKey::Named(format!("paths/{other}")),
            ] {
                entries.push(self.entry(key.clone(), u64::MAX, owned));
                entries.push(self.entry(key.clone(), u64::MAX, None));
                let mut theirs = self.entry(key, 0, owned);
                theirs.register.stamp.node = other;
                entries.push(theirs);
            }
            entries.push(self.entry(RegisterKey::Revoked(other), u64::MAX, Some("{}")));
        }
        let last = RegisterKey::Named("last".to_owned());
        entries.push(self.entry(last.clone(), 0, Some("1")));
        self.send(entries);
        last
    }

    fn send(&self, entries: Vec<SignedEntry>) {
        for entries in entries.chunks(ENTRIES_MAX) {
            let entries = entries.to_vec();
            let message = serde_json::to_vec(&GossipMessage::Entries { entries });
            // The node may have cut it off.
            let _ = self.session.send(&message.unwrap());
        }
    }
}

#[test]
fn a_bad_member_gets_no_rights_changes_nobody_and_is_revoked_with_all_it_wrote() {
    let key = ClusterKey::random().unwrap();
    let file = Arc::new(MemoryKeyFile::default());
    lock(&file.0).insert("mine".to_owned(), "admin".to_owned());
    let home = tempfile::tempdir().unwrap();
    join_at_rest(home.path(), &key).unwrap();
    let one = with_keys(home, &file);
    let two = node("two", &key, &[one.agent.port()]);
    let agents = [&one.agent, &two.agent];
    until("they know each other", || {
        agents
            .iter()
            .all(|agent| agent.find("one").is_ok() && agent.find("two").is_ok())
    });
    until("the key is shared", || {
        let key = RegisterKey::api_key(one.agent.id(), "mine");
        two.agent.map().get(&key).is_some()
    });

    let mut bad = BadMember::join(&one);
    let id = bad.identity.id();
    let last = bad.attack([one.agent.id(), two.agent.id()]);
    until("all is read", || {
        agents.iter().all(|it| it.map().get(&last).is_some())
    });
    until("its key is no admin's", || {
        lock(&file.0)
            .get("bad")
            .is_some_and(|entry| entry == "user")
    });
    assert_eq!(lock(&file.0)["mine"], "admin");
    for agent in agents {
        for name in ["one", "two"] {
            assert_eq!(agent.find(name).unwrap().facts.cores, 4, "{name}");
        }
        agent
            .write(
                RegisterKey::Named("room".to_owned()),
                0,
                Some("1".repeat(3000)),
            )
            .unwrap();
    }

    let token = one.agent.token();
    let told = one.agent.revoke(&id.to_string()).unwrap();
    assert!(!told.needs_second, "{told:?}");
    assert_eq!(told.keys, Vec::<String>::new(), "its own is gone");
    let is_clean = |agent: &Agent| {
        let map = agent.map();
        let is_bad = |(_, register): (&RegisterKey, &Register)| register.stamp.node == id;
        map.revoked().contains(&id) && !map.iter().any(is_bad)
    };
    until("all have revoked it", || {
        agents.iter().all(|agent| is_clean(agent))
    });
    until("its key is gone", || !lock(&file.0).contains_key("bad"));
    until("there is a new token", || {
        *two.agent.token() == *one.agent.token()
    });
    assert_ne!(*token, *one.agent.token());
    assert!(lock(&file.0).contains_key("mine"));
    let acts = one.agent.acts();
    assert!(
        acts.iter().any(|act| matches!(act, ClusterAct::Revoked(_))),
        "{acts:?}"
    );
}
