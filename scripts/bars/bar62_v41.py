#!/usr/bin/env python3
"""Issue 62: log-probabilities of a tiny random DeepSeek V4.1 beside those of mlx-lm 0.32.2, which alone has the family.

    PACELINE=PROGRAM python scripts/bars/bar62_v41.py

Needs mlx (its CPU build), mlx-lm and numpy. Four prompts of 250 tokens on one node and over a tensor split; a pipeline is refused
by name. Keys are rounded to 8 and 4 bits: one whose last bit differs may be rounded to another number, which moves all later rows.
So the bar of 1e-3 is on the positions before the first such row of mlx-lm itself, where one pass is unlike one that is cut.
"""
import os, sys, subprocess  # noqa: E401

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../golden"))
from pathlib import Path  # noqa: E402

import deepseek_v41_tiny as tiny  # noqa: E402
import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from common32 import BINARY, REPO, Up, arguments, bar, end, told  # noqa: E402

FOLDER = f"{REPO}/tests-data/golden/hf/{tiny.NAME}"
WAYS = {"one": [], "tensor": ["--nodes", 2, "--split", "tensor"]}


def log_probabilities(logits, tokens):
    of = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    return [float(of[i, token]) for i, token in enumerate(tokens[1:])]


def main():
    arguments(__doc__).parse_args()
    mx.set_default_device(mx.cpu)
    rng, model = np.random.default_rng(62), tiny.loaded(Path(FOLDER))
    prompts = [rng.integers(3, 300, 250).tolist() for _ in range(4)]
    wanted = []
    for prompt in prompts:
        whole = model(mx.array([prompt]))[0]
        apart = mx.max(mx.abs(tiny.cut(model, prompt) - whole), axis=-1)
        rows = int(mx.argmax(apart > 2e-4)) or len(prompt)
        told("positions before a key is rounded otherwise", rows)
        wanted.append(log_probabilities(whole, prompt)[:rows - 1])
    for way, more in WAYS.items():
        server = Up(FOLDER, "--threads", 1, "--context", 256, "--parallel", 1, "--prefix-cache", "off", *more, seconds=60)
        far = 0.0
        for prompt, rows in zip(prompts, wanted):
            body = {"model": server.model, "prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 0, "temperature": 0}
            got = server.call("POST", "/v1/completions", body)["choices"][0]["logprobs"]["token_logprobs"][1:len(prompt)]
            far = max([far, *(abs(x - y) for x, y in zip(got, rows))])
        server.end()
        bar(f"DeepSeek V4.1, {way}, the furthest log-probability", far, "", 1e-3, False)
    refused = subprocess.run([BINARY, "run", FOLDER, "a", "--nodes", "2", "--split", "pipeline"], capture_output=True, text=True)
    told("a pipeline", refused.stderr.strip().splitlines()[-1:])
    bar("a pipeline that runs", float(refused.returncode == 0), "", 0, False)
    end()


main()
