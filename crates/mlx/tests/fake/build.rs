//! Compiles libraries that stand in for MLX's, for tests of this crate and of others.

use std::path::{Path, PathBuf};
use std::process::Command;

use paceline_mlx::LIBRARY_NAME;

/// The library of `source`, a file of this folder, in `folder`, compiled with `arguments`; `None`
/// if there is no compiler.
///
/// # Panics
/// If there is one and it fails.
pub(crate) fn build(folder: &Path, source: &str, arguments: &[&str]) -> Option<PathBuf> {
    let sources = concat!(env!("CARGO_MANIFEST_DIR"), "/../mlx/tests/fake");
    let library = folder.join(LIBRARY_NAME);
    let compiler = std::env::var("RUSTC").unwrap_or("rustc".to_string());
    let status = Command::new(compiler)
        .args(["--edition", "2024", "--crate-type", "cdylib"])
        .args(["--cap-lints", "allow"])
        .args(arguments)
        .arg("-o")
        .args([&library, &Path::new(sources).join(source)])
        .status()
        .ok()?;
    assert!(status.success(), "{source}: {status}");
    Some(library)
}

/// The library of `source` in `folder`, linked with the real `library`; `None` if there is no
/// compiler.
#[allow(dead_code, reason = "not each test links")]
pub(crate) fn linked(folder: &Path, library: &Path, source: &str) -> Option<PathBuf> {
    let place = library.parent()?.display();
    let link = [
        format!("-Lnative={place}"),
        format!("-Clink-arg=-Wl,-rpath,{place}"),
    ];
    build(folder, source, &link.each_ref().map(|argument| &**argument))
}
