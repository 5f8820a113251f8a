//! Gathers with other ranks as operations of MLX's graph.
//!
//! Functions of our own in the C layer (`crates/store/data/mlx-group.cpp`) give MLX a group whose
//! gathers are calls of this program. A layer without them has no such group: [`GraphGroup::new`]
//! then gives `None`.

use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::table::ObjectHandle;
use crate::{Array, Error, Library, Stream};

/// Gathers the parts of all ranks: this rank's part, and memory for all. `false`: it failed.
pub type Exchange = Box<dyn Fn(&[u8], &mut [u8]) -> bool + Send + Sync>;

type ExchangeFunction =
    extern "C" fn(*mut c_void, *const c_void, usize, *mut c_void, usize) -> c_int;
type DropFunction = extern "C" fn(*mut c_void);

/// The functions of the layer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GroupTable {
    new: unsafe extern "C" fn(
        c_int,
        c_int,
        ExchangeFunction,
        *mut c_void,
        DropFunction,
    ) -> *mut c_void,
    free: unsafe extern "C" fn(*mut c_void),
    all_gather:
        unsafe extern "C" fn(*mut ObjectHandle, *mut c_void, ObjectHandle, ObjectHandle) -> c_int,
}

impl GroupTable {
    /// The functions, if the layer has them.
    pub(crate) fn look_up(library: &libloading::Library) -> Option<Self> {
        // SAFETY: the types are those of `mlx-group.cpp`, the only source of these names.
        unsafe {
            Some(Self {
                new: *library.get(b"paceline_group_new\0").ok()?,
                free: *library.get(b"paceline_group_free\0").ok()?,
                all_gather: *library.get(b"paceline_group_all_gather\0").ok()?,
            })
        }
    }
}

/// Called by MLX's thread of the processor.
extern "C" fn exchange(
    payload: *mut c_void,
    own: *const c_void,
    own_bytes: usize,
    all: *mut c_void,
    all_bytes: usize,
) -> c_int {
    // SAFETY: the payload of `GraphGroup::new`, which MLX drops after its last call. The arrays are
    // computed, are as long, and no other operation touches them meanwhile.
    let (exchange, own, all) = unsafe {
        let exchange = &*payload.cast::<Exchange>();
        let own = std::slice::from_raw_parts(own.cast::<u8>(), own_bytes);
        (
            exchange,
            own,
            std::slice::from_raw_parts_mut(all.cast::<u8>(), all_bytes),
        )
    };
    // No panic may leave this function.
    let done = catch_unwind(AssertUnwindSafe(|| exchange(own, all)));
    c_int::from(!done.unwrap_or(false))
}

extern "C" fn drop_payload(payload: *mut c_void) {
    // SAFETY: `GraphGroup::new` made it of such a box, and MLX calls this once.
    drop(unsafe { Box::from_raw(payload.cast::<Exchange>()) });
}

/// The ranks that gather, for MLX's graphs.
#[derive(derive_more::Debug)]
#[debug("group in MLX's graph")]
pub struct GraphGroup {
    table: GroupTable,
    group: *mut c_void,
}

impl GraphGroup {
    /// A group of `size` ranks for its member `rank`. `exchange` is called by a thread of MLX's
    /// while arrays are evaluated. `None` if the layer has no such groups.
    pub fn new(
        library: &Library,
        (rank, size): (u32, u32),
        exchange_parts: Exchange,
    ) -> Option<Self> {
        let table = *library.group()?;
        let payload = Box::into_raw(Box::new(exchange_parts)).cast();
        let (rank, size) = (c_int::try_from(rank).ok()?, c_int::try_from(size).ok()?);
        // SAFETY: the payload is of the type that both functions expect.
        let group = unsafe { (table.new)(rank, size, exchange, payload, drop_payload) };
        (!group.is_null()).then_some(Self { table, group })
    }

    /// The parts `(n, ..)` of all ranks, `(size n, ..)` in rank order. All ranks have equal shapes.
    ///
    /// # Errors
    /// [`Error::Call`]. An exchange that fails is an error of the evaluation.
    pub fn all_gather(&self, stream: &Stream, part: &Array) -> Result<Array, Error> {
        const NAME: &str = "paceline_group_all_gather";
        // SAFETY: live handles.
        Array::made_by(stream.library(), NAME, |out| unsafe {
            (self.table.all_gather)(out, self.group, part.handle, stream.handle)
        })
    }
}

impl Drop for GraphGroup {
    fn drop(&mut self) {
        // SAFETY: a live group, used nowhere else. Arrays of its gathers keep what they need.
        unsafe { (self.table.free)(self.group) };
    }
}
