#!/usr/bin/env python3
"""What llama.cpp answers on a text, recorded: llama_cpp.py NPM_DIR MODELS_DIR [OUT]

NPM_DIR holds the npm package node-llama-cpp (see scripts/peers/llama_bench.py), MODELS_DIR the two
models (scripts/models/fetch_models.sh). OUT defaults to tests-data/golden/llama_cpp. Writes
smollm2.json and gemma3.json: 256 ids of Emma's first lines as llama.cpp's tokenizer cuts them, and
for each position what `llama_bench.py --text` describes. llama.cpp rounds activations to 8 bits and
picks its kernels by CPU, so another machine gives slightly other numbers.
"""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
BENCH = REPOSITORY / "scripts/peers/llama_bench.py"
N_TOKENS = 256

# Gemma's larger vocabulary cuts the 1,056 bytes into 243 ids only; it gets more of the same text.
GOLDENS = {
    "smollm2": ("SmolLM2-135M-Instruct.Q4_1.gguf", "tests-data/austen-1056.txt"),
    "gemma3": ("gemma-3-270m-q4_k_m.gguf", "tests-data/golden/llama_cpp/austen-1298.txt"),
}


def cpu():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown"


def make(npm, models, name):
    model, text = GOLDENS[name]
    answer = json.loads(subprocess.run(
        [sys.executable, BENCH, npm, str(Path(models) / model), "--runs", "0", "--text",
         str(REPOSITORY / text), "--limit", str(N_TOKENS)],
        check=True, stdout=subprocess.PIPE).stdout)
    if len(answer["tokens"]) != N_TOKENS:
        sys.exit(f"{text}: {len(answer['tokens'])} ids, expected {N_TOKENS}")
    with open(Path(models) / model, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "made_by": "scripts/golden/llama_cpp.py", "versions": answer["versions"], "cpu": cpu(),
        "model": model, "model_sha256": digest, "text": text,
    } | {k: answer[k] for k in ("nll", "tokens", "nlls", "argmax", "second", "gaps")}


def main():
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    out = Path(sys.argv[3]) if sys.argv[3:] else REPOSITORY / "tests-data/golden/llama_cpp"
    for name in GOLDENS:
        golden = make(*sys.argv[1:3], name)
        fields = (f" {json.dumps(k)}: {json.dumps(v)}" for k, v in golden.items())
        (out / f"{name}.json").write_text("{\n" + ",\n".join(fields) + "\n}\n")


if __name__ == "__main__":
    main()
