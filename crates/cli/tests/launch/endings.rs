//! Failures, interruptions and deaths: the right code, and nothing left behind.

use std::path::PathBuf;
use std::process::Child;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use super::{SshHosts, assert_gone, finish, until};
use crate::nodes::processes::all_children;

/// The limit for events that should come at once, less what the machine withheld.
const SOON: Duration = Duration::from_secs(10);

/// Notes the id of itself and of a child of its own, then sleeps.
const SLEEP: &str = "cd $D; sleep 1000 & echo $! >child.$MLX_RANK; echo $$ >id.$MLX_RANK.part; \
                     mv id.$MLX_RANK.part id.$MLX_RANK; wait";

fn ids(world: &SshHosts, ranks: &[usize]) -> Vec<PathBuf> {
    let names = ranks
        .iter()
        .flat_map(|r| [format!("here/id.{r}"), format!("here/child.{r}")]);
    names.map(|name| world.path(&name)).collect()
}

/// The two kinds of hosts, `ranks` ranks.
fn kinds(world: &SshHosts, ranks: usize) -> [Vec<String>; 2] {
    let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
    [
        words(&["-n", &ranks.to_string()]),
        words(&["--hostfile", &world.hostfile(ranks)]),
    ]
}

/// Arguments that run `script` in the tests' folder.
fn args<'a>(
    world: &SshHosts,
    hosts: &'a [String],
    own: &[&'a str],
    script: &'a str,
) -> Vec<String> {
    let folder = format!("D={}", world.path("here").display());
    let mut all = hosts.to_vec();
    all.extend(["--env".to_owned(), folder]);
    let rest = own.iter().copied().chain(["--", "sh", "-c", script]);
    all.extend(rest.map(str::to_owned));
    all
}

fn start(world: &SshHosts, args: &[String]) -> Child {
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    world.launch(&args).spawn().unwrap()
}

fn wait_for_ranks(world: &SshHosts, ranks: &[usize]) {
    until("all ranks run", || {
        ids(world, ranks).iter().all(|file| file.exists())
    });
}

#[test]
fn the_first_failure_ends_all_with_its_code() {
    let world = SshHosts::new();
    let script = format!(
        "if [ $MLX_RANK = 1 ]; then while ! [ -e $D/id.0 ] || ! [ -e $D/id.2 ]; \
                          do sleep 0.02; done; exit 7; fi; {SLEEP}"
    );
    for hosts in kinds(&world, 3) {
        let ended = finish(start(&world, &args(&world, &hosts, &[], &script)));
        assert_eq!(ended.code, Some(7), "{ended:?}");
        let host = if hosts[0] == "-n" { "127.0.0.1" } else { "b" };
        let expected = format!("error: rank 1 on {host} exited with code 7\n");
        assert_eq!(ended.stderr, expected);
        assert!(ended.counted < SOON, "{ended:?}");
        assert_gone(&ids(&world, &[0, 2]));
        world.assert_clean();
        ids(&world, &[0, 2])
            .iter()
            .for_each(|file| std::fs::remove_file(file).unwrap());
    }
}

#[test]
fn codes_and_signals_are_passed_on() {
    let world = SshHosts::new();
    for (script, code, words) in [
        ("exit 0", 0, ""),
        ("exit 255", 255, "exited with code 255"),
        ("exit 2", 2, "exited with code 2"),
        ("kill -SEGV $$", 139, "was ended by SIGSEGV"),
        ("kill -KILL $$", 137, "was ended by SIGKILL"),
    ] {
        for hosts in kinds(&world, 1) {
            let ended = finish(start(&world, &args(&world, &hosts, &[], script)));
            assert_eq!(ended.code, Some(code), "{ended:?}");
            assert!(ended.stderr.contains(words), "{ended:?}");
        }
    }
    std::fs::write(world.path("here/p.py"), "print(1)").unwrap();
    let ended = world.run_launch(&["./p.py"]);
    assert_eq!(ended.code, Some(126), "{ended:?}");
    assert!(
        ended.stderr.contains("run a script as `-- python3 SCRIPT`"),
        "{ended:?}"
    );
    let ended = world.run_launch(&["no-such-program-anywhere"]);
    assert_eq!(ended.code, Some(127), "{ended:?}");
    for part in ["not found", "hint: the program must be on 127.0.0.1"] {
        assert!(
            ended.stderr.contains(part),
            "no {part:?} in {}",
            ended.stderr
        );
    }
}

/// MLX sends SIGTERM and waits for ever.
#[test]
fn a_rank_that_will_not_end_is_killed() {
    let world = SshHosts::new();
    let script = format!(
        "if [ $MLX_RANK = 0 ]; then while ! [ -e $D/id.1 ]; do sleep 0.02; done; exit 3; fi; \
         trap '' TERM INT; {SLEEP}"
    );
    for hosts in kinds(&world, 2) {
        let own = ["--grace", "1"];
        let ended = finish(start(&world, &args(&world, &hosts, &own, &script)));
        assert_eq!(ended.code, Some(3), "{ended:?}");
        let words = "rank 1 did not end by itself and was killed\n";
        assert!(ended.stderr.starts_with(words), "{ended:?}");
        assert!(
            ended.took > Duration::from_secs(1) && ended.counted < SOON,
            "{ended:?}"
        );
        assert_gone(&ids(&world, &[1]));
        world.assert_clean();
        ids(&world, &[1])
            .iter()
            .for_each(|file| std::fs::remove_file(file).unwrap());
    }
}

#[test]
fn ctrl_c_reaches_the_programs() {
    let world = SshHosts::new();
    let script = format!("trap 'echo caught; exit 0' INT; {SLEEP}");
    for hosts in kinds(&world, 2) {
        let child = start(&world, &args(&world, &hosts, &[], &script));
        wait_for_ranks(&world, &[0, 1]);
        kill_process(Pid::from_child(&child), Signal::INT).unwrap();
        let ended = finish(child);
        assert_eq!(ended.code, Some(1), "{ended:?}");
        assert_eq!(ended.lines(), ["[0] caught", "[1] caught"], "{ended:?}");
        assert_eq!(ended.stderr, "error: interrupted\n");
        assert_gone(&ids(&world, &[0, 1]));
        world.assert_clean();
        ids(&world, &[0, 1])
            .iter()
            .for_each(|file| std::fs::remove_file(file).unwrap());
    }
}

#[test]
fn a_launcher_that_is_killed_takes_all_with_it() {
    let world = SshHosts::new();
    let script = format!("trap '' HUP; {SLEEP}");
    for hosts in kinds(&world, 3) {
        let child = start(&world, &args(&world, &hosts, &[], &script));
        wait_for_ranks(&world, &[0, 1, 2]);
        kill_process(Pid::from_child(&child), Signal::KILL).unwrap();
        finish(child);
        assert_gone(&ids(&world, &[0, 1, 2]));
        // Its own temporary folder is left: nobody was there to remove it.
        let ranks_folders = || {
            let entries = std::fs::read_dir(world.path("tmp")).unwrap();
            let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
            names.filter(|name| name.starts_with("paceline.")).count()
        };
        until("the ranks' files are removed", || ranks_folders() == 0);
        ids(&world, &[0, 1, 2])
            .iter()
            .for_each(|file| std::fs::remove_file(file).unwrap());
    }
}

/// A connection that breaks ends the ranks on its host, and those on the others; so does a session
/// of a rank that breaks alone.
#[test]
fn a_connection_that_breaks_ends_all() {
    for (which, words) in [
        (0, "error: the connection to b is lost: "),
        (
            1,
            "error: the session of rank 1 on b is lost: it was ended by SIGKILL\n",
        ),
    ] {
        let world = SshHosts::new();
        let hosts = &kinds(&world, 2)[1];
        let child = start(&world, &args(&world, hosts, &[], SLEEP));
        wait_for_ranks(&world, &[0, 1]);
        // The stand-ins for ssh wait for their sessions; the keeper's is the first of a host.
        let sessions = all_children(child.id()).into_iter();
        let mut of_b = sessions.filter(|id| has_word(*id, "/hosts/b"));
        let session = Pid::from_raw(of_b.nth(which).unwrap() as i32).unwrap();
        kill_process(session, Signal::KILL).unwrap();
        let ended = finish(child);
        assert_eq!(ended.code, Some(1), "{ended:?}");
        assert!(ended.stderr.contains(words), "{ended:?}");
        assert!(ended.counted < SOON, "{ended:?}");
        assert_gone(&ids(&world, &[0, 1]));
        world.assert_clean();
    }
}

fn has_word(id: u32, word: &str) -> bool {
    let text = std::fs::read(format!("/proc/{id}/cmdline")).unwrap();
    String::from_utf8_lossy(&text).contains(word)
}

/// MLX raises in a thread, and the other ranks continue.
#[test]
fn a_host_that_cannot_be_reached_starts_nothing() {
    let world = SshHosts::new();
    let path = world.path("hosts.json");
    let text = r#"[{"ssh": "a", "ips": ["10.0.0.1"]}, {"ssh": "gone", "ips": ["10.0.0.2"]}]"#;
    std::fs::write(&path, text).unwrap();
    let ended = world.run_launch(&["--hostfile", path.to_str().unwrap(), "echo", "ran"]);
    assert_eq!(
        (ended.code, ended.stdout.as_str()),
        (Some(1), ""),
        "{ended:?}"
    );
    let expected = "error: cannot reach gone: ssh: connect to host gone port 22: Connection \
                    refused\nhint: `ssh gone true` must work without a question";
    assert!(ended.stderr.starts_with(expected), "{ended:?}");
    world.assert_clean();
}

/// A process that a program leaves behind is ended with it, and does not hold up the launch.
#[test]
fn what_a_program_leaves_behind_ends_with_it() {
    let world = SshHosts::new();
    let script = "cd $D; sleep 1000 & echo $! >child.$MLX_RANK; echo done";
    for hosts in kinds(&world, 2) {
        let ended = finish(start(&world, &args(&world, &hosts, &[], script))).ok();
        assert_eq!(ended.lines(), ["[0] done", "[1] done"]);
        assert!(ended.counted < SOON, "{ended:?}");
        assert_gone(&[world.path("here/child.0"), world.path("here/child.1")]);
    }
}

/// A daemon has left the group on purpose; it lives on, but does not hold up the launch.
#[test]
fn a_daemon_does_not_hold_up_the_launch() {
    let world = SshHosts::new();
    let script = "cd $D; setsid sh -c 'echo $$ >daemon; exec sleep 1000' & \
                  while ! [ -s daemon ]; do sleep 0.02; done; echo done";
    let hosts = &kinds(&world, 1)[0];
    let ended = finish(start(&world, &args(&world, hosts, &[], script))).ok();
    let id = std::fs::read_to_string(world.path("here/daemon")).unwrap();
    assert!(super::lives(id.trim()), "{id}");
    kill_process(
        Pid::from_raw(id.trim().parse().unwrap()).unwrap(),
        Signal::KILL,
    )
    .unwrap();
    assert!(ended.counted < SOON, "{ended:?}");
}
