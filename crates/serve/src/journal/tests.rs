//! Tests of journals: storage, expiry, and transfer to other nodes.

use paceline_base::SplitMix64;

use super::*;

const BOUNDS: JournalBounds = JournalBounds {
    count: 2,
    bytes: 4000,
    stay: Duration::from_secs(60),
};

fn head(id: &str, key: Option<&str>) -> JournalHead {
    JournalHead {
        id: id.to_owned(),
        endpoint: Endpoint::Chat,
        body: "{}".to_owned(),
        seed: 7,
        unix_s: 1,
        model: "tiny".to_owned(),
        key: key.map(str::to_owned),
        earlier: None,
    }
}

fn token(token: u32) -> ChoiceReply {
    let (text, logprobs) = ("é\n".to_owned(), None);
    (
        0,
        Reply::Token {
            token,
            text,
            logprobs,
        },
    )
}

fn appended(
    journal: &Journal,
    reader: &JournalReader,
    line: ChoiceReply,
) -> Result<usize, Superseded> {
    let mut lines = vec![line];
    journal.append(reader.life, &mut lines, 1000)?;
    Ok(lines.len())
}

#[test]
fn journals_are_bounded_and_go_when_nobody_comes_back() {
    let (journals, now) = (Journals::default(), Instant::now());
    let begin = |id: &str, now| journals.begin(head(id, None), BOUNDS, now);
    let one = begin("a", now).unwrap();
    let (reader, _) = one.take_over().unwrap();
    assert!(begin("b", now).is_some());
    assert!(begin("c", now).is_some(), "b goes, which nobody reads");
    assert!(journals.get("b", None).is_none() && journals.get("a", None).is_some());
    let (_held, _) = journals.get("c", None).unwrap().take_over().unwrap();
    assert!(begin("d", now).is_none(), "all are read");
    one.leave(reader.life, now);
    journals.forget_old(BOUNDS, now + BOUNDS.stay);
    assert!(journals.get("a", None).is_some());
    journals.forget_old(BOUNDS, now + BOUNDS.stay + Duration::from_millis(1));
    assert!(journals.get("a", None).is_none() && journals.get("c", None).is_some());
}

#[test]
fn a_journal_that_grows_too_long_is_good_for_nothing() {
    let (journals, now) = (Journals::default(), Instant::now());
    let journal = journals.begin(head("a", None), BOUNDS, now).unwrap();
    let (reader, _) = journal.take_over().unwrap();
    for number in 0..100 {
        appended(&journal, &reader, token(number)).unwrap();
    }
    assert!(journals.get("a", None).is_none());
    assert_eq!(journal.next_piece(now), None);
}

#[test]
fn growth_counts_and_what_nobody_reads_makes_room_first() {
    // A head has 102 bytes and a line 56, so a journal ends less than 56 bytes above its aim.
    let bounds = JournalBounds { count: 8, ..BOUNDS };
    let (journals, now) = (Journals::default(), Instant::now());
    let begin = |id: &str| {
        let journal = journals.begin(head(id, None), bounds, now).unwrap();
        let (reader, _) = journal.take_over().unwrap();
        (journal, reader)
    };
    let grow = |(journal, reader): &(Arc<Journal>, JournalReader), bytes: usize| {
        while journal.is_whole() && journal.state().text.len() < bytes {
            appended(journal, reader, token(1)).unwrap();
            journals.settle(journal, bounds);
            assert!(journals.bytes() <= bounds.bytes);
        }
        journal.is_whole()
    };
    let [a, b, c, d, e] = ["a", "b", "c", "d", "e"].map(begin);
    assert!([&a, &b, &c, &d, &e].into_iter().all(|it| grow(it, 700)));
    a.0.leave(a.1.life, now);
    drop(a);
    assert!(journals.get("a", None).is_some(), "there is room");
    assert!([&b, &c, &d, &e].into_iter().all(|it| grow(it, 900)));
    assert!(journals.get("a", None).is_none(), "nobody reads it");
    let f = begin("f");
    assert!(!grow(&f, 900), "the one that grows gives up");
    assert!(journals.get("f", None).is_none() && b.0.is_whole());
    drop([b, c, d, e, f]);
    drop(journals.release("b", None).unwrap());
    journals.all().clear();
    assert_eq!(journals.bytes(), 0, "all that was counted is gone");
}

#[test]
fn only_the_key_that_asked_is_given_a_journal_and_it_is_whole_elsewhere() {
    let (journals, now) = (Journals::default(), Instant::now());
    let journal = journals.begin(head("a", Some("k1")), BOUNDS, now).unwrap();
    let (reader, _) = journal.take_over().unwrap();
    appended(&journal, &reader, token(1)).unwrap();
    assert_eq!(journals.release("a", Some("k2")), None);
    assert_eq!(journals.release("a", None), None);
    let mut text = journals.release("a", Some("k1")).unwrap();
    assert!(appended(&journal, &reader, token(2)).is_err());
    assert_eq!(journals.release("a", Some("k1")), None, "it is given once");
    text.extend_from_slice(b"[0,{\"Tok"); // the last line was cut off
    let journal = Journal::parse(text, now).unwrap();
    assert_eq!(journal.take_over().unwrap().1, [token(1)]);
}

#[test]
fn damaged_journals_are_refused() {
    let now = Instant::now();
    for text in ["", "\n", "{}\n", "x", "{\"id\":\"a\"}\n[]\n"] {
        assert!(Journal::parse(text.into(), now).is_none(), "{text:?}");
    }
}

/// Records each part, and returns scripted results.
struct ScriptedMirror(Mutex<(VecDeque<MirrorOutcome>, Vec<JournalPart>)>);

impl Mirror for ScriptedMirror {
    fn put(&self, piece: JournalPart, done: MirrorCallback) {
        let mut own = self.0.lock().unwrap();
        own.1.push(piece);
        done(own.0.pop_front().unwrap());
    }

    fn find(&self, _: &str, _: Option<&str>) -> JournalMatch {
        JournalMatch::Nowhere
    }
}

#[tokio::test]
async fn another_node_gets_what_it_lacks_and_its_loss_is_told_once() {
    let (journals, start) = (Journals::default(), Instant::now());
    let journal = journals.begin(head("a", None), BOUNDS, start).unwrap();
    let (reader, _) = journal.take_over().unwrap();
    let no = || MirrorOutcome::No("none".to_owned());
    let answers = [
        MirrorOutcome::Yes,
        MirrorOutcome::Gap,
        MirrorOutcome::Yes,
        no(),
    ]
    .into();
    let mirror = ScriptedMirror(Mutex::new((answers, Vec::new())));
    let mut told = Vec::new();
    for number in 0..4 {
        appended(&journal, &reader, token(number)).unwrap();
        told.push(journal.protect(&mirror, Instant::now).await);
    }
    // The fourth is not tried: mirroring is paused.
    assert_eq!(told, [None, None, Some("none".to_owned()), None]);
    let pieces = mirror.0.into_inner().unwrap().1;
    let at: Vec<u64> = pieces.iter().map(|piece| piece.at).collect();
    let len = |i: usize| pieces[i].bytes.len() as u64;
    assert_eq!(at, [0, len(0), 0, len(2)]);
    assert_eq!(len(2), len(0) + len(1), "all of it after a gap");
}

/// Nodes that mirror each other's journals, with failures drawn from a seed.
#[derive(Default)]
struct MirrorNetwork {
    /// By node: its own journals, and copies for others.
    nodes: Mutex<Vec<(Journals, JournalCopies)>>,
    random: Mutex<Option<SplitMix64>>,
    /// Whether nodes sometimes reject parts.
    refuses: bool,
}

type JournalCopies = std::collections::BTreeMap<String, Vec<u8>>;

struct NodeMirror(Arc<MirrorNetwork>, usize);

impl MirrorNetwork {
    fn below(&self, bound: usize) -> usize {
        self.random.lock().unwrap().as_mut().unwrap().below(bound)
    }

    fn restart(&self, node: usize) {
        self.nodes.lock().unwrap()[node] = Default::default();
    }

    fn journals(self: &Arc<Self>, node: usize) -> Journals {
        let journals = self.nodes.lock().unwrap()[node].0.clone();
        journals.mirror_to(Arc::new(NodeMirror(Arc::clone(self), node)));
        journals
    }
}

impl Mirror for NodeMirror {
    fn put(&self, piece: JournalPart, done: MirrorCallback) {
        if self.0.refuses && self.0.below(20) == 0 {
            return done(MirrorOutcome::No("full".to_owned()));
        }
        // Mostly the same node as before.
        let step = 1 + usize::from(self.0.below(8) == 0);
        let mut nodes = self.0.nodes.lock().unwrap();
        let at = (self.1 + step) % nodes.len();
        let copies = &mut nodes[at].1;
        let copy = match piece.at {
            0 => copies.entry(piece.id).or_default(),
            _ => match copies.get_mut(&piece.id) {
                Some(copy) => copy,
                None => return done(MirrorOutcome::Gap),
            },
        };
        if piece.at as usize > copy.len() {
            return done(MirrorOutcome::Gap);
        }
        copy.truncate(piece.at as usize);
        copy.extend(piece.bytes);
        done(MirrorOutcome::Yes);
    }

    fn find(&self, id: &str, key: Option<&str>) -> JournalMatch {
        let nodes = self.0.nodes.lock().unwrap();
        let own = nodes
            .iter()
            .filter_map(|(journals, _)| journals.release(id, key));
        let copies = nodes
            .iter()
            .filter_map(|(_, copies)| copies.get(id).cloned());
        let longest = own.chain(copies).max_by_key(Vec::len);
        longest.map_or(JournalMatch::Nowhere, JournalMatch::Copy)
    }
}

/// Length of the response: each number below this is one event.
const ANSWER: u32 = 30;

/// The tokens that a client receives; `None` if its response was not found.
async fn life(net: &Arc<MirrorNetwork>, seed: u64) -> Option<Vec<u32>> {
    let bounds = JournalBounds {
        count: 8,
        bytes: 1 << 20,
        stay: Duration::from_secs(60),
    };
    let (id, now) = (seed.to_string(), Instant::now());
    let mut at = net.below(3);
    let mut journals = net.journals(at);
    let mut journal = journals.begin(head(&id, Some("k")), bounds, now).unwrap();
    let (mut reader, mut past) = journal.take_over().unwrap();
    let mut has: Vec<u32> = Vec::new();
    loop {
        let known = past.len() as u32;
        // The journal replays the tokens below `known`; the service gives those up to `more`.
        let more = (known + 1 + net.below(4) as u32).min(ANSWER);
        let mut lines: Vec<ChoiceReply> = (known..more).map(token).collect();
        let appended = journal.append(reader.life, &mut lines, 1 << 20);
        appended.expect("no other stream reads it");
        let mirror = journals.mirror().unwrap();
        journal.protect(&*mirror, Instant::now).await;
        past.extend(lines);
        let cut = net.below(4) == 0;
        let sent = if cut {
            net.below(past.len() + 1)
        } else {
            past.len()
        };
        for (_, reply) in past.iter().take(sent).skip(has.len()) {
            let Reply::Token { token, .. } = reply else {
                unreachable!("only tokens were said")
            };
            has.push(*token);
        }
        if has.len() as u32 == ANSWER {
            return Some(has);
        }
        if !cut {
            continue;
        }
        match net.below(3) {
            0 => net.restart(at),
            1 => net.restart((at + 1) % 3),
            _ => {}
        }
        at = net.below(3);
        journals = net.journals(at);
        let client = ClientIdentity::Key("k".to_owned());
        let found = journals.find(&id, &client, bounds, Instant::now).await;
        journal = found.ok()?;
        (reader, past) = journal.take_over().unwrap();
    }
}

#[tokio::test]
async fn no_token_is_lost_or_doubled_whatever_is_cut_and_ends() {
    let (mut lost, mut risky) = (0, 0);
    for seed in 0..2000 {
        let net = Arc::new(MirrorNetwork {
            nodes: Mutex::new((0..3).map(|_| Default::default()).collect()),
            random: Mutex::new(Some(SplitMix64::new(seed))),
            refuses: seed % 4 == 3,
        });
        risky += usize::from(net.refuses);
        match life(&net, seed).await {
            Some(has) => assert!(has.iter().copied().eq(0..ANSWER), "seed {seed}: {has:?}"),
            None if net.refuses => lost += 1,
            None => panic!("seed {seed}: an answer that another node keeps is not found"),
        }
    }
    assert!(lost < risky / 2, "{lost} of {risky} unprotected answers");
}
