//! The rank behind `shim.py`: runs the calls received over a connection.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;

use half::{bf16, f16};
use paceline_base::Rank;
use paceline_comm::{Complex64, DataMut, Deadline, Element, Error, Group, Reduce};

/// Runs calls until the connection ends, each with deadline `by`.
pub(crate) fn serve(group: &dyn Group, stream: &TcpStream, by: fn() -> Deadline) {
    let (mut reader, mut writer) = (BufReader::new(stream), stream);
    let mut line = String::new();
    while reader.read_line(&mut line).unwrap() > 0 {
        let answer = match answer(group, &line, &mut reader, by()) {
            Ok(bytes) => [format!("ok {}\n", bytes.len()).as_bytes(), &bytes].concat(),
            Err(error) => format!("error {error}\n").into_bytes(),
        };
        writer.write_all(&answer).unwrap();
        line.clear();
    }
}

/// Runs one call: `NAME TYPE INPUT_BYTES OUTPUT_BYTES PEER`, then the input.
fn answer(
    group: &dyn Group,
    line: &str,
    reader: &mut impl Read,
    by: Deadline,
) -> Result<Vec<u8>, Error> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let number = |i: usize| words[i].parse::<usize>().unwrap();
    let mut input = vec![0; number(2)];
    reader.read_exact(&mut input).unwrap();
    let call = (words[0], number(3), Rank(words[4].parse().unwrap()));
    match words[1] {
        "bool" => typed::<bool>(group, call, &input, by),
        "i8" => typed::<i8>(group, call, &input, by),
        "i16" => typed::<i16>(group, call, &input, by),
        "i32" => typed::<i32>(group, call, &input, by),
        "i64" => typed::<i64>(group, call, &input, by),
        "u8" => typed::<u8>(group, call, &input, by),
        "u16" => typed::<u16>(group, call, &input, by),
        "u32" => typed::<u32>(group, call, &input, by),
        "u64" => typed::<u64>(group, call, &input, by),
        "f16" => typed::<f16>(group, call, &input, by),
        "bf16" => typed::<bf16>(group, call, &input, by),
        "f32" => typed::<f32>(group, call, &input, by),
        "f64" => typed::<f64>(group, call, &input, by),
        "complex64" => typed::<Complex64>(group, call, &input, by),
        other => panic!("no type {other}"),
    }
}

fn typed<T: Element + Default>(
    group: &dyn Group,
    (name, output, peer): (&str, usize, Rank),
    input: &[u8],
    by: Deadline,
) -> Result<Vec<u8>, Error> {
    let mut values = vec![T::default(); input.len() / T::DTYPE.bytes()];
    DataMut::new(&mut values).copy_from_bytes(input);
    let mut results = vec![T::default(); output / T::DTYPE.bytes()];
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
