//! Damaged copies are mended, and wrong roots refused.

use super::*;

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
