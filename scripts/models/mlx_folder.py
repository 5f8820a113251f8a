#!/usr/bin/env python3
"""SmolLM2 in MLX's form, 4 bits in groups of 64, from its GGUF file: mlx_folder.py SMOLLM2.gguf FOLDER

Makes FOLDER/SmolLM2-135M-Instruct-mlx-4bit by mlx_lm.convert, by way of hf_folder.py beside this,
and beside it NAME.golden.json: what mlx_lm generates greedily with it, 32 tokens, as stored and with
all floats in float32. Prints what it made; nothing is done where that is there, made by this very
script and versions. Needs scripts/mlx/requirements-lm.txt.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

NAME = "SmolLM2-135M-Instruct-mlx-4bit"
PROMPT = "Why is the sky blue?"
TOKENS = 32
HERE = Path(__file__).resolve().parent


def recipe():
    """What the result depends on."""
    scripts = [Path(__file__), HERE / "hf_folder.py"]
    packages = ("mlx", "mlx-lm", "transformers", "gguf")
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in scripts] + [
        f"{package} {version(package)}" for package in packages]


def greedy(model, prompt):
    """Ids, and the gap between first and second at each."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    cache, rest, ids, gaps = make_prompt_cache(model), list(prompt), [], []
    while len(ids) < TOKENS:
        last = model(mx.array([rest]), cache=cache)[0, -1].astype(mx.float32)
        first, second = mx.argsort(-last)[:2].tolist()
        gaps.append(round((last[first] - last[second]).item(), 5))
        ids.append(first)
        rest = [first]
    return ids, gaps


def record(folder):
    import mlx.core as mx
    from mlx.utils import tree_map
    from mlx_lm import load, stream_generate

    model, tokenizer = load(str(folder))
    messages = [{"role": "user", "content": PROMPT}]
    prompt = list(tokenizer.apply_chat_template(messages, add_generation_prompt=True,
                                                return_dict=False))
    stored = [r.token for r in stream_generate(model, tokenizer, prompt, max_tokens=TOKENS)]
    wide = lambda p: p.astype(mx.float32) if mx.issubdtype(p.dtype, mx.floating) else p
    model.update(tree_map(wide, model.parameters()))
    ids, gaps = greedy(model, prompt)
    return {"text": PROMPT, "prompt": prompt, "generated": stored, "greedy": ids,
            "greedy_gaps": gaps}


def main():
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    target, golden = folder / NAME, folder / f"{NAME}.golden.json"
    made_by = recipe()
    if golden.exists() and json.loads(golden.read_text())["made_by"] == made_by:
        print(f"present  {target}")
        return
    from mlx_lm import convert

    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        hub, fresh = Path(temporary) / "hub", Path(temporary) / "mlx"
        subprocess.run([sys.executable, HERE / "hf_folder.py", source, hub], check=True,
                       capture_output=True)
        convert(str(hub), mlx_path=str(fresh), quantize=True, q_bits=4, q_group_size=64)
        golden.unlink(missing_ok=True)
        shutil.rmtree(target, ignore_errors=True)
        fresh.rename(target)
    golden.write_text(json.dumps({"made_by": made_by} | record(target), indent=1) + "\n")
    print(f"made     {target}")


main()
