#!/usr/bin/env python3
"""Matrices and tiny models in MLX's quantised form: mlx_quantised.py [OUT]

OUT defaults to tests-data/golden/mlx of this repository. Written are
    dequant/                 for every scheme S a random matrix, S.weight, S.scales, S.biases as
                             mx.quantize gives them, and S.values, its mx.dequantize with scales and
                             biases widened to float32; config.json says which scheme is whose
    NAME/                    a folder of ../hf, converted by mlx_lm.convert
    NAME.golden.safetensors  "logits" (positions, vocabulary), float32
    NAME.golden.json         prompt, greedy continuation with its gaps, versions

The logits are those of mlx_lm's model with all floats widened to float32, so that only the order of
its sums differs from the definition; a folder as stored computes in its 16 bits. The same versions
give the same bytes of folders. Needs mlx and mlx-lm: scripts/mlx/requirements-lm.txt; folders with
experts were made with mlx 0.32.4, which mlx-lm needs for them.
"""

import json
import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm import convert, load

REPOSITORY = Path(__file__).resolve().parents[2]
HF = REPOSITORY / "tests-data/golden/hf"
SEED, ROWS, COLS, GREEDY = 20261121, 2, 256, 16

# Name: (folder in ../hf, what mlx_lm.convert is told). Between them: every family, each of the
# types of scales, three sizes of groups, mxfp4, and a matrix of another scheme than the rest.
MODELS = {
    "llama-4bit": ("llama-untied-bf16", {"q_bits": 4, "q_group_size": 64}),
    "llama-tied-mixed": ("llama-tied", {
        "q_bits": 3, "q_group_size": 32, "dtype": "float16",
        "quant_predicate": lambda path, module: (
            {"bits": 6, "group_size": 64} if "down_proj" in path else True)}),
    "qwen2-8bit": ("qwen2-f16", {"q_bits": 8, "q_group_size": 32}),
    "qwen3-mxfp4": ("qwen3-bf16", {"q_mode": "mxfp4", "q_bits": 4, "q_group_size": 32}),
    "gemma3-5bit": ("gemma3-bf16", {"q_bits": 5, "q_group_size": 32}),
    "llama-2bit-sharded": ("llama-rope3-sharded", {
        "q_bits": 2, "q_group_size": 32, "dtype": "bfloat16"}),
    # Experts, all of a layer in one matrix.
    "qwen3moe-4bit": ("qwen3moe-bf16", {"q_bits": 4, "q_group_size": 32}),
    "glm4moe-4bit": ("glm4moe-bf16", {"q_bits": 4, "q_group_size": 32}),
    "minimax-m2-6bit": ("minimax-m2-bf16", {"q_bits": 6, "q_group_size": 32}),
    "gpt-oss-mxfp4": ("gpt-oss-mxfp4", {
        "q_mode": "mxfp4", "q_bits": 4, "q_group_size": 32,
        "quant_predicate": lambda path, module: "router" not in path}),
    # Latent attention: both halves of the expansion apart, all heads of a layer in one matrix.
    "deepseek-v3-4bit": ("deepseek-v3-bf16", {"q_bits": 4, "q_group_size": 32}),
    # Queries, keys and values in one matrix; experts apart.
    "dbrx-4bit": ("dbrx-bf16", {"q_bits": 4, "q_group_size": 32}),
}


def schemes():
    """(name, arguments of mx.quantize, type of the scales)."""
    for bits in (2, 3, 4, 5, 6, 8):
        for group in (32, 64, 128):
            for name, dtype in (("f16", mx.float16), ("bf16", mx.bfloat16)):
                arguments = {"mode": "affine", "bits": bits, "group_size": group}
                yield f"affine-{bits}-{group}-{name}", arguments, dtype
    yield "mxfp4", {"mode": "mxfp4", "bits": 4, "group_size": 32}, mx.bfloat16


def dequant(out):
    tensors, table = {}, {}
    for i, (name, arguments, dtype) in enumerate(schemes()):
        values = mx.random.normal((ROWS, COLS), key=mx.random.key(SEED + i)) * 0.05
        values[0, : COLS // 2] = 0  # groups of zeros, and a lonely number
        values[0, 0] = 3.0
        parts = mx.quantize(values.astype(dtype), **arguments)
        weight, scales, *biases = parts
        wide = [part.astype(mx.float32) for part in biases]
        if biases:
            widened = mx.dequantize(weight, scales.astype(mx.float32), *wide, **arguments)
        else:
            widened = mx.dequantize(weight, scales, dtype=mx.float32, **arguments)
        table[name] = arguments
        tensors[f"{name}.weight"], tensors[f"{name}.scales"] = weight, scales
        if biases:
            tensors[f"{name}.biases"] = biases[0]
        tensors[f"{name}.values"] = widened.astype(mx.float32)
    target = out / "dequant"
    target.mkdir(exist_ok=True)
    mx.save_safetensors(str(target / "model.safetensors"), tensors)
    (target / "config.json").write_text(json.dumps({"quantization": table}, indent=1) + "\n")


def widened(model):
    """The model with float32 in the place of its 16-bit floats."""
    wide = lambda p: p.astype(mx.float32) if mx.issubdtype(p.dtype, mx.floating) else p
    model.update(tree_map(wide, model.parameters()))
    return model


def greedy(model, prompt):
    """The next ids, and how far each stood above the second."""
    ids, gaps = [], []
    for _ in range(GREEDY):
        last = model(mx.array([prompt + ids]))[0, -1]
        first, second = sorted(range(last.size), key=lambda i: -last[i].item())[:2]
        ids.append(first)
        gaps.append(round(last[first].item() - last[second].item(), 5))
    return ids, gaps


def old_style(source, into):
    """The folder `source`, with the base of its angles where every family of mlx_lm reads it:
    llama's passes over `rope_parameters`."""
    copy = into / source
    shutil.copytree(HF / source, copy)
    path = copy / "config.json"
    config = json.loads(path.read_text())
    config |= {key: value for key, value in config.pop("rope_parameters", {}).items()
               if key == "rope_theta"}
    if (config.get("rope_scaling") or {}).get("truncate") is False:
        config["rope_scaling"]["truncate"] = True  # the only ramp that mlx_lm has
    path.write_text(json.dumps(config))
    return str(copy)


def folder(name, source, arguments, out):
    target = out / name
    shutil.rmtree(target, ignore_errors=True)
    with tempfile.TemporaryDirectory() as temporary:
        path = old_style(source, Path(temporary))
        convert(path, mlx_path=str(target), quantize=True, **arguments)
    for other in target.iterdir():  # cards and templates that no test reads
        if other.name not in ("config.json", "model.safetensors", "tokenizer.json",
                              "tokenizer_config.json"):
            other.unlink()
    prompt = json.loads((HF / f"{source}.golden.json").read_text())["prompt"]
    model = widened(load(str(target))[0])
    logits = model(mx.array([prompt]))[0].astype(mx.float32)
    mx.save_safetensors(str(out / f"{name}.golden.safetensors"), {"logits": logits})
    ids, gaps = greedy(model, prompt)
    (out / f"{name}.golden.json").write_text(json.dumps({
        "made_by": "scripts/golden/mlx_quantised.py", "from": source,
        "versions": {package: version(package) for package in ("mlx", "mlx-lm")},
        "prompt": prompt, "greedy": ids, "greedy_gaps": gaps,
    }, indent=1) + "\n")
    print(f"{name}: least gap {min(gaps)}", flush=True)


def main():
    out = Path(sys.argv[1] if len(sys.argv) > 1 else REPOSITORY / "tests-data/golden/mlx")
    out.mkdir(parents=True, exist_ok=True)
    dequant(out)
    for name, (source, arguments) in MODELS.items():
        folder(name, source, arguments, out)


if __name__ == "__main__":
    main()
