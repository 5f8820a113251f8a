#!/usr/bin/env python3
"""The small models that check each storage type: quant_models.py BASE.gguf DIR [TYPE ...]

Makes DIR/qwen3-2l-TYPE.gguf for every TYPE (default: all 15), 12 to 127 MB each and 514 MB
together, with synth_gguf.py: random Qwen3 of 2 layers with SmolLM2's tokenizer, which BASE.gguf
gives (fetch_models.sh). Floats are drawn and rounded, block types are random bytes under a fixed
scale. A file that is there and has the right SHA-256 is kept; a new one is moved in place only when
it has. What the models must answer is in tests-data/golden/quant_models.json.
Needs numpy and gguf (0.19.0).
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

SYNTH = Path(__file__).resolve().parent / "synth_gguf.py"

# First 16 digits of each file's SHA-256.
MODELS = {
    "F32": "42823da8356695bb",
    "F16": "eb5108cfb9af12a5",
    "BF16": "60afab440988d4ea",
    "Q4_0": "6ea95feb122372b7",
    "Q4_1": "0303de6e90fef2b5",
    "Q5_0": "2bf2518c235c6166",
    "Q5_1": "2a1a029cc577fb9a",
    "Q8_0": "c7062888e20a4a27",
    "Q2_K": "9fb8fa0bbd10b988",
    "Q3_K": "dabffc06e3c647d2",
    "Q4_K": "47c6a890d01aae27",
    "Q5_K": "2f4b5e6bc8497db1",
    "Q6_K": "cc8cae5810a3d3cb",
    "IQ4_NL": "170df57a4155f340",
    "IQ4_XS": "3fdcfbf0d2938bd0",
}


def digest(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make(base, path, kind):
    """One model file, checked before it gets its name."""
    if path.exists() and digest(path).startswith(MODELS[kind]):
        print(f"present  {path}")
        return
    part = path.with_suffix(f".part{os.getpid()}")
    floats = kind in ("F32", "F16", "BF16")
    try:
        subprocess.run(
            [sys.executable, SYNTH, "qwen3", base, part, "--layers", "2", "--quant", kind,
             *([] if floats else ["--raw-blocks"])], check=True)
        found = digest(part)
        if not found.startswith(MODELS[kind]):
            sys.exit(f"{path}: SHA-256 is {found}, want {MODELS[kind]}...")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    print(f"made     {path}")


def main():
    if len(sys.argv) < 3 or set(sys.argv[3:]) - set(MODELS):
        sys.exit(__doc__)
    folder = Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    for kind in sys.argv[3:] or MODELS:
        make(sys.argv[1], folder / f"qwen3-2l-{kind}.gguf", kind)


if __name__ == "__main__":
    main()
