//! Dask on machines of a cluster: which program runs where, and which ports lead to it.
//!
//! Dask's scheduler and workers listen at ports of the loopback interface alone, a different one
//! each. On every machine a forwarder listens at the ports of the others, and leads to them through
//! the nodes' encrypted connections. So `tcp://127.0.0.1:PORT` means the same process everywhere.
//!
//! ```text
//! port     scheduler, on the first machine
//! port+1   its dashboard
//! port+2+i the worker of machine i
//! ```
//!
//! Pure: [`scripts`](Plan::scripts) says what runs, callers run it.

use crate::remote::quote;

/// Seconds for a worker to find its scheduler before it ends, and is started again.
const DEATH_S: u32 = 60;

/// A machine that takes part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    /// Its name for people, and of its worker in Dask.
    pub name: String,
    /// The id of its node.
    pub id: String,
}

/// The Python environment on every machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Environment {
    /// An interpreter that has Dask, at the same path on all machines.
    Python(String),
    /// A lock file of pip: each machine makes an environment of it once, named by `digest`.
    Lock {
        /// The file's text.
        text: String,
        /// A name made of its contents.
        digest: String,
    },
}

/// A Dask cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The machines; the first one, which starts it all, has the scheduler.
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
    /// Address of the scheduler on all machines.
    pub fn scheduler(&self) -> String {
        format!("tcp://127.0.0.1:{}", self.port)
    }

    /// Address of the scheduler's dashboard.
    pub fn dashboard(&self) -> String {
        format!("http://127.0.0.1:{}/status", self.port + 1)
    }

    /// Port of the worker of a machine.
    fn worker_port(&self, machine: usize) -> u16 {
        let offset = u16::try_from(machine).expect("machines are far fewer than ports");
        self.port + 2 + offset
    }

    /// Number of ports, of machines of this number.
    pub const fn ports(machines: usize) -> usize {
        2 + machines
    }

    /// All programs: the scheduler, then for each machine its forwarder and its worker.
    pub fn scripts(&self) -> Vec<Script> {
        let mut scripts = vec![self.script("scheduler", 0, self.scheduler_text())];
        for machine in 0..self.machines.len() {
            if self.machines.len() > 1 {
                scripts.push(self.script("forwarder", machine, self.forwarder_text(machine)));
            }
            scripts.push(self.script("worker", machine, self.worker_text(machine)));
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
        let (address, port) = (self.scheduler(), self.worker_port(machine));
        let name = quote(&self.machines[machine].name);
        format!(
            "{}{}exec \"$python\" -m distributed.cli.dask_worker {address} --host 127.0.0.1 \
             --worker-port {port} --no-nanny --no-dashboard --name {name} \
             --death-timeout {DEATH_S}\n",
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
            let mut ports = vec![self.worker_port(other)];
            if other == 0 {
                ports.push(self.port);
            }
            for port in ports {
                text += &format!(" --forward {port}={}", it.id);
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
            port: 20_000,
            environment: Environment::Python("/venv/bin/python".to_owned()),
        };
        let scripts = plan.scripts();
        assert_eq!(scripts.len(), 7);
        let of = |name: &str| &scripts.iter().find(|it| it.name == name).unwrap().text;
        for (name, expected) in [
            (
                "forwarder on a",
                " --forward 20003=id-b --forward 20004=id-c\n",
            ),
            (
                "forwarder on c",
                " --forward 20002=id-a --forward 20000=id-a --forward 20003=id-b\n",
            ),
        ] {
            assert!(of(name).ends_with(expected), "{}", of(name));
        }
        for port in ["--port 20000", "--dashboard-address 127.0.0.1:20001"] {
            assert!(of("scheduler on a").contains(port));
        }
        assert!(of("worker on b").contains("tcp://127.0.0.1:20000 --host 127.0.0.1"));
        assert!(of("worker on b").contains("--worker-port 20003"));
    }
}
