"""Builds MLX's C layer, `libmlxc`, that releases have beside the program.

    python packaging/layer.py linux-x86_64|linux-aarch64|darwin-arm64 [--out FOLDER]

The layer is mlx-c out of the crate `mlx-sys`, compiled as one file with the headers of MLX's wheel, as
`paceline engines install mlx` does where no release has it (`crates/store/src/engine/layer.rs`). Versions and
hashes are those of `crates/store/src/engine/pins.rs`. GCC compiles for Linux, since MLX needs its C++ library;
Zig compiles for macOS and links the system's. MLX's builds for one system have the same headers, so one layer
serves all of them. Beside the layer lies `mlx-layer.json`, the record that the program reads.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import macho

ROOT = Path(__file__).resolve().parents[1]
STORE = ROOT / "crates/store"
RECORD = "mlx-layer.json"

#: The wheel's name in pins.rs, pip's name of the platform, and the layer's file.
SYSTEMS = {
    "linux-x86_64": ("CPU", "manylinux_2_35_x86_64", "libmlxc.so"),
    "linux-aarch64": ("CPU", "manylinux_2_35_aarch64", "libmlxc.so"),
    "darwin-arm64": ("METAL", "macosx_14_0_arm64", "libmlxc.dylib"),
}

#: Seconds for a download or a compiler. Zig takes 20 to 40 s on one core of 2025.
LIMIT = 600

#: A package that makes cargo download the sources.
MANIFEST = """[package]
name = "paceline-mlx-sources"
version = "0.0.0"
edition = "2021"
[lib]
path = "lib.rs"
[workspace]
[dependencies]
mlx-sys = {{ version = "={version}", default-features = false }}
"""


class Skip(Exception):
    """A tool or the network is missing."""


def run(*command: str | Path, **options) -> str:
    try:
        done = subprocess.run([str(word) for word in command], text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, timeout=LIMIT, **options)
    except FileNotFoundError:
        raise Skip(f"{command[0]} is not installed") from None
    assert done.returncode == 0, f"{command[0]} ended with {done.returncode}: {done.stderr[-800:]}"
    return done.stdout


def pins() -> str:
    return (STORE / "src/engine/pins.rs").read_text()


def pinned(name: str) -> str:
    """A string constant of pins.rs."""
    return re.search(rf'const {name}: &str =\s*"([^"]+)"', pins())[1]


def wheel(system: str, folder: Path) -> Path:
    """MLX's wheel for `system`, verified and unpacked; its folder."""
    name, tag, _ = SYSTEMS[system]
    entry = re.search(rf'const {name}: &\[Pin\] = &\[Pin \{{\s*requirement: "([^"]+)",(.*?)\}}\]', pins(), re.S)
    try:
        run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:",
            "--platform", tag, "--dest", folder, entry[1])
    except AssertionError as error:
        raise Skip(str(error)[-200:]) from None
    (file,) = folder.glob("*.whl")
    got = hashlib.sha256(file.read_bytes()).hexdigest()
    assert got in re.findall(r'"([0-9a-f]{64})"', entry[2]), f"{file.name} has sha256 {got}"
    with zipfile.ZipFile(file) as archive:
        archive.extractall(folder / "wheel")
    return folder / "wheel"


def sources(folder: Path) -> Path:
    """The folder with `mlx/c` in cargo's registry, verified as the program does."""
    (folder / "Cargo.toml").write_text(MANIFEST.format(version=pinned("MLX_C_VERSION")))
    (folder / "lib.rs").touch()
    try:
        facts = json.loads(run("cargo", "metadata", "--format-version", "1", "--manifest-path",
                               folder / "Cargo.toml", cwd="/"))
    except AssertionError as error:
        raise Skip(str(error)[-200:]) from None
    (found,) = (part for part in facts["packages"] if part["name"] == "mlx-sys")
    root = Path(found["manifest_path"]).parent / "src/mlx-c"
    digest = hashlib.sha256()
    files = (path for path in (root / "mlx/c").rglob("*") if path.is_file())
    for path in sorted(path.relative_to(root / "mlx/c") for path in files):
        data = (root / "mlx/c" / path).read_bytes()
        digest.update(str(path).encode() + b"\0" + struct.pack("<Q", len(data)) + data)
    assert digest.hexdigest() == pinned("MLX_C_SOURCES_SHA256"), "mlx-c has other sources than the pinned ones"
    return root


def compile_linux(arch: str, common: list, lib: Path, work: Path, target: Path) -> None:
    compiler = os.environ.get("CXX", "g++") if arch == platform.machine() else f"{arch}-linux-gnu-g++"
    # The linker need not see what MLX itself needs, which another machine has.
    run(compiler, *common, "mlxc.cpp", "-shared", "-s", "-L", lib, "-lmlx", "-Wl,-rpath,$ORIGIN",
        "-Wl,-soname,libmlxc.so", "-Wl,--allow-shlib-undefined", "-o", target, cwd=work)


def compile_darwin(common: list, lib: Path, work: Path, target: Path) -> None:
    zig = [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-macos.14.0",
           # Else the headers expect what only a newer library of the system has.
           "-D_LIBCPP_HAS_VENDOR_AVAILABILITY_ANNOTATIONS=1"]
    run(*zig, *common, "-c", "mlxc.cpp", "-o", "mlxc.o", cwd=work)
    # Zig would put its own C++ library into the layer, which then could not catch MLX's exceptions. It has no
    # list of the system's symbols, so this one names those that the object needs and MLX has not.
    needed = macho.read(work / "mlxc.o").undefined - macho.read(lib / "libmlx.dylib").exported
    symbols = ", ".join(f"'{name}'" for name in sorted(needed) if macho.is_cxx(name))
    (work / "libc++.tbd").write_text(
        "--- !tapi-tbd\ntbd-version: 4\ntargets: [ arm64-macos ]\ninstall-name: '/usr/lib/libc++.1.dylib'\n"
        f"exports:\n  - targets: [ arm64-macos ]\n    symbols: [ {symbols} ]\n...\n")
    run(*zig, "-nostdlib++", "-dynamiclib", "mlxc.o", "-L", lib, "-lmlx", "libc++.tbd", "-Wl,-S",
        "-Wl,-rpath,@loader_path", "-Wl,-install_name,@rpath/libmlxc.dylib", "-o", target, cwd=work)


def make(system: str, out: Path) -> Path:
    """The layer and its record in `out`; the same inputs give the same bytes.

    Raises:
        Skip: a compiler, cargo or the network is missing.
    """
    from pip._internal.models.index import PyPI

    work = out.with_name(f"{out.name}.work")
    for folder in (out, work):
        shutil.rmtree(folder, ignore_errors=True)
    work.mkdir(parents=True)
    target = work / SYSTEMS[system][2]
    mlx = wheel(system, work) / "mlx"
    # Relative paths: the compiler writes them into error texts.
    shutil.copytree(sources(work) / "mlx", work / "sources/mlx")
    names = sorted(path.name for path in (work / "sources/mlx/c").glob("*.cpp"))
    names = [f"mlx/c/{name}" for name in names] + ["mlx-group.cpp"]
    (work / "mlxc.cpp").write_text("".join(f'#include "{name}"\n' for name in names))
    shutil.copy(STORE / "data/mlx-group.cpp", work)
    shutil.copy(STORE / "data/mlxc-shim.h", work / "shim.h")
    common = ["-std=c++20", "-O1", "-fPIC", "-include", "shim.h", "-I", "sources", "-I", "wheel/mlx/include"]
    if system == "darwin-arm64":
        compile_darwin(common, mlx / "lib", work, target)
        macho.check(target, mlx / "lib")
    else:
        compile_linux(system.removeprefix("linux-"), common, mlx / "lib", work, target)
        check_linux(target, mlx / "lib/libmlx.so")
    out.mkdir(parents=True)
    made = Path(shutil.copy(target, out))
    shutil.rmtree(work)
    digest = hashlib.sha256(made.read_bytes()).hexdigest()
    record = {"mlx": pinned("MLX_VERSION"), "mlx_c": pinned("MLX_C_VERSION"), "sha256": digest,
              # Asked by machines that have no pip, or whose pip has the default.
              "index": PyPI.simple_url}
    (out / RECORD).write_text(json.dumps(record, indent=1) + "\n")
    return made


def check_linux(layer: Path, mlx: Path) -> None:
    """The layer has our table's functions, and asks for no newer C or C++ library than MLX does."""
    asks = {name: (newest(layer, name), newest(mlx, name)) for name in (b"GLIBC", b"GLIBCXX", b"CXXABI")}
    assert all(ours <= theirs for ours, theirs in asks.values()), f"newer than MLX itself: {asks}"
    data = layer.read_bytes()
    missing = [name for name in macho.table() if b"\0" + name.encode() + b"\0" not in data]
    assert not missing, f"{layer.name} lacks {missing}"


def newest(path: Path, name: bytes) -> tuple[int, ...]:
    """The newest version of a library's symbols that an ELF file asks for."""
    found = re.findall(rb"\0" + name + rb"_([0-9.]+)\0", path.read_bytes())
    return max((tuple(map(int, text.split(b"."))) for text in found), default=())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    out = arguments.out or ROOT / "target/mlx-layer" / arguments.system
    name = f"MLX's C layer for {arguments.system} fits"
    try:
        made = make(arguments.system, out.resolve())
    except Skip as skip:
        print(f"SKIPPED {name}: {skip}")
    except AssertionError as error:
        print(f"FAILED {name}: {error}")
        sys.exit(1)
    else:
        print(f"{made}, {made.stat().st_size} bytes\nok {name}")


if __name__ == "__main__":
    main()
