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

/// `fake`, a library that stands for the real `library`, with our group of MLX
/// (`crates/store/data/mlx-group.cpp`), in `folder`. `None` without a C++ compiler, or without MLX
/// and its headers.
#[allow(dead_code, reason = "not each test needs it")]
pub(crate) fn with_group(folder: &Path, fake: &Path, library: &Path) -> Option<PathBuf> {
    let place = library.parent()?;
    let headers = place.with_file_name("include");
    let data = concat!(env!("CARGO_MANIFEST_DIR"), "/../store/data");
    let grouped = folder.join(LIBRARY_NAME);
    if !headers.is_dir() {
        return None;
    }
    let mut compile = Command::new(std::env::var("CXX").unwrap_or("c++".to_string()));
    compile.args(["-std=c++20", "-O0", "-fPIC", "-shared", "-include"]);
    compile.arg(Path::new(data).join("mlxc-shim.h"));
    compile.arg("-I").arg(headers);
    compile.arg(Path::new(data).join("mlx-group.cpp"));
    compile
        .arg("-Wl,--no-as-needed")
        .arg(fake)
        .arg("-L")
        .arg(place);
    compile.args(["-lmlxc", "-lmlx"]);
    compile.arg(format!("-Wl,-rpath,{}", place.display()));
    let status = compile.arg("-o").arg(&grouped).status().ok()?;
    assert!(status.success(), "mlx-group.cpp: {status}");
    Some(grouped)
}
