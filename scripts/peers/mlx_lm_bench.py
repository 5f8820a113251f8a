#!/usr/bin/env python3
"""Speed of mlx-lm on one folder, for side-by-side runs with `paceline bench model --engine mlx`.

    pip install mlx-lm==0.32.2            # the version that the figures in docs are of
    mlx_lm_bench.py FOLDER [--prompt 512] [--gen 128] [--serve]

Reads a prompt of --prompt tokens and decodes --gen more after it, once to warm up and once
measured, with mlx-lm's own loop (`mlx_lm.generate.generate_step`, greedy, which does not stop at
an end of text). Prints tokens per second, a JSON list: of the prompt, and decoding. With --serve
it runs once for each line of its input and prints a line each.
"""

import argparse
import json
import sys
import time

import mlx.core as mx
from mlx_lm import load
from mlx_lm.generate import generate_step


def run(model, prompt, count):
    """Prefill and decode speed."""
    start = time.perf_counter()
    stamps = [time.perf_counter()
              for _ in generate_step(mx.array(prompt), model, max_tokens=count + 1)]
    decode = (len(stamps) - 1) / (stamps[-1] - stamps[0])
    return [len(prompt) / (stamps[0] - start), decode]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--gen", type=int, default=128)
    parser.add_argument("--serve", action="store_true")
    given = parser.parse_args()
    model, tokenizer = load(given.model)
    # Spread over the vocabulary, as those that paceline reads.
    inner = max(tokenizer.vocab_size - 100, 1)
    prompt = [i * 7919 % inner + 50 for i in range(given.prompt)]
    if given.serve:
        for _ in sys.stdin:
            print(json.dumps(run(model, prompt, given.gen)), flush=True)
        return
    run(model, prompt, 2)
    print(json.dumps(run(model, prompt, given.gen)))


if __name__ == "__main__":
    main()
