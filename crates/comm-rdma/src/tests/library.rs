//! Compiles the software verbs library, for the tests of this crate and of the binary, which share
//! this file.

use std::path::{Path, PathBuf};
use std::process::Command;

use paceline_comm_rdma::LIBRARY;

/// Compiles the library under the system's name; `None` if there is no compiler.
///
/// # Panics
/// If the compiler fails.
pub(crate) fn build(folder: &Path) -> Option<PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../comm-rdma/examples/ibverbs.rs");
    let library = folder.join(LIBRARY);
    let compiler = std::env::var("RUSTC").unwrap_or("rustc".to_string());
    let status = Command::new(compiler)
        .args([
            "--edition",
            "2024",
            "--crate-type",
            "cdylib",
            "--crate-name",
            "ibverbs",
        ])
        .args(["-C", "opt-level=1", "--cap-lints", "allow", "-o"])
        .args([&library, &source])
        .status()
        .ok()?;
    assert!(status.success(), "the software library: {status}");
    Some(library)
}
