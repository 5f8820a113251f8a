//! Unpacks a wheel into a folder. Its hash was verified; its paths and sizes are checked anyway.

use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::path::Path;

use paceline_base::Bytes;
use zip::ZipArchive;
use zip::read::ZipFile;

use crate::download::PullContext;
use crate::hash::CHUNK_BYTES;
use crate::{Error, disk};

/// Maximum unpacked bytes of a wheel: the largest, cuDNN and cuBLAS, have about 1 GB.
const BYTES_MAX: u64 = 4 << 30;
/// Maximum files of a wheel: MLX for CUDA has 2,200.
const FILES_MAX: usize = 50_000;

/// Unpacks `path` into `folder`, which may have other wheels; existing names are rejected.
pub(super) fn wheel(
    name: &str,
    path: &Path,
    folder: &Path,
    ctx: &mut PullContext<'_>,
) -> Result<(), Error> {
    let bad = |member: &str, cause| Error::BadWheel {
        wheel: name.to_owned(),
        member: member.to_owned(),
        cause,
    };
    let file = File::open(path).map_err(|error| Error::io("open", path, error))?;
    let mut archive = ZipArchive::new(file).map_err(|cause| bad("its list of files", cause))?;
    let total = check_sizes(name, &mut archive, bad)?;
    disk::check_space(ctx.options.free_space, folder, total)?;
    ctx.progress
        .start(&format!("unpacking {name}"), Some(total), 0);
    let mut to_come = total;
    for index in 0..archive.len() {
        let mut member = archive
            .by_index(index)
            .map_err(|cause| bad("a file", cause))?;
        let size = member.size();
        let unpacked = one(name, &mut member, folder, to_come, ctx);
        if unpacked.is_err() {
            ctx.progress.finish();
            return unpacked;
        }
        to_come -= size.min(to_come);
    }
    ctx.progress.finish();
    Ok(())
}

/// Bytes of all members.
fn check_sizes(
    name: &str,
    archive: &mut ZipArchive<File>,
    bad: impl Fn(&str, zip::result::ZipError) -> Error,
) -> Result<u64, Error> {
    let too_large = |got| Error::SizeMismatch {
        what: format!("{name}, unpacked"),
        expected: Bytes(BYTES_MAX),
        got: Bytes(got),
    };
    if archive.len() > FILES_MAX {
        return Err(too_large(u64::MAX));
    }
    let mut total = 0_u64;
    for index in 0..archive.len() {
        let member = archive.by_index_raw(index);
        total = total.saturating_add(member.map_err(|cause| bad("a file", cause))?.size());
    }
    if total > BYTES_MAX {
        return Err(too_large(total));
    }
    Ok(total)
}

/// Writes one member below `folder`; paths that leave it are rejected.
fn one(
    wheel: &str,
    member: &mut ZipFile<'_, File>,
    folder: &Path,
    to_come: u64,
    ctx: &mut PullContext<'_>,
) -> Result<(), Error> {
    let what = String::from_utf8_lossy(member.name_raw()).into_owned();
    let bad = |cause| Error::BadWheel {
        wheel: wheel.to_owned(),
        member: what.clone(),
        cause,
    };
    let refused = zip::result::ZipError::InvalidArchive("its path leads out of the wheel".into());
    let Some(inside) = member.enclosed_name().filter(|_| !member.is_symlink()) else {
        return Err(bad(refused));
    };
    let target = folder.join(inside);
    if member.is_dir() {
        return disk::create_dir(&target);
    }
    disk::create_dir(target.parent().unwrap_or(folder))?;
    let opened = OpenOptions::new()
        .create_new(true)
        .write(true)
        .open(&target);
    let file = opened.map_err(|error| Error::io("create", &target, error))?;
    let mut sink = disk::ModelFileSink {
        file,
        path: &target,
        free_space: ctx.options.free_space,
    };
    let expected = member.size();
    let (mut buffer, mut done) = (vec![0; CHUNK_BYTES], 0);
    loop {
        ctx.cancel.check()?;
        let n = member
            .read(&mut buffer)
            .map_err(|error| bad(error.into()))?;
        done += n as u64;
        // The declared size may be wrong; the written size is limited too.
        if done > expected || (n == 0 && done < expected) {
            return Err(Error::SizeMismatch {
                what: format!("{what} in {wheel}"),
                expected: Bytes(expected),
                got: Bytes(done),
            });
        }
        if n == 0 {
            break;
        }
        sink.write(&buffer[..n], to_come.saturating_sub(done - n as u64))?;
        ctx.progress.advance(n as u64);
    }
    // Some of NVIDIA's wheels have the same empty `__init__.py`; it is removed, so that the next
    // wheel can add its own.
    if expected == 0 {
        fs::remove_file(&target).map_err(|error| Error::io("remove", &target, error))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::path::PathBuf;

    use zip::ZipWriter;
    use zip::write::SimpleFileOptions;

    use super::*;
    use crate::options::PullOptions;
    use crate::progress::{Cancel, SilentProgress};

    fn archive(dir: &Path, files: &[(&str, &[u8])]) -> PathBuf {
        let path = dir.join("x.whl");
        let mut zip = ZipWriter::new(File::create(&path).unwrap());
        for (name, body) in files {
            zip.start_file(*name, SimpleFileOptions::default()).unwrap();
            zip.write_all(body).unwrap();
        }
        zip.finish().unwrap();
        path
    }

    /// Unpacks `files` below the returned temporary folder.
    fn unpacked(files: &[(&str, &[u8])]) -> (tempfile::TempDir, Result<(), Error>) {
        let dir = tempfile::tempdir().unwrap();
        let path = archive(dir.path(), files);
        let options = PullOptions::default();
        let mut ctx = PullContext {
            options: &options,
            cancel: &Cancel::default(),
            progress: &mut SilentProgress,
        };
        let folder = dir.path().join("a/b");
        disk::create_dir(&folder).unwrap();
        let done = wheel("x==1", &path, &folder, &mut ctx);
        (dir, done)
    }

    #[test]
    fn a_wheel_becomes_a_folder() {
        let large = vec![7; 3 * CHUNK_BYTES + 1];
        let (dir, done) = unpacked(&[
            ("m/lib/l.so", &large),
            ("m/h.h", b"h"),
            ("n/__init__.py", b""),
        ]);
        done.unwrap();
        let folder = dir.path().join("a/b");
        assert_eq!(fs::read(folder.join("m/lib/l.so")).unwrap(), large);
        assert_eq!(fs::read(folder.join("m/h.h")).unwrap(), b"h");
        assert!(
            !folder.join("n/__init__.py").exists(),
            "empty files of several wheels collide"
        );
    }

    #[test]
    fn paths_that_lead_out_are_refused() {
        for name in ["../evil", "m/../../evil", "m/../../../evil"] {
            let (dir, done) = unpacked(&[("ok", b"x"), (name, b"evil")]);
            assert!(
                matches!(done, Err(Error::BadWheel { .. })),
                "{name}: {done:?}"
            );
            for place in ["evil", "a/evil"] {
                assert!(!dir.path().join(place).exists(), "{name}");
            }
        }
        let (dir, done) = unpacked(&[("/not-absolute", b"x")]);
        done.unwrap();
        assert!(
            dir.path().join("a/b/not-absolute").exists() && !Path::new("/not-absolute").exists()
        );
    }

    #[test]
    fn a_file_is_not_written_twice() {
        let dir = tempfile::tempdir().unwrap();
        let path = archive(dir.path(), &[("m/a", b"1")]);
        let options = PullOptions::default();
        let mut ctx = PullContext {
            options: &options,
            cancel: &Cancel::default(),
            progress: &mut SilentProgress,
        };
        wheel("x==1", &path, dir.path(), &mut ctx).unwrap();
        let again = wheel("x==1", &path, dir.path(), &mut ctx);
        assert!(matches!(again, Err(Error::Io { .. })), "{again:?}");
    }

    #[test]
    fn a_cut_wheel_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = archive(dir.path(), &[("m/a", &[1; 1000]), ("m/b", b"2")]);
        let whole = fs::read(&path).unwrap();
        let options = PullOptions::default();
        for cut in (0..whole.len()).step_by(7) {
            fs::write(&path, &whole[..cut]).unwrap();
            let into = tempfile::tempdir().unwrap();
            let mut ctx = PullContext {
                options: &options,
                cancel: &Cancel::default(),
                progress: &mut SilentProgress,
            };
            assert!(
                wheel("x==1", &path, into.path(), &mut ctx).is_err(),
                "cut at {cut}"
            );
        }
    }
}
