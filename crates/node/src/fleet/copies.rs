//! Models on the machines that compute them: a node that lacks a file copies it from the owner.
//!
//! ```text
//! owner -> fetch: {"model":{...},"bytes":N,"asks":false}
//!                                             node has it, or opens `file` to the owner
//! node  -> file:  {"name":..,"sha256":..}
//! owner <- the file in pieces, then an empty message
//! node  <- {"done":N} while it copies, then {"ready":true} or {"refused":"why"}
//! ```
//! With `asks` a node that lacks the file refuses instead.

use std::collections::{BTreeSet, HashMap};
use std::fs::{self, File};
use std::io::{BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant, SystemTime};

use paceline_base::lock;
use paceline_cluster::nodes::agent::{Agent, Channel};
use paceline_cluster::nodes::{NodeId, placement::Wanted};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{FETCH, FILE, Find};
use crate::crew::host::ModelName;
use crate::crew::line::{Broken, hear, say};
use crate::fleet::places::Wire;

/// Bytes of a piece: large enough that sealing and system calls cost nothing beside the copying.
const PIECE_BYTES: usize = 1 << 20;

/// Longest wait for the next piece or word of another node.
const SILENCE: Duration = Duration::from_secs(30);

/// How often a node says how far its copy is.
const TELL_EVERY: Duration = Duration::from_millis(200);

/// A model that a node is to have.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Fetch {
    pub(super) model: ModelName,
    pub(super) bytes: u64,
    /// A node that lacks it is to say so, and copies nothing. Earlier versions copy it.
    #[serde(default)]
    pub(super) asks: bool,
}

/// What a node says of its copy.
#[derive(Debug, Serialize, Deserialize)]
enum Told {
    /// Bytes that it has.
    Done(u64),
    Ready,
    Refused(String),
}

/// Reads `bytes` as messages about a copy, for fuzzing.
pub(super) fn parse(bytes: &[u8]) {
    let _ = serde_json::from_slice::<Fetch>(bytes);
    let _ = serde_json::from_slice::<Told>(bytes);
}

/// Finds models of this machine, and keeps copies.
pub(super) struct Copies {
    /// A model of the user's store, by its name.
    find: Box<Find>,
    /// Where copies are kept.
    folder: PathBuf,
    /// SHA-256 of files, as long as they stay as they are: to read one takes a second a gigabyte.
    known: Mutex<HashMap<(PathBuf, u64, SystemTime), String>>,
    /// Held while a file is copied to this node: two copies of one model would be one file.
    turn: Mutex<()>,
}

impl Copies {
    pub(super) fn new(find: Box<Find>, folder: PathBuf) -> Self {
        Self {
            find,
            folder,
            known: Mutex::default(),
            turn: Mutex::default(),
        }
    }

    /// The file that the user means by a name.
    pub(super) fn of_user(&self, name: &str) -> Result<PathBuf, String> {
        (self.find)(name)
    }

    /// SHA-256 of a file or of a folder's files, in hexadecimal digits. Reads all of it the first
    /// time.
    ///
    /// # Errors
    /// What the system says.
    pub(super) fn hash(&self, path: &Path) -> std::io::Result<String> {
        let (mut bytes, mut changed) = (0, SystemTime::UNIX_EPOCH);
        for file in files(path)? {
            let facts = fs::metadata(file)?;
            bytes += facts.len();
            changed = changed.max(facts.modified()?);
        }
        let key = (path.to_owned(), bytes, changed);
        if let Some(known) = lock(&self.known).get(&key) {
            return Ok(known.clone());
        }
        let sum = hash(path)?;
        lock(&self.known).insert(key, sum.clone());
        Ok(sum)
    }

    /// The file of a model on this machine: a copy of just this content, or the store's model of
    /// this name where it has the content.
    pub(super) fn find(&self, model: &ModelName) -> Result<PathBuf, String> {
        let copy = self.place(model)?;
        if copy.is_file() {
            return Ok(copy);
        }
        let path = (self.find)(&model.name)?;
        let own = self
            .hash(&path)
            .map_err(|error| format!("{}: {error}", path.display()))?;
        if own == model.sha256 {
            return Ok(path);
        }
        Err(format!(
            "the model {:?} of this machine is another file (SHA-256 {own})",
            model.name
        ))
    }

    /// Where a copy is kept, by its content.
    fn place(&self, model: &ModelName) -> Result<PathBuf, String> {
        let is_hash =
            model.sha256.len() == 64 && model.sha256.bytes().all(|b| b.is_ascii_hexdigit());
        match is_hash {
            true => Ok(self.folder.join(format!("{}.gguf", model.sha256))),
            false => Err(format!("{:?} is no SHA-256", model.sha256)),
        }
    }

    /// Answers an owner that wants this node to have a model.
    pub(super) fn answer_fetch(&self, agent: &Agent, channel: &Channel) {
        let line = Wire(channel.clone());
        let fetched = match hear::<Fetch>(&line, SILENCE) {
            Ok(Some(fetch)) => {
                let mut told = |bytes: u64| say(&line, &Told::Done(bytes));
                self.fetch(agent, channel.peer(), &fetch, &mut told)
            }
            Ok(None) => Err("nothing was asked for".to_owned()),
            Err(broken) => Err(broken.to_string()),
        };
        // An owner that is gone needs no answer.
        let _: Result<(), _> = say(&line, &fetched.map_or_else(Told::Refused, |()| Told::Ready));
    }

    /// Has this node have a model that the node `from` has; waits until it has. `progress` hears
    /// bytes.
    pub(super) fn take(
        &self,
        agent: &Agent,
        from: NodeId,
        wanted: &Wanted,
        progress: &dyn Fn(u64),
    ) -> Result<(), String> {
        let mut told = |bytes: u64| -> Result<(), Broken> {
            progress(bytes);
            Ok(())
        };
        self.fetch(agent, from, &fetch(wanted), &mut told)
    }

    fn fetch(
        &self,
        agent: &Agent,
        from: NodeId,
        fetch: &Fetch,
        told: &mut Hear<'_>,
    ) -> Result<(), String> {
        if self.find(&fetch.model).is_ok() {
            return Ok(());
        }
        if fetch.asks {
            return Err("it has no copy of the model".to_owned());
        }
        let _turn = lock(&self.turn);
        if self.find(&fetch.model).is_ok() {
            return Ok(()); // copied meanwhile
        }
        let place = self.place(&fetch.model)?;
        fs::create_dir_all(&self.folder).map_err(|e| format!("{}: {e}", self.folder.display()))?;
        let partial = place.with_extension("part");
        let opened = agent.open(from, FILE, SILENCE);
        let file = Wire(opened.map_err(|error| error.to_string())?);
        say(&file, &fetch.model).map_err(|broken| broken.to_string())?;
        let copied = copy(&file, &partial, fetch, told);
        let copied = copied.map_err(|error| format!("{}: {error}", partial.display()))?;
        if copied != fetch.model.sha256 {
            return Err(format!(
                "the copy has SHA-256 {copied}, which is another file"
            ));
        }
        fs::rename(&partial, &place).map_err(|e| format!("{}: {e}", place.display()))
    }

    /// Sends a model's file to a node that asks for it.
    pub(super) fn answer_file(&self, channel: &Channel) {
        let line = Wire(channel.clone());
        let sent = match hear::<ModelName>(&line, SILENCE) {
            Ok(Some(model)) => self.find(&model).and_then(|path| {
                send_file(&line, &path).map_err(|error| format!("{}: {error}", path.display()))
            }),
            _ => return,
        };
        if sent.is_err() {
            channel.close(); // the other end counts bytes
        }
    }
}

/// Has another node have the model of an instance; waits until it has. `progress` hears bytes.
pub(super) fn ensure(
    agent: &Agent,
    node: NodeId,
    wanted: &Wanted,
    progress: &dyn Fn(u64),
) -> Result<(), String> {
    let line = request(agent, node, &fetch(wanted), SILENCE)?;
    loop {
        // To hash a file of 100 GB on a slow disk takes minutes, in which nothing is said.
        let told = hear::<Told>(&line, SILENCE * 20).map_err(|broken| broken.to_string())?;
        match told {
            Some(Told::Done(bytes)) => progress(bytes),
            Some(Told::Ready) => return Ok(()),
            Some(Told::Refused(reason)) => return Err(reason),
            None => return Err("it says nothing about its copy of the model".to_owned()),
        }
    }
}

/// As [`ensure`], but waits only as long as `goes_on`, which is asked some times a second, and no
/// longer than `limit` for the node to answer at all.
pub(super) fn ensure_while(
    agent: &Agent,
    node: NodeId,
    wanted: &Wanted,
    limit: Duration,
    goes_on: &mut dyn FnMut() -> bool,
) -> Result<(), String> {
    let line = request(agent, node, &fetch(wanted), limit.min(SILENCE))?;
    while goes_on() {
        match hear::<Told>(&line, TELL_EVERY).map_err(|broken| broken.to_string())? {
            Some(Told::Ready) => return Ok(()),
            Some(Told::Refused(reason)) => return Err(reason),
            Some(Told::Done(_)) | None => {}
        }
    }
    Err("its copy of the model is not complete in time".to_owned())
}

/// The nodes, of those given, that have the model of an instance. One that does not say so within
/// `limit` counts as one that lacks it.
pub(super) fn holders(
    agent: &Agent,
    nodes: &[NodeId],
    wanted: &Wanted,
    limit: Duration,
) -> BTreeSet<NodeId> {
    let fetch = Fetch {
        asks: true,
        ..fetch(wanted)
    };
    let has = |node: NodeId| {
        let line = request(agent, node, &fetch, limit).ok()?;
        let told = hear::<Told>(&line, limit);
        matches!(told, Ok(Some(Told::Ready))).then_some(node)
    };
    std::thread::scope(|scope| {
        let has = &has;
        let asked: Vec<_> = nodes
            .iter()
            .map(|node| scope.spawn(move || has(*node)))
            .collect();
        let answers = asked.into_iter().filter_map(|thread| {
            let ended = thread.join();
            ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        answers.collect()
    })
}

/// Asks for a copy of an instance's model.
fn fetch(wanted: &Wanted) -> Fetch {
    Fetch {
        model: super::name_of(wanted),
        bytes: wanted.bytes,
        asks: false,
    }
}

/// A line to a node that was told which model it is to have.
fn request(agent: &Agent, node: NodeId, fetch: &Fetch, limit: Duration) -> Result<Wire, String> {
    let opened = agent.open(node, FETCH, limit);
    let line = Wire(opened.map_err(|error| error.to_string())?);
    say(&line, fetch).map_err(|broken| broken.to_string())?;
    Ok(line)
}

fn send_file(line: &Wire, path: &Path) -> std::io::Result<()> {
    let mut file = File::open(path)?;
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        let n = file.read(&mut piece)?;
        line.0.send(&piece[..n]).map_err(std::io::Error::other)?;
        if n == 0 {
            return Ok(());
        }
    }
}

/// Hears how many bytes are copied; an error ends the copying.
type Hear<'a> = dyn FnMut(u64) -> Result<(), Broken> + 'a;

/// Writes the pieces that come to `place`; the SHA-256 of what was written.
fn copy(from: &Wire, place: &Path, fetch: &Fetch, told: &mut Hear<'_>) -> Result<String, Broken> {
    let mut file = BufWriter::new(File::create(place).map_err(Broken::new)?);
    let (mut sum, mut done, mut last) = (Sha256::new(), 0_u64, Instant::now());
    loop {
        let piece = from.0.recv(PIECE_BYTES, SILENCE).map_err(Broken::new)?;
        let piece = piece.ok_or_else(|| Broken::new("no further piece came"))?;
        if piece.is_empty() {
            break;
        }
        done += piece.len() as u64;
        if done > fetch.bytes {
            return Err(Broken::new(format!(
                "more than the {} bytes said",
                fetch.bytes
            )));
        }
        sum.update(&piece);
        file.write_all(&piece).map_err(Broken::new)?;
        if last.elapsed() >= TELL_EVERY {
            told(done)?;
            last = Instant::now();
        }
    }
    file.flush().map_err(Broken::new)?;
    file.get_ref().sync_all().map_err(Broken::new)?;
    Ok(digits(sum))
}

/// SHA-256 of a file, or of the names, lengths and bytes of a folder's files in order of their
/// names; in hexadecimal digits. Reads all of it.
///
/// # Errors
/// What the system says.
fn hash(path: &Path) -> std::io::Result<String> {
    let mut sum = Sha256::new();
    let mut piece = vec![0; PIECE_BYTES];
    for of_model in files(path)? {
        let mut file = File::open(&of_model)?;
        if let Ok(name) = of_model.strip_prefix(path)
            && name != Path::new("")
        {
            sum.update(name.as_os_str().as_encoded_bytes());
            sum.update([0]);
            sum.update(file.metadata()?.len().to_le_bytes());
        }
        loop {
            match file.read(&mut piece)? {
                0 => break,
                n => sum.update(&piece[..n]),
            }
        }
    }
    Ok(digits(sum))
}

/// Most files of a model's folder: some hundreds of shards in the largest known.
const FILES_MAX: usize = 4096;

/// The file itself, or the files of a folder and its folders, in order of their names.
///
/// # Errors
/// A folder that cannot be read, or that has more than [`FILES_MAX`] files.
fn files(path: &Path) -> std::io::Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let (mut folders, mut all) = (vec![path.to_owned()], Vec::new());
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            match path.is_dir() {
                true => folders.push(path),
                false => all.push(path),
            }
            if all.len() + folders.len() > FILES_MAX {
                let reason = format!("a folder of over {FILES_MAX} files is no model");
                return Err(std::io::Error::other(reason));
            }
        }
    }
    all.sort();
    Ok(all)
}

fn digits(sum: Sha256) -> String {
    sum.finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use paceline_cluster::nodes::ClusterKey;
    use paceline_cluster::nodes::agent::{Config, Discovery, Facts, join_at_rest};

    use super::*;

    fn copies(folder: &Path, model: PathBuf) -> Copies {
        Copies::new(Box::new(move |_| Ok(model.clone())), folder.to_owned())
    }

    fn agent(home: &Path, key: &ClusterKey, peer: Option<u16>) -> Agent {
        join_at_rest(home, key).unwrap();
        let mut config = Config::new(home, Facts::default());
        config.port = 0;
        config.discovery = Discovery::Peers;
        config.peers = peer
            .iter()
            .map(|port| format!("127.0.0.1:{port}"))
            .collect();
        Agent::start(config).unwrap()
    }

    fn wanted(model: ModelName, bytes: u64) -> Wanted {
        Wanted {
            model: model.name,
            sha256: model.sha256,
            bytes,
            nodes: Vec::new(),
            successors: Vec::new(),
            named: false,
            split: "auto".to_owned(),
            threads: 1,
            context: None,
            parallel: 1,
            spare: 0,
            width: None,
            replica: 0,
            source: None,
            lender: None,
            draft: None,
            drafts: None,
            follow: false,
            grows: false,
            added: false,
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
        };
        let key = ClusterKey::random().unwrap();
        let one = agent(homes[0].path(), &key, None);
        let two = agent(homes[1].path(), &key, Some(one.port()));
        let has = copies(homes[0].path(), model);
        one.serve(FILE, move |channel| has.answer_file(&channel));
        let (folder, own) = (homes[1].path().join("copies"), two.clone());
        let lacks = Copies::new(Box::new(|_| Err("there is none".to_owned())), folder);
        two.serve(FETCH, move |channel| lacks.answer_fetch(&own, &channel));
        let limit = Duration::from_secs(60); // unless something hangs
        let end = Instant::now() + limit;
        let linked = |agent: &Agent| agent.nodes().iter().filter(|node| node.linked).count();
        while linked(&one) + linked(&two) < 4 {
            assert!(Instant::now() < end, "they do not meet");
            std::thread::sleep(Duration::from_millis(5));
        }
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
    fn a_folder_is_known_by_its_files() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        fs::create_dir(folder.path().join("inner")).unwrap();
        write("a", "1");
        write("inner/b", "2");
        let first = hash(folder.path()).unwrap();
        assert_eq!(hash(folder.path()).unwrap(), first);
        write("inner/b", "3");
        assert_ne!(hash(folder.path()).unwrap(), first);
        write("inner/b", "2");
        assert_eq!(hash(folder.path()).unwrap(), first);
        write("c", "");
        assert_ne!(hash(folder.path()).unwrap(), first);
    }

    #[test]
    fn only_the_content_that_was_asked_for_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let model = folder.path().join("model.gguf");
        fs::write(&model, b"weights").unwrap();
        let name = |sha256: String| ModelName {
            name: "m".to_owned(),
            sha256,
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
}
