//! Lines come whole and with their rank; input goes where it should.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::Stdio;
use std::thread;

use super::{SshHosts, feed, finish};
use crate::common::complaints;

/// MLX loses what is in the pipe when a process ends.
#[test]
fn the_last_output_is_not_lost() {
    let world = SshHosts::new();
    let hostfile = world.hostfile(2);
    let script =
        "i=0; while [ $i -lt 5000 ]; do i=$((i+1)); echo line $i; done; echo bye >&2; exit 0";
    let ended = world
        .run_launch(&["--hostfile", &hostfile, "sh", "-c", script])
        .ok();
    for rank in 0..2 {
        let of_rank = ended
            .stdout
            .lines()
            .filter(|line| line.starts_with(&format!("[{rank}] ")));
        assert_eq!(of_rank.count(), 5000);
    }
    assert_eq!(ended.stderr.lines().count(), 2, "{}", ended.stderr);
}

#[test]
fn input_goes_where_it_should() {
    let world = SshHosts::new();
    let bytes: Vec<u8> = (0..300_000_u32)
        .flat_map(|i| (i as u16).to_le_bytes())
        .collect();
    for hosts in ["local", "remote"] {
        let hostfile = world.hostfile(2);
        let hosts = match hosts {
            "local" => vec!["-n", "2"],
            _ => vec!["--hostfile", &hostfile],
        };
        for (stdin, sizes) in [
            (&[][..], [600_000, 0]),
            (&["--stdin", "rank0"], [600_000, 0]),
            (&["--stdin", "all"], [600_000, 600_000]),
            (&["--stdin", "none"], [0, 0]),
        ] {
            let args = [&hosts, stdin, &["--", "sh", "-c", "cksum; echo end"]].concat();
            let mut command = world.launch(&args);
            let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
            let own = bytes.clone();
            let writer = thread::spawn({
                let mut stdin = child.stdin.take().unwrap();
                // Where nobody reads, the pipe breaks.
                move || drop(stdin.write_all(&own))
            });
            let ended = finish(child).ok();
            writer.join().unwrap();
            let size = |rank: usize| -> usize {
                let prefix = format!("[{rank}] ");
                let line = ended
                    .stdout
                    .lines()
                    .find_map(|line| line.strip_prefix(&prefix));
                line.unwrap().split(' ').nth(1).unwrap().parse().unwrap()
            };
            assert_eq!([size(0), size(1)], sizes, "{args:?}");
        }
    }
}

/// With MLX a rank that does not read breaks the launcher's pipe, or is fed for ever.
#[test]
fn ranks_need_not_read_their_input() {
    let world = SshHosts::new();
    let input = vec![b'x'; 1 << 20];
    for script in ["exit 0", "head -c 1 >one.$MLX_RANK"] {
        let args = ["-n", "2", "--stdin", "all", "sh", "-c", script];
        let mut child = world.launch(&args).stdin(Stdio::piped()).spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        // More than the pipes hold: it is not all taken, and nobody waits for that.
        let own = input.clone();
        let writer = thread::spawn(move || drop(stdin.write_all(&own)));
        let ended = finish(child).ok();
        writer.join().unwrap();
        assert_eq!((ended.stdout.as_str(), ended.stderr.as_str()), ("", ""));
    }
}

/// Bytes come unchanged, the control characters of terminals included.
#[test]
fn input_is_not_touched() {
    let world = SshHosts::new();
    let hostfile = world.hostfile(1);
    let mut command = world.launch(&["--hostfile", &hostfile, "od", "-An", "-tx1", "-v"]);
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    feed(&mut child, b"\x00\x03\x04\r\n\x1a\x7f\xff\\0'");
    let ended = finish(child).ok();
    assert_eq!(ended.stdout, "[0]  00 03 04 0d 0a 1a 7f ff 5c 30 27\n");
}

#[test]
fn a_reader_that_leaves_ends_all() {
    let world = SshHosts::new();
    // Both ranks run, and have said which process they are, before the first byte of output.
    let script = "echo $$ >id.$MLX_RANK; \
                  while ! [ -s id.0 ] || ! [ -s id.1 ]; do sleep 0.02; done; \
                  while :; do echo x; done";
    let mut command = world.launch(&["-n", "2", "--grace", "1", "sh", "-c", script]);
    let mut child = command.spawn().unwrap();
    let mut byte = [0];
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut byte).unwrap();
    drop(stdout);
    let ended = finish(child);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(!ended.stderr.contains("error"), "{ended:?}");
    super::assert_gone(&[world.path("here/id.0"), world.path("here/id.1")]);
    world.assert_clean();
}

/// A stream of the launcher that does not wait, and its other end.
fn hasty() -> (OwnedFd, UnixStream) {
    let (own, other) = UnixStream::pair().unwrap();
    own.set_nonblocking(true).unwrap();
    (own.into(), other)
}

/// With MLX, streams that do not wait end in BlockingIOError: a terminal that another program has
/// switched, a pipe of a program that shares it.
#[test]
fn streams_that_do_not_wait_are_waited_for() {
    let world = SshHosts::new();
    let ((stdin, mut keys), (stdout, mut shown)) = (hasty(), hasty());
    let script = "cat; i=0; while [ $i -lt 5000 ]; do i=$((i+1)); echo a line of some length; done";
    let mut command = world.launch(&["-n", "2", "--stdin", "all", "sh", "-c", script]);
    let mut child = command.stdin(stdin).stdout(stdout).spawn().unwrap();
    drop(command); // its ends of the streams
    let mut first = [0; 10];
    for line in ["1st\n", "2nd\n"] {
        // Nothing is there to read before, and nothing after.
        keys.write_all(line.as_bytes()).unwrap();
        for _ in 0..2 {
            shown.read_exact(&mut first[..8]).unwrap();
            assert!(first.starts_with(b"[") && first[4..8] == *line.as_bytes());
        }
    }
    drop(keys);
    // The lines are more than the stream holds; reading begins once it has been full for a while.
    thread::sleep(std::time::Duration::from_millis(300));
    let mut rest = String::new();
    shown.read_to_string(&mut rest).unwrap();
    assert!(
        rest.lines()
            .all(|line| line[4..] == *"a line of some length")
    );
    assert_eq!(rest.lines().count(), 10_000);
    let said = complaints(&mut child);
    assert_eq!((child.wait().unwrap().code(), said.as_str()), (Some(0), ""));
}
