//! Access of a worker to its parent's files over the control channel, where they share no folder.
//!
//! The worker sends rows of a result to the parent, which writes them. In a sort, the worker also
//! sends the parts that it partitions into buckets, and receives a bucket's keys before its lease.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use paceline_base::lock;
use paceline_cluster::Control;

use crate::messages::{FromWorker, PackedPartial, ToWorker};
use crate::{Dtype, Error, Sink};

/// The worker's end of its control channel.
pub(crate) type ParentChannel = Arc<Control<ToWorker, FromWorker>>;

/// Bytes of values in a message: 1.4 MB as text. A connection of 2 Mbit/s moves that within the 10
/// s that a parent waits for a message to be read. A whole number of values of any type.
pub(crate) const PIECE_BYTES: usize = 1 << 20;

/// A job's exchange with the worker's parent: receives keys, sends results.
#[derive(Debug)]
pub struct ParentConnection {
    channel: ParentChannel,
    job: u64,
    /// Type of the values that are written.
    dtype: Dtype,
    /// Keys of buckets that will be leased next.
    waiting: Mutex<BTreeMap<u64, Vec<u8>>>,
}

impl ParentConnection {
    pub(crate) const fn new(channel: ParentChannel, job: u64, dtype: Dtype) -> Self {
        Self {
            channel,
            job,
            dtype,
            waiting: Mutex::new(BTreeMap::new()),
        }
    }

    /// Sends the keys of a part that is cut into buckets. They count once the part is done.
    ///
    /// # Errors
    /// [`Error::Cluster`].
    pub(crate) fn put(&self, part: u64, keys: &[u8]) -> Result<(), Error> {
        for piece in keys.chunks(PIECE_BYTES) {
            self.channel.send(&FromWorker::Keys {
                job: self.job,
                part,
                keys: PackedPartial(piece.to_vec()),
            })?;
        }
        Ok(())
    }

    /// Appends keys to those of a bucket.
    pub(crate) fn store(&self, bucket: u64, keys: Vec<u8>) {
        lock(&self.waiting).entry(bucket).or_default().extend(keys);
    }

    /// Removes the keys of a bucket.
    pub(crate) fn remove(&self, bucket: u64) -> Vec<u8> {
        lock(&self.waiting).remove(&bucket).unwrap_or_default()
    }
}

impl Sink for ParentConnection {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn write_bytes(&self, first_row: u64, bytes: &[u8]) -> Result<(), Error> {
        let rows = PIECE_BYTES / self.dtype.bytes();
        for (first_row, piece) in (first_row..).step_by(rows).zip(bytes.chunks(PIECE_BYTES)) {
            self.channel.send(&FromWorker::Rows {
                job: self.job,
                first_row,
                values: PackedPartial(piece.to_vec()),
            })?;
        }
        Ok(())
    }
}
