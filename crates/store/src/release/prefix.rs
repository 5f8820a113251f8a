//! An installation: a folder with `bin/paceline` and the list of its files.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use flate2::read::GzDecoder;
use tar::{Archive, EntryType};

use super::{Error, ReleaseKey, ReleaseSource, Version, read_text};
use crate::storage::sync_all;

/// The program, below the prefix.
const PROGRAM: &str = "bin/paceline";

/// The list: `# from SOURCE`, `# folder PATH` for each folder that was made, then a path of a file
/// on each line, below the prefix. install.sh writes the same.
const INSTALLED: &str = "lib/paceline/installed";

/// The public key that releases must be signed with.
const KEY: &str = "lib/paceline/release.pub";

/// Most bytes of an archive's files: a program of 80 MB and MLX's layer leave a factor of ten.
const BYTES_MAX: u64 = 1 << 30;

/// Most files of an archive: it has some seventy, most of them the manual.
const FILES_MAX: usize = 4096;

/// The folder that install.sh filled.
#[derive(Clone, Debug)]
pub struct Prefix {
    root: PathBuf,
}

impl Prefix {
    /// The installation that a program belongs to.
    ///
    /// # Errors
    /// [`Error::NotInstalled`]: a package manager or a build made it.
    pub fn of_program(program: &Path) -> Result<Self, Error> {
        let real = fs::canonicalize(program).map_err(|source| Error::File {
            path: program.to_owned(),
            source,
        })?;
        let root = real.parent().and_then(Path::parent);
        let root = root.unwrap_or(Path::new("/")).to_owned();
        let list = root.join(INSTALLED);
        match list.is_file() && root.join(PROGRAM) == real {
            true => Ok(Self { root }),
            false => Err(Error::NotInstalled {
                program: real,
                list,
            }),
        }
    }

    /// The program that the installation starts.
    pub fn program(&self) -> PathBuf {
        self.root.join(PROGRAM)
    }

    /// The key that releases must be signed with, if the installation has one.
    ///
    /// # Errors
    /// [`Error::Key`]: a damaged key admits no release.
    pub fn key(&self) -> Result<Option<ReleaseKey>, Error> {
        let path = self.root.join(KEY);
        path.exists().then(|| ReleaseKey::read(&path)).transpose()
    }

    /// Where it was installed from, if the list says so.
    pub fn source(&self) -> Option<ReleaseSource> {
        let list = read_text(&self.root.join(INSTALLED)).ok()?;
        let source = list.lines().find_map(|line| line.strip_prefix("# from "));
        source.map(ReleaseSource::from)
    }

    /// Whether this user may replace its files.
    ///
    /// # Errors
    /// [`Error::File`] names the folder.
    pub fn check_writable(&self) -> Result<(), Error> {
        let folders = [PROGRAM, INSTALLED].map(|path| self.root.join(path));
        let folders = folders.iter().filter_map(|path| path.parent());
        for folder in folders {
            tempfile::tempfile_in(folder).map_err(|source| Error::File {
                path: folder.to_owned(),
                source,
            })?;
        }
        Ok(())
    }

    /// Replaces the installation's files by those of a checked archive, the program last, and
    /// removes files that only the former version had. The new program must run and state
    /// `version` first. A failure before the program's turn leaves the former program in place.
    ///
    /// # Errors
    /// [`Error::Archive`], [`Error::DoesNotRun`], [`Error::File`].
    pub fn install(
        &self,
        archive: &Path,
        version: Version,
        from: &ReleaseSource,
    ) -> Result<(), Error> {
        let own = self.root.join("lib/paceline");
        let failed = |path: &Path| {
            let path = path.to_owned();
            |source| Error::File { path, source }
        };
        let new = tempfile::Builder::new().prefix(".new").tempdir_in(&own);
        let new = new.map_err(failed(&own))?;
        let files = unpack(archive, new.path())?;
        check_runs(&new.path().join(PROGRAM), version)?;
        let former = self.files()?;
        let mut made = self.folders()?;
        let program = Path::new(PROGRAM);
        let rest = files.iter().filter(|path| *path != program);
        for path in rest.map(PathBuf::as_path).chain([program]) {
            let (from, to) = (new.path().join(path), self.root.join(path));
            let parent = to.parent().unwrap_or(&self.root);
            made.extend(self.missing_folders(path));
            fs::create_dir_all(parent).map_err(failed(parent))?;
            fs::rename(from, &to).map_err(failed(&to))?;
        }
        self.write_list(&files, &made, from)?;
        for path in former.difference(&files).filter(|path| is_plain(path)) {
            // A file that its user removed is gone already.
            let _ = fs::remove_file(self.root.join(path));
        }
        let bin = self.root.join("bin");
        sync_all(&bin).map_err(failed(&bin))
    }

    /// Paths of its files, below the prefix.
    fn files(&self) -> Result<BTreeSet<PathBuf>, Error> {
        let list = read_text(&self.root.join(INSTALLED))?;
        let files = list.lines().filter(|line| !line.starts_with('#'));
        Ok(files.map(PathBuf::from).collect())
    }

    /// Folders that were made for it, below the prefix.
    fn folders(&self) -> Result<BTreeSet<PathBuf>, Error> {
        let list = read_text(&self.root.join(INSTALLED))?;
        let folders = list
            .lines()
            .filter_map(|line| line.strip_prefix("# folder "));
        Ok(folders.map(PathBuf::from).collect())
    }

    /// Folders of the file `path` that do not exist yet.
    fn missing_folders<'a>(&self, path: &'a Path) -> impl Iterator<Item = PathBuf> + use<'a, '_> {
        let folders = path.ancestors().skip(1);
        let folders = folders.filter(|folder| !self.root.join(folder).exists());
        folders.map(Path::to_owned)
    }

    fn write_list(
        &self,
        files: &BTreeSet<PathBuf>,
        folders: &BTreeSet<PathBuf>,
        from: &ReleaseSource,
    ) -> Result<(), Error> {
        let path = self.root.join(INSTALLED);
        // A folder, such as a USB disk, is not where later releases come from.
        let former = self
            .source()
            .filter(|_| matches!(from, ReleaseSource::Folder(_)));
        let from = former.as_ref().unwrap_or(from);
        let lines = files.iter().map(|path| format!("{}\n", path.display()));
        let made = folders.iter();
        let made = made.map(|path| format!("# folder {}\n", path.display()));
        let text = format!("# from {from}\n{}", made.chain(lines).collect::<String>());
        let written = crate::storage::replace(&crate::storage::FileSystem, &path, text.as_bytes());
        written.map_err(|source| Error::File { path, source })
    }
}

/// Whether `path` stays below the folder that it is joined to.
fn is_plain(path: &Path) -> bool {
    let mut parts = path.components();
    parts.all(|part| matches!(part, Component::Normal(_))) && path.parent().is_some()
}

/// Unpacks an archive without its first folder; gives the paths of its files.
fn unpack(archive: &Path, into: &Path) -> Result<BTreeSet<PathBuf>, Error> {
    let failed = |source| Error::File {
        path: archive.to_owned(),
        source,
    };
    let bad = |reason: String| Error::Archive {
        path: archive.to_owned(),
        reason,
    };
    let file = File::open(archive).map_err(failed)?;
    let mut entries = Archive::new(GzDecoder::new(file).take(BYTES_MAX));
    let mut files = BTreeSet::new();
    for entry in entries.entries().map_err(failed)? {
        let mut entry = entry.map_err(failed)?;
        let whole = entry.path().map_err(failed)?.into_owned();
        let path: PathBuf = whole.components().skip(1).collect();
        match entry.header().entry_type() {
            EntryType::Directory => continue,
            EntryType::Regular if is_plain(&path) && files.len() < FILES_MAX => {}
            _ => return Err(bad(format!("it has {}", whole.display()))),
        }
        let target = into.join(&path);
        fs::create_dir_all(target.parent().unwrap_or(into)).map_err(failed)?;
        let mut out = File::create_new(&target).map_err(failed)?;
        io::copy(&mut entry, &mut out).map_err(failed)?;
        let mode = entry.header().mode().map_err(failed)? & 0o755;
        let permissions = fs::Permissions::from_mode(mode);
        out.set_permissions(permissions).map_err(failed)?;
        out.sync_all().map_err(failed)?;
        files.insert(path);
    }
    match files.contains(Path::new(PROGRAM)) {
        true => Ok(files),
        false => Err(bad(format!("it has no {PROGRAM}"))),
    }
}

/// Runs the new program, which ends at once.
fn check_runs(program: &Path, version: Version) -> Result<(), Error> {
    let refused = |reason: String| Error::DoesNotRun { reason };
    let done = Command::new(program).arg("version").output();
    let done = done.map_err(|error| refused(error.to_string()))?;
    let said = String::from_utf8_lossy(&done.stdout);
    match done.status.success() && said.trim() == format!("paceline {version}") {
        true => Ok(()),
        false => {
            let error = String::from_utf8_lossy(&done.stderr);
            let first = error.lines().next().unwrap_or_default();
            Err(refused(format!(
                "`version` gives {:?} {first}, expected {version}",
                said.trim()
            )))
        }
    }
}

#[cfg(test)]
mod tests {
    use flate2::Compression;
    use flate2::write::GzEncoder;
    use tar::{Builder, Header};

    use super::*;

    fn archive(folder: &Path, files: &[(&str, &str)]) -> PathBuf {
        let path = folder.join("release.tar.gz");
        let gzip = GzEncoder::new(File::create(&path).unwrap(), Compression::fast());
        let mut builder = Builder::new(gzip);
        for (name, text) in files {
            let mut header = Header::new_gnu();
            header.set_size(text.len() as u64);
            header.set_mode(0o755);
            // As a hostile archive may name it: `set_path` refuses such names.
            header.as_gnu_mut().unwrap().name[..name.len()].copy_from_slice(name.as_bytes());
            header.set_cksum();
            builder.append(&header, text.as_bytes()).unwrap();
        }
        builder.into_inner().unwrap().finish().unwrap();
        path
    }

    fn installed(root: &Path) -> Prefix {
        for folder in ["bin", "lib/paceline", "share"] {
            fs::create_dir_all(root.join(folder)).unwrap();
        }
        fs::write(root.join(PROGRAM), "old").unwrap();
        fs::write(root.join("share/old"), "").unwrap();
        let list = "# from /releases\n# folder lib\nbin/paceline\nshare/old\n../kept\n";
        fs::write(root.join(INSTALLED), list).unwrap();
        Prefix::of_program(&root.join(PROGRAM)).unwrap()
    }

    const RUNS: &str = "#!/bin/sh\necho paceline 0.2.0\n";

    #[test]
    fn a_release_replaces_the_files_of_the_former_one() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("prefix");
        let prefix = installed(&root);
        let kept = folder.path().join("kept");
        fs::write(&kept, "").unwrap();
        let from = ReleaseSource::from("https://example.com/v2");
        let files = [("p/bin/paceline", RUNS), ("p/share/man/new", "")];
        let archive = archive(folder.path(), &files);
        prefix.install(&archive, Version(0, 2, 0), &from).unwrap();
        assert_eq!(fs::read_to_string(prefix.program()).unwrap(), RUNS);
        assert!(root.join("share/man/new").exists() && !root.join("share/old").exists());
        assert!(
            kept.exists(),
            "a list removes nothing outside of the prefix"
        );
        assert_eq!(prefix.source(), Some(from));
        let made = BTreeSet::from(["lib", "share/man"].map(PathBuf::from));
        assert_eq!(prefix.folders().unwrap(), made, "what an uninstall removes");
        let own = fs::read_dir(root.join("lib/paceline")).unwrap();
        assert_eq!(own.count(), 1, "nothing but the list is left");
    }

    #[test]
    fn a_program_that_does_not_run_is_not_installed() {
        let folder = tempfile::tempdir().unwrap();
        let prefix = installed(&folder.path().join("prefix"));
        let from = ReleaseSource::from("/releases");
        for text in [
            "#!/bin/sh\necho paceline 0.1.0\n",
            "#!/bin/sh\nexit 1\n",
            "?",
        ] {
            let archive = archive(folder.path(), &[("p/bin/paceline", text)]);
            let refused = prefix.install(&archive, Version(0, 2, 0), &from);
            assert!(matches!(refused, Err(Error::DoesNotRun { .. })), "{text}");
            assert_eq!(fs::read_to_string(prefix.program()).unwrap(), "old");
        }
    }

    #[test]
    fn an_archive_with_other_paths_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let prefix = installed(&folder.path().join("prefix"));
        let from = ReleaseSource::from("/releases");
        for name in ["p/../../x", "p", "p/share/x"] {
            let archive = archive(folder.path(), &[(name, RUNS)]);
            let refused = prefix.install(&archive, Version(0, 2, 0), &from);
            assert!(matches!(refused, Err(Error::Archive { .. })), "{name}");
        }
        let path = folder.path().join("cut.tar.gz");
        fs::write(&path, "no gzip").unwrap();
        assert!(prefix.install(&path, Version(0, 2, 0), &from).is_err());
    }

    #[test]
    fn a_program_without_a_list_belongs_to_another_manager() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("paceline");
        fs::write(&program, "").unwrap();
        let found = Prefix::of_program(&program);
        assert!(
            matches!(found, Err(Error::NotInstalled { .. })),
            "{found:?}"
        );
    }
}
