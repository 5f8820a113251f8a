//! Tests of `remote.rs`.

use crate::workers::connection::MessageConnection as _;
use std::collections::VecDeque;
use std::io::Read as _;
use std::net::IpAddr;
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::time::Instant;

use paceline_base::testing::Stopwatch;

use super::super::connection::pair;
use super::*;
use crate::workers::connection::MemoryConnection;

/// Hosts, one at a time: each hands out a connection whose other end the test has.
#[derive(Debug)]
struct FakeWorkerHosts {
    lines: Mutex<VecDeque<MemoryConnection>>,
    settled: Arc<Settled>,
}

/// By call: how many nodes were verified, and how many of them were doubted; `None` if the
/// routes were trusted.
type Settled = Mutex<Vec<(usize, Option<usize>)>>;

impl WorkerHosts for FakeWorkerHosts {
    fn open(&self, _: Rank) -> Result<WorkerHost, ConnectionError> {
        let mut lines = lock(&self.lines);
        let left = lines.len() as u8;
        let line = lines.pop_front();
        let line = line.ok_or_else(|| ConnectionError::new("no machine is left"))?;
        Ok(WorkerHost {
            name: "quokka".to_owned(),
            node: NodeId([left; 16]), // each is another one
            line: Box::new(line),
        })
    }

    fn lives(&self, _: NodeId) -> bool {
        true
    }

    /// The seventh machine speaks to this one alone.
    fn apart(&self, nodes: &[NodeId]) -> BTreeMap<NodeId, String> {
        let seventh = nodes.iter().filter(|id| **id == NodeId([7; 16]));
        seventh
            .map(|id| (*id, "no path answers".to_owned()))
            .collect()
    }

    /// The third machine and the first one speak through this one alone.
    fn relays_at(&self, from: NodeId, to: NodeId) -> Option<IpAddr> {
        let ends = [from.0[0], to.0[0]];
        (ends == [1, 3] || ends == [3, 1]).then_some(Ipv4Addr::LOCALHOST.into())
    }

    fn open_spare(&self, rank: Rank) -> Result<WorkerHost, ConnectionError> {
        self.open(rank)
    }

    fn promoted(&self, _: Rank) {}

    fn route(&self, _: NodeId, _: NodeId) -> Option<SocketAddr> {
        None
    }

    fn trust(&self, nodes: &[NodeId]) {
        lock(&self.settled).push((nodes.len(), None));
    }

    fn settle(&self, nodes: &[NodeId], doubted: &[NodeId]) {
        let doubted = nodes.iter().filter(|id| doubted.contains(id)).count();
        lock(&self.settled).push((nodes.len(), Some(doubted)));
    }
}

const WAIT: Duration = Duration::from_secs(5);

fn crew<const N: usize>() -> (RemoteWorkers, [MemoryConnection; N]) {
    let (crew, hosts, _) = crew_of(1);
    (crew, hosts)
}

fn crew_of<const N: usize>(ranks: u32) -> (RemoteWorkers, [MemoryConnection; N], Arc<Settled>) {
    let (lines, hosts): (Vec<_>, Vec<_>) = (0..N).map(|_| pair()).unzip();
    let model = ModelName {
        name: "smollm2".to_owned(),
        sha256: String::new(),
        manifest: false,
    };
    let settled = Arc::<Settled>::default();
    let lines = FakeWorkerHosts {
        lines: Mutex::new(lines.into()),
        settled: Arc::clone(&settled),
    };
    let crew = RemoteWorkers::new(Box::new(lines), model, ranks, None);
    (crew, hosts.try_into().unwrap(), settled)
}

fn started() -> FromHost {
    FromHost::Started {
        listen: Some(SocketAddr::from(([10, 0, 0, 7], 0))),
        bind: SocketAddr::from(([0, 0, 0, 0], 0)),
        model: "/there/model.gguf".into(),
        draft: Some("/there/draft.gguf".into()),
        adapters: vec!["/there/poet.gguf".into()],
        first_core: None,
        pid: Some(7),
    }
}

fn is_packed(crew: &RemoteWorkers) -> bool {
    let mut state = lock(&crew.state);
    matches!(state.slot(Rank(0)), SpareSlot::Kept(spare) if spare.is_packed())
}

/// Waits for the receiving thread.
fn until(what: &str, done: impl Fn() -> bool) {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < WAIT, "{what}");
        std::thread::yield_now();
    }
}

#[test]
fn a_worker_is_started_heard_and_replaced_when_its_machine_is_gone() {
    let (crew, [first, second]) = crew();
    send_message(&first, &started()).unwrap();
    crew.start(Rank(0)).unwrap();
    let post = crew.post(Rank(0));
    assert_eq!(post.listen, SocketAddr::from(([0, 0, 0, 0], 0)));
    let heard = [SocketAddr::from(([0, 0, 0, 0], 77))];
    assert_eq!(crew.seen_by(Rank(0), &heard), heard, "its own");
    assert_eq!(post.model.to_str(), Some("/there/model.gguf"));
    assert_eq!(post.draft.as_deref(), Some("/there/draft.gguf".as_ref()));
    assert_eq!(post.adapters, [PathBuf::from("/there/poet.gguf")]);

    let listening = FromWorker::Listening { addr: post.listen };
    send_message(&first, &FromHost::Message(listening.clone())).unwrap();
    let expected = Event::Message {
        rank: Rank(0),
        message: listening,
    };
    assert_eq!(crew.receive(WAIT), Some(expected));
    first.close();
    let lost = crew.receive(WAIT).unwrap().to_string();
    assert_eq!(lost, "rank 0 on quokka: the line is closed");

    send_message(&second, &started()).unwrap();
    crew.start(Rank(0)).unwrap();
    crew.send(Rank(0), &ToWorker::Leave).unwrap();
    let mut heard = Vec::new();
    while !matches!(heard.last(), Some(ToHost::Worker(ToWorker::Leave))) {
        heard.extend(receive_message::<ToHost>(&second, WAIT).unwrap());
    }
    assert!(matches!(heard[0], ToHost::Start { .. }), "{heard:?}");
    let error = crew.start(Rank(0)).unwrap_err().to_string();
    assert_eq!(error, "rank 0 on no machine is left");
}

#[test]
fn a_spare_takes_the_place_of_a_lost_worker_and_keeps_its_line() {
    let (crew, [first, second]) = crew();
    send_message(&first, &started()).unwrap();
    crew.start(Rank(0)).unwrap();
    send_message(&second, &started()).unwrap();
    let message = |post: WorkerSite| {
        assert_eq!(post.model.to_str(), Some("/there/model.gguf"));
        ToWorker::Measure
    };
    assert!(crew.keep_spare(Rank(0), 1, &message).unwrap());
    assert!(crew.keep_spare(Rank(0), 1, &message).unwrap(), "the same");
    assert!(crew.keep_spare(Rank(0), 2, &message).unwrap());
    let loading = FromWorker::Loading { done: 1, of: 2 };
    send_message(&second, &FromHost::Message(loading)).unwrap();
    send_message(&second, &FromHost::Message(FromWorker::Prepared)).unwrap();
    send_message(&second, &FromHost::Message(FromWorker::Prepared)).unwrap();
    until("both are heard", || is_packed(&crew));
    first.close();
    let lost = crew.receive(WAIT).unwrap().to_string();
    assert_eq!(
        lost, "rank 0 on quokka: the line is closed",
        "and nothing of the spare"
    );
    crew.start(Rank(0)).unwrap();
    let left = FromWorker::Listening {
        addr: SocketAddr::from(([10, 0, 0, 7], 1)),
    };
    send_message(&second, &FromHost::Message(left.clone())).unwrap();
    let expected = Event::Message {
        rank: Rank(0),
        message: left,
    };
    let heard = loop {
        match crew.receive(WAIT) {
            // Sent while it was a standby; it may arrive after the loss.
            Some(Event::Message {
                message: FromWorker::Loading { .. },
                ..
            }) => {}
            other => break other,
        }
    };
    assert_eq!(heard, Some(expected));
    let mut prepared = 0;
    crew.send(Rank(0), &ToWorker::Leave).unwrap();
    loop {
        match receive_message::<ToHost>(&second, WAIT).unwrap() {
            Some(ToHost::Worker(ToWorker::Measure)) => prepared += 1,
            Some(ToHost::Worker(ToWorker::Leave)) => break,
            _ => {}
        }
    }
    assert_eq!(prepared, 2);
    second.close();
    let lost = crew.receive(WAIT).unwrap().to_string();
    assert_eq!(lost, "rank 0 on quokka: the line is closed");
    assert!(
        !crew.keep_spare(Rank(0), 2, &message).unwrap(),
        "no machine is left"
    );
}

#[test]
fn a_spare_that_is_not_packed_waits_on_while_a_new_worker_starts() {
    let (crew, [first, second, third]) = crew();
    send_message(&first, &started()).unwrap();
    crew.start(Rank(0)).unwrap();
    assert!(crew.lacks_spare(Rank(0), 1));
    send_message(&second, &started()).unwrap();
    assert!(crew.keep_spare(Rank(0), 1, &|_| ToWorker::Measure).unwrap());
    assert!(!crew.lacks_spare(Rank(0), 1));
    assert!(crew.lacks_spare(Rank(0), 2), "prepared for another tag");

    send_message(&third, &started()).unwrap();
    crew.start(Rank(0)).unwrap();
    let at = crew.node_of(Rank(0));
    assert_eq!(at, Some(NodeId([1; 16])), "the third machine");
    send_message(&second, &FromHost::Message(FromWorker::Prepared)).unwrap();
    until("it is packed", || is_packed(&crew));
    crew.start(Rank(0)).unwrap();
    let at = crew.node_of(Rank(0));
    assert_eq!(at, Some(NodeId([2; 16])), "the spare's");
    assert!(crew.lacks_spare(Rank(0), 1), "it is none any more");
}

#[test]
fn a_spare_whose_worker_is_lost_takes_no_place_and_is_replaced() {
    let failed = FromWorker::Failed {
        epoch: 0,
        reason: "no memory".to_owned(),
        blamed: None,
        interrupted: false,
    };
    let silence = Duration::from_secs(2);
    for lost in [FromHost::Message(failed), FromHost::Silent { silence }] {
        let (crew, [first, second, third]) = crew();
        send_message(&first, &started()).unwrap();
        crew.start(Rank(0)).unwrap();
        send_message(&second, &started()).unwrap();
        let message = |_: WorkerSite| ToWorker::Measure;
        assert!(crew.keep_spare(Rank(0), 1, &message).unwrap());
        send_message(&second, &FromHost::Message(FromWorker::Prepared)).unwrap();
        until("it is packed", || is_packed(&crew));
        send_message(&second, &lost).unwrap();
        until("it is lost", || crew.lacks_spare(Rank(0), 1));
        send_message(&third, &started()).unwrap();
        assert!(crew.keep_spare(Rank(0), 1, &message).unwrap());
        assert!(!is_packed(&crew), "another one");
        let error = crew.start(Rank(0)).unwrap_err().to_string();
        assert_eq!(error, "rank 0 on no machine is left");
        assert!(!crew.lacks_spare(Rank(0), 1), "it packs on");
    }
}

#[test]
fn ways_are_doubted_where_a_line_broke_or_no_worker_was_lost() {
    let (crew, [first, second, third], settled) = crew_of(2);
    send_message(&first, &started()).unwrap();
    crew.start(Rank(0)).unwrap();
    send_message(&second, &started()).unwrap();
    crew.start(Rank(1)).unwrap();
    let epoch = |number| {
        lock(&crew.state).epochs.assigned = number;
        crew.settle();
        crew.settle(); // once for each rank
        std::mem::take(&mut *lock(&settled))
    };
    assert_eq!(epoch(1), [(2, None)], "its ways were measured for the plan");
    assert_eq!(epoch(2), [(2, Some(0))], "a planned change");

    let failed = FromWorker::Failed {
        epoch: 2,
        reason: "rank 1 is silent".to_owned(),
        blamed: Some(1),
        interrupted: false,
    };
    send_message(&first, &FromHost::Message(failed.clone())).unwrap();
    crew.receive(WAIT).unwrap();
    assert_eq!(epoch(3), [(2, Some(2))], "all workers live");

    send_message(&first, &FromHost::Message(failed)).unwrap();
    crew.receive(WAIT).unwrap();
    second.close();
    crew.receive(WAIT).unwrap();
    send_message(&third, &started()).unwrap();
    crew.start(Rank(1)).unwrap();
    assert_eq!(epoch(4), [(2, Some(0))], "the lost node is no part of it");
    first.close();
    crew.receive(WAIT).unwrap();
    assert_eq!(epoch(5), [(2, Some(1))], "its line broke");
}

#[test]
fn ranks_join_nowhere_while_two_machines_cannot_speak() {
    let (crew, hosts, _) = crew_of::<9>(3);
    let start = |rank: u32, host: usize| {
        send_message(&hosts[host], &started()).unwrap();
        crew.start(Rank(rank)).unwrap();
    };
    (0..3).for_each(|i| start(i as u32, i));
    let epoch = |number: u64, refused: &[bool]| {
        lock(&crew.state).epochs.assigned = number;
        let addrs = vec![SocketAddr::from(([127, 0, 0, 1], 1)); 3];
        let join = ToWorker::Join { addrs };
        for (rank, refused) in (0..3).map(Rank).zip(refused) {
            let sent = crew.send(rank, &join);
            assert_eq!(sent.is_err(), *refused, "{rank}: {sent:?}");
        }
    };
    epoch(1, &[false, false, true]);
    start(2, 3); // on the sixth machine
    epoch(2, &[false; 3]);
    for host in [0, 1, 3] {
        let heard = std::iter::from_fn(|| receive_message::<ToHost>(&hosts[host], WAIT).ok()?);
        let heard = heard.filter(|it| !matches!(it, ToHost::Beat | ToHost::Start { .. }));
        let joins = heard.take(1).count();
        assert_eq!(joins, 1, "machine {host} joins the second epoch alone");
    }
    assert!(
        lock(&crew.inbox.state)
            .events
            .iter()
            .all(|(_, it)| it.rank() != Rank(0))
    );
}

#[test]
fn the_higher_rank_dials_a_relay_where_two_machines_cannot_speak() {
    let (crew, hosts, _) = crew_of::<3>(3);
    for (rank, host) in (0..3).map(Rank).zip(&hosts) {
        send_message(host, &started()).unwrap();
        crew.start(rank).unwrap();
    }
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let addrs = [listener.local_addr().unwrap(); 3];
    assert_eq!(crew.seen_by(Rank(0), &addrs), addrs, "it dials none");
    assert_eq!(crew.seen_by(Rank(1), &addrs), addrs, "it reaches both");
    let seen = crew.seen_by(Rank(2), &addrs);
    assert_eq!(seen[1..], addrs[1..]);
    assert_ne!(seen[0], addrs[0]);
    let mut dialled = TcpStream::connect(seen[0]).unwrap();
    listener.accept().unwrap();
    crew.end(Duration::ZERO);
    assert_eq!(dialled.read(&mut [0]).unwrap_or(0), 0, "the relay is gone");
}

#[test]
fn an_end_does_not_wait_for_a_spare_that_is_starting() {
    let (crew, [first, second]) = crew();
    send_message(&first, &started()).unwrap();
    crew.start(Rank(0)).unwrap();
    std::thread::scope(|scope| {
        let keep = || crew.keep_spare(Rank(0), 1, &|_| ToWorker::Measure).unwrap();
        let kept = scope.spawn(keep);
        let asked = receive_message::<ToHost>(&second, WAIT).unwrap();
        assert!(matches!(asked, Some(ToHost::Start { .. })), "{asked:?}");
        // That machine has up to START_LIMIT to answer, and does so only after the end.
        let began = Instant::now();
        crew.end(Duration::ZERO);
        assert!(began.elapsed() < START_LIMIT / 2);
        send_message(&second, &started()).unwrap();
        assert!(!kept.join().unwrap(), "it comes too late");
    });
    while receive_message::<ToHost>(&second, WAIT).is_ok_and(|heard| heard.is_some()) {}
    let ended = receive_message::<ToHost>(&second, WAIT)
        .unwrap_err()
        .to_string();
    assert_eq!(ended, "the line is closed");
}

#[test]
fn a_machine_that_refuses_or_is_silent_is_named() {
    let (crew, [first, second]) = crew();
    let reason = "there is no model \"smollm2\" here".to_owned();
    send_message(&first, &FromHost::Refused { reason }).unwrap();
    let error = crew.start(Rank(0)).unwrap_err().to_string();
    assert_eq!(
        error,
        "rank 0 on quokka: there is no model \"smollm2\" here"
    );
    send_message(&second, &started()).unwrap();
    crew.start(Rank(0)).unwrap();
    let began = Stopwatch::start();
    let lost = crew.receive(WAIT).unwrap().to_string();
    assert!(lost.contains("quokka: no sign of life for 1."), "{lost}");
    assert!(began.elapsed() < Duration::from_secs(2));
}
