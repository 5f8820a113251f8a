//! A test of an installed program on its user's machine, without tools or a repository.
//!
//! ```text
//! paceline selftest                the report: rows, deadlines, figures of the machine
//!   paceline selftest --part mlx   a process for each engine: a row of JSON for each check
//!   paceline bench model ...       the speed of a model
//! ```
//!
//! - [`report`]: rows, and the report that can be posted.
//! - [`checks`]: what the process of an engine computes, with the answers recorded for class `cpu`.
//! - [`tiny_model`]: the model that it computes.
//! - [`child`]: a program under a deadline.
//! - [`part`], [`machine`], [`speed`]: rows of the report's process.

pub mod checks;
pub mod child;
pub mod report;
pub mod tiny_model;

use std::io;
use std::process::Command;
use std::time::Instant;

use paceline_base::counted;
use paceline_cluster::machine::{gpu_memory, memory, thunderbolt};
use paceline_cluster::network::{
    has_thunderbolt_bridge, idle_rdma_ports, unauthorised_thunderbolt,
};
use paceline_comm_rdma::{RdmaError, Verbs};
use serde_json::Value;

use self::checks::gib;
use self::child::{Ended, Ending};
use self::report::{Outcome, Row};

/// A process with checks: its command line, and what it reports.
#[derive(Debug)]
pub struct Part<'a> {
    pub command: Command,
    /// The checks that it has a row for.
    pub checks: &'a [&'a str],
    /// Name of the check that it ends in order.
    pub exit: &'a str,
}

/// Runs the process of some checks; `show` receives its rows, a failed one for each check without,
/// and one about its end. `None` if it was cancelled.
pub fn part(
    mut part: Part<'_>,
    until: Instant,
    is_cancelled: &dyn Fn() -> bool,
    show: &mut dyn FnMut(Row),
) -> io::Result<Option<()>> {
    let mut seen: Vec<(String, Outcome)> = Vec::new();
    let mut see = |line: &str| {
        if let Ok(row) = serde_json::from_str::<Row>(line) {
            seen.push((row.check.clone(), row.outcome));
            show(row);
        }
    };
    let ended = child::run(&mut part.command, until, is_cancelled, &mut see)?;
    if ended.ending == Ending::Cancelled {
        return Ok(None);
    }
    let is_missing = |check: &&&str| seen.iter().all(|(name, _)| name != **check);
    for check in part.checks.iter().filter(is_missing) {
        show(Row::failed(check, ended.reason()));
    }
    let is_idle = seen.iter().all(|(_, end)| *end != Outcome::Passed);
    show(exit(part.exit, &ended, is_idle));
    Ok(Some(()))
}

/// The row about the end of a process; `is_idle`: none of its checks passed.
fn exit(check: &str, ended: &Ended, is_idle: bool) -> Row {
    match ended.ending {
        Ending::Exited(status) if status.is_success() && is_idle => {
            Row::skipped(check, "none of its checks passed")
        }
        Ending::Exited(status) if status.is_success() => {
            Row::passed(check, "exit code").with(0.0, "")
        }
        _ => Row::failed(check, ended.reason()),
    }
}

/// Memory, RDMA devices and Thunderbolt ports of this machine, as the system states them. Takes
/// under a second.
pub fn machine() -> Vec<Row> {
    let main = memory().map(|all| (all.total.0, all.available.map(|free| free.0)));
    let gpu = gpu_memory().map(|gpu| (gpu.total.0, Some(gpu.limit.0)));
    let devices = Verbs::load().and_then(|verbs| verbs.devices());
    vec![
        memory_row("main memory", main, "available"),
        memory_row("GPU memory", gpu, "for a model"),
        rdma(devices.map(|names| names.len())),
        thunderbolt_row(thunderbolt(), unauthorised_thunderbolt().len()),
    ]
}

/// Memory in all, and the part of it that is free for a model.
fn memory_row(check: &str, bytes: Option<(u64, Option<u64>)>, of: &str) -> Row {
    let Some((total, free)) = bytes else {
        return Row::skipped(check, "the system states none");
    };
    let note = free.map(|free| format!("{:.1} GiB {of}", gib(free)));
    Row::passed(check, note.unwrap_or_default()).with(gib(total), "GiB")
}

/// RDMA devices, by number. Their names may tell more than a person wants to post.
fn rdma(devices: Result<usize, RdmaError>) -> Row {
    const CHECK: &str = "RDMA devices";
    let count = match devices {
        Ok(0) => return Row::skipped(CHECK, "none"),
        Ok(count) => count,
        Err(error) => return Row::skipped(CHECK, error.to_string()),
    };
    if cfg!(target_os = "macos") && has_thunderbolt_bridge() {
        let note = "the Thunderbolt ports are one bridge, over which RDMA does not work";
        return Row::skipped(CHECK, note);
    }
    let idle = match idle_rdma_ports().len() {
        0 => String::new(),
        idle => format!("{} idle", counted(idle, "port")),
    };
    Row::passed(CHECK, idle).with(count as f64, "")
}

/// Thunderbolt ports, and connected devices that this machine does not let in.
fn thunderbolt_row(ports: usize, refused: usize) -> Row {
    const CHECK: &str = "Thunderbolt ports";
    if ports == 0 {
        return Row::skipped(CHECK, "none");
    }
    let refused = match refused {
        0 => String::new(),
        refused => format!("{} not authorised", counted(refused, "device")),
    };
    Row::passed(CHECK, refused).with(ports as f64, "")
}

/// Speeds out of the JSON object of `paceline bench model`; `engine` computed, and `note` names the
/// model. Rows of the program that it was compared with come behind.
pub fn speed(engine: &str, note: &str, measured: &Value) -> Vec<Row> {
    let peer = measured["peer"].as_str();
    let both = [(Some(engine), "paceline"), (peer, "peer_result")];
    let mut rows = Vec::new();
    for (name, key) in both {
        let Some(name) = name else { continue };
        for what in ["prefill", "decode"] {
            let check = format!("{name}: {what}");
            let median = &measured[key][format!("{what}_tok_s")]["median"];
            rows.push(match median.as_f64() {
                Some(speed) => Row::passed(&check, note).with(speed, "tokens/s"),
                None => Row::failed(&check, "no figure"),
            });
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;

    use super::*;

    /// The rows of a shell that stands for the process of two checks.
    fn rows(script: &str) -> Vec<Row> {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]);
        let of = Part {
            command,
            checks: &["a", "b"],
            exit: "end",
        };
        let mut rows = Vec::new();
        let until = Instant::now() + Duration::from_secs(600);
        part(of, until, &|| false, &mut |row| rows.push(row)).unwrap();
        rows
    }

    const A: &str = r#"echo '{"check":"a","outcome":"passed","figure":null,"note":""}'"#;

    #[test]
    fn a_process_that_aborts_fails_the_checks_that_are_missing() {
        let all = rows(&format!("{A}; echo 'what(): no device' >&2; kill -ABRT $$"));
        let outcomes: Vec<_> = all.iter().map(|row| (&*row.check, row.outcome)).collect();
        let (passed, failed) = (Outcome::Passed, Outcome::Failed);
        assert_eq!(outcomes, [("a", passed), ("b", failed), ("end", failed)]);
        for row in &all[1..] {
            assert!(row.note.starts_with("was ended by SIGABRT"), "{row:?}");
            assert!(row.note.ends_with("what(): no device"), "{row:?}");
        }
    }

    #[test]
    fn an_end_in_order_passes_unless_no_check_passed() {
        let b = A.replace("\"a\"", "\"b\"");
        assert_eq!(rows(&format!("{A}; {b}"))[2].outcome, Outcome::Passed);
        let half = format!("{A}; {}", b.replace("passed", "skipped"));
        assert_eq!(rows(&half)[2].outcome, Outcome::Passed);
        let idle = format!("{A}; {b}").replace("passed", "skipped");
        assert_eq!(rows(&idle)[2].outcome, Outcome::Skipped);
        assert_eq!(
            rows(&format!("{A}; {b}; exit 1"))[2].outcome,
            Outcome::Failed
        );
    }

    #[test]
    fn speeds_come_with_those_of_the_other_program() {
        let run = |prefill, decode| json!({"prefill_tok_s": {"median": prefill}, "decode_tok_s": {"median": decode}});
        let alone = json!({"paceline": run(100.0, 10.0), "peer": null});
        assert_eq!(speed("mlx", "x", &alone).len(), 2);
        let both = json!({
            "paceline": run(100.0, 10.0), "peer": "mlx-lm", "peer_result": run(90.0, 9.0),
        });
        let rows = speed("mlx", "x", &both);
        let figures: Vec<_> = rows
            .iter()
            .map(|row| (&*row.check, row.figure.as_ref().map(|figure| figure.value)))
            .collect();
        assert_eq!(
            figures,
            [
                ("mlx: prefill", Some(100.0)),
                ("mlx: decode", Some(10.0)),
                ("mlx-lm: prefill", Some(90.0)),
                ("mlx-lm: decode", Some(9.0)),
            ]
        );
        assert_eq!(speed("mlx", "x", &json!({}))[0].outcome, Outcome::Failed);
    }
}
