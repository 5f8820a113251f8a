//! The environment of workers of array jobs and trainings, as `/proc` shows it.

use std::fs;
use std::process::Stdio;

use crate::common::home::TestHome;
use crate::common::until;
use crate::nodes::processes::all_children;
use crate::train;

/// A file in `/proc` of a process; empty when that has ended.
fn told(pid: u32, file: &str) -> String {
    let bytes = fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}

#[test]
fn workers_of_jobs_and_trainings_get_no_secrets_of_the_environment() {
    let world = TestHome::new();
    let data = train::data(&world);
    // Both take minutes, and are killed long before.
    let job = [
        "mapreduce",
        "montecarlo",
        "sin(x) * y",
        "--samples",
        "10000000000",
    ];
    let training = train::args(&data, "out", &["--steps", "100000"]);
    for args in [job.map(str::to_owned).to_vec(), training] {
        let mut command = world.paceline(&args);
        command.args(["--nodes", "2", "--threads", "1"]);
        for name in ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "SSH_AUTH_SOCK"] {
            command.env(name, "a-secret");
        }
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let mut running = command.spawn().unwrap();
        let mut workers = Vec::new();
        until("two workers run", || {
            workers = all_children(running.id());
            // Before it runs its program, a child has its parent's variables.
            workers.retain(|pid| told(*pid, "cmdline").contains("worker\0"));
            workers.len() == 2 || running.try_wait().unwrap().is_some()
        });
        let variables: Vec<_> = workers.iter().map(|pid| told(*pid, "environ")).collect();
        let statuses: Vec<_> = workers.iter().map(|pid| told(*pid, "status")).collect();
        let _ = running.kill();
        running.wait().unwrap();
        assert_eq!(variables.len(), 2, "{args:?}");
        for variables in variables {
            assert!(variables.contains("PACELINE_HOME="), "{variables}");
            assert!(!variables.contains("a-secret"), "{variables}");
        }
        // An array job writes where its user says.
        for status in statuses.iter().filter(|_| args[0] == "train") {
            assert!(status.contains("NoNewPrivs:\t1"), "{status}");
        }
    }
}
