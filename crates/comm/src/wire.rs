//! Frames, byte by byte, little-endian. No byte is trusted: an invalid frame decodes to `None`.
//!
//! ```text
//! frame on the lanes for calls and messages: 60 bytes, then `payload` bytes
//!   0  "PLc1"      4  what: 1 call, 2 message, 3 credit, 4 abort
//!   5  algorithm   6  step (u16)        8  call (44)        52  payload (u64)
//! call
//!   0  kind   1  reduction   2  dtype   3  0   4  root, to or from (u32)   8  tag (u32)
//!  12  sequence (u64)   20  length (u64)   28  digest (u64)   36  site (u64)
//! control frame: 128 bytes
//!   0  "PLk1"      4  what: 1 beat, 2 left, 3 silent, 4 garbled, 5 failed   8  at (u64)
//!  16  rank (u32) 20  milliseconds (u32)   24  error, if failed
//! ```

use paceline_base::Rank;

use crate::status::{Cause, FailureNotice};
use crate::{Call, Dtype, Error, Kind, Reduce, Site};

/// Bytes of a frame before its payload.
pub(crate) const HEADER_BYTES: usize = 60;
const HEADER_MAGIC: [u8; 4] = *b"PLc1";

pub(crate) const CONTROL_BYTES: usize = 128;
const CONTROL_MAGIC: [u8; 4] = *b"PLk1";

/// Buffer arguments of an [`Error::Length`], by their number on the wire.
const BUFFERS: [&str; 6] = ["counts", "input", "output", "data", "sends", "receives"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FrameKind {
    /// Part of a collective.
    Call,
    Message,
    /// The receiver consumed `call.length` messages.
    Credit,
    /// The sender abandoned its current collective; the control connection carries the cause.
    Abort,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) what: FrameKind,
    /// The algorithm of the collective, see `plan`.
    pub(crate) algorithm: u8,
    /// Step of the plan that this frame belongs to.
    pub(crate) step: u16,
    pub(crate) call: Call,
    /// Bytes that follow.
    pub(crate) payload: u64,
}

/// Writes consecutive little-endian values.
struct FieldWriter<'a>(&'a mut [u8]);

impl FieldWriter<'_> {
    fn put(&mut self, bytes: &[u8]) {
        let (head, tail) = std::mem::take(&mut self.0).split_at_mut(bytes.len());
        head.copy_from_slice(bytes);
        self.0 = tail;
    }

    fn put_u8(&mut self, value: u8) {
        self.put(&[value]);
    }

    fn put_u32(&mut self, value: u32) {
        self.put(&value.to_le_bytes());
    }

    fn put_u64(&mut self, value: u64) {
        self.put(&value.to_le_bytes());
    }
}

/// Reads what [`FieldWriter`] wrote; `None` at the end of the bytes.
struct FieldReader<'a>(&'a [u8]);

impl FieldReader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, tail) = self.0.split_first_chunk()?;
        self.0 = tail;
        Some(*head)
    }

    fn take_u8(&mut self) -> Option<u8> {
        self.take().map(|[byte]| byte)
    }

    fn take_u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_le_bytes)
    }

    fn take_u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn take_u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    fn take_rank(&mut self) -> Option<Rank> {
        self.take_u32().map(Rank)
    }
}

impl Header {
    pub(crate) fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let mut writer = FieldWriter(&mut bytes);
        writer.put(&HEADER_MAGIC);
        writer.put_u8(match self.what {
            FrameKind::Call => 1,
            FrameKind::Message => 2,
            FrameKind::Credit => 3,
            FrameKind::Abort => 4,
        });
        writer.put_u8(self.algorithm);
        writer.put(&self.step.to_le_bytes());
        put_call(&mut writer, &self.call);
        writer.put_u64(self.payload);
        bytes
    }

    /// `None` if the bytes are no header.
    pub(crate) fn decode(bytes: &[u8; HEADER_BYTES]) -> Option<Self> {
        let mut reader = FieldReader(bytes);
        if reader.take()? != HEADER_MAGIC {
            return None;
        }
        let what = match reader.take_u8()? {
            1 => FrameKind::Call,
            2 => FrameKind::Message,
            3 => FrameKind::Credit,
            4 => FrameKind::Abort,
            _ => return None,
        };
        Some(Self {
            what,
            algorithm: reader.take_u8()?,
            step: reader.take_u16()?,
            call: take_call(&mut reader)?,
            payload: reader.take_u64()?,
        })
    }
}

fn put_call(writer: &mut FieldWriter<'_>, call: &Call) {
    let (kind, reduce, peer, tag) = match call.kind {
        Kind::Barrier => (1, 0, 0, 0),
        Kind::AllGather => (2, 0, 0, 0),
        Kind::AllReduce(op) => (3, op.code(), 0, 0),
        Kind::Broadcast { root } => (4, 0, root.0, 0),
        Kind::Send { to, tag } => (5, 0, to.0, tag),
        Kind::Recv { from, tag } => (6, 0, from.0, tag),
        Kind::ReduceScatter(op) => (7, op.code(), 0, 0),
        Kind::AllToAll => (8, 0, 0, 0),
    };
    writer.put(&[kind, reduce, call.dtype.code(), 0]);
    writer.put_u32(peer);
    writer.put_u32(tag);
    writer.put_u64(call.sequence);
    writer.put_u64(call.length);
    writer.put_u64(call.digest);
    writer.put_u64(call.site.code());
}

fn take_call(reader: &mut FieldReader<'_>) -> Option<Call> {
    let [kind, reduce, dtype, _] = reader.take()?;
    let (peer, tag) = (reader.take_rank()?, reader.take_u32()?);
    let kind = match kind {
        1 => Kind::Barrier,
        2 => Kind::AllGather,
        3 => Kind::AllReduce(Reduce::from_code(reduce)?),
        4 => Kind::Broadcast { root: peer },
        5 => Kind::Send { to: peer, tag },
        6 => Kind::Recv { from: peer, tag },
        7 => Kind::ReduceScatter(Reduce::from_code(reduce)?),
        8 => Kind::AllToAll,
        _ => return None,
    };
    Some(Call {
        kind,
        dtype: Dtype::from_code(dtype)?,
        sequence: reader.take_u64()?,
        length: reader.take_u64()?,
        digest: reader.take_u64()?,
        site: Site::from_code(reader.take_u64()?),
    })
}

/// A message between two ranks on their control connection.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Control {
    /// A heartbeat.
    Beat,
    /// The group is poisoned.
    News(FailureNotice),
}

impl Control {
    pub(crate) fn encode(&self) -> [u8; CONTROL_BYTES] {
        let mut bytes = [0; CONTROL_BYTES];
        let mut writer = FieldWriter(&mut bytes);
        writer.put(&CONTROL_MAGIC);
        let Self::News(news) = self else {
            writer.put_u8(1);
            return bytes;
        };
        let (what, rank, millis) = match news.cause {
            Cause::Left(rank) => (2, rank, 0),
            Cause::Silent { rank, millis } => (3, rank, millis),
            Cause::Garbled(rank) => (4, rank, 0),
            Cause::Failed(_) => (5, Rank(0), 0),
        };
        writer.put(&[what, 0, 0, 0]);
        writer.put_u64(news.at);
        writer.put_u32(rank.0);
        writer.put_u32(millis);
        if let Cause::Failed(error) = &news.cause {
            put_error(&mut writer, error);
        }
        bytes
    }

    /// `None` if the bytes are no control frame.
    pub(crate) fn decode(bytes: &[u8; CONTROL_BYTES]) -> Option<Self> {
        let mut reader = FieldReader(bytes);
        if reader.take()? != CONTROL_MAGIC {
            return None;
        }
        let [what, ..] = reader.take::<4>()?;
        let (at, rank, millis) = (reader.take_u64()?, reader.take_rank()?, reader.take_u32()?);
        let cause = match what {
            1 => return Some(Self::Beat),
            2 => Cause::Left(rank),
            3 => Cause::Silent { rank, millis },
            4 => Cause::Garbled(rank),
            5 => Cause::Failed(take_error(&mut reader)?),
            _ => return None,
        };
        Some(Self::News(FailureNotice { cause, at }))
    }
}

fn put_error(writer: &mut FieldWriter<'_>, error: &Error) {
    let head = |writer: &mut FieldWriter<'_>, code, call, rank: Rank| {
        writer.put_u8(code);
        put_call(writer, call);
        writer.put_u32(rank.0);
    };
    match error {
        Error::PeerLost { call, rank } => head(writer, 1, call, *rank),
        Error::Timeout { call, rank } => head(writer, 2, call, *rank),
        Error::Mismatch {
            rank,
            expected,
            got,
        } => {
            head(writer, 3, expected, *rank);
            put_call(writer, got);
        }
        Error::Length {
            call,
            rank,
            buffer,
            expected,
            got,
        } => {
            head(writer, 4, call, *rank);
            let number = BUFFERS.iter().position(|name| name == buffer);
            writer.put_u8(number.map_or(u8::MAX, |n| u8::try_from(n).unwrap_or(u8::MAX)));
            writer.put_u64(*expected);
            writer.put_u64(*got);
        }
        Error::NoSuchRank {
            call,
            rank,
            named,
            size,
        } => {
            head(writer, 5, call, *rank);
            writer.put_u32(named.0);
            writer.put_u32(*size);
        }
        Error::Silent { call, rank, millis } => {
            head(writer, 6, call, *rank);
            writer.put_u32(*millis);
        }
        Error::Garbled { call, rank } => head(writer, 7, call, *rank),
        Error::Unsupported { call, rank, .. } => head(writer, 8, call, *rank),
        Error::Library {
            call, rank, code, ..
        } => {
            head(writer, 9, call, *rank);
            writer.put_u32(code.cast_unsigned());
        }
        Error::System {
            call, rank, code, ..
        } => {
            head(writer, 10, call, *rank);
            writer.put_u32(code.cast_unsigned());
        }
    }
}

fn take_error(reader: &mut FieldReader<'_>) -> Option<Error> {
    let code = reader.take_u8()?;
    let (call, rank) = (take_call(reader)?, reader.take_rank()?);
    Some(match code {
        1 => Error::PeerLost { call, rank },
        2 => Error::Timeout { call, rank },
        3 => Error::Mismatch {
            rank,
            expected: call,
            got: take_call(reader)?,
        },
        4 => {
            let number = usize::from(reader.take_u8()?);
            Error::Length {
                call,
                rank,
                buffer: BUFFERS.get(number).copied().unwrap_or("a buffer"),
                expected: reader.take_u64()?,
                got: reader.take_u64()?,
            }
        }
        5 => Error::NoSuchRank {
            call,
            rank,
            named: reader.take_rank()?,
            size: reader.take_u32()?,
        },
        6 => Error::Silent {
            call,
            rank,
            millis: reader.take_u32()?,
        },
        7 => Error::Garbled { call, rank },
        // Backends with frames produce neither of these errors; the name of the backend that did is
        // unknown here.
        8 => Error::Unsupported {
            call,
            rank,
            backend: "its backend",
        },
        9 => Error::Library {
            call,
            rank,
            backend: "a library",
            code: reader.take_u32()?.cast_signed(),
        },
        10 => Error::System {
            call,
            rank,
            what: "set up the group",
            code: reader.take_u32()?.cast_signed(),
        },
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const CALL: Call = Call {
        sequence: 7,
        kind: Kind::Send {
            to: Rank(3),
            tag: 0xdead_beef,
        },
        dtype: Dtype::F32,
        length: 1 << 40,
        digest: 0x0123_4567_89ab_cdef,
        site: Site::mark(77),
    };

    #[test]
    fn headers_come_back() {
        for (what, kind) in [
            (FrameKind::Call, Kind::Barrier),
            (FrameKind::Call, Kind::AllGather),
            (FrameKind::Call, Kind::AllReduce(Reduce::Max)),
            (FrameKind::Call, Kind::Broadcast { root: Rank(9) }),
            (FrameKind::Call, Kind::ReduceScatter(Reduce::Prod)),
            (FrameKind::Call, Kind::AllToAll),
            (FrameKind::Message, CALL.kind),
            (FrameKind::Credit, CALL.kind),
            (FrameKind::Abort, Kind::Barrier),
        ] {
            let header = Header {
                what,
                algorithm: 3,
                step: 515,
                call: Call { kind, ..CALL },
                payload: 99,
            };
            assert_eq!(Header::decode(&header.encode()), Some(header));
        }
    }

    #[test]
    fn news_come_back() {
        let got = Call {
            kind: Kind::Barrier,
            ..CALL
        };
        let (call, rank) = (CALL, Rank(2));
        for error in [
            Error::PeerLost { call, rank },
            Error::Timeout { call, rank },
            Error::Mismatch {
                rank,
                expected: call,
                got,
            },
            Error::Length {
                call,
                rank,
                buffer: "output",
                expected: 5,
                got: 6,
            },
            Error::NoSuchRank {
                call,
                rank,
                named: Rank(77),
                size: 3,
            },
            Error::Silent {
                call,
                rank,
                millis: 1500,
            },
            Error::Garbled { call, rank },
        ] {
            let cause = Cause::Failed(error);
            let control = Control::News(FailureNotice { cause, at: 12 });
            assert_eq!(Control::decode(&control.encode()), Some(control));
        }
        assert_eq!(
            Control::decode(&Control::Beat.encode()),
            Some(Control::Beat)
        );
    }

    #[test]
    fn any_bytes_are_a_frame_or_none() {
        let mut random = 1_u64;
        let mut next = || {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            random.to_le_bytes()[7]
        };
        for _ in 0..10_000 {
            let mut header: [u8; HEADER_BYTES] = std::array::from_fn(|_| next());
            header[..4].copy_from_slice(&HEADER_MAGIC);
            let _ = Header::decode(&header);
            let mut control: [u8; CONTROL_BYTES] = std::array::from_fn(|_| next() & 7);
            control[..4].copy_from_slice(&CONTROL_MAGIC);
            let _ = Control::decode(&control);
            crate::testing::parse_frames(&header);
            crate::testing::parse_frames(&control);
        }
    }
}
