#!/usr/bin/env python3
"""Rotary frequencies of transformers for fields of `config.json`: ropes.py [OUT]

OUT defaults to tests-data/golden/ropes.json of this repository. For each case it has the changed
fields of a Llama configuration with heads of 16, the context, the inverse frequencies that
`LlamaRotaryEmbedding` uses for a sequence of that length, and its factor of cosines and sines.
Needs torch and transformers: requirements.txt.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

REPOSITORY = Path(__file__).resolve().parents[2]
SHORT = [1.0, 1.02, 1.05, 1.1, 1.2, 1.3, 1.5, 2.0]
LONG = [1.0, 1.1, 1.4, 2.0, 4.0, 8.0, 16.0, 32.0]
ORIGINAL = "original_max_position_embeddings"

YARN = {"factor": 4.0, ORIGINAL: 128}
LONGROPE = {"short_factor": SHORT, "long_factor": LONG, ORIGINAL: 128}
CASES = {
    # Qwen's advice: old names, the stated context unchanged.
    "yarn, old names": {"rope_scaling": {"type": "yarn", **YARN}, "max_position_embeddings": 128},
    "yarn, names of 4.43": {
        "rope_scaling": {"rope_type": "yarn", **YARN}, "rope_theta": 1e6,
        "max_position_embeddings": 512},
    "yarn, names of 5": {
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "beta_fast": 16.0,
                            "attention_factor": 0.9, "truncate": False, **YARN},
        "max_position_embeddings": 512},
    "yarn, factor from the contexts": {
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": None, ORIGINAL: 128},
        "max_position_embeddings": 1024},
    "longrope": {
        "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **LONGROPE},
        "max_position_embeddings": 512},
    "longrope, original context outside": {
        "rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG},
        "max_position_embeddings": 512, ORIGINAL: 128},
    "longrope, own factor": {
        "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 8.0, **LONGROPE},
        "max_position_embeddings": 128},
    "dynamic": {
        "rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 128},
}

cases = []
for name, fields in CASES.items():
    usual = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1,
             "intermediate_size": 64, "vocab_size": 8}
    contexts = [384] if name.startswith("yarn") else [64, 128, 384]
    for context in contexts:
        rope = LlamaRotaryEmbedding(LlamaConfig(**usual, **json.loads(json.dumps(fields))))
        rope(torch.zeros(1, 1), torch.arange(context)[None])
        cases.append({
            "name": name, "fields": fields, "context": context,
            "frequencies": rope.inv_freq.tolist(), "magnitude": float(rope.attention_scaling)})
out = Path(sys.argv[1]) if len(sys.argv) > 1 else REPOSITORY / "tests-data/golden/ropes.json"
found = {"transformers": version("transformers"), "script": "scripts/golden/ropes.py"}
lines = ",\n".join(json.dumps(case) for case in cases)
out.write_text(json.dumps(found)[:-1] + ',\n"cases": [\n' + lines + "\n]}\n")
