//! Model copies between two nodes, and the lookup of copies.

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

/// Opens a copy for a fault; its time of change stays as it was once `change` has ended.
fn damage(copy: &Path, change: impl FnOnce(&fs::File)) {
    let file = fs::File::options().write(true).open(copy).unwrap();
    let changed = file.metadata().unwrap().modified().unwrap();
    change(&file);
    file.set_modified(changed).unwrap();
}

/// Two nodes: one with a copy of [`model`], one with the file itself.
struct CopyPair {
    _homes: [tempfile::TempDir; 2],
    agents: [Agent; 2],
    copies: ModelCopies,
    copy: PathBuf,
    bytes: Vec<u8>,
    name: ModelName,
    told: Arc<Mutex<Vec<String>>>,
}

impl CopyPair {
    fn new() -> Self {
        let homes: [_; 2] = std::array::from_fn(|_| tempfile::tempdir().unwrap());
        let (path, bytes, name) = model(homes[0].path());
        let key = ClusterKey::random().unwrap();
        let one = agent(homes[0].path(), &key, None);
        let two = agent(homes[1].path(), &key, Some(one.port()));
        gives(&one, &Arc::new(copies(homes[0].path(), path)));
        let folder = homes[1].path().join("copies");
        fs::create_dir_all(&folder).unwrap();
        let copy = folder.join(format!("{}.gguf", name.sha256));
        fs::write(&copy, &bytes).unwrap();
        let told: Arc<Mutex<Vec<String>>> = Arc::default();
        let heard = Arc::clone(&told);
        let tell = move |line: &str| lock(&heard).push(line.to_owned());
        let find: Box<FileLookup> = Box::new(|_| Err("there is none".into()));
        // A repaired copy takes no more disk than before.
        let full = Box::new(|bytes| Err(format!("{bytes} bytes are too many")));
        Self {
            _homes: homes,
            agents: [one, two],
            copies: ModelCopies::new((find, folder), full, Arc::new(tell)),
            copy,
            bytes,
            name,
            told,
        }
    }

    /// Signs the root on the node with the file; waits until the other one knows it.
    fn sign(&self) {
        let [one, two] = &self.agents;
        let tree = Tree::read(&mut &*self.bytes, self.bytes.len() as u64).unwrap();
        let rooted = FileRoot::sign(one, &self.name.sha256, &tree, 1000).unwrap();
        rooted.publish(one, &self.name.sha256).unwrap();
        until("the root arrives", || {
            roots::of(&two.map(), &self.name.sha256).is_ok() && two.life(one.id()) == Life::Alive
        });
    }

    fn check(&self, extent: CheckRange<'_>) -> Result<Option<u64>, String> {
        let model = (&self.agents[1], &self.name);
        let mended = self.copies.check(model, None, extent, &|_| true)?;
        Ok(mended.map(|it| it.bytes))
    }

    fn is_right(&self) -> bool {
        fs::read(&self.copy).unwrap() == self.bytes
    }

    fn flip(&self, at: u64) {
        let wrong = [self.bytes[at as usize] ^ 1];
        damage(&self.copy, |file| file.write_all_at(&wrong, at).unwrap());
    }
}

impl Drop for CopyPair {
    fn drop(&mut self) {
        self.agents.iter().for_each(Agent::stop);
    }
}

#[test]
fn a_damaged_copy_is_mended_from_another_node() {
    let pair = CopyPair::new();
    pair.sign();
    let each = 64 << 10;
    assert_eq!(pair.check(CheckRange::All), Ok(None), "it is right");
    pair.flip((2 << 20) + 5);
    let others = CheckRange::Parts(&[(0, 2 << 20), ((2 << 20) + each, 3 << 20)]);
    assert_eq!(pair.check(others), Ok(None), "not among these bytes");
    assert_eq!(
        pair.check(CheckRange::Parts(&[(2 << 20, 3 << 20)])),
        Ok(Some(each))
    );
    assert!(pair.is_right());

    let long = pair.bytes.len() as u64;
    for (length, lacks) in [(long - 1, each), (100, long), (0, long), (long + 9, each)] {
        damage(&pair.copy, |file| file.set_len(length).unwrap());
        assert_eq!(
            pair.check(CheckRange::Start),
            Ok(Some(lacks)),
            "{length} bytes"
        );
        assert!(pair.is_right(), "{length} bytes");
    }
    let lines = lock(&pair.told).join("\n");
    for part in [
        "warning: m: the copy ",
        ".gguf is damaged at bytes 2097152..2162688",
        "m: mended 1 blocks (64.0 KiB) of the copy",
    ] {
        assert!(lines.contains(part), "{part}: {lines}");
    }

    // A damaged tree does not invalidate an intact copy.
    fs::write(pair.copy.with_extension(partial_file::TREE), [7; 48 * 32]).unwrap();
    assert_eq!(pair.check(CheckRange::All), Ok(None));

    pair.agents[0].stop();
    pair.flip(9);
    let refused = pair.check(CheckRange::Start).unwrap_err();
    for part in [
        ".gguf is damaged at bytes 0..65536: bytes 0..65536 cannot be had",
        "`paceline pull m --to ",
    ] {
        assert!(refused.contains(part), "{refused}");
    }
}

#[test]
fn a_file_of_the_store_is_mended_from_another_node() {
    let mut pair = CopyPair::new();
    pair.sign();
    let folder = pair.copies.folder.clone();
    let stored = folder.with_file_name("stored.gguf");
    fs::rename(&pair.copy, &stored).unwrap();
    record_checksums(&stored, &pair.name.sha256, &mut |_| true).unwrap();
    pair.copies = copies(&folder, stored.clone());
    pair.copy = stored;
    assert_eq!(pair.check(CheckRange::All), Ok(None), "it is right");

    pair.flip(2 << 20);
    let sum = pair.copies.hash(&pair.copy).unwrap();
    assert_eq!(
        sum, pair.name.sha256,
        "it is the damaged file of that model"
    );
    let (two, part) = (&pair.agents[1], [(2 << 20, 3 << 20)]);
    let repaired = pair.copies.repair(two, (&pair.name, ""), &part, &|| true);
    repaired.unwrap();
    assert!(pair.is_right());
    assert!(!folder.join(format!("{}.shard", pair.name.sha256)).exists());

    pair.flip(0);
    let found = pair.copies.find_part(two, &pair.name);
    assert_eq!(found.as_ref(), Ok(&pair.copy));
    assert!(
        pair.is_right(),
        "its first bytes are compared before a start"
    );

    let file = StoredFile {
        model: pair.name.name.clone(),
        path: pair.copy.clone(),
        sha256: pair.name.sha256.clone(),
        bytes: pair.bytes.len() as u64,
    };
    let mend = || pair.copies.mend_stored(two, &file, &|_| true);
    assert_eq!(mend(), Ok(None), "all bytes are right");
    pair.flip((2 << 20) + 5);
    damage(&pair.copy, |it| it.set_len(file.bytes - 1).unwrap());
    let mended = mend().unwrap().unwrap();
    let last = file.bytes - (64 << 10); // it has whole groups
    let ranges = format!("2097152..2162688, {last}..{}", file.bytes);
    assert_eq!((mended.mended.blocks, mended.ranges), (2, ranges));
    assert!(pair.is_right(), "also the bytes that were cut off");
}

#[test]
fn a_copy_without_a_signed_root_is_checked_by_its_sha256() {
    let pair = CopyPair::new();
    assert_eq!(pair.check(CheckRange::Start), Ok(None));
    pair.flip(3 << 19);
    let refused = pair.check(CheckRange::Start).unwrap_err();
    assert!(refused.contains("is damaged, its SHA-256 is "), "{refused}");
    let found = pair.copies.find_part(&pair.agents[1], &pair.name);
    assert_eq!(found, Err(refused));
}

#[test]
fn groups_that_were_damaged_after_they_came_are_fetched_again() {
    let pair = CopyPair::new();
    pair.sign();
    fs::remove_file(&pair.copy).unwrap();
    let copies = none(&pair.copies.folder);
    let (two, part) = (&pair.agents[1], [(0, 1 << 20)]);
    copies
        .bring(two, (&pair.name, ""), &part, &|| true)
        .unwrap();
    let shard = pair.copy.with_extension(partial_file::FILE);
    damage(&shard, |file| file.write_all_at(b"wrong", 7).unwrap());
    copies
        .repair(two, (&pair.name, ""), &part, &|| true)
        .unwrap();
    let there = fs::read(&shard).unwrap();
    assert_eq!(there[..1 << 20], pair.bytes[..1 << 20]);

    // The SHA-256 of the whole file detects it too, and a second attempt repairs it.
    damage(&shard, |file| file.write_all_at(b"wrong", 7).unwrap());
    let mut record = wanted(pair.name.clone(), pair.bytes.len() as u64);
    record.source = Some(pair.agents[0].id());
    let failed = copies.take(two, None, &record, &|_| ()).unwrap_err();
    assert!(failed.contains("was changed after it came"), "{failed}");
    copies.take(two, None, &record, &|_| ()).unwrap();
    assert!(pair.is_right());
}

#[test]
fn manifests_with_other_roots_of_a_file_take_turns() {
    let pair = CopyPair::new();
    pair.sign();
    fs::remove_file(&pair.copy).unwrap();
    let (copies, two) = (none(&pair.copies.folder), &pair.agents[1]);
    let bytes = pair.bytes.len() as u64;
    let other = Tree::read(&mut &*vec![7; pair.bytes.len()], bytes).unwrap();
    let tree = pair.copy.with_extension(partial_file::TREE);
    fs::write(tree, other.to_bytes()).unwrap();
    let right = KnownRoot::from(roots::of(&two.map(), &pair.name.sha256).unwrap());
    let wrong = KnownRoot {
        root: shown(other.root()),
        ..right.clone()
    };
    let held = |root: &KnownRoot| copies.held(two, &pair.name, Some((root.clone(), None)));
    let in_use = held(&wrong).unwrap();
    let refused = held(&right).err().unwrap();
    assert!(refused.contains("in use now"), "{refused}");
    drop(in_use);
    let record = wanted(pair.name.clone(), bytes);
    copies.take(two, None, &record, &|_| ()).unwrap();
    assert!(pair.is_right());
}
