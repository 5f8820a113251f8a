//! Both ends of a session over loopback, and attacks by strangers.

use std::net::TcpListener;
use std::thread;

use std::io::Read;
use std::net::Shutdown;

use super::*;

const LIMIT: Duration = Duration::from_secs(20);

struct TestPeer {
    identity: Identity,
    key: ClusterKey,
    hello: Hello,
}

impl TestPeer {
    fn new(name: &str, key: u8) -> Self {
        Self {
            identity: Identity::random().unwrap(),
            key: ClusterKey::new([key; 32]),
            hello: Hello {
                name: name.to_owned(),
                boot: 1,
                port: 52416,
                wall_ms: 0,
                build: "0.1.0".to_owned(),
                numerics: 1,
            },
        }
    }

    fn own<'a>(&'a self, judge: PeerCheck<'a>) -> Own<'a> {
        Own {
            identity: &self.identity,
            key: &self.key,
            hello: &self.hello,
            judge,
        }
    }
}

const ANYONE: PeerCheck<'static> = &|_, _| None;

type SessionResult = Result<NodeSession, Error>;

/// Both ends of a session, or their errors: the dialler's, the acceptor's.
fn meet(
    one: &TestPeer,
    two: &TestPeer,
    judge: impl Fn(NodeId, &Hello) -> Option<String>,
) -> (SessionResult, SessionResult) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    thread::scope(|scope| {
        let dialling = || dial(one.own(ANYONE), addr, Purpose::Control, LIMIT);
        let dialled = scope.spawn(dialling);
        let (stream, _) = listener.accept().unwrap();
        let accepted = accept(two.own(&judge), stream, LIMIT);
        (dialled.join().unwrap(), accepted)
    })
}

#[test]
fn messages_of_any_length_arrive_whole() {
    let (one, two) = (TestPeer::new("one", 7), TestPeer::new("two", 7));
    let (dialled, accepted) = meet(&one, &two, ANYONE);
    let (dialled, accepted) = (dialled.unwrap(), accepted.unwrap());
    assert_eq!(dialled.peer(), two.identity.id());
    assert_eq!(accepted.peer(), one.identity.id());
    assert_eq!(
        (dialled.hello(), accepted.hello()),
        (&two.hello, &one.hello)
    );
    let lengths = [
        0,
        1,
        RECORD_BYTES - 5,
        RECORD_BYTES - 4,
        RECORD_BYTES - 3,
        300_000,
    ];
    thread::scope(|scope| {
        scope.spawn(|| {
            for length in lengths {
                dialled.send(&vec![length as u8; length]).unwrap();
            }
        });
        for length in lengths {
            let message = accepted.recv(300_000, LIMIT).unwrap().unwrap();
            assert!(message == vec![length as u8; length], "{length}");
        }
    });
    assert!(dialled.recv(10, Duration::ZERO).unwrap().is_none());
    assert!(
        dialled
            .recv(10, Duration::from_millis(2))
            .unwrap()
            .is_none()
    );
    accepted.send(&[1; 11]).unwrap();
    let error = dialled.recv(10, LIMIT).unwrap_err();
    assert!(matches!(error, Error::TooLong { bytes: 11, .. }), "{error}");
    dialled.close();
    assert!(matches!(
        accepted.recv(10, LIMIT),
        Err(Error::Closed | Error::Broken(_))
    ));
}

#[test]
fn a_refusal_names_its_reason() {
    let (one, two) = (TestPeer::new("one", 7), TestPeer::new("two", 7));
    let judge = |_, hello: &Hello| Some(format!("{} is revoked", hello.name));
    let (dialled, accepted) = meet(&one, &two, judge);
    assert_eq!(
        dialled.unwrap_err().to_string(),
        "refused by two: one is revoked"
    );
    assert_eq!(
        accepted.unwrap_err().to_string(),
        "refused one: one is revoked"
    );
}

/// A refused node is reported even if it closes the connection before it receives the refusal.
#[test]
fn a_refused_peer_that_leaves_early_is_refused_by_name() {
    let (one, two) = (TestPeer::new("one", 7), TestPeer::new("two", 7));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    let accepted = thread::scope(|scope| {
        scope.spawn(|| {
            let stream = TcpStream::connect(addr).unwrap();
            let mut wire = HandshakeStream::new(stream, Instant::now() + LIMIT, LIMIT).unwrap();
            let preface = preface(Purpose::Control);
            wire.stream.write_all(&preface).unwrap();
            let own = one.own(ANYONE);
            let mut state = builder(own.identity, own.key, &preface)
                .build_initiator()
                .unwrap();
            wire.send(&mut state, &[]).unwrap();
            wire.receive(&mut state).unwrap();
            wire.send(&mut state, &say_hello(own.hello)).unwrap();
        });
        let (stream, _) = listener.accept().unwrap();
        accept(two.own(&|_, _| Some("gone".to_owned())), stream, LIMIT)
    });
    assert_eq!(accepted.unwrap_err().to_string(), "refused one: gone");
}

/// Sends `bytes` to a listener; returns its answer.
fn answer_to(bytes: &[u8]) -> (SessionResult, Vec<u8>) {
    let side = TestPeer::new("one", 7);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    thread::scope(|scope| {
        let asker = scope.spawn(move || {
            let mut stream = TcpStream::connect(addr).unwrap();
            stream.write_all(bytes).unwrap();
            // After an early refusal there is no connection to shut down.
            let _ = stream.shutdown(Shutdown::Write);
            let mut said = Vec::new();
            let _ = stream.read_to_end(&mut said); // may be reset
            said
        });
        let (stream, _) = listener.accept().unwrap();
        let outcome = accept(side.own(ANYONE), stream, LIMIT);
        (outcome, asker.join().unwrap())
    })
}

/// A hundred malformed handshakes, ten thousand with `PACELINE_TEST_LONG`.
#[test]
fn strangers_are_told_nothing() {
    let random = |seed: u64, count: usize| -> Vec<u8> {
        (0..count as u64)
            .map(|i| (seed.wrapping_mul(0x9e37_79b9_7f4a_7c15 ^ i) >> 31) as u8)
            .collect()
    };
    let runs = if std::env::var_os("PACELINE_TEST_LONG").is_some() {
        10_000
    } else {
        100
    };
    for seed in 0..runs {
        let mut bytes = preface(Purpose::ALL[seed as usize % 2]).to_vec();
        match seed % 4 {
            0 => bytes = random(seed, seed as usize % 70),
            1 => bytes.extend([48, 0].into_iter().chain(random(seed, 48))),
            2 => bytes.extend([0xff, 0xff].into_iter().chain(random(seed, 200))),
            _ => bytes.extend(random(seed, seed as usize % 60)),
        }
        let (outcome, said) = answer_to(&bytes);
        assert!(
            outcome.is_err() && said.is_empty(),
            "{seed}: {outcome:?} {said:?}"
        );
    }
}

/// A replayed handshake gets one message that the attacker cannot read.
#[test]
fn a_replayed_handshake_makes_no_session() {
    let side = TestPeer::new("two", 7);
    let preface = preface(Purpose::Control);
    let mut shaking = builder(&side.identity, &side.key, &preface)
        .build_initiator()
        .unwrap();
    let mut first = [0; 48];
    assert_eq!(shaking.write_message(&[], &mut first).unwrap(), 48);
    let mut bytes = preface.to_vec();
    bytes.extend([48, 0]);
    bytes.extend(first);
    let begun = <[u8; FIRST_BYTES]>::try_from(bytes.as_slice()).unwrap();
    for (key, is_it) in [(7, true), (8, false)] {
        let other = TestPeer::new("one", key);
        assert_eq!(fits(&other.identity, &other.key, &begun), is_it, "{key}");
    }
    bytes.extend([64, 0]);
    bytes.extend([3; 64]);
    let (outcome, said) = answer_to(&bytes);
    assert!(matches!(outcome, Err(Error::Stranger)), "{outcome:?}");
    assert!(
        !said.windows(3).any(|text| text == b"one"),
        "the name is not in the clear"
    );
}

#[test]
fn a_silent_peer_is_given_up() {
    let side = TestPeer::new("one", 7);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (stream, _) = listener.accept().unwrap();
    let limit = Duration::from_millis(20);
    let outcome = accept(side.own(ANYONE), stream, limit);
    assert!(matches!(outcome, Err(Error::Late { .. })), "{outcome:?}");
    drop(silent);
}
