#!/usr/bin/env python3
"""What `transformers` gives each token of a text by SmolLM2: echo.py FILE.gguf [OUT]

OUT defaults to tests-data/golden/echo.json of this repository: ids of a text and the natural
logarithm of each token's probability after those before it, null for the first; float32 weights,
dequantised by transformers, eager attention, softmax in float64.

Needs torch (a CPU build will do), transformers, gguf, accelerate: requirements.txt, and accelerate.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

REPOSITORY = Path(__file__).resolve().parents[2]


def main():
    file = Path(sys.argv[1])
    out = Path(sys.argv[2]) if len(sys.argv) > 2 else REPOSITORY / "tests-data/golden/echo.json"
    options = {"gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, dtype=torch.float32, attn_implementation="eager", **options).eval()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **options)
    ids = tokenizer((REPOSITORY / "tests-data/austen-1056.txt").read_text())["input_ids"]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0].double()
    scores = torch.log_softmax(logits, -1)
    known = [round(scores[i, token].item(), 6) for i, token in enumerate(ids[1:])]
    versions = {name: version(name) for name in ("torch", "transformers", "gguf")}
    text = {"model": file.name, "versions": versions, "ids": ids, "logprobs": [None, *known]}
    out.write_text(json.dumps(text) + "\n")


if __name__ == "__main__":
    main()
