#!/usr/bin/env python3
"""Matrices in the layouts of DeepSeek, compressed-tensors and ModelOpt: scaled.py [OUT]

OUT defaults to tests-data/golden/scaled of this repository, a folder of config.json and
model.safetensors: for every layout L the tensors of a module L, random bytes under scales as such
files have them, and L.values, what they stand for in float32. The number formats are those of
ml_dtypes (0.6.0): float8_e4m3fn, float8_e8m0fnu, float4_e2m1fn. Integers are packed by the rule
of compressed_tensors.compressors.pack_quantized.helpers (0.20.1), value k in the bits from
bits * k on. The same versions give the same bytes. Needs numpy and ml_dtypes.
"""

import json
import sys
from pathlib import Path

import ml_dtypes
import numpy as np

REPOSITORY = Path(__file__).resolve().parents[2]
SEED, ROWS, COLS = 20261129, 40, 96
TILE = [32, 64]  # neither size of the matrix is a multiple
E4M3, E8M0, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu, ml_dtypes.bfloat16
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "uint8": "U8", "int32": "I32",
          "int64": "I64", "float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0"}
rng = np.random.default_rng(SEED)


def fp8():
    """Random finite E4M3."""
    raw = rng.integers(0, 256, (ROWS, COLS), dtype=np.uint8)
    raw[raw & 127 == 127] = 0x08
    return raw.view(E4M3)


def scales(*shape):
    return (rng.uniform(0.5, 2.0, shape) * 2.0**-9).astype(np.float32)


def powers(*shape):
    return rng.integers(110, 125, shape, dtype=np.uint8)


def wide(scale, rows=1, cols=1):
    """Scales as float32, repeated over their rows and columns of the matrix."""
    scale = np.asarray(scale).astype(np.float32)
    scale = scale.reshape(scale.shape + (1,) * (2 - scale.ndim))
    return np.repeat(np.repeat(scale, rows, 0), cols, 1)[:ROWS, :COLS]


def scaled(module, weight, scale, repeated, name="weight_scale"):
    values = repeated * weight.astype(np.float32)
    return {f"{module}.weight": weight, f"{module}.{name}": scale, f"{module}.values": values}


def fp8_layouts():
    tiles = scales(-(-ROWS // TILE[0]), -(-COLS // TILE[1]))
    yield scaled("fp8-tile", fp8(), tiles, wide(tiles, *TILE), "weight_scale_inv")
    whole = scales()
    yield scaled("fp8-tensor", fp8(), whole, np.float32(whole))
    one = scales(1)
    yield scaled("fp8-tensor-1", fp8(), one, one[0])
    rows = scales(ROWS, 1).astype(BF16)
    yield scaled("fp8-row", fp8(), rows, wide(rows, 1, COLS))
    flat = scales(ROWS)
    yield scaled("fp8-row-flat", fp8(), flat, wide(flat, 1, COLS))
    groups = scales(ROWS, COLS // 32)
    yield scaled("fp8-group", fp8(), groups, wide(groups, 1, 32))
    mx = powers(ROWS, COLS // 32)
    yield scaled("mxfp8", fp8(), mx, wide(mx.view(E8M0), 1, 32))
    mx = powers(ROWS, COLS // 32).view(E8M0)
    yield scaled("mxfp8-e8m0", fp8(), mx, wide(mx, 1, 32))


def fp4():
    """Random packed E2M1, low half first, and its values."""
    raw = rng.integers(0, 256, (ROWS, COLS // 2), dtype=np.uint8)
    codes = np.stack([raw & 15, raw >> 4], -1).reshape(ROWS, COLS)
    return raw, codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)


def fp4_layouts():
    for module, packed, suffix, factor in (
            ("nvfp4", "weight_packed", "weight_global_scale", 1234.5),
            ("nvfp4-modelopt", "weight", "weight_scale_2", 0.00071)):
        raw, values = fp4()
        scale = rng.integers(0x30, 0x7F, (ROWS, COLS // 16), dtype=np.uint8).view(E4M3)
        factor = np.float32(factor)
        each = scale.astype(np.float32)
        each = each * factor if suffix == "weight_scale_2" else each / factor
        yield {f"{module}.{packed}": raw, f"{module}.weight_scale": scale,
               f"{module}.{suffix}": factor.reshape(() if packed == "weight" else (1,)),
               f"{module}.values": wide(each, 1, 16) * values}
    raw, values = fp4()
    mx = powers(ROWS, COLS // 32)
    yield {"mxfp4.weight_packed": raw, "mxfp4.weight_scale": mx,
           "mxfp4.values": wide(mx.view(E8M0), 1, 32) * values}


def integer_layouts():
    for bits, group, dtype in ((4, 32, BF16), (4, COLS, np.float16), (8, 32, BF16), (3, 32, BF16)):
        module = f"int{bits}-{group}-{np.dtype(dtype).name}"
        q = rng.integers(0, 1 << bits, (ROWS, COLS), dtype=np.uint8)
        spread = (q[..., None] >> np.arange(bits, dtype=np.uint8)) & 1
        packed = np.packbits(spread.reshape(ROWS, -1), -1, bitorder="little").view("<i4")
        scale = scales(ROWS, COLS // group).astype(dtype)
        values = wide(scale, 1, group) * (q.astype(np.float32) - (1 << bits - 1))
        yield {f"{module}.weight_packed": packed, f"{module}.weight_scale": scale,
               f"{module}.weight_shape": np.array([ROWS, COLS], np.int64 if bits > 3 else np.int32),
               f"{module}.values": values}


def save(path, tensors):
    header, data = {}, b""
    for name, array in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": DTYPES[array.dtype.name], "shape": list(array.shape),
                        "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def main():
    if len(sys.argv) > 2 or sys.argv[-1].startswith("-"):
        sys.exit(__doc__)
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else REPOSITORY / "tests-data/golden/scaled"
    out.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for layout in (*fp8_layouts(), *fp4_layouts(), *integer_layouts()):
        for name, array in layout.items():
            tensors[name] = array.astype(np.float32) if name.endswith(".values") else array
    save(out / "model.safetensors", tensors)
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": TILE}}
    (out / "config.json").write_text(json.dumps(config) + "\n")


if __name__ == "__main__":
    main()
