"""Checks MLX's library for macOS, and our C layer for it, where no Mac is.

    python packaging/macho.py LAYER MLX_LIB_FOLDER

The checks read what macOS's loader would refuse: processor, names by which the libraries find each
other, oldest macOS, signature, and that each symbol is in the library that it is expected in.
"""

from __future__ import annotations

import dataclasses
import re
import struct
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

#: `CPU_TYPE_ARM64`, and load commands, of Apple's `mach-o/loader.h`.
ARM64 = 0x0100000C
ID_DYLIB, SYMTAB, CODE_SIGNATURE, RPATH, BUILD_VERSION = 0xD, 0x2, 0x1D, 0x8000001C, 0x32
#: Also weak and re-exported libraries; all have an ordinal.
LOAD_DYLIB = (0xC, 0x80000018, 0x8000001F)

#: Symbols of macOS 14's C++ library that MLX itself does not use: streams and locales are as old as the
#: library, sized `delete` came with C++14, `to_chars` of floats with macOS 13.3 (libc++'s `availability.h`).
OLD_CXX = re.compile(r"basic_(ostream|streambuf)I|6localeaS|8to_charsEPcS0_[def]|^__ZdlPvm$")


@dataclasses.dataclass
class MachO:
    name: str | None = None
    libraries: list[str] = dataclasses.field(default_factory=list)
    rpaths: list[str] = dataclasses.field(default_factory=list)
    minimum: tuple[int, int] = (0, 0)
    is_signed: bool = False
    exported: set[str] = dataclasses.field(default_factory=set)
    #: Symbols that other libraries have, and the ordinal of that library.
    imported: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def undefined(self) -> set[str]:
        return set(self.imported)


def read(path: Path) -> MachO:
    """The load commands and symbols of a thin arm64 file."""
    data, found = path.read_bytes(), MachO()
    magic, cpu = struct.unpack_from("<II", data)
    assert (magic, cpu) == (0xFEEDFACF, ARM64), f"{path.name} is no thin file for arm64: {magic:#x} {cpu:#x}"
    at = 32
    for _ in range(struct.unpack_from("<I", data, 16)[0]):
        command, size = struct.unpack_from("<II", data, at)

        def text() -> str:
            start = at + struct.unpack_from("<I", data, at + 8)[0]
            return data[start:at + size].split(b"\0")[0].decode()

        if command == ID_DYLIB:
            found.name = text()
        elif command in LOAD_DYLIB:
            found.libraries.append(text())
        elif command == RPATH:
            found.rpaths.append(text())
        elif command == BUILD_VERSION:
            version = struct.unpack_from("<I", data, at + 12)[0]
            found.minimum = (version >> 16, version >> 8 & 0xFF)
        elif command == CODE_SIGNATURE:
            found.is_signed = True
        elif command == SYMTAB:
            symbols(data, struct.unpack_from("<4I", data, at + 8), found)
        at += size
    return found


def symbols(data: bytes, table: tuple[int, ...], found: MachO) -> None:
    """Reads the symbol table: `nlist_64` of Apple's `mach-o/nlist.h`."""
    offset, count, strings, _ = table
    for entry in range(count):
        index, kind, _, about, _ = struct.unpack_from("<IBBHQ", data, offset + 16 * entry)
        if not kind & 0x01 or kind & 0xE0 or kind & 0x10:  # not external, for a debugger, or hidden
            continue
        name = data[strings + index:data.index(b"\0", strings + index)].decode()
        if kind & 0x0E:
            found.exported.add(name)
        else:
            found.imported[name] = about >> 8


def is_cxx(name: str) -> bool:
    """Whether a symbol is of the C++ library or its runtime, if MLX has not defined it."""
    return name.startswith(("__Z", "___cxa_", "___gxx_", "___dynamic_cast"))


def table() -> list[str]:
    """The functions that `crates/mlx` looks up."""
    text = (ROOT / "crates/mlx/src/table.rs").read_text()
    body = text[text.index("\ntable! {"):]
    looked_up = re.findall(r'"(mlx_\w+)"', (ROOT / "crates/mlx/src/library.rs").read_text())
    return [f"mlx_{name}" for name in re.findall(r"^    (\w+):\s+fn\(", body, re.M)] + [
        name for name in looked_up if name.startswith(("mlx_string_", "mlx_version"))]


def check(layer: Path, lib: Path) -> None:
    """The layer and MLX's library in `lib` fit together and would be loaded."""
    ours, mlx = read(layer), read(lib / "libmlx.dylib")
    assert (lib / "mlx.metallib").is_file(), "MLX looks for mlx.metallib beside its library"
    assert mlx.name == "@rpath/libmlx.dylib" and mlx.name in ours.libraries, (mlx.name, ours.libraries)
    assert "@loader_path" in ours.rpaths, f"the layer looks for MLX in {ours.rpaths}"
    assert ours.is_signed and mlx.is_signed, "macOS on arm64 loads signed libraries only"
    assert (14, 0) <= ours.minimum <= mlx.minimum, f"the layer needs macOS {ours.minimum}, MLX {mlx.minimum}"
    missing = [name for name in table() if f"_{name}" not in ours.exported]
    assert not missing, f"the layer lacks {missing}"
    from_mlx = {name for name, at in ours.imported.items() if ours.libraries[at - 1] == mlx.name}
    assert from_mlx and from_mlx <= mlx.exported, f"MLX lacks {sorted(from_mlx - mlx.exported)}"
    # Exceptions are caught across the libraries only if both have the system's C++ library.
    cxx = {name for name, at in ours.imported.items() if ours.libraries[at - 1] == "/usr/lib/libc++.1.dylib"}
    assert {"___cxa_throw", "___cxa_begin_catch"} <= cxx, "the layer has a C++ library of its own"
    newer = {name for name in cxx - mlx.undefined if not OLD_CXX.search(name)}
    assert not newer, f"macOS {mlx.minimum} may lack {sorted(newer)}"


if __name__ == "__main__":
    check(Path(sys.argv[1]), Path(sys.argv[2]))
