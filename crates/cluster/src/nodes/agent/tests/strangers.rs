//! Refused, malformed and malicious connections.

use super::*;

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
pub(super) fn refused(agent: &Agent) -> Vec<(&'static str, Option<IpAddr>)> {
    let mut told = Vec::new();
    until("a refusal is reported", || {
        told = agent.refusals();
        !told.is_empty()
    });
    let pair = |refusal: &Refusal| (refusal.cause, refusal.from);
    told.iter().map(pair).collect()
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
    until("both are reported", || {
        let told = |agent: &Agent| agent.problems().join(" ").contains("its home was copied");
        told(&twin) && told(&nodes[0].agent)
    });
    twin.stop();
    let error = Agent::start(config(nodes[0].home.path(), "one", &[])).unwrap_err();
    assert!(matches!(error, Error::Running { .. }), "{error}");
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
