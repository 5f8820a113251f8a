//! Dask or Ray on machines of a cluster: which program runs where, and which ports lead to it.
//!
//! The engine's processes listen at ports of the loopback interface alone, a different one each. On
//! every machine a forwarder listens at the ports of the others, and leads to them through the
//! nodes' encrypted connections. So `127.0.0.1:PORT` means the same process everywhere.
//!
//! ```text
//! port          the scheduler of Dask, or the head of Ray, on the first machine
//! port+1        its dashboard (Dask)
//! port+2+i*span the processes of machine i: a worker of Dask, or the processes of Ray's node
//! ```
//!
//! Pure: [`scripts`](Plan::scripts) says what runs, callers run it.

use crate::remote::quote;

/// Seconds for a worker of Dask to find its scheduler before it ends, and is started again.
const DEATH_S: u32 = 60;

/// Ports of a machine with Ray: six of its node, and the workers' from [`RAY_WORKERS`] on.
const RAY_SPAN: u16 = 48;

/// Offset of the workers' ports: Ray starts a worker for each core, and some ahead.
const RAY_WORKERS: u16 = 8;

/// Makes Ray's folder `t`, and removes the last one. Its name is short: sockets lie deep in it.
const RAY_FOLDER: &str = r#"h="${PACELINE_HOME:-$HOME/.paceline}/compute"
mkdir -p "$h"
if [ -L "$h/ray" ]; then rm -rf "$(readlink "$h/ray")"; fi
t=$(mktemp -d "${TMPDIR:-/tmp}/ray.XXXXXX") && ln -sfn "$t" "$h/ray" || exit 1
"#;

paceline_base::named_enum! {
    /// An engine of others.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Engine {
        /// `dask` and `distributed`.
        Dask = "dask",
        Ray = "ray",
    }
}

impl Engine {
    /// Ports of a machine.
    const fn span(self) -> u16 {
        match self {
            Self::Dask => 1,
            Self::Ray => RAY_SPAN,
        }
    }
}

/// A machine that takes part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    /// Its name for people, and of its worker in Dask.
    pub name: String,
    pub id: String,
}

/// The Python environment on every machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Environment {
    /// An interpreter that has the engine, at the same path on all machines.
    Python(String),
    /// A lock file of pip: each machine makes an environment of it once, named by `digest`.
    Lock {
        /// The file's text.
        text: String,
        /// A name made of its contents.
        digest: String,
    },
}

/// A cluster of an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    pub engine: Engine,
    /// The machines; the first one, which starts it all, has the scheduler or the head.
    pub machines: Vec<Machine>,
    /// The first port.
    pub port: u16,
    /// The Python of all.
    pub environment: Environment,
}

/// A program of a plan: a script for `/bin/sh`, to be started again whenever it ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Script {
    /// Its role, for people.
    pub name: String,
    /// Index of its machine.
    pub machine: usize,
    /// The script; the variable `PACELINE_BINARY` must name the program.
    pub text: String,
}

impl Plan {
    /// Address of the scheduler or head on all machines.
    pub fn scheduler(&self) -> String {
        match self.engine {
            Engine::Dask => format!("tcp://127.0.0.1:{}", self.port),
            Engine::Ray => format!("127.0.0.1:{}", self.port),
        }
    }

    /// Address of the scheduler's dashboard, if there is one.
    pub fn dashboard(&self) -> Option<String> {
        let address = format!("http://127.0.0.1:{}/status", self.port + 1);
        (self.engine == Engine::Dask).then_some(address)
    }

    /// The last port, which may be no port at all.
    pub fn last_port(&self) -> usize {
        let of_machines = self.machines.len() * usize::from(self.engine.span());
        usize::from(self.port) + 1 + of_machines
    }

    fn first_port(&self, machine: usize) -> u16 {
        let machine = u16::try_from(machine).expect("machines are fewer than ports");
        self.port + 2 + machine * self.engine.span()
    }

    /// All programs: the scheduler, then for each machine its forwarder and its worker.
    pub fn scripts(&self) -> Vec<Script> {
        let mut scripts = Vec::new();
        if self.engine == Engine::Dask {
            scripts.push(self.script("scheduler", 0, self.scheduler_text()));
        }
        for machine in 0..self.machines.len() {
            if self.machines.len() > 1 {
                scripts.push(self.script("forwarder", machine, self.forwarder_text(machine)));
            }
            let text = match self.engine {
                Engine::Dask => self.worker_text(machine),
                Engine::Ray => self.ray_text(machine),
            };
            scripts.push(self.script("worker", machine, text));
        }
        scripts
    }

    fn script(&self, role: &str, machine: usize, text: String) -> Script {
        Script {
            name: format!("{role} on {}", self.machines[machine].name),
            machine,
            text,
        }
    }

    fn scheduler_text(&self) -> String {
        let (port, dashboard) = (self.port, self.port + 1);
        let wait = match self.environment {
            Environment::Python(_) => "",
            Environment::Lock { .. } => "until [ -e \"$d/ready\" ]; do sleep 1; done\n",
        };
        format!(
            "{}{wait}exec \"$python\" -m distributed.cli.dask_scheduler --host 127.0.0.1 --port {port} \
             --dashboard-address 127.0.0.1:{dashboard} --no-show\n",
            self.environment_text()
        )
    }

    fn worker_text(&self, machine: usize) -> String {
        let (address, port) = (self.scheduler(), self.first_port(machine));
        let name = quote(&self.machines[machine].name);
        format!(
            "{}{}exec \"$python\" -m distributed.cli.dask_worker {address} --host 127.0.0.1 \
             --worker-port {port} --no-nanny --no-dashboard --name {name} \
             --death-timeout {DEATH_S}\n",
            self.environment_text(),
            self.preparation_text()
        )
    }

    /// Ray's node of a machine; that of the first one is the head.
    fn ray_text(&self, machine: usize) -> String {
        let role = match machine {
            0 => format!("--head --port {} --include-dashboard false", self.port),
            _ => format!("--address {}", self.scheduler()),
        };
        let first = self.first_port(machine);
        let names = [
            "node-manager-port",
            "object-manager-port",
            "dashboard-agent-listen-port",
            "dashboard-agent-grpc-port",
            "runtime-env-agent-port",
            "metrics-export-port",
        ];
        let ports = names.iter().zip(first..);
        let ports: String = ports
            .map(|(name, port)| format!(" --{name} {port}"))
            .collect();
        let (least, most) = (first + RAY_WORKERS, first + RAY_SPAN - 1);
        format!(
            "{}{}{RAY_FOLDER}exec \"$python\" -m ray.scripts.scripts start {role} --block \
             --disable-usage-stats --node-ip-address 127.0.0.1{ports} --min-worker-port {least} \
             --max-worker-port {most} --temp-dir \"$t\"\n",
            self.environment_text(),
            self.preparation_text()
        )
    }

    /// Leads the ports of the other machines' programs to them.
    fn forwarder_text(&self, machine: usize) -> String {
        let mut text = String::from("exec \"$PACELINE_BINARY\" programs");
        for (other, it) in self.machines.iter().enumerate() {
            if other == machine {
                continue;
            }
            let first = self.first_port(other);
            let last = first + self.engine.span() - 1;
            text += &format!(" --forward {first}-{last}={}", it.id);
            if other == 0 {
                text += &format!(" --forward {0}-{0}={1}", self.port, it.id);
            }
        }
        text + "\n"
    }

    /// Sets `python` to one that has Dask.
    fn environment_text(&self) -> String {
        match &self.environment {
            Environment::Python(python) => format!("python={}\n", quote(python)),
            Environment::Lock { digest, .. } => format!(
                "d=\"${{PACELINE_HOME:-$HOME/.paceline}}/compute/{digest}\"\npython=\"$d/bin/python\"\n"
            ),
        }
    }

    /// Makes the environment of a lock file if there is none. Workers alone do, one a machine.
    fn preparation_text(&self) -> String {
        let Environment::Lock { text, .. } = &self.environment else {
            return String::new();
        };
        format!(
            r#"if [ ! -e "$d/ready" ]; then
mkdir -p "$d" && printf '%s' {} >"$d/requirements.txt" && python3 -m venv "$d" || exit 1
"$python" -m pip install -q --disable-pip-version-check -r "$d/requirements.txt" || exit 1
: >"$d/ready"
fi
"#,
            quote(text)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_means_the_same_process_on_every_machine() {
        let machine = |name: &str| Machine {
            name: name.to_owned(),
            id: format!("id-{name}"),
        };
        let plan = Plan {
            machines: ["a", "b", "c"].map(machine).to_vec(),
            engine: Engine::Dask,
            port: 20_000,
            environment: Environment::Python("/venv/bin/python".to_owned()),
        };
        let scripts = plan.scripts();
        assert_eq!(scripts.len(), 7);
        let of = |name: &str| &scripts.iter().find(|it| it.name == name).unwrap().text;
        for (name, expected) in [
            (
                "forwarder on a",
                " --forward 20003-20003=id-b --forward 20004-20004=id-c\n",
            ),
            (
                "forwarder on c",
                " --forward 20002-20002=id-a --forward 20000-20000=id-a --forward 20003-20003=id-b\n",
            ),
        ] {
            assert!(of(name).ends_with(expected), "{}", of(name));
        }
        for port in ["--port 20000", "--dashboard-address 127.0.0.1:20001"] {
            assert!(of("scheduler on a").contains(port));
        }
        assert!(of("worker on b").contains("tcp://127.0.0.1:20000 --host 127.0.0.1"));
        assert!(of("worker on b").contains("--worker-port 20003"));

        let ray = Plan {
            engine: Engine::Ray,
            ..plan
        };
        let scripts = ray.scripts();
        let of = |name: &str| &scripts.iter().find(|it| it.name == name).unwrap().text;
        assert!(of("forwarder on b").ends_with(
            " --forward 20002-20049=id-a --forward 20000-20000=id-a --forward 20098-20145=id-c\n"
        ));
        assert!(of("worker on a").contains("--head --port 20000 "));
        let b = of("worker on b");
        for part in [
            "--address 127.0.0.1:20000 ",
            "--node-manager-port 20050 ",
            "--metrics-export-port 20055 ",
            "--min-worker-port 20058 --max-worker-port 20097 ",
        ] {
            assert!(b.contains(part), "{b}");
        }
        assert_eq!(ray.last_port(), 20_145);
    }
}
