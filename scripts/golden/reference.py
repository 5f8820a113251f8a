#!/usr/bin/env python3
"""Golden answers of the numpy forward pass: reference.py MODELS_DIR QUANT_DIR [OUT]

MODELS_DIR holds the two real models (scripts/models/fetch_models.sh), QUANT_DIR what
scripts/models/quant_models.py makes; OUT defaults to tests-data/golden. Writes
    quant_models.json           for each storage type, at the end of the prompt
    numpy/smollm2.json, numpy/gemma3.json
                                the same, and every position of 256 ids of Austen (the ids of
                                llama_cpp/NAME.json)
Fields: see tests-data/golden/README.md. Three minutes. Needs numpy and gguf (0.19.0).
"""

import hashlib
import json
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))
from numpy_forward import Model, log_softmax, nlls, top
from quant_models import MODELS

REPOSITORY = Path(__file__).resolve().parents[2]

# "The capital of France is".
PROMPT = [504, 3575, 282, 4649, 314]
GEMMA_PROMPT = [2, 818, 5279, 529, 7001, 563]

# Logits recorded besides the first two: the ends of SmolLM2's vocabulary and some between.
FIXED_IDS = [0, 1, 260, 7042, 14634, 22617, 32568, 49151]


def digest(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def deviations(path, ids, logits):
    """Largest differences of a logit at the last position under the roundings of fast engines."""
    out = {}
    for name, options in (("kv_f16", {"kv_f16": True}), ("act_q8", {"act_q8": True})):
        other = Model(path, **options).logits(ids)[-1]
        out[name] = float(np.abs(other - logits[-1]).max())
    return out


def prompt_answer(path, ids):
    logits = Model(path).logits(ids)
    each = nlls(logits, ids)
    return {
        "file": path.name, "sha256": digest(path), "prompt": ids, "top": top(logits[-1], 5),
        "nll": float(np.mean(each)), "nlls": each,
        "logits": [{"id": i, "logit": float(logits[-1, i])} for i in FIXED_IDS],
        "logit_std": float(logits[-1].std()), "max_abs_diff": deviations(path, ids, logits),
    }


def text_answer(path, ids):
    """Each position of a longer text: likelihood, first, second and their distance."""
    logits = Model(path).logits(ids)
    each = nlls(logits, ids)
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :2]
    gaps = [float(row[a] - row[b]) for row, (a, b) in zip(logits, order)]
    last = log_softmax(logits[-1])
    return {
        "tokens": ids, "nll": float(np.mean(each)), "nlls": [round(x, 6) for x in each],
        "argmax": order[:, 0].tolist(), "second": order[:, 1].tolist(),
        "gaps": [round(x, 6) for x in gaps],
        "last_logprob": float(last[order[-1, 0]]),
    }


def origin():
    return {"made_by": "scripts/golden/reference.py",
            "versions": {p: version(p) for p in ("gguf", "numpy")}}


def real_model(path, name, prompt, out):
    recorded = json.loads((REPOSITORY / f"tests-data/golden/llama_cpp/{name}.json").read_text())
    golden = origin() | {"short": prompt_answer(path, prompt), "text": recorded["text"]}
    golden |= text_answer(path, recorded["tokens"])
    fields = (f" {json.dumps(k)}: {json.dumps(v)}" for k, v in golden.items())
    (out / f"{name}.json").write_text("{\n" + ",\n".join(fields) + "\n}\n")
    print(f"{name}: {golden['nll']:.5f}")


def main():
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    models, quant = map(Path, sys.argv[1:3])
    out = Path(sys.argv[3]) if sys.argv[3:] else REPOSITORY / "tests-data/golden"
    (out / "numpy").mkdir(parents=True, exist_ok=True)
    types = {}
    for kind in MODELS:
        answer = types[kind] = prompt_answer(quant / f"qwen3-2l-{kind}.gguf", PROMPT)
        first, second = answer["top"][:2]
        print(f"{kind}: {first['id']} {first['logit']:.4f} {first['logprob']:.4f}, "
              f"{second['id']} {second['logit']:.4f}, {answer['nll']:.5f}, "
              f"{answer['max_abs_diff']}")
    golden = origin() | {"types": types}
    (out / "quant_models.json").write_text(json.dumps(golden, indent=1) + "\n")
    real_model(models / "SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2", PROMPT, out / "numpy")
    real_model(models / "gemma-3-270m-q4_k_m.gguf", "gemma3", GEMMA_PROMPT, out / "numpy")


if __name__ == "__main__":
    main()
