#!/usr/bin/env python3
"""Issue 62: log-probabilities of tiny random DeepSeek V4.1, with and without a memory of n-grams, beside those of mlx-lm 0.32.2,
which alone has the family; the memory is that of sglang.

    PACELINE=PROGRAM SGLANG=FOLDER python scripts/bars/bar62_v41.py

Needs what scripts/golden/deepseek_v41_tiny.py needs. Eight prompts of 250 tokens on one node, over a tensor split and a pipeline.
Keys are rounded to 8 and 4 bits: one whose last bit differs may be rounded to another number, which moves all rows that attend to
it. mlx-lm beside itself with embeddings moved by two units in the last place says how many that are.
"""
import os, sys  # noqa: E401

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../golden"))
from pathlib import Path  # noqa: E402

import deepseek_v41_tiny as tiny  # noqa: E402
import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from common32 import REPO, Up, arguments, bar, end, told  # noqa: E402

WAYS = {"one": [], "tensor": ["--nodes", 2, "--split", "tensor"], "pipeline": ["--nodes", 2, "--split", "pipeline"]}


def log_probabilities(logits, tokens):
    of = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    return [float(of[i, token]) for i, token in enumerate(tokens[1:])]


def measured(name):
    folder = f"{REPO}/tests-data/golden/hf/{name}"
    rng, model = np.random.default_rng(62), tiny.loaded(Path(folder))
    prompts = [rng.integers(3, 300, 250).tolist() for _ in range(8)]
    wanted = [log_probabilities(model(mx.array([prompt]))[0], prompt) for prompt in prompts]
    moved = [log_probabilities(tiny.moved(model, prompt, rng), prompt) for prompt in prompts]

    def beyond(rows):
        far = np.abs(np.array(rows) - np.array(wanted))
        return int((far > 1e-3).sum()), float(np.median(far))

    most, _ = beyond(moved)
    told(f"{name}: positions beyond 1e-3, mlx-lm beside itself", most)
    for way, more in WAYS.items():
        server = Up(folder, "--threads", 1, "--context", 256, "--parallel", 1, "--prefix-cache", "off", *more, seconds=60)
        rows = []
        for prompt in prompts:
            body = {"model": server.model, "prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 0, "temperature": 0}
            answer = server.call("POST", "/v1/completions", body)["choices"][0]
            rows.append(answer["logprobs"]["token_logprobs"][1:len(prompt)])
        server.end()
        n, median = beyond(rows)
        bar(f"{name}, {way}, the middle distance of a log-probability", median, "", 1e-3, False)
        bar(f"{name}, {way}, positions of 1,992 beyond 1e-3", n, "", 1.5 * most, False)


def main():
    arguments(__doc__).parse_args()
    mx.set_default_device(mx.cpu)
    for name in tiny.NAMES:
        measured(name)
    end()


if __name__ == "__main__":
    main()
