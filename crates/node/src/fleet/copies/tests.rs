//! Model copies between two nodes, and the lookup of copies.

mod damage;

use super::super::FILE;
use super::super::hub::HubOrigin;
use super::messages::fetch;
use paceline_base::CallbackError;
use paceline_cluster::nodes::member::Life;
use paceline_fleet::InstanceSpec;
use paceline_store::verified::damage::merged;
use paceline_store::verified::tree::Tree;
use paceline_store::verified::tree::shown;
use std::os::unix::fs::FileExt;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering;
use std::time::Instant;

use paceline_cluster::nodes::agent::{Config, Discovery, NodeFacts, join_at_rest};
use paceline_cluster::nodes::{ClusterKey, RegisterKey};
use paceline_fleet::{InstanceId, specs};

use super::*;
use crate::fleet::{FETCH, PIECES};
use paceline_store::verified::record_checksums;

/// Reached only if something hangs.
const LIMIT: Duration = Duration::from_secs(60);

fn copies(folder: &Path, model: PathBuf) -> ModelCopies {
    copies_of(folder, Box::new(move |_| Ok(model.clone())))
}

fn copies_of(folder: &Path, find: Box<FileLookup>) -> ModelCopies {
    ModelCopies::new(
        (find, folder.to_owned()),
        Box::new(|_| Ok(())),
        Arc::new(|_| {}),
    )
}

/// Copies of a node whose store is empty.
pub(super) fn none(folder: &Path) -> ModelCopies {
    copies_of(folder, Box::new(|_| Err("there is none".into())))
}

pub(super) fn until(what: &str, done: impl Fn() -> bool) {
    let end = Instant::now() + LIMIT;
    while !done() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub(super) fn agent(home: &Path, key: &ClusterKey, peer: Option<u16>) -> Agent {
    join_at_rest(home, key).unwrap();
    let mut config = Config::new(home, NodeFacts::default());
    config.port = 0;
    config.discovery = Discovery::Peers;
    config.peers = peer
        .iter()
        .map(|port| format!("127.0.0.1:{port}"))
        .collect();
    Agent::start(config).unwrap()
}

/// A record without nodes.
pub(in crate::fleet) fn wanted(model: ModelName, bytes: u64) -> InstanceSpec {
    InstanceSpec {
        model: model.name,
        sha256: model.sha256,
        manifest: model.manifest,
        bytes,
        split: "auto".to_owned(),
        threads: 1,
        ..InstanceSpec::default()
    }
}

#[test]
fn a_node_without_the_file_says_so_or_copies_it() {
    let homes = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let model = homes[0].path().join("model.gguf");
    fs::write(&model, b"weights").unwrap();
    let name = ModelName {
        name: "m".to_owned(),
        sha256: hash(&model).unwrap(),
        manifest: false,
    };
    let key = ClusterKey::random().unwrap();
    let one = agent(homes[0].path(), &key, None);
    let two = agent(homes[1].path(), &key, Some(one.port()));
    let has = copies(homes[0].path(), model);
    one.serve(FILE, move |channel| has.answer_file(&channel));
    let (folder, own) = (homes[1].path().join("copies"), two.clone());
    let lacks = none(&folder);
    two.serve(FETCH, move |channel| lacks.answer_fetch(&own, &channel));
    let (limit, end) = (LIMIT, Instant::now() + LIMIT);
    let linked = |agent: &Agent| agent.nodes().iter().filter(|node| node.linked).count();
    until("they meet", || linked(&one) + linked(&two) == 4);
    let (wanted, to) = (wanted(name, 7), two.id());
    assert_eq!(holders(&one, &[to], &wanted, limit), BTreeSet::new());
    let mut goes_on = || Instant::now() < end;
    let copied = ensure_while(&one, to, &wanted, limit, &mut goes_on);
    assert_eq!(copied, Ok(()));
    assert_eq!(holders(&one, &[to], &wanted, limit), BTreeSet::from([to]));
    let late = ensure_while(&one, to, &wanted, limit, &mut || false).unwrap_err();
    assert!(late.contains("in time"), "{late}");
    one.stop();
    two.stop();
}

#[test]
fn only_the_content_that_was_asked_for_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model.gguf");
    fs::write(&model, b"weights").unwrap();
    let name = |sha256: String| ModelName {
        name: "m".to_owned(),
        sha256,
        manifest: false,
    };
    let right = name(hash(&model).unwrap());
    let found = copies(folder.path(), model.clone());
    assert_eq!(found.find(&right), Ok(model));
    let error = found.find(&name("0".repeat(64))).unwrap_err();
    assert!(error.contains("another file"), "{error}");
    let error = found.find(&name("../../etc".to_owned())).unwrap_err();
    assert!(error.contains("no SHA-256"), "{error}");
    let copy = folder.path().join(format!("{}.gguf", "0".repeat(64)));
    fs::write(&copy, b"others").unwrap();
    assert_eq!(found.find(&name("0".repeat(64))), Ok(copy));
}

#[test]
fn no_group_is_fetched_twice() {
    assert_eq!(
        merged(vec![5..7, 0..1, 1..2, 6..9, 20..21]),
        [0..2, 5..9, 20..21]
    );
    assert_eq!(merged(Vec::new()), []);
}

/// A file of some pieces, and its name.
fn model(folder: &Path) -> (PathBuf, Vec<u8>, ModelName) {
    let bytes: Vec<u8> = (0..3_u32 << 20).map(|i| (i / 7) as u8).collect();
    let path = folder.join("model.gguf");
    fs::write(&path, &bytes).unwrap();
    let sha256 = hash(&path).unwrap();
    let name = ModelName {
        name: "m".to_owned(),
        sha256,
        manifest: false,
    };
    (path, bytes, name)
}

/// Serves byte ranges, as a fleet does.
fn gives(agent: &Agent, copies: &Arc<ModelCopies>) {
    let (own, copies) = (agent.clone(), Arc::clone(copies));
    agent.serve(PIECES, move |channel| copies.answer_pieces(&own, &channel));
}

#[test]
fn a_source_that_lies_is_named_and_another_one_taken() {
    let homes: [_; 3] = std::array::from_fn(|_| tempfile::tempdir().unwrap());
    let folder = |node: usize| homes[node].path().join("copies");
    let (path, bytes, name) = model(homes[0].path());
    let key = ClusterKey::random().unwrap();
    let one = agent(homes[0].path(), &key, None);
    let liar = agent(homes[1].path(), &key, Some(one.port()));
    let two = agent(homes[2].path(), &key, Some(one.port()));

    // The bad source has the right hashes and flips a bit of every range.
    let tree = Tree::read(&mut &*bytes, bytes.len() as u64).unwrap();
    let mut wrong = bytes.clone();
    wrong.chunks_mut(64 << 10).for_each(|group| group[100] ^= 2);
    fs::create_dir_all(folder(1)).unwrap();
    let place = |ending: &str| folder(1).join(format!("{}.{ending}", name.sha256));
    fs::write(place("gguf"), &wrong).unwrap();
    fs::write(place(partial_file::TREE), tree.to_bytes()).unwrap();
    gives(&liar, &Arc::new(none(&folder(1))));

    let rooted = FileRoot::sign(&one, &name.sha256, &tree, 1000).unwrap();
    rooted.publish(&one, &name.sha256).unwrap();
    let mut record = wanted(name.clone(), bytes.len() as u64);
    record.nodes = vec![one.id(), liar.id()];
    let text = serde_json::to_string(&record).unwrap();
    one.write(RegisterKey::Record(InstanceId(1)), 1, Some(text))
        .unwrap();
    let knows = || {
        let map = two.map();
        specs(&map).next().is_some() && roots::of(&map, &name.sha256).is_ok()
    };
    until("the map arrives", || {
        knows() && two.life(liar.id()) == Life::Alive
    });

    let told: Arc<Mutex<Vec<String>>> = Arc::default();
    let heard = Arc::clone(&told);
    let find: Box<FileLookup> = Box::new(|_| Err("there is none".into()));
    let tell = move |line: &str| lock(&heard).push(line.to_owned());
    let lacks = ModelCopies::new((find, folder(2)), Box::new(|_| Ok(())), Arc::new(tell));
    let failed = lacks.take(&two, None, &record, &|_| ()).unwrap_err();
    assert!(failed.contains("it gave wrong bytes at "), "{failed}");
    assert!(failed.contains("cannot be had"), "{failed}");
    let lines = lock(&told).join("\n");
    assert!(
        lines.contains("warning: m: ") && lines.contains("wrong bytes"),
        "{lines}"
    );
    let held = lacks.part(&name.sha256).unwrap();
    assert!(held.partial.runs().is_empty(), "nothing of it is kept");

    gives(&one, &Arc::new(copies(&folder(0), path)));
    lacks.take(&two, None, &record, &|_| ()).unwrap();
    let copy = lacks.find(&name).unwrap();
    assert_eq!(fs::read(&copy).unwrap(), bytes);
    assert_eq!(
        lacks.of_user("m"),
        Ok(copy),
        "by the name that it was sent under"
    );
    assert_eq!(lacks.forget(&name.sha256).unwrap(), bytes.len() as u64);
    assert!(lacks.find(&name).is_err());
    assert_eq!(
        fs::read_dir(folder(2)).unwrap().count(),
        0,
        "nothing is left"
    );
    [one, liar, two].iter().for_each(Agent::stop);
}

#[test]
fn a_worker_gets_the_parts_that_it_asks_for_and_no_others() {
    let homes: [_; 2] = std::array::from_fn(|_| tempfile::tempdir().unwrap());
    let (path, bytes, name) = model(homes[0].path());
    let key = ClusterKey::random().unwrap();
    let one = agent(homes[0].path(), &key, None);
    let two = agent(homes[1].path(), &key, Some(one.port()));
    let tree = Tree::read(&mut &*bytes, bytes.len() as u64).unwrap();
    let rooted = FileRoot::sign(&one, &name.sha256, &tree, 1000).unwrap();
    rooted.publish(&one, &name.sha256).unwrap();
    gives(&one, &Arc::new(copies(homes[0].path(), path)));
    until("the root arrives", || {
        roots::of(&two.map(), &name.sha256).is_ok()
    });
    let folder = homes[1].path().join("copies");
    let full = ModelCopies::new(
        (Box::new(|_| Err("".into())), folder.clone()),
        Box::new(|bytes| Err(format!("{bytes} bytes are too many"))),
        Arc::new(|_| {}),
    );
    let part = [(1 << 20, (1 << 20) + 1)];
    let refused = full.bring(&two, (&name, ""), &part, &|| true).unwrap_err();
    assert_eq!(refused, "65536 bytes are too many");
    let fetch = Fetch {
        parts: true,
        share: 2 << 20,
        ..fetch(&two, &wanted(name.clone(), bytes.len() as u64))
    };
    let refused = full.fetch(&two, None, &fetch, &mut |_| Ok(())).unwrap_err();
    assert_eq!(refused, "2097152 bytes are too many");
    drop(full);

    let own = none(&folder);
    own.bring(&two, (&name, ""), &part, &|| true).unwrap();
    let held = own.part(&name.sha256).unwrap();
    assert_eq!(held.partial.runs(), [(16, 17)]);
    let given_up = own
        .bring(&two, (&name, ""), &[(0, 1 << 20)], &|| false)
        .unwrap_err();
    assert!(given_up.contains("nobody waits"), "{given_up}");
    assert_eq!(held.partial.runs(), [(0, 17)], "what came is kept");

    // The file's first bytes are its header, and samples tell it from others.
    let opened = own.find_part(&two, &name).unwrap();
    let there = fs::read(opened).unwrap();
    assert_eq!(there.len(), bytes.len());
    for sample in identity::parts(bytes.len(), 1000, bytes.len() - 1000) {
        assert_eq!(there[sample.clone()], bytes[sample]);
    }
    one.stop();
    let gone = own.bring(&two, (&name, ""), &[(2 << 20, 3 << 20)], &|| true);
    // The samples cover every group of this small file, so all of it is here.
    assert_eq!(gone, Ok(()));
    two.stop();
}

/// A hub that has one file.
struct OneFile {
    bytes: Mutex<Vec<u8>>,
    is_reached: AtomicBool,
    /// The ranges that were read of it, first bytes and ends.
    read: Mutex<Vec<(u64, u64)>>,
}

impl OneFile {
    fn reach(&self) -> Result<(), String> {
        match self.is_reached.load(Ordering::SeqCst) {
            true => Ok(()),
            false => Err("no network".to_owned()),
        }
    }
}

impl ModelHub for OneFile {
    fn origin(&self, _: &Path) -> Option<HubOrigin> {
        None
    }

    fn whole(
        &self,
        _: &HubOrigin,
        path: &Path,
        came: &hub::FetchProgress<'_>,
    ) -> Result<(), CallbackError> {
        self.reach()?;
        let bytes = lock(&self.bytes);
        assert!(came(bytes.len() as u64));
        Ok(fs::write(path, &*bytes)?)
    }

    fn read(
        &self,
        _: &HubOrigin,
        span: Range<u64>,
        take: &mut hub::ByteSink<'_>,
    ) -> Result<(), CallbackError> {
        self.reach()?;
        lock(&self.read).push((span.start, span.end));
        let part = lock(&self.bytes)[span.start as usize..span.end as usize].to_vec();
        let mut pieces = part.chunks(100_000);
        let _ = pieces.all(take);
        Ok(())
    }
}

#[test]
fn bytes_that_no_node_has_come_from_the_hub_and_are_checked() {
    let home = tempfile::tempdir().unwrap();
    let (_, bytes, name) = model(home.path());
    let one = agent(home.path(), &ClusterKey::random().unwrap(), None);
    let hub = Arc::new(OneFile {
        bytes: Mutex::new(bytes.clone()),
        is_reached: AtomicBool::new(false),
        read: Mutex::default(),
    });
    let folder = |name: &str| home.path().join(name);
    let lacks = |name: &str| none(&folder(name)).with_hub(Arc::clone(&hub) as Arc<dyn ModelHub>);
    let record = wanted(name.clone(), bytes.len() as u64);
    let own = lacks("copies");
    let unknown = own.take(&one, None, &record, &|_| ()).unwrap_err();
    assert!(
        unknown.contains("not known from which file of the hub"),
        "{unknown}"
    );
    let origin = HubOrigin {
        repo: "own/repo".to_owned(),
        revision: "0".repeat(40),
        file: "m.gguf".to_owned(),
        bytes: bytes.len() as u64,
        sha256: name.sha256.clone(),
    };
    origin.publish(&one);
    let cut_off = own.take(&one, None, &record, &|_| ()).unwrap_err();
    for part in ["has told the root", "no network", "`paceline pull m --to "] {
        assert!(cut_off.contains(part), "{cut_off}");
    }

    // Without a tree: all of it, by its SHA-256.
    hub.is_reached.store(true, Ordering::SeqCst);
    let others = lacks("others");
    others.take(&one, None, &record, &|_| ()).unwrap();
    assert_eq!(fs::read(others.of_user("m").unwrap()).unwrap(), bytes);
    assert!(others.has(&name.sha256) && !own.has(&name.sha256));

    // With one: just the groups that are missing.
    let tree = Tree::read(&mut &*bytes, bytes.len() as u64).unwrap();
    let rooted = FileRoot::sign(&one, &name.sha256, &tree, 1000).unwrap();
    rooted.publish(&one, &name.sha256).unwrap();
    let kept = folder("copies").join(format!("{}.{}", name.sha256, partial_file::TREE));
    fs::write(kept, tree.to_bytes()).unwrap();
    let bring = |end: u64| own.bring(&one, (&name, ""), &[(end - 1, end)], &|| true);
    bring((1 << 20) + 1).unwrap();
    let held = own.part(&name.sha256).unwrap();
    assert_eq!(held.partial.runs(), [(16, 17)]);
    let flip = || lock(&hub.bytes)[17 << 16] ^= 4;
    flip();
    let wrong = bring((17 << 16) + 1).unwrap_err();
    assert!(wrong.contains("wrong bytes at 1114112..1179648"), "{wrong}");
    assert_eq!(held.partial.runs(), [(16, 17)], "nothing of it is kept");
    flip();
    lock(&hub.read).clear();
    own.take(&one, None, &record, &|_| ()).unwrap();
    let read = lock(&hub.read).clone();
    assert_eq!(read, [(0, 16 << 16), (17 << 16, 48 << 16)], "no byte twice");
    assert_eq!(fs::read(own.find(&name).unwrap()).unwrap(), bytes);
    one.stop();
}
