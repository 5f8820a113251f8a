//! Curves for TensorBoard: files of records, each an `Event` as a protocol buffer.
//!
//! ```text
//! record   length (u64), its masked CRC-32C (u32), the event, its masked CRC-32C; little-endian
//! Event    1 wall_time (f64), 2 step, 3 file_version, 5 summary, 7 session_log
//! Summary  1 value, any number: 1 tag, 2 simple_value (f32)
//! ```
//! Source: `tensorflow/core/lib/io/record_writer.h`, `tensorflow/core/util/event.proto`.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::metrics::Measured;

/// Wire types of fields.
const VARINT: u64 = 0;
const FIXED_64: u64 = 1;
const BYTES: u64 = 2;
const FIXED_32: u64 = 5;

/// A file that TensorBoard reads while it grows.
#[derive(Debug)]
pub(crate) struct EventFile {
    path: PathBuf,
}

impl EventFile {
    /// Begins a file of its own in `folder`, which is made. TensorBoard forgets what earlier files
    /// have of steps after `step`: they were not saved.
    pub(crate) fn start(folder: &Path, step: u64, now_s: f64) -> Result<Self, Error> {
        std::fs::create_dir_all(folder).map_err(Error::file("make", folder))?;
        let name = format!("events.out.tfevents.{:010}.paceline-{step}", now_s as u64);
        let events = Self {
            path: folder.join(name),
        };
        let version = field(3, b"brain.Event:2");
        let mut bytes = record(&[time(now_s), version].concat());
        if step > 0 {
            let start = field(7, &number(1, 1));
            bytes.extend(record(&[time(now_s), number(2, step + 1), start].concat()));
        }
        events.append(&bytes)?;
        Ok(events)
    }

    /// Adds what was measured of a step.
    pub(crate) fn add(&self, m: &Measured, now_s: f64) -> Result<(), Error> {
        let known = [
            ("loss/train", Some(m.loss)),
            ("loss/valid", m.val_loss),
            ("perplexity/valid", m.val_ppl),
            ("learning_rate", Some(m.lr)),
            ("grad_norm", Some(m.grad_norm)),
            ("tokens_per_second", Some(m.tok_s)),
            ("flop_share", m.flop_share),
            ("nodes", Some(f64::from(m.nodes))),
        ];
        let values = known.into_iter().filter_map(|(tag, x)| {
            let x = (x? as f32).to_bits();
            let simple = [key(2, FIXED_32), x.to_le_bytes().to_vec()].concat();
            Some(field(1, &[field(1, tag.as_bytes()), simple].concat()))
        });
        let summary = field(5, &values.collect::<Vec<_>>().concat());
        self.append(&record(&[time(now_s), number(2, m.step), summary].concat()))
    }

    fn append(&self, bytes: &[u8]) -> Result<(), Error> {
        let file = OpenOptions::new()
            .append(true)
            .create(true)
            .open(&self.path);
        let written = file.and_then(|mut file| file.write_all(bytes));
        written.map_err(Error::file("write", &self.path))
    }
}

fn varint(mut n: u64) -> Vec<u8> {
    let mut out = Vec::new();
    while n >= 0x80 {
        out.push(n as u8 | 0x80);
        n >>= 7;
    }
    out.push(n as u8);
    out
}

fn key(number: u64, wire: u64) -> Vec<u8> {
    varint(number << 3 | wire)
}

fn number(field: u64, n: u64) -> Vec<u8> {
    [key(field, VARINT), varint(n)].concat()
}

fn field(number: u64, bytes: &[u8]) -> Vec<u8> {
    [
        key(number, BYTES),
        varint(bytes.len() as u64),
        bytes.to_vec(),
    ]
    .concat()
}

fn time(s: f64) -> Vec<u8> {
    [key(1, FIXED_64), s.to_le_bytes().to_vec()].concat()
}

fn record(event: &[u8]) -> Vec<u8> {
    let length = (event.len() as u64).to_le_bytes();
    let sums = [masked(&length), masked(event)].map(u32::to_le_bytes);
    [&length[..], &sums[0], event, &sums[1]].concat()
}

/// CRC-32C, turned and shifted so that a sum of data with a sum in it is no trivial one.
fn masked(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xA282_EAD8)
}

/// Castagnoli's polynomial, bit by bit: a record has some hundred bytes.
fn crc32c(bytes: &[u8]) -> u32 {
    const POLYNOMIAL: u32 = 0x82F6_3B78;
    let mut sum = u32::MAX;
    for byte in bytes {
        sum ^= u32::from(*byte);
        for _ in 0..8 {
            let low = sum & 1;
            sum = (sum >> 1) ^ (POLYNOMIAL * low);
        }
    }
    !sum
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 3720, section B.4, and a record of TensorFlow's writer for a known event.
    #[test]
    fn sums_and_records_are_those_of_the_specification() {
        assert_eq!(crc32c(b"123456789"), 0xE306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8A91_36AA);
        let event = [time(1.0), field(3, b"brain.Event:2")].concat();
        assert_eq!(event.len(), 24);
        let record = record(&event);
        assert_eq!(record.len(), 8 + 4 + 24 + 4);
        assert_eq!(record[..8], 24u64.to_le_bytes());
        assert_eq!(varint(300), [0xAC, 0x02]);
    }

    #[test]
    fn a_run_that_goes_on_has_steps_after_its_checkpoint_forgotten() {
        let folder = tempfile::tempdir().unwrap();
        let events = EventFile::start(folder.path(), 7, 1.75e9).unwrap();
        let measured = serde_json::json!({
            "step": 8, "loss": 2.5, "lr": 1e-3, "grad_norm": 1.0, "judged": 3, "tokens": 4,
            "val_loss": 2.0, "val_ppl": 7.4, "step_s": 1.0, "tok_s": 4.0, "nodes": 2
        });
        let measured = serde_json::from_value(measured).unwrap();
        events.add(&measured, 1.75e9).unwrap();
        let bytes = std::fs::read(&events.path).unwrap();
        let (mut at, mut found) = (0, Vec::new());
        while at < bytes.len() {
            let n = u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
            let event = &bytes[at + 12..at + 12 + n];
            let sum = u32::from_le_bytes(bytes[at + 12 + n..at + 16 + n].try_into().unwrap());
            assert_eq!(masked(event), sum);
            found.push(event.to_vec());
            at += 16 + n;
        }
        assert_eq!(found.len(), 3);
        assert!(found[1].ends_with(&[0x3A, 2, 8, 1]), "a start of a session");
        let has = |text: &[u8]| found[2].windows(text.len()).any(|w| w == text);
        assert!(has(b"loss/valid") && has(&2.5f32.to_le_bytes()) && !has(b"flop_share"));
    }
}
