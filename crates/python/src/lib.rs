//! The module `paceline._native`: groups of `paceline-comm` for Python.
//!
//! ```text
//! paceline.distributed (Python)   names of MLX, arrays to buffers and back, defaults
//!         | buffers, element types, seconds
//! _native (this crate)            checks the buffers, releases the GIL, calls the group
//!         |
//! paceline_comm::Group
//! ```
//!
//! Nothing here reads the environment or depends on an array library. Python passes objects with
//! the buffer protocol; this module requires them contiguous in C order and uses their memory in
//! place.
//!
//! - `group`: a rank's handle and its calls; `join`: how a group is joined.
//! - `buffer`: memory of Python objects; `error`: failures as exceptions of `paceline.errors`.

mod buffer;
mod error;
mod group;
mod join;

use paceline_comm::Dtype;
use pyo3::prelude::*;

/// The extension module.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let dtypes: Vec<String> = Dtype::ALL.iter().map(Dtype::to_string).collect();
    module.add("DTYPES", dtypes)?;
    module.add("VERSION", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<group::PyGroup>()?;
    module.add_class::<join::PyListener>()?;
    module.add_function(wrap_pyfunction!(join::alone, module)?)?;
    module.add_function(wrap_pyfunction!(join::join, module)?)?;
    module.add_function(wrap_pyfunction!(join::join_launched, module)?)?;
    Ok(())
}
