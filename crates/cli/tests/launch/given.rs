//! Inputs of ranks: environment, files, arguments, folder.

use std::fs;

use super::{SshHosts, finish};

/// Prints what MLX reads.
const SHOW: &str = r#"echo "$MLX_RANK $(cat "$MLX_HOSTFILE" 2>/dev/null) $V" "$@""#;

#[test]
fn local_ranks_are_a_ring() {
    let world = SshHosts::new();
    let ended = world
        .run_launch(&["-n", "2", "--env", "V=x y", "--", "sh", "-c", SHOW])
        .ok();
    let ring = r#"[["127.0.0.1:32323"], ["127.0.0.1:32324"]]"#;
    let expected = [format!("[0] 0 {ring} x y"), format!("[1] 1 {ring} x y")];
    assert_eq!(ended.lines(), expected);
    assert_eq!(ended.stderr, "");
    assert!(world.calls().is_empty(), "this machine needs no ssh");
    world.assert_clean();
}

#[test]
fn other_machines_are_reached_by_ssh() {
    let world = SshHosts::new();
    let hostfile = world.hostfile(3);
    let args = [
        "--hostfile",
        &hostfile,
        "--connections-per-ip",
        "2",
        "-p",
        "5000",
        "--",
    ];
    let ended = world
        .run_launch(&[&args[..], &["sh", "-c", SHOW]].concat())
        .ok();
    let ring = r#"[["10.0.0.0:5000", "10.0.0.0:5001"], ["10.0.0.1:5002", "10.0.0.1:5003"], ["10.0.0.2:5004", "10.0.0.2:5005"]]"#;
    let expected = [0, 1, 2].map(|rank| format!("[{rank}] {rank} {ring} "));
    assert_eq!(ended.lines(), expected);
    world.assert_clean();
}

/// A host has one connection: the keeper's session makes it, those of the ranks join it.
#[test]
fn sessions_of_a_host_share_a_connection() {
    let world = SshHosts::new();
    let hostfile = world.hostfile(4);
    world.run_launch(&["--hostfile", &hostfile, "true"]).ok();
    let calls = world.calls();
    for host in ["a", "b"] {
        let of = |role: &str| -> Vec<String> {
            let words = calls
                .iter()
                .map(|call| call.split('\t').collect::<Vec<_>>());
            let ours = words.filter(|words| words.contains(&host) && words.contains(&role));
            let path = |word: &&&str| word.starts_with("ControlPath=");
            ours.map(|words| words.iter().find(path).unwrap().to_string())
                .collect()
        };
        let leads = of("ControlMaster=yes");
        assert_eq!(leads.len(), 1, "{calls:?}");
        assert_eq!(
            of("ControlMaster=no"),
            [&leads[..], &leads].concat(),
            "{calls:?}"
        );
        assert!(!leads[0].contains("none"), "{leads:?}");
    }
    for call in &calls {
        assert!(
            call.contains("\tBatchMode=yes\t"),
            "it must not ask: {call}"
        );
    }
}

/// Nothing of the launcher's environment reaches other machines, and no value can be read from
/// the arguments of a process.
#[test]
fn values_are_not_in_sight() {
    let world = SshHosts::new();
    let hostfile = world.hostfile(1);
    let args = [
        "--hostfile",
        &hostfile,
        "--env",
        "TOKEN=hunter2",
        "--",
        "sh",
        "-c",
    ];
    let script = "echo \"$TOKEN $LEAK\"; cat /proc/[0-9]*/cmdline | tr '\\0' '\\n' | grep -c 'TOKEN=hunte[r]2'";
    let mut command = world.launch(&[&args[..], &[script]].concat());
    let ended = super::finish(command.env("LEAK", "leaked").spawn().unwrap());
    // The launcher's own command line has it, because this test put it there.
    assert_eq!(ended.stdout, "[0] hunter2 \n[0] 1\n", "{ended:?}");
    let log = world.calls().concat();
    assert!(!log.contains("hunter2"), "{log}");
}

#[test]
fn words_arrive_as_they_are() {
    let world = SshHosts::new();
    let hostfile = world.hostfile(1);
    let words = [
        "",
        " a  b ",
        "it's",
        "\"q\"",
        "$HOME `id` \\n",
        "*",
        "--hosts",
        "\u{e9}\n2",
        "!",
    ];
    let value = "it's \"$HOME\" \\ ;\n&";
    let script = r#"printf '<%s>' "$V" "$@""#;
    let env = format!("V={value}");
    let mut args = vec![
        "--hostfile",
        &hostfile,
        "--env",
        &env,
        "--",
        "sh",
        "-c",
        script,
        "sh",
    ];
    args.extend(words);
    let ended = world.run_launch(&args).ok();
    let expected: String = [value]
        .iter()
        .chain(&words)
        .map(|word| format!("<{word}>"))
        .collect();
    assert_eq!(ended.stdout.replace("[0] ", ""), format!("{expected}\n"));
}

/// MLX takes flags of the program for its own unless `--` comes first.
#[test]
fn the_programs_flags_are_its_own() {
    let world = SshHosts::new();
    let ended = world
        .run_launch(&["-n", "1", "echo", "--verbose", "-n", "7", "--", "--hosts"])
        .ok();
    assert_eq!(ended.stdout, "[0] --verbose -n 7 -- --hosts\n");
}

#[test]
fn the_folder_is_the_launchers_where_it_exists() {
    let world = SshHosts::new();
    let here = world.path("here").canonicalize().unwrap();
    let ended = world.run_launch(&["pwd"]).ok();
    assert_eq!(ended.stdout, format!("[0] {}\n", here.display()));
    let wanted = world.path("it's there");
    fs::create_dir(&wanted).unwrap();
    let wanted = wanted.to_str().unwrap();
    let ended = world.run_launch(&["--cwd", wanted, "pwd"]).ok();
    assert_eq!(ended.stdout, format!("[0] {wanted}\n"));
    let ended = world.run_launch(&["-n", "2", "--cwd", "/nonexistent", "echo", "ran"]);
    assert_eq!(
        (ended.code, ended.stdout.as_str()),
        (Some(1), ""),
        "{ended:?}"
    );
    // Either rank may be the first to end. The words of the other may be cut off.
    let error = ended.stderr.split_once("error: cannot start rank ");
    let rank = error.and_then(|(_, rest)| rest.chars().next());
    let rank = rank.unwrap_or_else(|| panic!("{ended:?}"));
    for part in [
        format!("[{rank}] cannot change to /nonexistent\n"),
        "hint: ".to_owned(),
    ] {
        assert!(
            ended.stderr.contains(&part),
            "no {part:?} in {}",
            ended.stderr
        );
    }
}

/// A value that is not on the command line is in no list of processes, here or there.
#[test]
fn a_variable_without_a_value_is_passed_on_unseen() {
    let world = SshHosts::new();
    let hostfile = world.hostfile(1);
    // The pattern does not match itself.
    let show = r#"echo "$KEPT"; cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\0' '\n' |
        grep -e '^launch$' -e 'a-word[-]of'"#;
    let args = ["--hostfile", &hostfile, "--env", "KEPT"];
    let mut command = world.launch(&[&args[..], &["--", "sh", "-c", show]].concat());
    command.env("KEPT", "a-word-of-the-user");
    let ended = finish(command.spawn().unwrap()).ok();
    let lines: Vec<&str> = ended.stdout.lines().collect();
    assert_eq!(lines[0], "[0] a-word-of-the-user");
    let shown = &lines[1..];
    assert!(!shown.is_empty(), "lists of processes are readable");
    assert!(shown.iter().all(|line| *line == "[0] launch"), "{shown:?}");
    assert!(!world.calls().is_empty(), "it ran elsewhere");
}

#[test]
fn the_hostfile_brings_backend_and_environment() {
    let world = SshHosts::new();
    let path = world.path("jaccl.json");
    let text = r#"{"backend": "jaccl", "envs": ["V=file", "W=file"], "hosts": [
        {"ssh": "a", "ips": ["10.0.0.1"], "rdma": [null, ["rdma_en5", "rdma_en6"]]},
        {"ssh": "b", "rdma": ["rdma_en2", null]}]}"#;
    fs::write(&path, text).unwrap();
    let hostfile = path.to_str().unwrap();
    let show =
        r#"echo "$V $W $MLX_JACCL_COORDINATOR ${MLX_JACCL_RING-mesh} $(cat $MLX_IBV_DEVICES)""#;
    let devices = r#"[[null, ["rdma_en5", "rdma_en6"]], ["rdma_en2", null]]"#;
    for (backend, ring) in [(&[][..], "mesh"), (&["--backend", "jaccl-ring"], "1")] {
        let args = [
            &["--hostfile", hostfile, "--env", "V=own"],
            backend,
            &["--", "sh", "-c", show],
        ];
        let ended = world.run_launch(&args.concat()).ok();
        let expected = [0, 1].map(|r| format!("[{r}] own file 10.0.0.1:32323 {ring} {devices}"));
        assert_eq!(ended.lines(), expected);
    }
    let show = "echo $NCCL_HOST_IP $NCCL_PORT $MLX_WORLD_SIZE $CUDA_VISIBLE_DEVICES $NCCL_DEBUG";
    let args = [
        "-n",
        "2",
        "--backend",
        "nccl",
        "--verbose",
        "--nccl-port",
        "7",
        "sh",
        "-c",
        show,
    ];
    let ended = world.run_launch(&args).ok();
    assert_eq!(
        ended.lines(),
        ["[0] 127.0.0.1 7 2 0 INFO", "[1] 127.0.0.1 7 2 1 INFO"]
    );
}

#[test]
fn python_runs_what_follows() {
    let world = SshHosts::new();
    fs::write(world.path("here/p.py"), "print('hi')").unwrap();
    let ended = world.run_launch(&["--python", "cat", "p.py"]).ok();
    assert_eq!(ended.stdout, "[0] print('hi')\n");
    let ended = world
        .run_launch(&["--print-python", "--python", "/opt/python"])
        .ok();
    assert_eq!(ended.stdout, "/opt/python\n");
}

/// A greeting of a login shell is no output of the program.
#[test]
fn greetings_are_not_output() {
    let world = SshHosts::new();
    fs::create_dir(world.path("hosts/a/bin")).unwrap();
    let hostfile = world.hostfile(1);
    let fake = fs::read_to_string(world.path("bin/ssh")).unwrap();
    let greeting = fake.replacen(
        "exec setsid",
        "echo 'Welcome!'; printf 'no newline '\nexec setsid",
        1,
    );
    world.replace_ssh(&greeting);
    let ended = world
        .run_launch(&["--hostfile", &hostfile, "echo", "out"])
        .ok();
    assert_eq!(ended.stdout, "[0] out\n");
}
