//! Settings from the environment.
//!
//! | variable | meaning |
//! |---|---|
//! | `PACELINE_HOME` | where paceline keeps its files, default `~/.paceline` |
//! | `PACELINE_MLXC` | the C layer of MLX, or its folder: no other is looked for |
//! | `HF_ENDPOINT` | another hub than the public one |
//! | `HF_TOKEN` | login at the hub |
//! | `HTTPS_PROXY`, `HTTP_PROXY`, `ALL_PROXY`, `NO_PROXY` | proxies, in lower case too |
//! | `SSL_CERT_FILE` | certificates to trust instead of the built-in ones |

use std::env;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::Context;
use paceline_base::Bytes;
use paceline_mlx::Places;
use paceline_node::DiskCache;
use paceline_serve::tls::Own;
use paceline_store::{Home, Hub, ProxySetting, PullOptions, Token, find_mlx};

use crate::error::Error;
use crate::output::tell;

/// Settings that the store needs.
#[derive(Debug)]
pub(crate) struct Settings {
    /// The folder that holds everything.
    pub(crate) home: Home,
    /// Hub, pip, retries, deadlines.
    pub(crate) options: PullOptions,
}

impl Settings {
    /// Reads the environment.
    pub(crate) fn from_env() -> anyhow::Result<Self> {
        let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| Hub::DEFAULT_ENDPOINT.to_owned());
        let hub = Hub {
            token: text("HF_TOKEN").map(|token| Token::new(token.trim())),
            ca_pem: certificates(),
            proxy: proxy(&endpoint),
            endpoint,
        };
        Ok(Self {
            home: home()?,
            options: PullOptions {
                hub,
                ..PullOptions::default()
            },
        })
    }
}

/// The store's folder.
///
/// # Errors
/// As [`folder`].
pub(crate) fn home() -> anyhow::Result<Home> {
    Ok(Home::new(folder()?))
}

/// The prefix cache on disk, of so many bytes.
///
/// # Errors
/// As [`folder`].
pub(crate) fn prefixes(limit: Bytes) -> anyhow::Result<DiskCache> {
    let folder = folder()?.join("prefixes");
    Ok(DiskCache { folder, limit })
}

/// The file of API keys.
///
/// # Errors
/// As [`folder`].
pub(crate) fn api_keys() -> anyhow::Result<PathBuf> {
    Ok(folder()?.join("api-keys.json"))
}

/// The folder of this home's own certificate.
///
/// # Errors
/// As [`folder`].
pub(crate) fn tls_folder() -> anyhow::Result<PathBuf> {
    Ok(folder()?.join("tls"))
}

/// The certificates to trust for the server at `url`, where they are not the built-in ones:
/// `$SSL_CERT_FILE`, else this home's own certificate where it is for the host of `url`.
pub(crate) fn trusted(url: &str) -> Option<PathBuf> {
    let uri: ureq::http::Uri = url.parse().ok()?;
    if uri.scheme_str() != Some("https") {
        return None;
    }
    if let Some(path) = text("SSL_CERT_FILE") {
        return Some(PathBuf::from(path)).filter(|path| path.exists());
    }
    let host = uri.host()?.trim_matches(['[', ']']);
    let now = SystemTime::UNIX_EPOCH.elapsed();
    let now = now.map_or(0, |since| since.as_secs());
    Own::find(&tls_folder().ok()?, host, now)
}

/// The certificates that [`trusted`] returns.
///
/// # Errors
/// A file that cannot be read.
pub(crate) fn certificates_for(url: &str) -> anyhow::Result<Option<Vec<u8>>> {
    let read = |path: PathBuf| {
        let failed = || format!("cannot read the certificates of {}", path.display());
        std::fs::read(&path).with_context(failed)
    };
    trusted(url).map(read).transpose()
}

/// The folder that MLX is installed into, a folder below it for each version.
///
/// # Errors
/// As [`folder`].
pub(crate) fn mlx_folder() -> anyhow::Result<PathBuf> {
    Ok(folder()?.join("engines/mlx"))
}

/// Where MLX is looked for.
///
/// # Errors
/// As [`folder`].
pub(crate) fn mlx_places() -> anyhow::Result<Places> {
    let program = env::current_exe().ok();
    Ok(Places {
        explicit: text("PACELINE_MLXC").map(PathBuf::from),
        beside: program.and_then(|path| path.parent().map(Path::to_path_buf)),
        installed: find_mlx(&mlx_folder()?).map(|mlx| mlx.library),
    })
}

/// `$PACELINE_HOME`, else `~/.paceline`.
///
/// # Errors
/// [`Error::NoHome`], or when there is no current folder.
pub(crate) fn folder() -> anyhow::Result<PathBuf> {
    let set = |name| {
        env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    let root = set("PACELINE_HOME").or_else(|| set("HOME").map(|home| home.join(".paceline")));
    let root = root.ok_or(Error::NoHome)?;
    // Paths are printed for use elsewhere, so they should not depend on the current folder.
    std::path::absolute(root).context("cannot find the current folder")
}

/// `$PACELINE_HOME`, absolute; `None` where it is not set.
///
/// # Errors
/// As [`folder`].
pub(crate) fn named_folder() -> anyhow::Result<Option<PathBuf>> {
    let named = env::var_os("PACELINE_HOME").is_some_and(|value| !value.is_empty());
    named.then(folder).transpose()
}

/// A variable that is set, not empty and Unicode.
fn text(name: &str) -> Option<String> {
    env::var(name).ok().filter(|value| !value.is_empty())
}

fn proxy(endpoint: &str) -> Option<ProxySetting> {
    let either = |upper: &str| text(&upper.to_lowercase()).or_else(|| text(upper));
    let by_scheme = if endpoint.starts_with("http://") {
        "HTTP_PROXY"
    } else {
        "HTTPS_PROXY"
    };
    let url = either(by_scheme).or_else(|| either("ALL_PROXY"))?;
    Some(ProxySetting {
        url,
        no_proxy: either("NO_PROXY").unwrap_or_default(),
    })
}

/// A variable that points nowhere is common (build sandboxes set one on purpose) and no reason to
/// stop.
fn certificates() -> Option<Vec<u8>> {
    let path = text("SSL_CERT_FILE")?;
    match std::fs::read(&path) {
        Ok(pem) => Some(pem),
        Err(error) => {
            tell(format_args!(
                "warning: SSL_CERT_FILE is not used: {path}: {error}"
            ));
            None
        }
    }
}
