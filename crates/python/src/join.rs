//! Functions that join a group: by addresses, alone, or from a launcher's settings.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};

use paceline_base::Rank;
use paceline_comm::provider::LaunchedProvider;
use paceline_comm::tcp::{Config, GroupId, GroupKey, KEY_BYTES, Listener, Protection};
use paceline_comm::{Backend, Group, JoinParams, Plaintext, Strict, init, local};
use paceline_comm_interop::nccl::Libraries;
use paceline_comm_interop::{MlxBackend, MlxPlace, init_mlx};
use paceline_comm_rdma::JacclSettings;
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;

use crate::error::of_join;
use crate::group::{PyGroup, deadline};

/// A listening rank that has not joined yet.
#[pyclass(frozen, name = "Listener", module = "paceline._native")]
#[derive(Debug)]
pub(crate) struct PyListener {
    listener: Mutex<Option<Listener>>,
    addrs: Vec<String>,
}

#[pymethods]
impl PyListener {
    /// Listens at all of `addrs`, each `host:port`; port 0 lets the system choose.
    #[new]
    fn bind(addrs: Vec<String>) -> PyResult<Self> {
        let addrs: Vec<SocketAddr> = addrs.iter().map(|a| resolve(a)).collect::<PyResult<_>>()?;
        let listener = Listener::bind_all(&addrs)
            .map_err(|error| PyOSError::new_err(format!("cannot listen at {addrs:?}: {error}")))?;
        let addrs = listener.addrs().iter().map(SocketAddr::to_string).collect();
        let listener = Mutex::new(Some(listener));
        Ok(Self { listener, addrs })
    }

    /// The addresses, each `ip:port`.
    #[getter]
    fn addrs(&self) -> Vec<String> {
        self.addrs.clone()
    }
}

/// A group of one.
#[pyfunction]
pub(crate) fn alone() -> PyGroup {
    PyGroup::new(Box::new(local::ranks(1).remove(0)))
}

/// Settings shared by all ranks of a group.
#[derive(FromPyObject)]
pub(crate) struct GroupSettings {
    /// Addresses by rank, each `host:port`.
    #[pyo3(item)]
    addrs: Vec<Vec<String>>,
    /// Distinguishes groups that meet by mistake.
    #[pyo3(item)]
    id: [u8; 16],
    /// The group key; `None` without encryption.
    #[pyo3(item)]
    key: Option<[u8; KEY_BYTES]>,
    /// Whether bytes may leave this machine unencrypted.
    #[pyo3(item)]
    plaintext: bool,
}

impl GroupSettings {
    fn protection(&self) -> Protection {
        match (self.key, self.plaintext) {
            (Some(key), _) => Protection::Key(GroupKey::new(key)),
            (None, true) => Protection::Plaintext,
            (None, false) => Protection::Loopback,
        }
    }
}

/// Joins the ranks at `terms["addrs"]` by shared memory or TCP. Collective.
#[pyfunction]
pub(crate) fn join(
    py: Python<'_>,
    backend: &str,
    listener: &PyListener,
    rank: u32,
    terms: GroupSettings,
    seconds: f64,
) -> PyResult<PyGroup> {
    let backend: Backend = backend
        .parse()
        .map_err(|error| PyValueError::new_err(format!("{error}")))?;
    let by = deadline(seconds)?;
    let mut slot = listener
        .listener
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    let taken = slot.take();
    drop(slot);
    let listener = taken.ok_or_else(|| PyValueError::new_err("this listener has joined before"))?;
    let config = Config {
        protection: terms.protection(),
        ..Config::default()
    };
    let addrs = hosts(&terms.addrs)?;
    let seat = JoinParams {
        listener,
        rank: Rank(rank),
        addrs: &addrs,
        id: GroupId(terms.id),
        config,
    };
    let made = py.detach(|| init(backend, Strict::Yes, seat, &[], by));
    made.map(PyGroup::new).map_err(|error| of_join(py, &error))
}

/// Settings of a launcher, as MLX's backends read them.
#[derive(FromPyObject)]
pub(crate) struct LauncherSettings {
    /// Variables of the environment.
    #[pyo3(item)]
    env: HashMap<String, String>,
    /// Addresses of a ring, by rank.
    #[pyo3(item)]
    hosts: Option<Vec<Vec<String>>>,
    /// Text of the file of RDMA devices.
    #[pyo3(item)]
    devices: Option<String>,
    /// Whether bytes may leave this machine unencrypted.
    #[pyo3(item)]
    plaintext: bool,
}

/// Joins by a backend of MLX: `ring`, `jaccl` or `mpi`. Collective.
#[pyfunction]
pub(crate) fn join_launched(
    py: Python<'_>,
    backend: &str,
    launched: LauncherSettings,
    seconds: f64,
) -> PyResult<PyGroup> {
    let by = deadline(seconds)?;
    let made = py.detach(|| launched.join(backend, by));
    let made = made.map_err(|error| of_join(py, &*error))?;
    Ok(PyGroup::new(made))
}

impl LauncherSettings {
    fn join(
        &self,
        backend: &str,
        by: paceline_comm::Deadline,
    ) -> Result<Box<dyn Group>, Box<dyn std::error::Error + Send + Sync>> {
        let backend: MlxBackend = backend.parse()?;
        let lookup = |name: &str| self.env.get(name).cloned();
        let jaccl = match &self.devices {
            Some(devices) => Some(JacclSettings::parse(&lookup, devices)?),
            None => None,
        };
        let rank = lookup("MLX_RANK").map(|text| text.trim().parse::<u32>());
        let hosts = self.hosts.as_deref().map(hosts).transpose()?;
        let place = MlxPlace {
            rank: rank.transpose()?.map(Rank),
            hosts: hosts.as_deref(),
            nccl: None,
            jaccl: jaccl
                .as_ref()
                .map(|settings| settings as &dyn LaunchedProvider),
            libraries: &Libraries::default(),
            plaintext: match self.plaintext {
                true => Plaintext::Allowed,
                false => Plaintext::Refused,
            },
        };
        Ok(init_mlx(backend, Strict::Yes, &place, by)?)
    }
}

fn hosts(texts: &[Vec<String>]) -> PyResult<Vec<Vec<SocketAddr>>> {
    let rank = |own: &Vec<String>| own.iter().map(|text| resolve(text)).collect();
    texts.iter().map(rank).collect()
}

fn resolve(text: &str) -> PyResult<SocketAddr> {
    paceline_comm::resolve(text)
        .map_err(|why| PyValueError::new_err(format!("cannot use address {text:?}: {why}")))
}
