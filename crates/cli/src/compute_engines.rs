//! `paceline compute`: Dask or Ray on the cluster's machines.
//!
//! `start` leaves a keeper behind, a process of this program that starts the scripts of
//! [`paceline_launch::engines`] and starts each again when it has ended. So a machine that is lost
//! leaves, and joins again when it is back. `stop` ends the keeper, and with it all scripts.

use std::fs;
use std::fs::File;
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use paceline_board::machines::consenting;
use paceline_launch::engines::{Engine, Environment, Machine, Plan, Script};
use paceline_launch::joined::PROGRAM_VARIABLE;
use paceline_process::{Process, Signal};
use rustix::process::{Pid, kill_process, test_kill_process};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::home;
use crate::interrupt::Signals;
use crate::output::{print, print_err};

/// First of the ports: Dask's own 8786, moved to where few programs listen.
const PORT: u16 = 28_786;

/// Time for the scheduler to listen: a lock file of Dask takes pip a minute or two.
const START_LIMIT: Duration = Duration::from_secs(600);

/// Time for the keeper to end its scripts.
const STOP_LIMIT: Duration = Duration::from_secs(15);

/// Pause before a script that has ended is started again, doubled up to [`PAUSE_MAX`].
const PAUSE: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(16);

/// Time for a script to end by itself after SIGTERM.
const GRACE: Duration = Duration::from_secs(3);

/// Poll interval.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Timeout of a connection to a port of this machine.
const KNOCK: Duration = Duration::from_millis(500);

/// Ends a script of this machine with the keeper, however that ends: kills its process group at the
/// end of the input.
const END_WITH_INPUT: &str = "exec 3<&0; (cat <&3 >/dev/null; kill -s KILL 0) &\n";

/// Things to do with an engine.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Args {
    /// Start Dask or Ray: the scheduler or head here, a worker on each machine
    Start(StartArgs),
    /// Addresses, machines and workers of what runs
    Status {
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// End it on all machines
    Stop,
    /// Keeps it running: started by `start`
    #[command(hide = true)]
    Keep(StartArgs),
}

/// The engine, and where its Python comes from.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct StartArgs {
    /// The engine
    #[arg(value_enum)]
    engine: ComputeEngine,
    /// Machines, this one first [default: all that run programs]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    nodes: Option<u16>,
    /// A lock file of pip with `dask` and `distributed`, or `ray`: each machine makes its
    /// environment
    #[arg(long, value_name = "FILE", required_unless_present = "python")]
    lock: Option<PathBuf>,
    /// A Python with them, at the same path on all machines, in place of --lock
    #[arg(long, value_name = "PROGRAM", conflicts_with = "lock")]
    python: Option<String>,
    /// First of the loopback ports: the scheduler's, its dashboard's, then one for each machine, or
    /// 48 for Ray
    #[arg(short = 'p', long, value_name = "PORT", default_value_t = PORT,
          value_parser = clap::value_parser!(u16).range(1024..=60_000))]
    port: u16,
}

/// Engines of others.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum ComputeEngine {
    Dask,
    Ray,
}

impl From<ComputeEngine> for Engine {
    fn from(engine: ComputeEngine) -> Self {
        match engine {
            ComputeEngine::Dask => Self::Dask,
            ComputeEngine::Ray => Self::Ray,
        }
    }
}

/// Starts, shows or stops an engine.
pub(crate) fn run(args: &Args, signals: &Signals) -> anyhow::Result<()> {
    match args {
        Args::Start(args) => start(args),
        Args::Status { json } => status(*json),
        Args::Stop => stop(),
        Args::Keep(args) => keep(args, signals),
    }
}

/// The file with what runs.
fn state_file() -> anyhow::Result<PathBuf> {
    Ok(home::folder()?.join("compute/engine.json"))
}

/// The state that `status` shows, if its keeper lives.
fn state() -> anyhow::Result<Option<Value>> {
    let Ok(text) = fs::read(state_file()?) else {
        return Ok(None);
    };
    let state: Value = serde_json::from_slice(&text).context("cannot read what runs")?;
    Ok(keeper(&state).map(|_| state))
}

/// The keeper's process, if it lives.
fn keeper(state: &Value) -> Option<Pid> {
    let id = i32::try_from(state["pid"].as_i64()?).ok()?;
    let pid = Pid::from_raw(id)?;
    test_kill_process(pid).is_ok().then_some(pid)
}

fn listens(port: u16) -> bool {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    TcpStream::connect_timeout(&address, KNOCK).is_ok()
}

impl StartArgs {
    fn plan(&self) -> anyhow::Result<Plan> {
        let found = consenting(&home::folder()?)?;
        ensure!(
            !found.machines.is_empty(),
            "this machine's node does not run"
        );
        let count = self.nodes.map_or(found.machines.len(), usize::from);
        ensure!(
            found.machines.len() >= count,
            "{} machines run programs, {count} are wanted{}",
            found.machines.len(),
            match &found.refusing[..] {
                [] => String::new(),
                names => format!("; not allowed on {}", names.join(", ")),
            }
        );
        ensure!(
            count == 1 || found.is_open,
            "workers elsewhere reach the scheduler here only with `paceline up --allow-programs`"
        );
        let machines = found.machines.into_iter().take(count);
        let machines = machines.map(|it| Machine {
            name: it.name,
            id: it.id,
        });
        let plan = Plan {
            engine: self.engine.into(),
            machines: machines.collect(),
            port: self.port,
            environment: self.environment()?,
        };
        let last = plan.last_port();
        ensure!(
            last <= 65_535,
            "ports {} to {last} are wanted: take a lower --port",
            plan.port
        );
        Ok(plan)
    }

    fn environment(&self) -> anyhow::Result<Environment> {
        let Some(path) = &self.lock else {
            let python = self.python.clone().unwrap_or_default();
            return Ok(Environment::Python(python));
        };
        let text = fs::read_to_string(path);
        let text = text.with_context(|| format!("cannot read {}", path.display()))?;
        let hash: String = Sha256::digest(&text)
            .iter()
            .take(8)
            .map(|b| format!("{b:02x}"))
            .collect();
        Ok(Environment::Lock {
            text,
            digest: format!("{}-{hash}", Engine::from(self.engine).name()),
        })
    }

    /// These arguments for the keeper.
    fn keeper_words(&self) -> Vec<String> {
        let engine = Engine::from(self.engine).name();
        let mut words = vec!["compute".into(), "keep".into(), engine.to_owned()];
        words.push(format!("--port={}", self.port));
        words.extend(self.nodes.map(|count| format!("--nodes={count}")));
        words.extend(
            self.python
                .as_ref()
                .map(|python| format!("--python={python}")),
        );
        let lock = self.lock.as_ref();
        words.extend(lock.map(|path| format!("--lock={}", path.display())));
        words
    }
}

/// Starts the keeper, and waits until the scheduler listens.
fn start(args: &StartArgs) -> anyhow::Result<()> {
    if let Some(state) = state()? {
        bail!("it runs already, at {}", state["scheduler"]);
    }
    let plan = args.plan()?;
    ensure!(
        !listens(plan.port),
        "another program listens at port {}",
        plan.port
    );
    let folder = home::folder()?.join("compute");
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let log = folder.join("engine.log");
    let out = File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
    let program = std::env::current_exe().context("cannot find this program's own file")?;
    let mut command = Command::new(program);
    command.args(args.keeper_words()).stdin(Stdio::null());
    command.stdout(out.try_clone()?).stderr(out);
    // A session of its own: it outlives this command and its terminal.
    let mut keeper = command
        .process_group(0)
        .spawn()
        .context("cannot start the keeper")?;
    let began = Instant::now();
    while !listens(plan.port) {
        if let Some(ending) = keeper.try_wait()? {
            bail!("it ended ({ending}); {} says why", log.display());
        }
        if began.elapsed() > START_LIMIT {
            stop()?;
            bail!(
                "no scheduler within {START_LIMIT:?}; {} says why",
                log.display()
            );
        }
        std::thread::sleep(LOOK_EVERY);
    }
    status(false)
}

fn status(as_json: bool) -> anyhow::Result<()> {
    let Some(state) = state()? else {
        return match as_json {
            true => print(&json!({ "running": false }).to_string()),
            false => print("nothing runs: paceline compute start dask --lock FILE"),
        };
    };
    if as_json {
        return print(&state.to_string());
    }
    let text = |key: &str| state[key].as_str().unwrap_or_default().to_owned();
    print(&format!("scheduler {}", text("scheduler")))?;
    if state["dashboard"].is_string() {
        print(&format!("dashboard {}", text("dashboard")))?;
    }
    for script in state["scripts"].as_array().into_iter().flatten() {
        let (name, told) = (&script["name"], &script["state"]);
        let words = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        print(&format!("{}: {}", words(name), words(told)))?;
    }
    Ok(())
}

fn stop() -> anyhow::Result<()> {
    let Some(pid) = state()?.as_ref().and_then(keeper) else {
        print_err("nothing runs");
        return Ok(());
    };
    kill_process(pid, Signal::TERM).context("cannot end the keeper")?;
    let began = Instant::now();
    while state()?.is_some() {
        ensure!(
            began.elapsed() < STOP_LIMIT,
            "the keeper {pid:?} does not end"
        );
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(())
}

/// A script under way, or to be started again.
struct Kept {
    script: Script,
    process: Option<Process>,
    again_at: Instant,
    pause: Duration,
}

/// Keeps the scripts running until a signal.
fn keep(args: &StartArgs, signals: &Signals) -> anyhow::Result<()> {
    let plan = args.plan()?;
    let program = std::env::current_exe().context("cannot find this program's own file")?;
    let path = state_file()?;
    let scripts = plan.scripts().into_iter();
    let mut kept: Vec<Kept> = scripts
        .map(|script| Kept {
            script,
            process: None,
            again_at: Instant::now(),
            pause: PAUSE,
        })
        .collect();
    let ended = signals.orderly(|cancel| {
        let mut told = Value::Null;
        while !cancel.is_cancelled() {
            for it in &mut kept {
                it.look(&plan, &program);
            }
            let state = described(&plan, &kept);
            if state != told {
                write(&path, &state)?;
                told = state;
            }
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(())
    });
    kept.iter().for_each(Kept::terminate);
    let began = Instant::now();
    while kept.iter().any(Kept::runs) && began.elapsed() < GRACE {
        std::thread::sleep(LOOK_EVERY);
    }
    drop(kept);
    let _ = fs::remove_file(&path); // without it, the dead process id says the same
    ended
}

/// The state for `status`.
fn described(plan: &Plan, kept: &[Kept]) -> Value {
    let script = |it: &Kept| {
        let state = if it.runs() {
            "runs"
        } else {
            "ended, will be started again"
        };
        json!({ "name": it.script.name, "state": state })
    };
    let scripts: Vec<Value> = kept.iter().map(script).collect();
    json!({ "running": true, "pid": std::process::id(), "scheduler": plan.scheduler(),
        "dashboard": plan.dashboard(), "scripts": scripts })
}

/// Replaces a file as a whole.
fn write(path: &Path, value: &Value) -> anyhow::Result<()> {
    let new = path.with_extension("new");
    let mut file = File::create(&new).with_context(|| format!("cannot write {}", new.display()))?;
    file.write_all(value.to_string().as_bytes())?;
    fs::rename(&new, path).with_context(|| format!("cannot write {}", path.display()))
}

impl Kept {
    fn runs(&self) -> bool {
        self.process
            .as_ref()
            .is_some_and(|process| !process.has_ended())
    }

    fn terminate(&self) {
        if let Some(process) = &self.process {
            process.signal(Signal::TERM);
        }
    }

    /// Starts the script if it does not run and its pause is over.
    fn look(&mut self, plan: &Plan, program: &Path) {
        if self.runs() {
            return;
        }
        if let Some(mut process) = self.process.take() {
            print_err(format_args!("{} {}", self.script.name, process.reap()));
            self.again_at = Instant::now() + self.pause;
            self.pause = (self.pause * 2).min(PAUSE_MAX);
        }
        if Instant::now() < self.again_at {
            return;
        }
        match Process::start(&mut self.command(plan, program)) {
            Ok(process) => self.process = Some(process),
            Err(error) => {
                print_err(format_args!("{}: {error}", self.script.name));
                self.again_at = Instant::now() + self.pause;
            }
        }
    }

    /// The script here, or on its machine; either ends when its input does.
    fn command(&self, plan: &Plan, program: &Path) -> Command {
        let text = &self.script.text;
        let mut command = match self.script.machine {
            0 => {
                let mut command = Command::new("/bin/sh");
                command.args(["-c", &format!("{END_WITH_INPUT}{text}")]);
                command.env(PROGRAM_VARIABLE, program);
                command
            }
            machine => {
                let mut command = Command::new(program);
                let id = &plan.machines[machine].id;
                command.args(["programs", "--node", id, "--", "/bin/sh", "-c", text]);
                command
            }
        };
        command.stdin(Stdio::piped());
        command
    }
}
