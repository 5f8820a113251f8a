//! The identity of a model's files: a hash that detects replaced files.
//!
//! An instance has the identity of the files that it was loaded from. Each worker compares it with
//! the files that it opened before it computes. So a worker that restarts after the file was
//! replaced refuses the file. Clients see the identity in `system_fingerprint`.
//!
//! The hash covers of each weight file: its length, everything before its weights, and pages of its
//! weights, [`SAMPLES`] of all files together. In a GGUF file the part before the weights also has
//! the tokenizer and the chat template. Another training of the same shape has the same tensor
//! table to the byte, and other weights throughout. For a folder it also covers the small files
//! that affect text and numbers. Only the full hash, which `paceline pull` checks, detects a change
//! of single weights.

use std::fs::File;
use std::io::{self, Read as _};
use std::ops::Range;
use std::path::Path;

use paceline_base::hex;
use paceline_model::ModelSource;
use paceline_text::chat::TOOL_USE_FILE;
use sha2::{Digest, Sha256};

/// Hashed pages of weights, evenly spread over a model. A cold disk reads them in about 10 ms.
///
/// Other values in a share `f` of all weights stay unnoticed with a probability of `(1 - f)^64`.
/// That is 4 % for `f` = 5 %, however many files the model has. Each file has at least one page, so
/// a file of another training is always noticed. A model of `n` files has at most `64 + n` pages. A
/// node fetches their groups of 64 KiB before a start: 15 MB of 163 files, where 64 pages of each
/// file took 680 MB.
const SAMPLES: usize = 64;

const SAMPLE_BYTES: usize = 4096;

/// Hexadecimal digits of an identity: 64 bits, enough against accidents.
const DIGITS: usize = 16;

/// Files of a folder, besides its weights, that affect text and numbers.
const SMALL_FILES: [&str; 7] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
];

/// Most bytes read of a small file: the limit of a tokenizer file.
const SMALL_FILE_BYTES: u64 = 256 << 20;

/// The identity of a model: 16 hexadecimal digits.
///
/// Cost: one pass over the headers, 5 to 40 ms, and 64 pages of weights, or one of each file.
///
/// # Errors
/// A small file of a folder exists and cannot be read.
pub fn identity(source: &ModelSource) -> io::Result<String> {
    let mut hash = Sha256::new();
    match source {
        ModelSource::Gguf(file) => weigh(&mut hash, || file.contents()),
        ModelSource::Hf(folder) => {
            weigh(&mut hash, || folder.contents());
            for name in SMALL_FILES {
                add_small(&mut hash, &folder.path().join(name))?;
            }
            // Only where it is there: identities of other folders stay.
            let tool_use = folder.path().join(TOOL_USE_FILE);
            if tool_use.exists() {
                add_small(&mut hash, &tool_use)?;
            }
        }
    }
    let mut digits = hex(&hash.finalize());
    digits.truncate(DIGITS);
    Ok(digits)
}

/// Adds weight files, each with the number of bytes before its weights.
fn weigh<'a, F: Iterator<Item = (&'a [u8], usize)>>(hash: &mut Sha256, files: impl Fn() -> F) {
    let all = files().map(|(bytes, header)| bytes.len() - header).sum();
    for (bytes, header) in files() {
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update((header as u64).to_le_bytes());
        for part in parts(bytes.len(), header, all) {
            hash.update(&bytes[part]);
        }
    }
}

/// The hashed ranges of a weight file of `bytes` bytes, with `header` of them before the weights.
/// `all` is the number of bytes of weights in all files of its model.
pub fn parts(bytes: usize, header: usize, all: usize) -> impl Iterator<Item = Range<usize>> {
    let weights = bytes.saturating_sub(header);
    let sample = move |start: usize| header + start..header + weights.min(start + SAMPLE_BYTES);
    std::iter::once(0..header).chain(samples(weights, all).map(sample))
}

/// Offsets of the sampled pages in the `len` bytes of a file's weights; `all` is the length of its
/// model's weights. A small model of one file has all its pages sampled.
fn samples(len: usize, all: usize) -> impl Iterator<Item = usize> {
    let step = (all / SAMPLES).max(SAMPLE_BYTES);
    // The first tensor of a part is often a norm, which a later training hardly changes.
    let first = if len < all { step.min(len) / 2 } else { 0 };
    (first..len).step_by(step)
}

/// Adds a file of a folder, or its absence.
fn add_small(hash: &mut Sha256, path: &Path) -> io::Result<()> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            hash.update(u64::MAX.to_le_bytes());
            return Ok(());
        }
        Err(error) => return Err(error),
    };
    let mut content = Vec::new();
    file.take(SMALL_FILE_BYTES).read_to_end(&mut content)?;
    hash.update((content.len() as u64).to_le_bytes());
    hash.update(&content);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(bytes: &[u8], header: usize) -> String {
        of_files(&[(bytes, header)])
    }

    fn of_files(files: &[(&[u8], usize)]) -> String {
        let mut hash = Sha256::new();
        weigh(&mut hash, || files.iter().copied());
        format!("{:x}", hash.finalize())
    }

    #[test]
    fn header_length_and_weights_all_count() {
        let bytes: Vec<u8> = (0..1 << 20).map(|i: u32| (i / 7) as u8).collect();
        let mut header = bytes.clone();
        header[10] ^= 1;
        let other: Vec<u8> = bytes.iter().map(|b| b ^ 1).collect();
        let mut weights = bytes.clone();
        weights[100..].copy_from_slice(&other[100..]);
        let all = [
            of(&bytes, 100),
            of(&header, 100),
            of(&weights, 100),
            of(&bytes, 101),
            of(&bytes[1..], 100),
        ];
        let distinct: std::collections::BTreeSet<_> = all.iter().collect();
        assert_eq!(distinct.len(), all.len());
        assert_eq!(of(&bytes, 100), all[0]);
    }

    #[test]
    fn what_is_hashed_is_all_that_is_read() {
        let bytes: Vec<u8> = (0..1 << 20).map(|i: u32| (i / 7) as u8).collect();
        let mut read = vec![0; bytes.len()];
        for part in parts(bytes.len(), 5000, bytes.len() - 5000) {
            read[part.clone()].copy_from_slice(&bytes[part]);
        }
        assert_ne!(read, bytes);
        assert_eq!(of(&read, 5000), of(&bytes, 5000));
    }

    #[test]
    fn samples_are_few_and_reach_the_end() {
        for len in [0, 1, SAMPLE_BYTES, 100 * SAMPLE_BYTES + 1, 1 << 30] {
            let starts: Vec<usize> = samples(len, len).collect();
            assert!(starts.len() <= SAMPLES + 1, "{len}: {}", starts.len());
            let last = starts.last().map_or(0, |last| len - last);
            assert!(last <= (len / SAMPLES).max(SAMPLE_BYTES), "{len}");
        }
    }

    #[test]
    fn files_share_the_samples_and_each_has_one() {
        for files in [vec![1 << 30; 163], vec![1 << 30, 5, 0, 7 << 28, 1]] {
            let all = files.iter().sum();
            let counts = files.iter().map(|len| samples(*len, all).count());
            let counts: Vec<usize> = counts.collect();
            let pairs = || files.iter().zip(&counts);
            assert!(pairs().all(|(len, count)| (*len > 0) == (*count > 0)));
            let most = SAMPLES + files.len();
            assert!(counts.iter().sum::<usize>() <= most, "{counts:?}");
            let share = |len: usize| len * SAMPLES / all;
            assert!(pairs().all(|(len, count)| *count + 1 >= share(*len)));
        }
    }

    #[test]
    fn another_file_among_many_is_noticed() {
        let file = |no: usize| -> Vec<u8> { (0..9000).map(|i| (i * no / 7) as u8).collect() };
        let mut files: Vec<Vec<u8>> = (1..200).map(file).collect();
        let of = |files: &[Vec<u8>]| {
            let files: Vec<(&[u8], usize)> = files.iter().map(|it| (&**it, 100)).collect();
            of_files(&files)
        };
        let right = of(&files);
        for no in [0, 77, 198] {
            let own = std::mem::replace(&mut files[no], vec![0; 9000]);
            files[no][..100].copy_from_slice(&own[..100]);
            assert_ne!(of(&files), right, "{no}");
            files[no] = own;
        }
        assert_eq!(of(&files), right);
    }
}
