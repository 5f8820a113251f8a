#!/usr/bin/env python3
"""Golden decodes of every storage type: dequant.py [OUT]

OUT defaults to tests-data/golden/dequant of this repository. For each type T it writes
    T.bin   random blocks as a GGUF file stores them
    T.f32   what they decode to, float32, little endian, in the same order
and index.json with the counts and the versions used.

All bytes are random, so that every bit pattern of quants and block-internal scales occurs;
only the half-precision fields are set, each block to a pair from HALVES (zero, negative,
subnormal, tiny, usual, large; never inf or nan). The decoder is the `gguf` package, which
agrees with llama.cpp's reference decoders and rounds after every operation (no fused
multiply-add). The same arguments give the same bytes. Needs numpy and gguf (0.19.0).
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q

SEED = 20261121
REPOSITORY = Path(__file__).resolve().parents[2]

# Byte offsets of the half-precision fields in a block; source: ggml/src/ggml-common.h.
HALF_FIELDS = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
    "IQ4_NL": [0], "IQ4_XS": [0], "MXFP4": [],
    "IQ1_S": [0], "IQ1_M": [], "IQ2_XXS": [0], "IQ2_XS": [0], "IQ2_S": [0], "IQ3_XXS": [0],
    "IQ3_S": [0], "TQ1_0": [52], "TQ2_0": [64], "NVFP4": [],
}

# Exponents of successive MXFP4 blocks: both subnormal scales, the smallest normal ones, usual ones
# and the largest but 255, which is NaN here and 2^128 in llama.cpp.
EXPONENTS = [0, 1, 2, 3, 64, 118, 119, 120, 121, 126, 127, 128, 200, 251]

# (first field, second field) of successive blocks. 2^-24 is the smallest subnormal half,
# 1023 * 2^-24 the largest, 2^-14 the smallest normal, 65504 the largest finite.
HALVES = [
    (1.0, 0.0), (0.0, 1.0), (-1.0, -0.5), (2.0**-24, -(2.0**-24)),
    (1023 * 2.0**-24, 2.0**-23), (-513 * 2.0**-24, 700 * 2.0**-24), (2.0**-14, -(2.0**-14)),
    (0.0043, -0.03225), (-0.0217, 0.311), (65504.0, -65504.0), (-0.0, 37.25), (11.7, -0.0),
]


def quantised(name, rng):
    """Blocks of one type: every pair of HALVES once for 256-value blocks, twice for others."""
    length, size = gguf.GGML_QUANT_SIZES[Q[name]]
    count = len(HALVES) if length == 256 else 2 * len(HALVES)
    raw = rng.integers(0, 256, (count, size), dtype=np.uint8)
    for block in range(count):
        pair = HALVES[block % len(HALVES)]
        for offset, value in zip(HALF_FIELDS[name], pair):
            raw[block, offset : offset + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)
        if name == "IQ1_M":  # four bits of the scale at the top of each of its last four words
            bits = int(np.float16(pair[0]).view(np.uint16))
            for i in range(4):
                top = bits >> 4 * i & 15
                raw[block, 49 + 2 * i] = raw[block, 49 + 2 * i] & 15 | top << 4
        if name == "MXFP4":
            raw[block, 0] = EXPONENTS[block % len(EXPONENTS)]
    return raw


def floats(name, rng):
    """256 finite values of a float type: the edges of its range, then random bits."""
    bits, mantissa, exponent = {"F32": (32, 23, 8), "F16": (16, 10, 5), "BF16": (16, 7, 8)}[name]
    sign, one = 1 << (bits - 1), 1 << mantissa
    top = (((1 << exponent) - 1) << mantissa) - 1  # the largest finite value
    edges = [0, 1, 2, one - 1, one, one + 1, top, top - 1]
    values = edges + [e | sign for e in edges]
    while len(values) < 256:
        word = int(rng.integers(0, 1 << bits))
        if word & ~sign <= top:
            values.append(word)
    return np.array(values, f"<u{bits // 8}").view(np.uint8).reshape(1, -1)


def main():
    if len(sys.argv) > 2 or sys.argv[-1].startswith("-"):
        sys.exit(__doc__)
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else REPOSITORY / "tests-data/golden/dequant"
    out.mkdir(parents=True, exist_ok=True)
    types = {}
    for number, name in enumerate(["F32", "F16", "BF16", *HALF_FIELDS]):
        rng = np.random.default_rng([SEED, number])
        raw = quantised(name, rng) if name in HALF_FIELDS else floats(name, rng)
        decoded = gguf.quants.dequantize(raw.reshape(1, -1), Q[name]).astype("<f4").reshape(-1)
        if not np.isfinite(decoded).all():
            sys.exit(f"{name}: a decoded value is not finite")
        (out / f"{name}.bin").write_bytes(raw.tobytes())
        (out / f"{name}.f32").write_bytes(decoded.tobytes())
        types[name] = {"bytes": raw.size, "values": decoded.size}
    index = {
        "made_by": "scripts/golden/dequant.py",
        "versions": {p: version(p) for p in ("gguf", "numpy")},
        "types": types,
    }
    (out / "index.json").write_text(json.dumps(index, indent=1) + "\n")


if __name__ == "__main__":
    main()
