//! Settings from the environment, by [`paceline_board::settings`].

use std::env;
use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::Context;
use paceline_base::Bytes;
use paceline_board::{servers, settings};
use paceline_mlx::LibraryPaths;
use paceline_store::{Home, PullOptions};
use paceline_worker::DiskCache;

use crate::error::failed;
use crate::output::print_err;

#[derive(Debug)]
pub(crate) struct StoreSettings {
    /// Paceline's folder.
    pub(crate) home: Home,
    /// Hub, pip, retries, deadlines.
    pub(crate) options: PullOptions,
}

impl StoreSettings {
    /// Reads the environment.
    pub(crate) fn from_env() -> anyhow::Result<Self> {
        let options = settings::pull_options(&variable, &|line| print_err(line));
        Ok(Self {
            home: home()?,
            options,
        })
    }
}

/// A variable of this process's environment.
pub(crate) fn variable(name: &str) -> Option<OsString> {
    env::var_os(name)
}

/// The store's folder.
pub(crate) fn home() -> anyhow::Result<Home> {
    Ok(Home::new(folder()?))
}

pub(crate) fn prefixes(limit: Bytes) -> anyhow::Result<DiskCache> {
    Ok(settings::prefixes(&folder()?, limit))
}

/// The folder of packed weights.
pub(crate) fn packed() -> anyhow::Result<PathBuf> {
    Ok(settings::packed(&folder()?))
}

/// As [`packed`], for the sandbox of workers: made if possible, without those of models that are
/// gone. A worker without it says so and packs in memory.
pub(crate) fn make_packed() -> anyhow::Result<Option<PathBuf>> {
    let folder = packed()?;
    let _ = paceline_model::remove_packed_orphans(&folder); // only takes room
    let made = std::fs::create_dir_all(&folder);
    Ok(made.ok().map(|()| folder))
}

pub(crate) fn api_keys() -> anyhow::Result<PathBuf> {
    Ok(settings::api_keys(&folder()?))
}

/// The file of certificates to trust for the server at `url`, if not the built-in ones. This home's
/// own certificate if it is for that host, else `$SSL_CERT_FILE`.
pub(crate) fn trusted(url: &str) -> Option<PathBuf> {
    let uri: ureq::http::Uri = url.parse().ok()?;
    if uri.scheme_str() != Some("https") {
        return None;
    }
    let host = uri.host()?.trim_matches(['[', ']']);
    let own = servers::trusted(&folder().ok()?, host);
    own.or_else(|| named_certificates().filter(|path| path.exists()))
}

/// `$SSL_CERT_FILE`.
fn named_certificates() -> Option<PathBuf> {
    settings::text(&variable, "SSL_CERT_FILE").map(PathBuf::from)
}

/// The certificates to trust for the server at `url`: those of [`trusted`] and of
/// `$SSL_CERT_FILE`, which often names the system's own bundle.
pub(crate) fn certificates_for(url: &str) -> anyhow::Result<Option<Vec<u8>>> {
    let read = |path: PathBuf| {
        let failed = || format!("cannot read the certificates of {}", path.display());
        std::fs::read(&path).with_context(failed)
    };
    let Some(first) = trusted(url) else {
        return Ok(None);
    };
    let named = named_certificates().filter(|path| path.exists() && *path != first);
    let mut all = read(first)?;
    if let Some(path) = named {
        all.push(b'\n');
        all.extend(read(path)?);
    }
    Ok(Some(all))
}

/// Install folder of MLX, with a folder per version.
pub(crate) fn mlx_folder() -> anyhow::Result<PathBuf> {
    Ok(settings::mlx_folder(&folder()?))
}

/// The folder of a release's own files, in the prefix of this program.
pub(crate) fn release_folder() -> Option<PathBuf> {
    settings::release_folder(&env::current_exe().ok()?)
}

pub(crate) fn mlx_places() -> anyhow::Result<LibraryPaths> {
    let program = env::current_exe().ok();
    let places = settings::mlx_places(&variable, &folder()?, program.as_deref());
    Ok(places)
}

/// `$PACELINE_HOME`, else `~/.paceline`.
pub(crate) fn folder() -> anyhow::Result<PathBuf> {
    let root = settings::folder(&variable).ok_or_else(|| {
        let hint = "set PACELINE_HOME to a folder for models";
        failed("neither PACELINE_HOME nor HOME is set", hint)
    })?;
    // Absolute, because paths are printed for use elsewhere.
    std::path::absolute(root).context("cannot find the current folder")
}

/// `$PACELINE_HOME`, absolute; `None` where it is not set.
pub(crate) fn named_folder() -> anyhow::Result<Option<PathBuf>> {
    let named = variable("PACELINE_HOME").is_some_and(|value| !value.is_empty());
    named.then(folder).transpose()
}
