#!/usr/bin/env python3
"""What llama.cpp answers on a text, recorded: llama_cpp.py NPM_DIR MODELS_DIR [OUT]

NPM_DIR holds the npm package node-llama-cpp (see scripts/peers/llama_bench.py), MODELS_DIR the two
models (scripts/models/fetch_models.sh). OUT defaults to tests-data/golden/llama_cpp. Writes
smollm2.json and gemma3.json: 256 ids of Emma's first lines as llama.cpp's tokenizer cuts them, and
for each position what `llama_bench.py --text` describes. llama.cpp rounds activations to 8 bits and
picks its kernels by CPU, so another machine gives slightly other numbers.

smollm2-f32.json and gemma3-f32.json: the same ids on the same weights widened to float32
(scripts/models/quantize.py; 1.1 GB in a temporary folder), where llama.cpp leaves the activations
alone and rounds only keys and values, to f16.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
BENCH = REPOSITORY / "scripts/peers/llama_bench.py"
QUANTIZE = REPOSITORY / "scripts/models/quantize.py"
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


def bench(npm, model, text):
    out = subprocess.run(
        [sys.executable, BENCH, npm, model, "--runs", "0", "--text", REPOSITORY / text, "--limit",
         str(N_TOKENS)], check=True, stdout=subprocess.PIPE).stdout
    answer = json.loads(out)
    if len(answer["tokens"]) != N_TOKENS:
        sys.exit(f"{text}: {len(answer['tokens'])} ids, expected {N_TOKENS}")
    return answer


def record(path, npm, file, origin):
    """Run `file` and write what it answers; `origin` says which model and text that is."""
    answer = bench(npm, file, origin["text"])
    golden = {
        "made_by": "scripts/golden/llama_cpp.py", "versions": answer["versions"], "cpu": cpu(),
    } | origin | {k: answer[k] for k in ("nll", "tokens", "nlls", "argmax", "second", "gaps")}
    fields = (f" {json.dumps(k)}: {json.dumps(v)}" for k, v in golden.items())
    path.write_text("{\n" + ",\n".join(fields) + "\n}\n")


def make(out, npm, models, name):
    model, text = GOLDENS[name]
    source = Path(models) / model
    with open(source, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    origin = {"model": model, "model_sha256": digest, "text": text}
    record(out / f"{name}.json", npm, source, origin | {"weights": "as stored"})
    with tempfile.TemporaryDirectory() as folder:
        wide = Path(folder) / "f32.gguf"
        subprocess.run([sys.executable, QUANTIZE, npm, source, wide, "F32"], check=True,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        record(out / f"{name}-f32.json", npm, wide, origin | {"weights": "widened to F32"})


def main():
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    out = Path(sys.argv[3]) if sys.argv[3:] else REPOSITORY / "tests-data/golden/llama_cpp"
    for name in GOLDENS:
        make(out, *sys.argv[1:3], name)


if __name__ == "__main__":
    main()
