//! Element types and reductions as MPI handles.
//!
//! MPI's own operations handle integers of 32 and 64 bits and the sums of `f32` and `f64`. All
//! others are user operations over our own `fold`:
//! - types that MPI's C interface lacks;
//! - `bool` as logic;
//! - max and min of floats, where MPI does not specify NaN;
//! - small integers, whose sums Open MPI 4.1.4 saturates where it uses AVX (i8: 127 instead of the
//!   wrapped -53, seen with 2 ranks).

use std::os::raw::{c_int, c_void};
use std::ptr;
use std::slice;

use mpi::ffi::{self, MPI_Datatype, MPI_Op, MPI_User_function};

use paceline_comm::provider::{OperandSide, fold};
use paceline_comm::{Dtype, Reduce};

/// The MPI type of elements of `dtype`: of their size, and their own if MPI reduces it.
pub(super) fn datatype(dtype: Dtype) -> MPI_Datatype {
    // SAFETY: the library's constants, written before `main` and never again.
    unsafe {
        match dtype {
            Dtype::I8 => ffi::RSMPI_INT8_T,
            Dtype::I16 => ffi::RSMPI_INT16_T,
            Dtype::I32 => ffi::RSMPI_INT32_T,
            Dtype::I64 => ffi::RSMPI_INT64_T,
            Dtype::U8 | Dtype::Bool => ffi::RSMPI_UINT8_T,
            Dtype::U16 | Dtype::F16 | Dtype::Bf16 => ffi::RSMPI_UINT16_T,
            Dtype::U32 => ffi::RSMPI_UINT32_T,
            Dtype::U64 | Dtype::Complex64 => ffi::RSMPI_UINT64_T,
            Dtype::F32 => ffi::RSMPI_FLOAT,
            Dtype::F64 => ffi::RSMPI_DOUBLE,
        }
    }
}

/// Whether MPI's own operation follows the rules of [`Reduce`].
const fn is_native(op: Reduce, dtype: Dtype) -> bool {
    match dtype {
        Dtype::I32 | Dtype::I64 | Dtype::U32 | Dtype::U64 => true,
        Dtype::F32 | Dtype::F64 => matches!(op, Reduce::Sum | Reduce::Prod),
        _ => false,
    }
}

/// The user operations of a session.
pub(super) struct Ops {
    made: Vec<(Reduce, Dtype, MPI_Op)>,
}

impl Ops {
    pub(super) fn new() -> Result<Self, c_int> {
        let mut made = Vec::new();
        for (op, dtype, function) in functions() {
            // SAFETY: any value will do for what `MPI_Op_create` overwrites; MPI has started, and
            // the function has the signature that MPI asks for.
            let code = unsafe {
                let mut handle = ffi::RSMPI_SUM;
                let code = ffi::MPI_Op_create(function, 1, ptr::from_mut(&mut handle));
                made.push((op, dtype, handle));
                code
            };
            if code != 0 {
                return Err(code);
            }
        }
        Ok(Self { made })
    }

    pub(super) fn get(&self, op: Reduce, dtype: Dtype) -> MPI_Op {
        let made = self
            .made
            .iter()
            .find(|made| (made.0, made.1) == (op, dtype));
        // SAFETY: the library's constants, written before `main` and never again.
        made.map_or_else(|| unsafe { native(op) }, |made| made.2)
    }
}

/// MPI's own operation.
///
/// # Safety
/// None beyond reading constants of the library.
unsafe fn native(op: Reduce) -> MPI_Op {
    // SAFETY: the library's constants, written before `main` and never again.
    unsafe {
        match op {
            Reduce::Sum => ffi::RSMPI_SUM,
            Reduce::Max => ffi::RSMPI_MAX,
            Reduce::Min => ffi::RSMPI_MIN,
            Reduce::Prod => ffi::RSMPI_PROD,
        }
    }
}

/// A function for each pair without a native operation.
fn functions() -> impl Iterator<Item = (Reduce, Dtype, MPI_User_function)> {
    let of = |dtype| Reduce::ALL.into_iter().map(move |op| (op, dtype));
    let pairs = Dtype::ALL.into_iter().flat_map(of);
    pairs
        .filter(|(op, dtype)| !is_native(*op, *dtype))
        .map(|(op, dtype)| {
            let function: MPI_User_function = match dtype {
                Dtype::Bool => for_op::<{ Dtype::Bool.code() }>(op),
                Dtype::I8 => for_op::<{ Dtype::I8.code() }>(op),
                Dtype::I16 => for_op::<{ Dtype::I16.code() }>(op),
                Dtype::U8 => for_op::<{ Dtype::U8.code() }>(op),
                Dtype::U16 => for_op::<{ Dtype::U16.code() }>(op),
                Dtype::F16 => for_op::<{ Dtype::F16.code() }>(op),
                Dtype::Bf16 => for_op::<{ Dtype::Bf16.code() }>(op),
                Dtype::F32 => for_op::<{ Dtype::F32.code() }>(op),
                Dtype::F64 => for_op::<{ Dtype::F64.code() }>(op),
                _ => for_op::<{ Dtype::Complex64.code() }>(op),
            };
            (op, dtype, function)
        })
}

fn for_op<const DTYPE: u8>(op: Reduce) -> MPI_User_function {
    match op {
        Reduce::Sum => Some(reduce::<DTYPE, { Reduce::Sum.code() }>),
        Reduce::Max => Some(reduce::<DTYPE, { Reduce::Max.code() }>),
        Reduce::Min => Some(reduce::<DTYPE, { Reduce::Min.code() }>),
        Reduce::Prod => Some(reduce::<DTYPE, { Reduce::Prod.code() }>),
    }
}

/// `inout[i] = input[i] op inout[i]`, as MPI specifies.
///
/// # Safety
/// Called by MPI with two arrays of `*len` elements that do not overlap.
unsafe extern "C" fn reduce<const DTYPE: u8, const OP: u8>(
    input: *mut c_void,
    inout: *mut c_void,
    len: *mut c_int,
    _: *mut MPI_Datatype,
) {
    // A panic must not cross into C; both codes are from enums, so both are always valid.
    let (Some(dtype), Some(op)) = (Dtype::from_code(DTYPE), Reduce::from_code(OP)) else {
        return;
    };
    // SAFETY: as promised above; elements have no padding.
    let (inout, input) = unsafe {
        let bytes = usize::try_from(*len).unwrap_or(0) * dtype.bytes();
        (
            slice::from_raw_parts_mut(inout.cast::<u8>(), bytes),
            slice::from_raw_parts(input.cast::<u8>(), bytes),
        )
    };
    fold(op, dtype, OperandSide::Second, inout, input);
}
