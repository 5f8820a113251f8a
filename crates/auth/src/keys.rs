//! API keys in a file: created, listed, revoked and verified.
//!
//! The file never holds a key, only SHA-256 over a salt and the key. A slow password hash would add
//! nothing: a key has 256 random bits, which cannot be guessed. The salt hides equal keys. The file
//! is JSON with mode 0600 and is replaced by renaming, so readers see the old version or the new
//! one:
//!
//! ```text
//! {"version":1,"keys":[{"id":"1f0c33aa","name":"laptop","created_unix_s":1790000000,
//!                       "salt":"<32 hex>","sha256":"<64 hex>"}]}
//! ```
//!
//! If two programs change the file at once, the later write wins and the earlier change is lost.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use paceline_base::hex;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use subtle::{ConditionallySelectable, ConstantTimeEq};
use tokio::time::sleep;

/// Prefix of all keys, for scanners of leaked secrets.
pub const PREFIX: &str = "pl-";

/// Maximum keys of a file: each request is compared with all.
pub const MAX_KEYS: usize = 1000;

/// Longest name of a key in characters.
pub const MAX_NAME: usize = 64;

/// Maximum size of the file; [`MAX_KEYS`] take some 250 KB.
const MAX_FILE_BYTES: u64 = 1 << 20;

const VERSION: u32 = 1;

/// Why keys cannot be read or changed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("reading {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("writing {}", path.display())]
    Write { path: PathBuf, source: io::Error },
    /// The file is not what [`Keys`] writes.
    #[error("{}: {reason}", path.display())]
    Malformed { path: PathBuf, reason: String },
    #[error("{} has mode {mode:04o}, expected 0600: others could read or change it", path.display())]
    Mode { path: PathBuf, mode: u32 },
    #[error("{} has {MAX_KEYS} keys already, which is the most", path.display())]
    Full { path: PathBuf },
    #[error("key name {name:?}: expected 1 to {MAX_NAME} characters without control characters")]
    Name { name: String },
    #[error("no key has the id {id:?}")]
    NoKey { id: String },
    #[error("the system gives no random numbers: {0}")]
    Random(getrandom::Error),
}

/// Rights of a key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KeyRole {
    /// Use models, and view the node.
    #[default]
    User,
    /// Also load, unload and remove models, and admit machines.
    Admin,
}

impl KeyRole {
    /// Whether it is the default role, which the file omits; keys from before roles have it.
    fn is_user(&self) -> bool {
        *self == Self::User
    }
}

/// Public facts of a key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyInfo {
    /// Eight hexadecimal digits, by which it is revoked.
    pub id: String,
    pub name: String,
    /// Seconds since 1970.
    pub created_unix_s: u64,
    /// Rights of its holder.
    #[serde(default, skip_serializing_if = "KeyRole::is_user")]
    pub role: KeyRole,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct KeyRecord {
    #[serde(flatten)]
    info: KeyInfo,
    salt: String,
    sha256: String,
}

#[derive(Debug, Serialize, Deserialize)]
struct Contents {
    version: u32,
    keys: Vec<KeyRecord>,
}

/// The keys of a file.
#[derive(Debug)]
pub struct Keys {
    path: PathBuf,
    keys: Vec<KeyRecord>,
}

impl Keys {
    /// Reads `path`. A file that does not exist has no keys.
    ///
    /// # Errors
    /// [`Error::Read`], [`Error::Malformed`], [`Error::Mode`].
    pub fn open(path: &Path) -> Result<Self, Error> {
        let failed = |source| Error::Read {
            path: path.to_owned(),
            source,
        };
        let path = path.to_owned();
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let keys = Vec::new();
                return Ok(Self { path, keys });
            }
            Err(error) => return Err(failed(error)),
        };
        let metadata = file.metadata().map_err(failed)?;
        let mode = metadata.permissions().mode() & 0o7777;
        if mode & 0o077 != 0 {
            return Err(Error::Mode { path, mode });
        }
        let malformed = |reason| Error::Malformed {
            path: path.clone(),
            reason,
        };
        if metadata.len() > MAX_FILE_BYTES {
            let (got, most) = (metadata.len(), MAX_FILE_BYTES);
            return Err(malformed(format!("{got} bytes, expected at most {most}")));
        }
        let contents = serde_json::from_reader(io::BufReader::new(file));
        let contents = contents.map_err(|error| malformed(error.to_string()))?;
        let keys = checked(contents).map_err(malformed)?;
        Ok(Self { path, keys })
    }

    /// Creates a key with `role`, and writes the file. The returned key is stored nowhere.
    ///
    /// # Errors
    /// [`Error::Full`], [`Error::Name`], [`Error::Random`], [`Error::Write`]; nothing has changed
    /// then.
    pub fn make(
        &mut self,
        name: &str,
        role: KeyRole,
        now_unix_s: u64,
    ) -> Result<(String, KeyInfo), Error> {
        if !is_name(name) {
            let name = name.to_owned();
            return Err(Error::Name { name });
        }
        if self.keys.len() >= MAX_KEYS {
            let path = self.path.clone();
            return Err(Error::Full { path });
        }
        let key = format!("{PREFIX}{}", random_hex::<32>()?);
        let salt = random_hex::<16>()?;
        let info = KeyInfo {
            id: self.free_id()?,
            name: name.to_owned(),
            created_unix_s: now_unix_s,
            role,
        };
        let stored = KeyRecord {
            info: info.clone(),
            sha256: hex(&digest(&salt, &key)),
            salt,
        };
        let mut keys = self.keys.clone();
        keys.push(stored);
        self.replace(keys)?;
        Ok((key, info))
    }

    /// All keys, oldest first.
    pub fn list(&self) -> impl Iterator<Item = &KeyInfo> {
        self.keys.iter().map(|stored| &stored.info)
    }

    /// Deletes the key with this id and writes the file. Running servers notice at the next
    /// request.
    pub fn revoke(&mut self, id: &str) -> Result<KeyInfo, Error> {
        let mut keys = self.keys.clone();
        let Some(at) = keys.iter().position(|stored| stored.info.id == id) else {
            let id = id.to_owned();
            return Err(Error::NoKey { id });
        };
        let revoked = keys.remove(at);
        self.replace(keys)?;
        Ok(revoked.info)
    }

    /// Lets the key with this id act as an admin's on this machine, and writes the file.
    pub fn allow_admin(&mut self, id: &str) -> Result<KeyInfo, Error> {
        let mut keys = self.keys.clone();
        let Some(stored) = keys.iter_mut().find(|stored| stored.info.id == id) else {
            let id = id.to_owned();
            return Err(Error::NoKey { id });
        };
        stored.info.role = KeyRole::Admin;
        let info = stored.info.clone();
        self.replace(keys)?;
        Ok(info)
    }

    /// All stored keys by id, as JSON with a hash each, for sharing with other machines.
    pub fn entries(&self) -> BTreeMap<String, String> {
        let entry = |stored: &KeyRecord| {
            let text = serde_json::to_string(stored).expect("a key is JSON");
            (stored.info.id.clone(), text)
        };
        self.keys.iter().map(entry).collect()
    }

    /// Replaces all keys by entries of another machine, and writes the file.
    ///
    /// # Errors
    /// [`Error::Malformed`] for an entry that is none, [`Error::Write`]; nothing has changed then.
    pub fn replace_entries(&mut self, entries: &BTreeMap<String, String>) -> Result<(), Error> {
        let malformed = |reason| Error::Malformed {
            path: self.path.clone(),
            reason,
        };
        let keys = entries.values().map(|text| serde_json::from_str(text));
        let keys: Result<Vec<KeyRecord>, _> = keys.collect();
        let keys = keys.map_err(|error| malformed(error.to_string()))?;
        let version = VERSION;
        let mut keys = checked(Contents { version, keys }).map_err(malformed)?;
        keys.sort_by_key(|stored| (stored.info.created_unix_s, stored.info.id.clone()));
        self.replace(keys)
    }

    /// Whether `key` is valid. Compares with all keys, in constant time.
    pub fn contains(&self, key: &str) -> bool {
        self.id_of(key).is_some()
    }

    /// The id of `key`, if valid; in constant time too.
    fn id_of(&self, key: &str) -> Option<&str> {
        let is_equal = |stored: &KeyRecord| {
            let digest = hex(&digest(&stored.salt, key));
            digest.as_bytes().ct_eq(stored.sha256.as_bytes())
        };
        let none = u32::MAX;
        let found = (0..).zip(&self.keys).fold(none, |found, (i, stored)| {
            u32::conditional_select(&found, &i, is_equal(stored))
        });
        let found = self.keys.get(usize::try_from(found).ok()?)?;
        Some(&found.info.id)
    }

    fn free_id(&self) -> Result<String, Error> {
        loop {
            let id = random_hex::<4>()?;
            if self.list().all(|info| info.id != id) {
                return Ok(id);
            }
        }
    }

    fn replace(&mut self, keys: Vec<KeyRecord>) -> Result<(), Error> {
        let version = VERSION;
        let contents = Contents { version, keys };
        write(&self.path, &contents).map_err(|source| Error::Write {
            path: self.path.clone(),
            source,
        })?;
        self.keys = contents.keys;
        Ok(())
    }
}

fn is_name(name: &str) -> bool {
    let chars = name.chars().count();
    (1..=MAX_NAME).contains(&chars) && !name.chars().any(char::is_control)
}

/// The entry of a key that another machine made, without the role of an admin. `None` if it is not
/// one of a key with this id.
pub fn restricted(id: &str, entry: &str) -> Option<String> {
    let mut stored: KeyRecord = serde_json::from_str(entry).ok()?;
    stored.info.role = KeyRole::User;
    // The file has a bound, which no other machine may exceed.
    is_name(&stored.info.name).then_some(())?;
    let contents = Contents {
        version: VERSION,
        keys: vec![stored],
    };
    let stored = checked(contents).ok()?.pop()?;
    let text = serde_json::to_string(&stored).expect("a key is JSON");
    (stored.info.id == id).then_some(text)
}

fn checked(contents: Contents) -> Result<Vec<KeyRecord>, String> {
    let Contents { version, keys } = contents;
    if version != VERSION {
        return Err(format!("version {version}, expected {VERSION}"));
    }
    if keys.len() > MAX_KEYS {
        return Err(format!("{} keys, expected at most {MAX_KEYS}", keys.len()));
    }
    let is_hex = |text: &str, len| text.len() == len && text.bytes().all(|b| b.is_ascii_hexdigit());
    for KeyRecord { info, salt, sha256 } in &keys {
        if !is_hex(salt, 32) || !is_hex(sha256, 64) {
            let id = &info.id;
            return Err(format!(
                "key {id:?}: expected a salt of 32 and a hash of 64 hex digits"
            ));
        }
    }
    Ok(keys)
}

/// Writes a temporary file of mode 0600 in the same folder and renames it.
fn write(path: &Path, contents: &Contents) -> io::Result<()> {
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty());
    let dir = dir.unwrap_or(Path::new("."));
    fs::create_dir_all(dir)?;
    let mut file = tempfile::Builder::new()
        .permissions(fs::Permissions::from_mode(0o600))
        .tempfile_in(dir)?;
    serde_json::to_writer(&mut file, contents)?;
    file.write_all(b"\n")?;
    file.as_file().sync_all()?;
    file.persist(path).map_err(|error| error.error)?;
    File::open(dir)?.sync_all()
}

fn digest(salt: &str, key: &str) -> [u8; 32] {
    let hasher = Sha256::new().chain_update(salt).chain_update(key);
    hasher.finalize().into()
}

fn random_hex<const N: usize>() -> Result<String, Error> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(Error::Random)?;
    Ok(hex(&bytes))
}

/// Detects a replaced file: inode, length, and modification time (seconds, nanoseconds).
type KeyFileStamp = Option<(u64, u64, i64, i64)>;

fn stamp(path: &Path) -> KeyFileStamp {
    let m = fs::metadata(path).ok()?;
    Some((m.ino(), m.len(), m.mtime(), m.mtime_nsec()))
}

/// The keys of a file, read again when it changes.
#[derive(Debug)]
pub struct WatchedKeys {
    current: Mutex<(KeyFileStamp, Keys)>,
}

impl WatchedKeys {
    /// # Errors
    /// The errors of [`Keys::open`].
    pub fn open(path: &Path) -> Result<Self, Error> {
        let current = Mutex::new((stamp(path), Keys::open(path)?));
        Ok(Self { current })
    }

    /// The id of `key`, if it is in the file now. An unreadable file admits no key. Cost: a stat of
    /// the file, and a hash per key.
    pub fn id_of(&self, key: &str) -> Option<String> {
        self.with_current(|keys| keys.id_of(key).map(str::to_owned))
    }

    /// Whether the file still has the key with this id. Cost: a stat of the file.
    pub fn has(&self, id: &str) -> bool {
        self.with_current(|keys| keys.list().any(|info| info.id == id))
    }

    /// Whether the key with this id is an admin's. Cost: a stat of the file.
    pub fn is_admin(&self, id: &str) -> bool {
        let is_it = |info: &KeyInfo| info.id == id && info.role == KeyRole::Admin;
        self.with_current(|keys| keys.list().any(is_it))
    }

    /// Number of keys now.
    pub fn count(&self) -> usize {
        self.with_current(|keys| keys.list().count())
    }

    fn with_current<T>(&self, see: impl FnOnce(&Keys) -> T) -> T {
        let mut current = self.current.lock().expect("nothing panics with the lock");
        let path = current.1.path.clone();
        let now = stamp(&path);
        if now != current.0 {
            let keys = Vec::new();
            let fresh = Keys::open(&path).unwrap_or(Keys { path, keys });
            *current = (now, fresh);
        }
        see(&current.1)
    }
}

/// The key of a request; its response ends when the key is revoked.
#[derive(Clone, Debug)]
pub struct ClientKey {
    pub keys: Arc<WatchedKeys>,
    pub id: String,
}

impl ClientKey {
    /// Whether the key was revoked.
    pub fn is_revoked(&self) -> bool {
        !self.keys.has(&self.id)
    }
}

/// Interval of revocation checks: a response ends at most this much later. A check is a stat of the
/// file, so a thousand streams cost some milliseconds a second.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Waits until the key is revoked; for ever without a key.
pub async fn revoked(key: Option<&ClientKey>) {
    let Some(key) = key else {
        return std::future::pending().await;
    };
    while !key.is_revoked() {
        sleep(LOOK_EVERY).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_machines_admin_key_is_one_here_once_it_is_allowed() {
        let dir = tempfile::tempdir().unwrap();
        let [there, here] = ["a", "b"].map(|name| dir.path().join(name));
        let mut keys = Keys::open(&there).unwrap();
        let (_, info) = keys.make("owner", KeyRole::Admin, 1).unwrap();
        let (id, entry) = keys.entries().pop_first().unwrap();
        assert_eq!(restricted("other", &entry), None);
        assert_eq!(restricted(&id, "{}"), None);
        let long = entry.replace("owner", &"x".repeat(MAX_NAME + 1));
        assert_eq!(restricted(&id, &long), None);
        let mine = BTreeMap::from([(id.clone(), restricted(&id, &entry).unwrap())]);
        let mut keys = Keys::open(&here).unwrap();
        keys.replace_entries(&mine).unwrap();
        assert_eq!(keys.list().next().unwrap().role, KeyRole::User);
        assert_eq!(keys.allow_admin(&id).unwrap(), info);
        let allowed = Keys::open(&here).unwrap().entries();
        assert_eq!(allowed[&id], entry, "exactly the maker's entry");
        assert!(matches!(keys.allow_admin("x"), Err(Error::NoKey { .. })));
    }

    #[test]
    fn keys_are_made_listed_and_revoked() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys.json");
        let mut keys = Keys::open(&path).unwrap();
        assert_eq!(keys.list().count(), 0);
        let (first, a) = keys.make("laptop", KeyRole::User, 1).unwrap();
        let (second, b) = keys.make("büro", KeyRole::User, 2).unwrap();
        assert!(first.starts_with(PREFIX) && first.len() == 67 && first != second);
        let mut again = Keys::open(&path).unwrap();
        assert_eq!(again.list().collect::<Vec<_>>(), [&a, &b]);
        assert!(again.contains(&first) && again.contains(&second));
        for wrong in [
            "",
            "pl-",
            &first[..66],
            &format!("{first}0"),
            &first.to_uppercase(),
            &a.id,
        ] {
            assert!(!again.contains(wrong), "{wrong}");
        }
        assert_eq!(again.revoke(&a.id).unwrap(), a);
        assert!(matches!(again.revoke(&a.id), Err(Error::NoKey { .. })));
        let left = Keys::open(&path).unwrap();
        assert!(!left.contains(&first) && left.contains(&second));
    }

    #[test]
    fn keys_can_be_taken_to_another_machine() {
        let dir = tempfile::tempdir().unwrap();
        let mut one = Keys::open(&dir.path().join("one.json")).unwrap();
        let mut two = Keys::open(&dir.path().join("two.json")).unwrap();
        let (key, info) = one.make("laptop", KeyRole::User, 1).unwrap();
        two.make("old", KeyRole::User, 2).unwrap();
        two.replace_entries(&one.entries()).unwrap();
        let two = Keys::open(&dir.path().join("two.json")).unwrap();
        assert!(two.contains(&key));
        assert_eq!(two.list().collect::<Vec<_>>(), [&info]);
        let bad = BTreeMap::from([("x".to_owned(), "{}".to_owned())]);
        assert!(matches!(
            one.replace_entries(&bad),
            Err(Error::Malformed { .. })
        ));
        assert!(one.contains(&key), "nothing has changed");
    }

    #[test]
    fn the_file_has_no_key_and_is_private() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys.json");
        let (key, _) = Keys::open(&path)
            .unwrap()
            .make("a", KeyRole::User, 1)
            .unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert!(!text.contains(&key[3..20]), "{text}");
        assert_eq!(
            fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o600
        );
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        assert!(matches!(
            Keys::open(&path),
            Err(Error::Mode { mode: 0o640, .. })
        ));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn hostile_files_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys.json");
        let key = r#"{"id":"a","name":"b","created_unix_s":1,"salt":"00","sha256":"00"}"#;
        for text in [
            String::new(),
            "[]".into(),
            r#"{"version":2,"keys":[]}"#.into(),
            format!(r#"{{"version":1,"keys":[{key}]}}"#),
            " ".repeat(2 << 20),
            "[".repeat(10_000),
        ] {
            fs::write(&path, &text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
            let got = Keys::open(&path);
            assert!(matches!(got, Err(Error::Malformed { .. })), "{got:?}");
        }
        for name in ["", "a\nb", &"x".repeat(65)] {
            let mut keys = Keys::open(&dir.path().join("none")).unwrap();
            assert!(matches!(
                keys.make(name, KeyRole::User, 1),
                Err(Error::Name { .. })
            ));
        }
    }

    #[test]
    fn a_watched_file_is_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys.json");
        let watched = WatchedKeys::open(&path).unwrap();
        let mut keys = Keys::open(&path).unwrap();
        let (key, info) = keys.make("a", KeyRole::User, 1).unwrap();
        assert!(watched.id_of(&key).is_some());
        keys.revoke(&info.id).unwrap();
        assert!(watched.id_of(&key).is_none());
        let (key, _) = keys.make("b", KeyRole::User, 1).unwrap();
        assert!(watched.id_of(&key).is_some());
        fs::remove_file(&path).unwrap();
        assert!(watched.id_of(&key).is_none());
    }
}
