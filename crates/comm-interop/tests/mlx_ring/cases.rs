//! The cases of MLX's own suite (`cases.py`) in rings of MLX's ranks and ours.
//!
//! A rank of ours is a Python process that runs the same script. Its `mx.distributed` is replaced
//! by calls to a child process (`shim.py`): this test binary, which its environment makes a rank.

use std::net::{SocketAddr, TcpStream};

use paceline_base::Rank;
use paceline_comm::Plaintext;
use paceline_comm_interop::mlx_ring;

use super::python::{Hosts, one_ring, patient, python};
use super::serve;

/// MLX's ring suite as of the reference has eight common cases and five of its own.
const CASES: usize = 13;

#[test]
fn mlxs_own_cases_pass_in_a_mixed_ring() {
    let Some(python) = python("MLX's ring suite in a mixed ring") else {
        return;
    };
    let _alone = one_ring();
    for (ranks, connections) in [("rprp", 1), ("pr", 2)] {
        let mut hosts = Hosts::new(ranks.len(), connections);
        let (binary, size) = (std::env::current_exe().unwrap(), ranks.len().to_string());
        let env = [
            ("COMM_TEST_BINARY", binary.to_str().unwrap()),
            ("COMM_TEST_SIZE", &size),
        ];
        let start = |(rank, kind)| {
            let kind = if kind == 'p' { "mlx" } else { "paceline" };
            hosts.start_with(&python, rank, "cases.py", &[kind], &env)
        };
        let pythons: Vec<_> = ranks.chars().enumerate().map(start).collect();
        for python in pythons {
            let log = python.finish();
            let passed = log.lines().filter(|line| line.starts_with("ok test_"));
            assert_eq!(passed.count(), CASES, "{log}");
            assert!(log.ends_with(&format!("done {CASES}\n")), "{log}");
        }
    }
}

/// Not a test: the rank behind `shim.py`, in its own process.
#[test]
fn serve() {
    let Ok(control) = std::env::var("COMM_TEST_CONTROL") else {
        return;
    };
    let rank = Rank(std::env::var("MLX_RANK").unwrap().parse().unwrap());
    let hosts = std::fs::read_to_string(std::env::var("MLX_HOSTFILE").unwrap()).unwrap();
    let hosts: Vec<Vec<SocketAddr>> = serde_json::from_str(&hosts).unwrap();
    let stream = TcpStream::connect(control).unwrap();
    stream.set_nodelay(true).unwrap();
    let ring = mlx_ring::join(rank, &hosts, Plaintext::Refused, patient()).unwrap();
    serve::serve(&ring, &stream, patient);
}
