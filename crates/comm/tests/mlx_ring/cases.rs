//! The cases of MLX's own suite (`cases.py`) in rings of MLX's ranks and ours.
//!
//! A rank of ours is a Python process that runs the same script, with `mx.distributed` replaced by
//! calls to a child (`shim.py`): this test binary, told by its environment to be a rank.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};

use half::{bf16, f16};
use paceline_base::Rank;
use paceline_comm::mlx_ring::{self, Plaintext};
use paceline_comm::{Complex64, DataMut, Element, Error, Group, Reduce};

use crate::python::{Hosts, one_ring, patient, python};

/// MLX's ring suite as of the reference: eight common cases and five of its own.
const CASES: [&str; 13] = [
    "test_average_gradients",
    "test_all_reduce",
    "test_donation",
    "test_shard_linear",
    "test_shard_predicate",
    "test_all_gather",
    "test_clip_grad_norm_sharded",
    "test_jaccl_all_gather_factory_validation",
    "test_groups",
    "test_all_reduce_extra",
    "test_all_gather_extra",
    "test_send_recv",
    "test_all_gather_vjp",
];

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
            for case in CASES {
                assert!(
                    log.lines().any(|line| line == format!("ok {case}")),
                    "{case}:\n{log}"
                );
            }
            assert!(log.ends_with("done\n"), "{log}");
        }
    }
}

/// Not a test: the rank behind `shim.py`, in a process of its own.
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
    let mut reader = BufReader::new(&stream);
    let mut line = String::new();
    while reader.read_line(&mut line).unwrap() > 0 {
        let answer = match answer(&ring, &line, &mut reader) {
            Ok(bytes) => [format!("ok {}\n", bytes.len()).as_bytes(), &bytes].concat(),
            Err(error) => format!("error {error}\n").into_bytes(),
        };
        (&stream).write_all(&answer).unwrap();
        line.clear();
    }
}

/// Makes one call: `NAME TYPE INPUT_BYTES OUTPUT_BYTES PEER`, then the input.
fn answer(group: &dyn Group, line: &str, reader: &mut impl Read) -> Result<Vec<u8>, Error> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let number = |i: usize| words[i].parse::<usize>().unwrap();
    let mut input = vec![0; number(2)];
    reader.read_exact(&mut input).unwrap();
    let call = (words[0], number(3), Rank(words[4].parse().unwrap()));
    match words[1] {
        "bool" => typed::<bool>(group, call, &input),
        "i8" => typed::<i8>(group, call, &input),
        "i16" => typed::<i16>(group, call, &input),
        "i32" => typed::<i32>(group, call, &input),
        "i64" => typed::<i64>(group, call, &input),
        "u8" => typed::<u8>(group, call, &input),
        "u16" => typed::<u16>(group, call, &input),
        "u32" => typed::<u32>(group, call, &input),
        "u64" => typed::<u64>(group, call, &input),
        "f16" => typed::<f16>(group, call, &input),
        "bf16" => typed::<bf16>(group, call, &input),
        "f32" => typed::<f32>(group, call, &input),
        "f64" => typed::<f64>(group, call, &input),
        "complex64" => typed::<Complex64>(group, call, &input),
        other => panic!("no type {other}"),
    }
}

fn typed<T: Element + Default>(
    group: &dyn Group,
    (name, output, peer): (&str, usize, Rank),
    input: &[u8],
) -> Result<Vec<u8>, Error> {
    let mut values = vec![T::default(); input.len() / T::DTYPE.bytes()];
    DataMut::new(&mut values).copy_from_bytes(input);
    let mut results = vec![T::default(); output / T::DTYPE.bytes()];
    let by = patient();
    match name {
        "sum" => group.all_reduce_into(&values, &mut results, Reduce::Sum, by)?,
        "max" => group.all_reduce_into(&values, &mut results, Reduce::Max, by)?,
        "min" => group.all_reduce_into(&values, &mut results, Reduce::Min, by)?,
        "gather" => group.all_gather(&values, &mut results, by)?,
        "send" => group.send(&values, peer, 0, by)?,
        "recv" => group.recv(&mut results, peer, 0, by)?,
        "split" => drop(group.split(0, 0, by)?),
        other => panic!("no call {other}"),
    }
    Ok(DataMut::new(&mut results).bytes().to_vec())
}
