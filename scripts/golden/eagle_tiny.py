#!/usr/bin/env python3
"""A tiny random EAGLE-3 head and what `speculators` computes with it: eagle_tiny.py [OUT]

OUT defaults to tests-data/golden/heads of this repository. It writes
    eagle3/                   config.json, model.safetensors: a head of the model `llama-untied-bf16`
    eagle3.golden.safetensors "captured" (T, 3, C): random captured rows; "tokens" (T,);
                              "logits" (T, draft vocabulary) after each row; "chained.logits" (draft
                              vocabulary,) after one more token, whose feature is the head's output;
                              all float32, tokens int64

Needs torch (a CPU build will do), speculators, transformers, safetensors, numpy.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig

REPOSITORY = Path(__file__).resolve().parents[2]
ROWS, DRAFT_VOCABULARY, SEED = 70, 96, 61  # more rows than a page of 64
CAPTURES = [0, 1, 2]


def head(model_dir):
    """The head of the model in a folder, with weights drawn by numpy."""
    model = json.loads((model_dir / "config.json").read_text())
    layer = LlamaConfig(**model)
    layer.num_hidden_layers = 1
    layer._attn_implementation = "eager"
    proposal = GreedyTokenProposalConfig(speculative_tokens=4)
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer, draft_vocab_size=DRAFT_VOCABULARY,
        norm_before_residual=True, eagle_aux_hidden_state_layer_ids=CAPTURES,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3", proposal_methods=[proposal], default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=model["architectures"])))
    made = Eagle3DraftModel(config).float().eval()
    draw = np.random.default_rng(SEED)
    chosen = np.sort(draw.choice(layer.vocab_size, DRAFT_VOCABULARY, replace=False))
    with torch.no_grad():
        for name, value in made.named_parameters():
            drawn = draw.standard_normal(value.shape).astype(np.float32)
            scale = 0.1 if value.dim() == 1 else value.shape[-1] ** -0.5
            value.copy_(torch.from_numpy(drawn * scale + (1.0 if value.dim() == 1 else 0.0)))
        made.d2t.copy_(torch.from_numpy(chosen - np.arange(DRAFT_VOCABULARY)))
        made.t2d.zero_()
        made.t2d[torch.from_numpy(chosen)] = True
    return made, draw


def forward(made, tokens, features):
    """Hidden rows and logits of rows with these features (T, C)."""
    rows = len(tokens)
    x = torch.cat([made.embed_tokens(tokens)[None], features[None]], dim=-1)
    positions = torch.arange(rows)[None]
    mask = torch.full((rows, rows), float("-inf")).triu(1)[None, None]
    turns = made.rotary_emb(x, positions)
    hidden = made.layers[0](x, attention_mask=mask, position_ids=positions,
                            position_embeddings=turns)[0]
    return hidden, made.lm_head(made.norm(hidden))


def main():
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else REPOSITORY / "tests-data/golden/heads"
    made, draw = head(REPOSITORY / "tests-data/golden/hf/llama-untied-bf16")
    width, vocabulary = made.hidden_size, made.embed_tokens.num_embeddings
    captured = torch.from_numpy(draw.standard_normal((ROWS, 3, width)).astype(np.float32))
    tokens = torch.from_numpy(draw.integers(0, vocabulary, ROWS + 1))
    with torch.no_grad():
        features = made.fc(captured.reshape(ROWS, -1))
        hidden, logits = forward(made, tokens[:ROWS], features)
        chained = torch.cat([features, hidden[-1:]])
        _, chained = forward(made, tokens, chained)
    made.save_pretrained(out / "eagle3")
    (out / "eagle3" / "config.py").unlink(missing_ok=True)
    save_file({"captured": captured, "tokens": tokens, "logits": logits.contiguous(),
               "chained.logits": chained[-1].contiguous()}, out / "eagle3.golden.safetensors")


if __name__ == "__main__":
    main()
