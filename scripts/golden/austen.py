#!/usr/bin/env python3
"""The text of Austen's Emma out of Debian's package r-cran-janeaustenr: austen.py DEB OUT [BYTES]

    apt-get download r-cran-janeaustenr       # 1.0.0-1; the novels are in the public domain
    austen.py r-cran-janeaustenr_1.0.0-1_all.deb austen-1298.txt 1298

Writes the first BYTES bytes (default: all). The package holds an R lazy-load file: per novel a
big-endian u32 length and a zlib stream, in it a serialised vector of strings, one per line, which
are joined by newlines here. Needs `dpkg-deb`; R is not needed.
"""

import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

LAZY_FILE = "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
STRING_VECTOR = struct.pack(">I", 16)  # STRSXP of R's serialisation format


def streams(data):
    """The uncompressed parts of a lazy-load file."""
    while data:
        (length,) = struct.unpack_from(">I", data)
        stream = zlib.decompressobj()
        part = stream.decompress(data[4:])
        if len(part) != length:
            sys.exit(f"a part has {len(part)} bytes, {length} announced")
        data = stream.unused_data
        yield part


def lines(part):
    """The strings of the first string vector in a serialised value."""
    at = part.index(STRING_VECTOR) + 4
    (count,) = struct.unpack_from(">I", part, at)
    at += 4
    for _ in range(count):
        _, length = struct.unpack_from(">Ii", part, at)
        at += 8
        yield part[at : at + max(length, 0)]
        at += max(length, 0)


def main():
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["dpkg-deb", "-x", sys.argv[1], folder], check=True)
        data = (Path(folder) / LAZY_FILE).read_bytes()
    for part in streams(data):
        text = b"\n".join(lines(part)) + b"\n"
        if text.startswith(b"EMMA\n"):
            Path(sys.argv[2]).write_bytes(text[: int(sys.argv[3])] if sys.argv[3:] else text)
            return
    sys.exit("Emma is not in the package")


if __name__ == "__main__":
    main()
