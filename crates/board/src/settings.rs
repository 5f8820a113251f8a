//! Settings from environment variables, and paths below paceline's home.
//!
//! | variable | meaning |
//! |---|---|
//! | `PACELINE_HOME` | where paceline keeps its files, default `~/.paceline` |
//! | `PACELINE_MLXC` | the C layer of MLX, or its folder: no other is looked for |
//! | `HF_ENDPOINT` | another hub than the public one |
//! | `HF_TOKEN` | login at the hub |
//! | `HTTPS_PROXY`, `HTTP_PROXY`, `ALL_PROXY`, `NO_PROXY` | proxies, in lower case too |
//! | `SSL_CERT_FILE` | certificates to trust instead of the built-in ones |
//! | `PIP_INDEX_URL` and pip's files | the package index that MLX's wheels come from |
//!
//! Only programs read the environment itself, and pass [`Variables`].

mod pip;

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use paceline_base::Bytes;
use paceline_mlx::{FAST_SYNC, LibraryPaths};
use paceline_store::{Hub, HubToken, ProxySetting, PullOptions, find_mlx};
use paceline_worker::DiskCache;

use crate::fast_sync::hang_note;

pub use pip::package_index;

/// Returns the value of a variable, if set.
pub type Variables<'a> = &'a dyn Fn(&str) -> Option<OsString>;

/// A variable that is set and not empty.
fn set(variables: Variables<'_>, name: &str) -> Option<OsString> {
    variables(name).filter(|value| !value.is_empty())
}

/// A variable that is set, not empty and Unicode.
pub fn text(variables: Variables<'_>, name: &str) -> Option<String> {
    set(variables, name)?.into_string().ok()
}

/// Paceline's folder by these variables, maybe relative: `PACELINE_HOME`, else `.paceline` in
/// `HOME`. `None` if neither is set.
pub fn folder(variables: Variables<'_>) -> Option<PathBuf> {
    let home = || set(variables, "HOME").map(|home| PathBuf::from(home).join(".paceline"));
    let named = set(variables, "PACELINE_HOME").map(PathBuf::from);
    named.or_else(home)
}

/// Hub, proxy and certificates; `tell` receives a line about unreadable certificates.
pub fn pull_options(variables: Variables<'_>, tell: &dyn Fn(&str)) -> PullOptions {
    let text = |name: &str| text(variables, name);
    let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| Hub::DEFAULT_ENDPOINT.to_owned());
    let hub = Hub {
        token: text("HF_TOKEN").map(|token| HubToken::new(token.trim())),
        ca_pem: text("SSL_CERT_FILE").and_then(|path| certificates(&path, tell)),
        proxy: proxy(&text, &endpoint),
        endpoint,
    };
    PullOptions {
        hub,
        index: package_index(variables),
        ..PullOptions::default()
    }
}

fn proxy(text: &dyn Fn(&str) -> Option<String>, endpoint: &str) -> Option<ProxySetting> {
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

/// A missing file is common (build sandboxes set one on purpose) and no error.
fn certificates(path: &str, tell: &dyn Fn(&str)) -> Option<Vec<u8>> {
    match std::fs::read(path) {
        Ok(pem) => Some(pem),
        Err(error) => {
            tell(&format!(
                "warning: SSL_CERT_FILE is not used: {path}: {error}"
            ));
            None
        }
    }
}

/// Search paths of MLX, for a program at `program`; `home` is paceline's folder.
pub fn mlx_places(variables: Variables<'_>, home: &Path, program: Option<&Path>) -> LibraryPaths {
    LibraryPaths {
        explicit: text(variables, "PACELINE_MLXC").map(PathBuf::from),
        beside: program.and_then(|path| path.parent().map(Path::to_path_buf)),
        installed: find_mlx(&mlx_folder(home)).map(|mlx| mlx.library),
        hang_note: (text(variables, FAST_SYNC).as_deref() == Some("1")).then(|| hang_note(home)),
    }
}

/// The folder of a release's own files, for a program at `program`: `lib/paceline` of the prefix.
pub fn release_folder(program: &Path) -> Option<PathBuf> {
    let program = program.canonicalize().ok()?;
    Some(program.parent()?.parent()?.join("lib/paceline"))
}

/// Install folder of MLX, with a folder per version.
pub fn mlx_folder(home: &Path) -> PathBuf {
    home.join("engines/mlx")
}

/// The file of API keys.
pub fn api_keys(home: &Path) -> PathBuf {
    home.join("api-keys.json")
}

/// The folder of this home's own certificate.
pub fn tls_folder(home: &Path) -> PathBuf {
    home.join("tls")
}

/// The folder of packed weights.
pub fn packed(home: &Path) -> PathBuf {
    home.join("packed")
}

/// The on-disk prefix cache, limited to `limit`.
pub fn prefixes(home: &Path, limit: Bytes) -> DiskCache {
    DiskCache {
        folder: home.join("prefixes"),
        limit,
    }
}
