#!/usr/bin/env python3
"""The codebooks of the IQ1, IQ2 and IQ3 types: grids.py [OUT]

OUT defaults to crates/tensor/src/storage/grids.hex of this repository. The grids are facts of the
format; the `gguf` package publishes them packed, 2 or 4 bits an element, as hexadecimal text
(`grid_hex` in gguf/quants.py). They are written one after the other, 64 digits a line. Needs gguf
(0.19.0).
"""

import sys
from pathlib import Path

from gguf import quants

REPOSITORY = Path(__file__).resolve().parents[2]
ORDER = (quants.IQ2_XXS, quants.IQ2_XS, quants.IQ2_S, quants.IQ1_S, quants.IQ3_XXS, quants.IQ3_S)


def main():
    if len(sys.argv) > 2 or sys.argv[-1].startswith("-"):
        sys.exit(__doc__)
    default = REPOSITORY / "crates/tensor/src/storage/grids.hex"
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    digits = b"".join(kind.grid_hex for kind in ORDER).decode()
    lines = (digits[at : at + 64] for at in range(0, len(digits), 64))
    out.write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main()
