//! Copies of models of several files.

use super::super::hub::HubOrigin;
use paceline_base::CallbackError;
use paceline_cluster::nodes::member::Life;
use paceline_fleet::InstanceSpec;
use std::os::unix::fs::FileExt;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering;

use paceline_cluster::nodes::ClusterKey;
use paceline_weights::gguf::testing::GgufWriter;

use super::models::ModelIdentity;
use super::tests::{agent, none, until, wanted};
use super::*;
use crate::fleet::PIECES;
use crate::fleet::file_ranges::FileInventory;
use paceline_store::verified::partial_file::GroupRun;

/// Bytes of a group of these small files.
const EACH: u64 = 64 << 10;

/// Files that a node serves to others.
#[derive(Default)]
struct Served {
    /// Bytes given so far.
    given: AtomicU64,
    /// After these it gives nothing, unless 0.
    most: AtomicU64,
    /// SHA-256 of the file that it gives with wrong bytes.
    wrong: Mutex<String>,
}

/// Groups that are counted, and wrong if the test says so.
struct Counted {
    groups: Box<dyn FileInventory>,
    sha256: String,
    served: Arc<Served>,
}

impl FileInventory for Counted {
    fn runs(&self) -> Vec<GroupRun> {
        self.groups.runs()
    }

    fn leaves(&self) -> io::Result<Vec<u8>> {
        self.groups.leaves()
    }

    fn give(&self, groups: &Range<u64>) -> io::Result<Option<Vec<u8>>> {
        let mut bytes = self.groups.give(groups)?.unwrap_or_default();
        let given = &self.served.given;
        let before = given.fetch_add(bytes.len() as u64, Ordering::SeqCst);
        let most = self.served.most.load(Ordering::SeqCst);
        if most > 0 && before >= most {
            given.fetch_sub(bytes.len() as u64, Ordering::SeqCst);
            return Ok(None);
        }
        if *lock(&self.served.wrong) == self.sha256 {
            bytes[5] ^= 4;
        }
        Ok(Some(bytes))
    }

    fn groups(&self) -> HashGroups {
        self.groups.groups()
    }
}

fn serve(agent: &Agent, copies: &Arc<ModelCopies>) -> Arc<Served> {
    let served = Arc::<Served>::default();
    let (own, copies, shared) = (agent.clone(), Arc::clone(copies), Arc::clone(&served));
    agent.serve(PIECES, move |channel| {
        file_ranges::answer(&channel, |model| {
            let groups = copies.inventory(&own, model)?;
            let (sha256, served) = (model.sha256.clone(), Arc::clone(&shared));
            Ok(Box::new(Counted {
                groups,
                sha256,
                served,
            }))
        });
    });
    served
}

fn safetensors(seed: u32) -> Vec<u8> {
    let values: u32 = 400_000;
    let end = 4 * values;
    let header =
        format!(r#"{{"w{seed}":{{"dtype":"F32","shape":[{values}],"data_offsets":[0,{end}]}}}}"#);
    let length = (header.len() as u64).to_le_bytes();
    let data = (0..values).flat_map(|i| i.wrapping_mul(seed + 7).to_le_bytes());
    [&length[..], header.as_bytes()]
        .concat()
        .into_iter()
        .chain(data)
        .collect()
}

/// A folder of three files of weights, a large tokenizer and settings.
fn folder(at: &Path) -> PathBuf {
    let folder = at.join("model");
    fs::create_dir_all(folder.join("1_Pooling")).unwrap();
    let write = |name: &str, bytes: &[u8]| fs::write(folder.join(name), bytes).unwrap();
    for number in 1..=3 {
        write(&format!("m-{number}.safetensors"), &safetensors(number));
    }
    let map = (1..=3).map(|n| format!("\"w{n}\":\"m-{n}.safetensors\""));
    let map: Vec<String> = map.collect();
    let index = format!("{{\"weight_map\":{{{}}}}}", map.join(","));
    write("model.safetensors.index.json", index.as_bytes());
    write("config.json", b"{}");
    write("1_Pooling/config.json", b"{\"pooling\":1}");
    write("tokenizer.json", &vec![b' '; (1 << 20) + 9]);
    write("README.md", b"no part of the model");
    folder
}

/// A GGUF model in three parts.
fn split(at: &Path) -> PathBuf {
    let name = |no: u32| at.join(format!("m-{no:05}-of-00003.gguf"));
    for no in 1..=3 {
        let values: Vec<f32> = (0..300_000).map(|i| (i % 1000 * no) as f32).collect();
        let part = GgufWriter::new()
            .meta("split.no", no - 1)
            .meta("split.count", 3_u32)
            .meta("split.tensors.count", 3_u32);
        let part = part.f32s(&format!("w{no}"), &[300_000], &values);
        part.write(name(no));
    }
    name(1)
}

/// A node with a model of several files, one without, and a log of the latter.
struct ModelPair {
    homes: [tempfile::TempDir; 2],
    agents: [Agent; 2],
    key: ClusterKey,
    path: PathBuf,
    /// Of the node with the model.
    copies: Arc<ModelCopies>,
    served: Arc<Served>,
    record: InstanceSpec,
}

impl ModelPair {
    fn new(model: impl Fn(&Path) -> PathBuf) -> Self {
        let homes: [_; 2] = std::array::from_fn(|_| tempfile::tempdir().unwrap());
        let path = model(homes[0].path());
        let key = ClusterKey::random().unwrap();
        let one = agent(homes[0].path(), &key, None);
        let two = agent(homes[1].path(), &key, Some(one.port()));
        let copies = Arc::new(has(&homes[0].path().join("copies"), &path));
        let identity = copies.identify(&one, &path).unwrap();
        let record = record(&identity);
        let served = serve(&one, &copies);
        copies.sign(&one, &name(&record), &path).unwrap();
        let sha256 = identity.sha256;
        until("the root arrives", || {
            roots::of(&two.map(), &sha256).is_ok() && two.life(one.id()) == Life::Alive
        });
        Self {
            homes,
            agents: [one, two],
            key,
            path,
            copies,
            served,
            record,
        }
    }

    fn folder(&self) -> PathBuf {
        self.homes[1].path().join("copies")
    }

    fn take(&self, copies: &ModelCopies) -> Result<(), String> {
        copies.take(&self.agents[1], None, &self.record, &|_| ())
    }

    /// The model's files, and their names.
    fn files(&self) -> Vec<(String, PathBuf)> {
        let files = files::model_files(&self.path).unwrap().unwrap();
        files.into_iter().map(|it| (it.name, it.path)).collect()
    }

    /// The place of a copied file, by the file's name.
    fn copy(&self, file: &str, ending: &str) -> PathBuf {
        let manifest = self.copies.manifest(&name(&self.record)).unwrap();
        let sha256 = &manifest.file(file).unwrap().sha256;
        self.folder().join(format!("{sha256}.{ending}"))
    }

    /// Lets the node with the model give no bytes of it from now on.
    fn give_nothing(&self) {
        self.served.given.store(1, Ordering::SeqCst);
        self.served.most.store(1, Ordering::SeqCst);
    }

    /// Bytes given since the last call.
    fn given(&self) -> u64 {
        self.served.given.swap(0, Ordering::SeqCst)
    }

    /// Asserts that the copied model has all files under their names, with the same bytes.
    fn assert_whole(&self, copies: &ModelCopies) {
        let found = copies.find(&name(&self.record)).unwrap();
        let is_folder = self.path.is_dir();
        assert_eq!(found.is_dir(), is_folder);
        let folder = if is_folder {
            &*found
        } else {
            found.parent().unwrap()
        };
        for (name, path) in self.files() {
            let (copied, right) = (fs::read(folder.join(&name)), fs::read(path));
            assert!(copied.unwrap() == right.unwrap(), "{name}");
        }
        let all = |at: &Path| fs::read_dir(at).unwrap().count();
        let others = if is_folder { 1 } else { 0 }; // README.md
        assert_eq!(
            all(folder) + others,
            all(if is_folder { &self.path } else { folder })
        );
    }
}

impl Drop for ModelPair {
    fn drop(&mut self) {
        self.agents.iter().for_each(Agent::stop);
    }
}

fn has(folder: &Path, path: &Path) -> ModelCopies {
    let path = path.to_owned();
    let find: Box<FileLookup> = Box::new(move |_| Ok(path.clone()));
    ModelCopies::new(
        (find, folder.to_owned()),
        Box::new(|_| Ok(())),
        Arc::new(|_| {}),
    )
}

fn record(identity: &ModelIdentity) -> InstanceSpec {
    let model = ModelName {
        name: "m".to_owned(),
        sha256: identity.sha256.clone(),
        manifest: identity.manifest,
    };
    wanted(model, identity.bytes)
}

fn name(record: &InstanceSpec) -> ModelName {
    crate::fleet::name_of(record)
}

#[test]
fn an_empty_node_gets_all_files_once_and_gives_them_on() {
    for (number, model) in [folder, split].into_iter().enumerate() {
        let pair = ModelPair::new(model);
        assert!(pair.record.manifest);
        let lacks = none(&pair.folder());
        pair.take(&lacks).unwrap();
        pair.assert_whole(&lacks);
        let (given, needed) = (pair.given(), pair.record.bytes);
        assert!(
            given >= needed && given * 100 <= needed * 105,
            "{number}: {given} of {needed}"
        );
        pair.take(&lacks).unwrap();
        assert_eq!(pair.given(), 0, "it is here");
        let found = lacks.of_user("m").unwrap();
        assert_eq!(
            lacks.find(&name(&pair.record)),
            Ok(found.clone()),
            "by its name"
        );
        let identity = lacks.identify(&pair.agents[1], &found).unwrap();
        assert_eq!(record(&identity), pair.record, "a copy is the same model");

        // After a restart, a third node gets it of the second one alone.
        let again = Arc::new(none(&pair.folder()));
        pair.assert_whole(&again);
        serve(&pair.agents[1], &again);
        pair.give_nothing();
        let home = tempfile::tempdir().unwrap();
        let three = agent(home.path(), &pair.key, Some(pair.agents[1].port()));
        until("the root arrives", || {
            roots::of(&three.map(), &pair.record.sha256).is_ok()
                && three.life(pair.agents[1].id()) == Life::Alive
        });
        let last = none(&home.path().join("copies"));
        last.take(&three, None, &pair.record, &|_| ()).unwrap();
        pair.assert_whole(&last);
        three.stop();

        assert_eq!(
            again.forget(&pair.record.sha256).unwrap(),
            pair.record.bytes
        );
        assert_eq!(
            fs::read_dir(pair.folder()).unwrap().count(),
            0,
            "nothing is left"
        );
    }
}

#[test]
fn a_wrong_byte_names_its_file_and_its_node_and_comes_from_another() {
    let pair = ModelPair::new(folder);
    let home = tempfile::tempdir().unwrap();
    let liar = agent(home.path(), &pair.key, Some(pair.agents[0].port()));
    let lies = serve(
        &liar,
        &Arc::new(has(&home.path().join("copies"), &pair.path)),
    );
    let copy = pair.copy("m-2.safetensors", COPY);
    let wrong = copy.file_stem().unwrap().to_str().unwrap();
    *lock(&lies.wrong) = wrong.to_owned();
    *lock(&pair.served.wrong) = wrong.to_owned();
    let two = &pair.agents[1];
    until("they meet", || two.life(liar.id()) == Life::Alive);
    let told: Arc<Mutex<Vec<String>>> = Arc::default();
    let heard = Arc::clone(&told);
    let find: Box<FileLookup> = Box::new(|_| Err("there is none".into()));
    let tell = move |line: &str| lock(&heard).push(line.to_owned());
    let lacks = ModelCopies::new((find, pair.folder()), Box::new(|_| Ok(())), Arc::new(tell));
    let failed = pair.take(&lacks).unwrap_err();
    assert!(failed.starts_with("m: m-2.safetensors: "), "{failed}");
    assert!(
        failed.contains("it gave wrong bytes at 0..65536"),
        "{failed}"
    );
    let lines = lock(&told).join("\n");
    assert!(lines.contains("warning: m: m-2.safetensors: "), "{lines}");
    assert!(!copy.exists() && pair.copy("m-1.safetensors", COPY).exists());

    lock(&pair.served.wrong).clear();
    lock(&lacks.state).liars.remove(&pair.agents[0].id());
    pair.take(&lacks).unwrap();
    pair.assert_whole(&lacks);
    liar.stop();
}

#[test]
fn a_copy_goes_on_where_it_ended_and_fetches_no_file_that_is_here() {
    let pair = ModelPair::new(folder);
    // The last file is a copy of another model's.
    let there = pair.copy("m-3.safetensors", COPY);
    fs::create_dir_all(pair.folder()).unwrap();
    fs::copy(pair.path.join("m-3.safetensors"), &there).unwrap();
    fs::write(there.with_extension(NAME), "other").unwrap();
    let here = fs::metadata(&there).unwrap().len();
    let most = 20 * EACH;
    pair.served.most.store(most, Ordering::SeqCst);
    let failed = pair.take(&none(&pair.folder())).unwrap_err();
    assert!(failed.contains("it has no such part any more"), "{failed}");
    let before = pair.given();

    pair.served.most.store(0, Ordering::SeqCst);
    let again = none(&pair.folder());
    pair.take(&again).unwrap();
    pair.assert_whole(&again);
    let (given, needed) = (before + pair.given(), pair.record.bytes - here);
    let manifest = EACH; // far less, in one group
    assert!(given <= needed + EACH + manifest, "{given} of {needed}");
    let freed = again.forget(&pair.record.sha256).unwrap();
    assert_eq!(freed, needed);
    assert!(there.exists(), "the other model keeps its file");
}

#[test]
fn a_disk_that_is_too_small_takes_no_byte_of_it() {
    let pair = ModelPair::new(folder);
    let least = pair.record.bytes - 1;
    let full = move |bytes: u64| match bytes > least {
        true => Err(format!("{bytes} bytes are too many")),
        false => Ok(()),
    };
    let find: Box<FileLookup> = Box::new(|_| Err("there is none".into()));
    let lacks = ModelCopies::new((find, pair.folder()), Box::new(full), Arc::new(|_| {}));
    let refused = pair.take(&lacks).unwrap_err();
    assert_eq!(refused, format!("{} bytes are too many", pair.record.bytes));
    assert!(pair.given() < EACH, "the manifest alone");
    assert!(!pair.copy("m-1.safetensors", partial_file::FILE).exists());

    let parts = |share: u64| {
        let own = messages::fetch(&pair.agents[1], &pair.record);
        let fetch = Fetch {
            parts: true,
            share,
            ..own
        };
        lacks.fetch(&pair.agents[1], None, &fetch, &mut |_| Ok(()))
    };
    let refused = parts(least + 1).unwrap_err();
    assert_eq!(refused, format!("{} bytes are too many", least + 1));
    assert!(pair.given() < EACH, "the manifest alone");
    assert_eq!(parts(least), Ok(None));
}

#[test]
fn a_worker_gets_ranges_of_each_file_and_damage_is_mended() {
    for (model, file) in [
        (folder as fn(&Path) -> PathBuf, "m-2.safetensors"),
        (split, "m-00002-of-00003.gguf"),
    ] {
        let pair = ModelPair::new(model);
        let (two, name) = (&pair.agents[1], name(&pair.record));
        let lacks = none(&pair.folder());
        lacks.take_part(two, &pair.record).unwrap();
        assert!(lacks.find(&name).is_err(), "it is not complete");
        let opened = lacks.find_part(two, &name).unwrap();
        let at = if opened.is_dir() {
            opened
        } else {
            opened.parent().unwrap().to_owned()
        };
        let link = fs::canonicalize(at.join(file)).unwrap();
        assert!(
            link.extension().unwrap() == partial_file::FILE,
            "{}",
            link.display()
        );
        let part = [(700_000, 900_000)];
        lacks.bring(two, (&name, file), &part, &|| true).unwrap();
        let right = fs::read(&pair.files().iter().find(|it| it.0 == file).unwrap().1).unwrap();
        let there = |range: Range<usize>| fs::read(&link).unwrap()[range.clone()] == right[range];
        assert!(there(700_000..900_000));
        let unknown = lacks.bring(two, (&name, "x"), &part, &|| true).unwrap_err();
        assert!(unknown.contains("has no file \"x\""), "{unknown}");

        let damage = |path: &Path| {
            let file = fs::File::options().write(true).open(path).unwrap();
            file.write_all_at(b"wrong", 800_000).unwrap();
        };
        damage(&link);
        lacks.repair(two, (&name, file), &part, &|| true).unwrap();
        assert!(there(700_000..900_000));

        pair.take(&lacks).unwrap();
        pair.assert_whole(&lacks);
        let copy = fs::canonicalize(at.join(file)).unwrap();
        assert!(
            copy.extension().unwrap() == COPY,
            "the link follows: {}",
            copy.display()
        );
        damage(&copy);
        lacks.find_right((two, &name), CheckRange::All).unwrap();
        pair.assert_whole(&lacks);
    }
}

/// A hub with the files of a folder, in `sub` of a repository.
struct FolderHub {
    folder: PathBuf,
    /// The files that it was asked for.
    asked: Mutex<BTreeSet<String>>,
}

impl FolderHub {
    fn path(&self, origin: &HubOrigin) -> PathBuf {
        lock(&self.asked).insert(origin.file.clone());
        self.folder.join(origin.file.strip_prefix("sub/").unwrap())
    }
}

impl ModelHub for FolderHub {
    fn origin(&self, path: &Path) -> Option<HubOrigin> {
        let name = path.strip_prefix(&self.folder).ok()?.to_str()?;
        Some(HubOrigin {
            repo: "own/repo".to_owned(),
            revision: "0".repeat(40),
            file: format!("sub/{name}"),
            bytes: fs::metadata(path).ok()?.len(),
            sha256: hash(path).ok()?,
        })
    }

    fn whole(
        &self,
        origin: &HubOrigin,
        path: &Path,
        _: &hub::FetchProgress<'_>,
    ) -> Result<(), CallbackError> {
        let copied = fs::copy(self.path(origin), path);
        Ok(copied.map(drop)?)
    }

    fn read(
        &self,
        origin: &HubOrigin,
        span: Range<u64>,
        take: &mut hub::ByteSink<'_>,
    ) -> Result<(), CallbackError> {
        let file = fs::read(self.path(origin))?;
        take(&file[span.start as usize..span.end as usize]);
        Ok(())
    }
}

#[test]
fn bytes_of_files_that_no_node_gives_come_from_the_models_repository() {
    let pair = ModelPair::new(folder);
    let hub = Arc::new(FolderHub {
        folder: pair.path.clone(),
        asked: Mutex::default(),
    });
    let shared = || Arc::clone(&hub) as Arc<dyn ModelHub>;
    let source = has(&pair.homes[0].path().join("copies"), &pair.path).with_hub(shared());
    let identity = source.identify(&pair.agents[0], &pair.path).unwrap();
    let origin = source.model_origin(&identity.sha256, &pair.path).unwrap();
    assert_eq!(
        (origin.file.as_str(), origin.bytes),
        ("sub/", identity.bytes)
    );
    origin.publish(&pair.agents[1]);
    let lacks = none(&pair.folder()).with_hub(shared());
    let manifest = pair.copies.manifest(&name(&pair.record)).unwrap();
    fs::create_dir_all(pair.folder()).unwrap();
    let place = format!("{}.{MANIFEST}", identity.sha256);
    fs::write(pair.folder().join(place), manifest.to_bytes()).unwrap();
    pair.give_nothing();
    pair.take(&lacks).unwrap();
    pair.assert_whole(&lacks);
    let asked = lock(&hub.asked).clone();
    let names = manifest
        .files()
        .iter()
        .map(|file| format!("sub/{}", file.name));
    assert_eq!(asked, names.collect());
}
