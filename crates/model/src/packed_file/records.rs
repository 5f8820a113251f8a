//! The parts of a packed file: matrices of units, headers, the index and the end.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use paceline_tensor::{MatrixMemory, PACKING};

/// Revision of the files. Version 2: an index. Version 3: pieces of 256 KiB.
const VERSION: u32 = 3;

const MAGIC: &[u8; 8] = b"plpack\r\n";
const RECORD_MAGIC: &[u8; 8] = b"plmatrix";
const END_MAGIC: &[u8; 8] = b"plpacked";

/// Bytes of a header, and what data is a multiple of: the largest sector of usual disks.
pub(crate) const BLOCK: usize = 4096;

/// Bytes that are read and hashed at a time. 128 KiB to 4 MiB read an NVMe disk at the same rate.
/// An expert of 3 MB alone takes 2.1 ms by 128 or 256 KiB, and 2.5 ms by 1 MiB (11-30, epyc3).
pub(crate) const PIECE: usize = 1 << 18;

/// Bytes of a record's fields.
const FIELDS: usize = 96;

/// A hash, or the bytes of one.
pub(crate) type Hash = [u8; 32];

/// Matrices that are read and dropped together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum StreamUnit {
    /// A layer, without its routed experts.
    Layer(usize),
    /// An expert of a layer.
    Expert(usize, usize),
}

/// A matrix that stays on the disk until a step needs it.
#[derive(Clone, Debug)]
pub(crate) struct StreamedMatrix {
    pub(crate) unit: StreamUnit,
    pub(crate) memory: MatrixMemory,
    /// Offset of its data in the file, a multiple of 4 KiB.
    pub(crate) start: u64,
    /// Hash of the hashes of its pieces.
    pub(crate) sum: Hash,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RecordHeader {
    pub(super) index: u64,
    pub(super) bytes: u64,
    pub(super) is_tiny: bool,
    /// Of type, shape and options.
    pub(super) key: Hash,
    /// Of the hashes of the data's pieces.
    pub(super) sum: Hash,
}

impl RecordHeader {
    fn fields(&self) -> [u8; FIELDS] {
        let tiny = u64::from(self.is_tiny).to_le_bytes();
        let (index, bytes) = (self.index.to_le_bytes(), self.bytes.to_le_bytes());
        let fields: [&[u8]; 6] = [RECORD_MAGIC, &index, &bytes, &tiny, &self.key, &self.sum];
        let mut own = [0; FIELDS];
        own.copy_from_slice(&fields.concat());
        own
    }

    pub(super) fn block(&self) -> [u8; BLOCK] {
        block(&[&self.fields()])
    }

    /// The record with these fields; `None` if they are none.
    fn of(fields: &[u8]) -> Option<Self> {
        let number = |at: usize| fields[at..].first_chunk().copied().map(u64::from_le_bytes);
        let hash = |at: usize| fields[at..].first_chunk::<32>().copied();
        let record = Self {
            index: number(8)?,
            bytes: number(16)?,
            is_tiny: number(24)? == 1,
            key: hash(32)?,
            sum: hash(64)?,
        };
        (record.fields() == fields[..FIELDS]).then_some(record)
    }
}

pub(super) fn is_of(file: &File, header: &[u8; BLOCK]) -> bool {
    let mut own = [0; BLOCK];
    file.read_exact_at(&mut own, 0).is_ok() && own == *header
}

pub(super) fn file_header(of: &str) -> [u8; BLOCK] {
    let of = blake3::hash(of.as_bytes());
    let [version, packing] = [VERSION, PACKING].map(u32::to_le_bytes);
    block(&[MAGIC, &version, &packing, of.as_bytes()])
}

/// The header of the record at `at`; `None` if there is none.
pub(super) fn read_record(file: &File, at: u64) -> Option<RecordHeader> {
    let mut own = [0; BLOCK];
    file.read_exact_at(&mut own, at).ok()?;
    let record = RecordHeader::of(&own)?;
    (record.block() == own).then_some(record)
}

/// Writes the headers of all records and the end at `at`. Returns the offset behind them.
///
/// # Errors
/// The system's answer.
pub(super) fn write_index(file: &File, at: u64, records: &[RecordHeader]) -> io::Result<u64> {
    let mut index: Vec<u8> = records.iter().flat_map(RecordHeader::fields).collect();
    let (sum, n) = (blake3::hash(&index), records.len() as u64);
    index.resize(index.len().next_multiple_of(BLOCK), 0);
    index.extend(block(&[END_MAGIC, &n.to_le_bytes(), sum.as_bytes()]));
    file.write_all_at(&index, at)?;
    Ok(at + index.len() as u64)
}

/// The headers of all records of a complete file; `None` for another.
pub(super) fn read_index(file: &File) -> Option<Vec<RecordHeader>> {
    let len = usize::try_from(file.metadata().ok()?.len()).ok()?;
    let (at, mut end) = (len.checked_sub(BLOCK)?, [0; BLOCK]);
    file.read_exact_at(&mut end, at as u64).ok()?;
    if end != block(&[END_MAGIC, &end[8..48]]) {
        return None;
    }
    let n = usize::try_from(u64::from_le_bytes(*end[8..].first_chunk()?)).ok()?;
    let bytes = n.checked_mul(FIELDS)?;
    let start = at.checked_sub(bytes.checked_next_multiple_of(BLOCK)?)?;
    let mut index = vec![0; bytes];
    file.read_exact_at(&mut index, start as u64).ok()?;
    let is_sound = blake3::hash(&index).as_bytes()[..] == end[16..48];
    let fields = index.chunks_exact(FIELDS).map(RecordHeader::of);
    is_sound.then(|| fields.collect()).flatten()
}

/// Fields, their hash, and zeros.
fn block(fields: &[&[u8]]) -> [u8; BLOCK] {
    let fields = fields.concat();
    let mut block = [0; BLOCK];
    block[..fields.len()].copy_from_slice(&fields);
    block[fields.len()..fields.len() + 32].copy_from_slice(blake3::hash(&fields).as_bytes());
    block
}
