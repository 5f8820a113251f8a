//! Tests of `partial_source.rs`.

use std::collections::BTreeMap;

use paceline_base::{BlockType, Rank};
use paceline_model::{Config, Split};
use paceline_weights::gguf::testing::GgufWriter;
use sha2::Digest as _;

use super::*;

/// The state of the only file of a model.
fn source_of(
    path: &Path,
    ask: impl Fn(RangeRequest) + Send + Sync + 'static,
) -> Option<PartialSource> {
    let ask: Arc<RangeRequester> = Arc::new(ask);
    let mapped = MappedBytes::open(path).unwrap();
    PartialSource::new(
        (path, &mapped),
        String::new(),
        (Some(&ask), &Arc::default()),
    )
    .unwrap()
}

fn fetch(file: &str, part: ByteRange) -> RangeRequest {
    let (file, parts) = (file.to_owned(), vec![part]);
    RangeRequest::Fetch { file, parts }
}

fn repair(file: &str, part: ByteRange) -> RangeRequest {
    let (file, parts) = (file.to_owned(), vec![part]);
    RangeRequest::Repair { file, parts }
}

#[test]
fn parts_are_asked_for_once_and_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.shard");
    let each = HashGroups::of(0).each as usize;
    std::fs::write(&path, vec![0; 3 * each]).unwrap();
    let have = path.with_extension(HAVE);
    std::fs::write(&have, [1, 0, 0]).unwrap();
    let asked: Arc<Mutex<Vec<ByteRange>>> = Arc::default();
    let (own, told) = (Arc::clone(&asked), have.clone());
    let ask = move |wish: RangeRequest| {
        let RangeRequest::Fetch { parts, .. } = wish else {
            panic!("{wish:?}");
        };
        lock(&own).extend(parts);
        std::fs::write(&told, [1, 1, 0]).unwrap(); // the machine has fetched it
    };
    let arriving = source_of(&path, ask).unwrap();
    arriving.wait(0..each).unwrap();
    assert!(lock(&asked).is_empty(), "it is here");
    arriving.wait(each - 1..each + 1).unwrap();
    arriving.wait(each..each + 9).unwrap();
    assert_eq!(*lock(&asked), [(each as u64 - 1, each as u64 + 1)]);
    arriving.wait(7..7).unwrap();
    assert!(is_partial(&path) && !is_partial(&have));
}

#[test]
fn parts_that_touch_are_one() {
    let ranges = [0..10, 32..64, 10_000..10_001, 64..70];
    let parts = joined(ranges.into_iter());
    assert_eq!(parts, [(0, 64), (10_000, 10_001), (64, 70)]);
}
/// A whole copy of four groups and its hash tree; its bytes.
fn copy(dir: &Path) -> (PathBuf, Vec<u8>) {
    let (path, each) = (dir.join("m.gguf"), HashGroups::of(0).each as usize);
    let bytes: Vec<u8> = (0..3 * each + 9).map(|i| (i / 7) as u8).collect();
    let tree = Tree::read(&mut &*bytes, bytes.len() as u64).unwrap();
    std::fs::write(&path, &bytes).unwrap();
    std::fs::write(path.with_extension(TREE), tree.to_bytes()).unwrap();
    (path, bytes)
}

/// Flips a bit of the file, whose length and time stay.
fn flip(path: &Path, bytes: &[u8], at: usize) {
    let file = File::options().write(true).open(path).unwrap();
    let changed = file.metadata().unwrap().modified().unwrap();
    file.write_all_at(&[bytes[at] ^ 1], at as u64).unwrap();
    file.set_modified(changed).unwrap();
}

#[test]
fn a_damaged_group_is_repaired_before_it_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let (path, bytes) = copy(dir.path());
    let each = HashGroups::of(0).each as usize;
    flip(&path, &bytes, each + 7);
    flip(&path, &bytes, 3 * each);
    let wishes: Arc<Mutex<Vec<RangeRequest>>> = Arc::default();
    let (heard, right, place) = (Arc::clone(&wishes), bytes.clone(), path.clone());
    let ask = move |wish: RangeRequest| {
        lock(&heard).push(wish);
        let file = File::options().write(true).open(&place).unwrap();
        file.write_all_at(&right[each..2 * each], each as u64)
            .unwrap();
    };
    let arriving = source_of(&path, ask).unwrap();
    arriving.wait(0..each).unwrap();
    arriving.wait(2 * each..3 * each).unwrap();
    assert!(lock(&wishes).is_empty(), "others' parts are not compared");
    arriving.wait(0..3 * each).unwrap();
    let each = each as u64;
    assert_eq!(*lock(&wishes), [repair("", (each, 2 * each))]);
}

/// Readers keep the mapping of the file that another one replaces.
#[test]
fn the_bytes_that_are_read_are_those_that_are_compared() {
    let dir = tempfile::tempdir().unwrap();
    let (path, bytes) = copy(dir.path());
    let each = HashGroups::of(0).each as usize;
    flip(&path, &bytes, each + 7);
    let mapped = MappedBytes::open(&path).unwrap();
    if mapped.resident(0..1).is_none() {
        eprintln!("SKIPPED compared mappings: Linux 5.14 has the call");
        return;
    }
    let right = dir.path().join("right");
    std::fs::write(&right, bytes).unwrap();
    std::fs::rename(right, &path).unwrap();
    let source = PartialSource::new((&path, &mapped), String::new(), (None, &Arc::default()));
    let source = source.unwrap().unwrap();
    source.wait(0..each).unwrap();
    source.wait(each..2 * each).unwrap_err();
}

#[test]
fn groups_that_were_here_before_are_compared_and_those_that_come_are_not() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, bytes) = copy(dir.path());
    let path = whole.with_extension(FILE);
    std::fs::rename(&whole, &path).unwrap();
    let each = HashGroups::of(0).each as usize;
    let have = path.with_extension(HAVE);
    std::fs::write(&have, [1, 1, 0, 0]).unwrap();
    flip(&path, &bytes, each);
    let wishes: Arc<Mutex<Vec<RangeRequest>>> = Arc::default();
    let (heard, right, place) = (Arc::clone(&wishes), bytes, path.clone());
    let ask = move |wish: RangeRequest| {
        match &wish {
            RangeRequest::Repair { .. } => std::fs::write(&place, &right).unwrap(),
            RangeRequest::Fetch { .. } => std::fs::write(&have, [1; 4]).unwrap(),
        }
        lock(&heard).push(wish);
    };
    let arriving = source_of(&path, ask).unwrap();
    arriving.wait(0..3 * each).unwrap();
    let each = each as u64;
    let expected = [repair("", (each, 2 * each)), fetch("", (0, 3 * each))];
    assert_eq!(*lock(&wishes), expected);
}

#[test]
fn a_file_of_the_users_own_is_read_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let (path, _) = copy(dir.path());
    std::fs::remove_file(path.with_extension(TREE)).unwrap();
    assert!(source_of(&path, |_| ()).is_none());
}

/// Bits flip in a store's file whose length and times stay.
#[test]
fn damage_of_a_stores_file_is_an_error_and_no_weight() {
    let dir = tempfile::tempdir().unwrap();
    let (path, each) = (dir.path().join("m.gguf"), HashGroups::of(0).each as usize);
    let file = GgufWriter::new().tensor("a", BlockType::F32, &[each], vec![1; 4 * each]);
    let file = file.tensor("b", BlockType::F32, &[each], vec![2; 4 * each]);
    file.write(&path);
    let bytes = std::fs::read(&path).unwrap();
    let sha256 = paceline_base::hex(&sha2::Sha256::digest(&bytes));
    paceline_store::verified::record_checksums(&path, &sha256, &mut |_| true).unwrap();
    let tensor = |source: &ModelSource, name: &str| {
        let ModelSource::Gguf(file) = source else {
            panic!("a file");
        };
        file.tensor(name).unwrap().bytes.arrived().map(drop)
    };
    let source = open_checked(&path).unwrap();
    assert!(tensor(&source, "a").is_ok() && tensor(&source, "b").is_ok());

    flip(&path, &bytes, bytes.len() - 1);
    let source = open_checked(&path).unwrap();
    tensor(&source, "a").unwrap();
    let error = tensor(&source, "b").unwrap_err();
    assert!(error.to_string().contains("m.gguf"), "{error}");
    assert!(error.reason.contains("damaged"), "{error}");

    let header = open_checked(&path).map(drop);
    assert!(header.is_ok(), "its header is right");
    flip(&path, &bytes, 40);
    assert!(open_checked(&path).is_err());
}

/// Requests that were sent, and the bytes and copy of each file by its name.
#[derive(Clone, Default)]
struct Machine {
    heard: Arc<Mutex<Vec<RangeRequest>>>,
    files: BTreeMap<String, (Vec<u8>, PathBuf)>,
}

impl Machine {
    /// The folder of a model of these files, with the first `present` bytes of each.
    fn fetching(dir: &Path, files: Vec<(String, Vec<u8>, usize)>) -> (Self, PathBuf) {
        let (mut machine, model) = (Self::default(), dir.join("of.model"));
        std::fs::create_dir(&model).unwrap();
        for (i, (name, bytes, present)) in files.into_iter().enumerate() {
            let copy = dir.join(format!("{i}.shard"));
            let groups = HashGroups::of(bytes.len() as u64);
            let start = groups.around(&(0..present as u64));
            let mut have = vec![0; groups.count() as usize];
            have[..start.end as usize].fill(1);
            let mut holed = bytes.clone();
            holed[groups.span(&start).end as usize..].fill(0);
            std::fs::write(&copy, holed).unwrap();
            std::fs::write(copy.with_extension(HAVE), have).unwrap();
            let tree = Tree::read(&mut &*bytes, bytes.len() as u64).unwrap();
            std::fs::write(copy.with_extension(TREE), tree.to_bytes()).unwrap();
            let target = Path::new("..").join(copy.file_name().unwrap());
            std::os::unix::fs::symlink(target, model.join(&name)).unwrap();
            machine.files.insert(name, (bytes, copy));
        }
        (machine, model)
    }

    /// Fetches a whole file once ranges of it are requested.
    fn serve(&self) -> Arc<RangeRequester> {
        let machine = self.clone();
        Arc::new(move |wish| {
            let RangeRequest::Fetch { file, .. } = &wish else {
                panic!("{wish:?}");
            };
            let (bytes, copy) = &machine.files[file];
            std::fs::write(copy, bytes).unwrap();
            let count = HashGroups::of(bytes.len() as u64).count() as usize;
            std::fs::write(copy.with_extension(HAVE), vec![1; count]).unwrap();
            lock(&machine.heard).push(wish);
        })
    }

    fn heard(&self) -> Vec<RangeRequest> {
        std::mem::take(&mut lock(&self.heard))
    }
}

fn fetch_of((file, range): (&Path, Range<usize>)) -> RangeRequest {
    let name = file.file_name().unwrap().to_str().unwrap();
    fetch(name, (range.start as u64, range.end as u64))
}

/// Tensors of a folder lie in three files, which are still empty but for their headers.
#[test]
fn requests_name_the_file_in_the_models_folder() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR"));
    let golden = golden.join("../../tests-data/golden/hf/llama-rope3-sharded");
    let complete = ModelSource::open(&golden).unwrap();
    let (mut weights, mut others) = (Vec::new(), Vec::new());
    for entry in std::fs::read_dir(&golden).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        let bytes = std::fs::read(&path).unwrap();
        match path.extension() == Some("safetensors".as_ref()) {
            true => weights.push((name, bytes, 5000)),
            false => others.push((name, bytes)),
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let (machine, model) = Machine::fetching(dir.path(), weights);
    for (name, bytes) in others {
        std::fs::write(model.join(name), bytes).unwrap();
    }
    let source = open(&model, Some(machine.serve())).unwrap();
    assert!(is_partial(&model) && !is_partial(&golden));
    let (ModelSource::Hf(folder), ModelSource::Hf(whole)) = (&source, &complete) else {
        panic!("folders");
    };

    let config = Config::read(&source).unwrap();
    let split = Split::plan(&config, "pipeline".parse().unwrap(), 2, &[]).unwrap();
    let shard = split.shard(&config, Rank(1));
    let expected = source.locations(config.family, &shard);
    let runs = ahead(&model, &source, (config.family, &shard));
    for (file, range) in expected {
        let (start, end) = (range.start as u64, range.end as u64);
        let holds = |part: &ByteRange| part.0 <= start && end <= part.1;
        let is_in = |(name, parts): &(String, Vec<ByteRange>)| {
            model.join(name) == file && parts.iter().any(holds)
        };
        assert!(runs.iter().any(is_in), "{}: {range:?}", file.display());
    }
    assert_eq!(ahead(&golden, &complete, (config.family, &shard)), []);
    assert_eq!(machine.heard(), [], "nothing was read");

    for name in ["lm_head.weight", "model.layers.2.mlp.gate_proj.weight"] {
        let bytes = folder.tensor(name).unwrap().bytes;
        assert_eq!(*bytes, *whole.tensor(name).unwrap().bytes, "{name}");
        assert_eq!(machine.heard(), [fetch_of(folder.location(name).unwrap())]);
    }
}

#[test]
fn parts_of_a_split_file_are_requested_by_their_names() {
    let dir = tempfile::tempdir().unwrap();
    let each = HashGroups::of(0).each as usize;
    let part = |no: u32| {
        let file = GgufWriter::new()
            .meta("split.no", no)
            .meta("split.count", 2u32)
            .meta("split.tensors.count", 2u32);
        let bytes = vec![1 + no as u8; 3 * each];
        file.tensor(&no.to_string(), BlockType::F32, &[3 * each / 4], bytes)
    };
    let name = |no| format!("m-0000{no}-of-00002.gguf");
    let parts = [0, 1].map(|no| (name(no + 1), part(no).to_bytes(), 1));
    let (machine, model) = Machine::fetching(dir.path(), parts.into());
    let first = model.join(name(1));
    assert!(is_partial(&first) && is_shard(&first) && !is_shard(&model));
    let source = open(&first, Some(machine.serve())).unwrap();
    let ModelSource::Gguf(file) = &source else {
        panic!("a file");
    };
    assert!(
        file.tensor("1")
            .unwrap()
            .bytes
            .iter()
            .all(|byte| *byte == 2)
    );
    let own = file.location("1").unwrap();
    assert_eq!(own.0, model.join(name(2)));
    assert_eq!(machine.heard(), [fetch_of(own)]);
    for no in [1, 2] {
        let link = model.join(name(no));
        std::fs::remove_file(&link).unwrap();
        part(no - 1).write(&link);
    }
    assert!(!is_partial(&first), "files of its own are complete");
}
