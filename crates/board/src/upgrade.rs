//! Upgrade of a cluster: one machine after the other, while answers continue.
//!
//! ```text
//! leader, `paceline upgrade`        receiver, started by the other machine's node
//!                                <- about: version, platform, why it cannot be upgraded
//! offer: checksums, signature    ->
//! bytes of the archive           ->
//!                                <- installed, or failed
//! restart                        ->
//!                                <- draining, any number; the node then executes its new program
//! ```
//! Messages are JSON, one a line. The receiver demands the signature of its own
//! installation's key. So no member can run a program of its own on another machine. It refuses an
//! older release. The leader waits until a machine is back and all instances answer. Then it
//! continues with the next.

mod receiver;

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use paceline_cluster::nodes::agent::Agent;
use paceline_cluster::nodes::agent::local::{self, CommandProgress};
use paceline_node::fleet::Fleet;
use paceline_node::tunnel;
use paceline_store::release::{self, Prefix, Release, ReleaseSource, SignedSums, Version};
use paceline_store::{Cancel, PullOptions, PullProgress};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Value, json};

pub use receiver::{ReceiverSettings, receive};

/// The service that starts a receiver.
pub const SERVICE: &str = "upgrade";

/// The node's command that drains it and has it execute its program anew.
const RESTART: &str = "restart";

/// Version of the messages. A receiver of another version is upgraded on its own machine.
const MESSAGES: u32 = 1;

/// Most bytes of a line: the checksums have at most 64 KiB, their quoting doubles few.
const LINE_BYTES_MAX: u64 = 256 << 10;

/// Longest silence of a receiver: it unpacks and syncs an archive of some 100 MB.
const SILENCE_MAX: Duration = Duration::from_secs(120);

/// Longest time until a restarted node is back and its models answer: a large model's load.
const BACK_MAX: Duration = Duration::from_secs(300);

/// Interval of looks at the cluster.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Time limit of a look at the own node, which answers within milliseconds.
const LOOK_MAX: Duration = Duration::from_secs(10);

/// Why an upgrade stopped. Machines before the named one have the new release.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Release(#[from] release::Error),
    #[error(transparent)]
    Node(#[from] local::Error),
    #[error("{machine}: {reason}")]
    Machine { machine: String, reason: String },
    #[error("{machine}: {offered} is older than its {installed}")]
    Older {
        machine: String,
        installed: Version,
        offered: Version,
    },
    #[error("{machine} did not return with {version} within {} s", BACK_MAX.as_secs())]
    NotBack { machine: String, version: Version },
    #[error("not all models answer again: {}", models.join(", "))]
    Unsettled { models: Vec<String> },
}

/// A receiver's description of its machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct MachineAbout {
    messages: u32,
    version: String,
    platform: String,
    /// Why it cannot be upgraded from here.
    problem: Option<String>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum ToReceiver {
    /// An archive's bytes follow.
    Offer {
        sums: String,
        signature: Option<String>,
        bytes: u64,
        from: String,
    },
    Restart,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum FromReceiver {
    About(MachineAbout),
    Installed,
    Draining,
    Failed(String),
}

fn write_line(mut to: impl Write, message: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    to.write_all(&line)?;
    to.flush()
}

fn read_line<T: DeserializeOwned>(from: &mut impl BufRead) -> io::Result<T> {
    let mut line = String::new();
    io::Read::take(from, LINE_BYTES_MAX).read_line(&mut line)?;
    match line.ends_with('\n') {
        true => Ok(serde_json::from_str(&line)?),
        false => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// Serves the command that drains this node and then sets `restart`.
pub fn serve_restart(agent: &Agent, fleet: &Arc<Fleet>, restart: Arc<AtomicBool>) {
    let own = Arc::downgrade(fleet);
    agent.serve_local(
        RESTART,
        move |_: &Value, progress: &mut CommandProgress<'_>| {
            let fleet = own.upgrade().ok_or("the node is stopping")?;
            crate::commands::leave(&fleet, &mut || {
                progress(Value::Null);
            })?;
            restart.store(true, Ordering::SeqCst);
            Ok(json!({}))
        },
    );
}

/// A machine of the cluster, as this machine's node lists it.
#[derive(Clone, Debug, Deserialize)]
struct ListedMachine {
    id: String,
    name: String,
    state: String,
    found_by: String,
    #[serde(default)]
    build: String,
    #[serde(default)]
    boot: u64,
}

impl ListedMachine {
    fn is_own(&self) -> bool {
        self.found_by == "self"
    }
}

/// The state of a machine with regard to a release.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MachineState {
    /// It has the release.
    Current,
    /// It has an older one, and can be upgraded.
    Upgradable(String),
    /// Why it cannot be upgraded from here.
    Refuses(String),
}

/// A release that is brought to the machines of a cluster.
#[derive(derive_more::Debug)]
#[debug("upgrade from {:?}", self.source)]
pub struct ClusterUpgrade<'a> {
    /// Paceline's files, with the socket of this machine's node.
    pub home: &'a Path,
    /// This machine's installation.
    pub prefix: Prefix,
    pub installed: Version,
    pub source: ReleaseSource,
    pub texts: SignedSums,
    pub release: Release,
    pub options: &'a PullOptions,
    pub cancel: &'a Cancel,
    /// Receives lines for people.
    pub tell: &'a dyn Fn(&str),
}

impl ClusterUpgrade<'_> {
    /// Names and states of all live machines, the own one last.
    pub fn states(&self) -> Result<Vec<(String, MachineState)>, Error> {
        let states = self.machines()?.into_iter().map(|machine| {
            let state = self.state(&machine);
            (machine.name, state)
        });
        Ok(states.collect())
    }

    /// Upgrades all live machines, the own one last. Nothing begins unless all can be upgraded.
    ///
    /// # Errors
    /// The first that fails; those before it have the release, and a second run continues.
    pub fn run(&self, progress: &mut dyn PullProgress) -> Result<(), Error> {
        let machines = self.machines()?;
        for machine in &machines {
            if let MachineState::Refuses(reason) = self.state(machine) {
                let machine = machine.name.clone();
                return Err(Error::Machine { machine, reason });
            }
        }
        for machine in machines {
            if self.state(&machine) == MachineState::Current {
                (self.tell)(&format!("{} has this release", machine.name));
                continue;
            }
            let before = self.answering()?;
            let version = match machine.is_own() {
                true => self.upgrade_own(progress)?,
                false => self.upgrade_other(&machine, progress)?,
            };
            self.wait_until_back(&machine, version)?;
            self.wait_until_settled(&before)?;
            (self.tell)(&format!("{} runs {version}", machine.name));
        }
        Ok(())
    }

    /// Upgrades this machine, whose node runs.
    ///
    /// # Errors
    /// As [`install`](Self::install); the node cannot drain, or does not return.
    pub fn run_here(&self, progress: &mut dyn PullProgress) -> Result<Version, Error> {
        let own = self.machines()?.pop().filter(ListedMachine::is_own);
        let version = self.upgrade_own(progress)?;
        if let Some(own) = own {
            self.wait_until_back(&own, version)?;
        }
        Ok(version)
    }

    /// Installs the release on this machine, without a restart.
    ///
    /// # Errors
    /// A checksum, an archive, or a file that cannot be replaced.
    pub fn install(&self, progress: &mut dyn PullProgress) -> Result<Version, Error> {
        let (version, file) = self.release.archive(&release::platform())?;
        self.prefix.check_writable()?;
        let folder = self.folder()?;
        let context = (self.cancel, progress);
        let archive = self
            .source
            .fetch(&file, folder.path(), self.options, context)?;
        self.prefix.install(&archive, version, &self.source)?;
        Ok(version)
    }

    fn folder(&self) -> Result<tempfile::TempDir, Error> {
        let made = tempfile::tempdir_in(self.home);
        Ok(made.map_err(|source| release::Error::File {
            path: self.home.to_owned(),
            source,
        })?)
    }

    fn ask(&self, command: &str, limit: Duration) -> Result<Value, local::Error> {
        local::ask(self.home, command, json!({}), limit, |_| {})
    }

    /// Live machines, the own one last.
    fn machines(&self) -> Result<Vec<ListedMachine>, Error> {
        let mut listed = self.ask("nodes", LOOK_MAX)?;
        let listed = listed["nodes"].take();
        let all: Vec<ListedMachine> = serde_json::from_value(listed).unwrap_or_default();
        let (mut live, away): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|it| it.state == "alive");
        for machine in away.iter().filter(|it| it.state != "left") {
            (self.tell)(&format!(
                "{} is {}: it keeps its release",
                machine.name, machine.state
            ));
        }
        live.sort_by(|a, b| (a.is_own(), &a.name).cmp(&(b.is_own(), &b.name)));
        Ok(live)
    }

    fn state(&self, machine: &ListedMachine) -> MachineState {
        let platform = release::platform();
        if machine.is_own() {
            let problem = self.prefix.check_writable().err();
            let problem = problem.map(|error| error.to_string());
            return self.compared(&machine.build, &platform, problem);
        }
        match Receiver::open(self.home, machine) {
            Ok(receiver) => {
                let about = receiver.about;
                self.compared(&about.version, &about.platform, about.problem)
            }
            Err(error) => MachineState::Refuses(error.to_string()),
        }
    }

    fn compared(&self, version: &str, platform: &str, problem: Option<String>) -> MachineState {
        let offered = self.release.archive(platform).map(|(offered, _)| offered);
        let pair = offered.and_then(|offered| Ok((offered, version.parse::<Version>()?)));
        match (pair, problem) {
            (Ok((offered, own)), _) if own == offered => MachineState::Current,
            (Err(error), _) => MachineState::Refuses(error.to_string()),
            (_, Some(problem)) => MachineState::Refuses(problem),
            (Ok((offered, own)), None) if offered < own => {
                MachineState::Refuses(format!("{offered} is older than its {own}"))
            }
            _ => MachineState::Upgradable(version.to_owned()),
        }
    }

    fn upgrade_own(&self, progress: &mut dyn PullProgress) -> Result<Version, Error> {
        let version = self.install(progress)?;
        (self.tell)("this machine drains");
        self.ask(RESTART, SILENCE_MAX)?;
        Ok(version)
    }

    fn upgrade_other(
        &self,
        machine: &ListedMachine,
        progress: &mut dyn PullProgress,
    ) -> Result<Version, Error> {
        let failed = |error: io::Error| Error::Machine {
            machine: machine.name.clone(),
            reason: error.to_string(),
        };
        let mut receiver = Receiver::open(self.home, machine).map_err(failed)?;
        let (version, file) = self.release.archive(&receiver.about.platform)?;
        let folder = self.folder()?;
        let context = (self.cancel, progress);
        let archive = self
            .source
            .fetch(&file, folder.path(), self.options, context)?;
        let texts = (&self.texts, &self.source);
        receiver.install(&archive, texts).map_err(failed)?;
        (self.tell)(&format!("{} drains", machine.name));
        receiver.restart().map_err(failed)?;
        Ok(version)
    }

    /// Waits until a machine runs `version` in another process than before.
    fn wait_until_back(&self, former: &ListedMachine, version: Version) -> Result<(), Error> {
        let is_back = || {
            let Ok(mut listed) = self.ask("nodes", LOOK_MAX) else {
                return false; // the own node restarts
            };
            let listed = serde_json::from_value(listed["nodes"].take());
            let all: Vec<ListedMachine> = listed.unwrap_or_default();
            let mut own = all.iter().filter(|it| it.id == former.id);
            own.any(|it| {
                let is_new = it.build == version.to_string() && it.boot != former.boot;
                it.state == "alive" && is_new
            })
        };
        match self.until(is_back) {
            true => Ok(()),
            false => Err(Error::NotBack {
                machine: former.name.clone(),
                version,
            }),
        }
    }

    /// Ids of the instances that answer.
    fn answering(&self) -> Result<BTreeSet<String>, Error> {
        let listed = self.ask("ps", LOOK_MAX)?;
        let listed = listed.as_array().cloned().unwrap_or_default();
        let ready = listed.iter().filter(|it| it["state"] == "ready");
        let ids = ready.filter_map(|it| it["id"].as_str());
        Ok(ids.map(str::to_owned).collect())
    }

    /// Waits until the instances that answered `before` do so again. Those of `up MODEL` end with
    /// their node and have other ids afterwards.
    fn wait_until_settled(&self, before: &BTreeSet<String>) -> Result<(), Error> {
        let unsettled = || -> Option<Vec<String>> {
            let listed = self.ask("ps", LOOK_MAX).ok()?;
            let listed = listed.as_array()?;
            let waits = listed.iter().filter(|it| {
                let was_ready = it["id"].as_str().is_some_and(|id| before.contains(id));
                was_ready && it["state"] != "ready"
            });
            let name = |it: &Value| it["model"].as_str().unwrap_or_default().to_owned();
            Some(waits.map(name).collect())
        };
        match self.until(|| unsettled().is_some_and(|models| models.is_empty())) {
            true => Ok(()),
            false => Err(Error::Unsettled {
                models: unsettled().unwrap_or_default(),
            }),
        }
    }

    /// Whether `done` is true before [`BACK_MAX`] has passed.
    fn until(&self, done: impl Fn() -> bool) -> bool {
        let begun = Instant::now();
        while begun.elapsed() < BACK_MAX && !self.cancel.is_cancelled() {
            if done() {
                return true;
            }
            std::thread::sleep(LOOK_EVERY);
        }
        false
    }
}

/// The leader's end of a connection to a receiver.
struct Receiver {
    stream: UnixStream,
    reader: BufReader<UnixStream>,
    about: MachineAbout,
}

impl Receiver {
    fn open(home: &Path, machine: &ListedMachine) -> io::Result<Self> {
        let stream = tunnel::line(home, &machine.id, SERVICE)?;
        stream.set_read_timeout(Some(SILENCE_MAX))?;
        stream.set_write_timeout(Some(SILENCE_MAX))?;
        let mut reader = BufReader::new(stream.try_clone()?);
        match read_line(&mut reader)? {
            FromReceiver::About(about) if about.messages == MESSAGES => Ok(Self {
                stream,
                reader,
                about,
            }),
            FromReceiver::About(about) => Err(io::Error::other(format!(
                "its messages have version {}, expected {MESSAGES}",
                about.messages
            ))),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// Sends an archive, and waits until it is installed.
    fn install(
        &mut self,
        archive: &Path,
        (texts, source): (&SignedSums, &ReleaseSource),
    ) -> io::Result<()> {
        let mut file = File::open(archive)?;
        let offer = ToReceiver::Offer {
            sums: texts.sums.clone(),
            signature: texts.signature.clone(),
            bytes: file.metadata()?.len(),
            from: source.to_string(),
        };
        write_line(&self.stream, &offer)?;
        io::copy(&mut file, &mut &self.stream)?;
        match read_line(&mut self.reader)? {
            FromReceiver::Installed => Ok(()),
            FromReceiver::Failed(reason) => Err(io::Error::other(reason)),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// Has the node drain, and returns when it executes its new program.
    fn restart(&mut self) -> io::Result<()> {
        write_line(&self.stream, &ToReceiver::Restart)?;
        loop {
            match read_line(&mut self.reader) {
                Ok(FromReceiver::Draining) => {}
                Ok(FromReceiver::Failed(reason)) => return Err(io::Error::other(reason)),
                Ok(_) => return Err(io::ErrorKind::InvalidData.into()),
                // The connection ends with the node's former process.
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }
}
