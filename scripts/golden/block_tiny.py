#!/usr/bin/env python3
"""Tiny random DFlash and DSpark heads and what `speculators` computes: block_tiny.py [OUT]

OUT defaults to tests-data/golden/heads of this repository. For NAME of dflash, dspark, dspark-gated (with a sliding
window) and dspark-rnn (with a causal one) it writes
    NAME/                    config.json, model.safetensors: a head of the model `llama-untied-bf16`
    NAME.golden.safetensors  "captured" (T, 2, C): random captured rows; "token": the one after
                             them; "logits" (B, draft vocabulary) of a block behind them; with
                             dspark "previous" (B,): the token before each place, and "bias"
                             (B, draft vocabulary): what these add; all float32, tokens int64

Needs torch (a CPU build will do), speculators, transformers, safetensors, numpy.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import Qwen3Config

REPOSITORY = Path(__file__).resolve().parents[2]
ROWS, BLOCK, WINDOW, SEED = 70, 5, 9, 62  # more rows than a page of 64
CAPTURES = [1, 2]


def head(model_dir, name, draft_vocab, is_rounded, layer_types=None, **more):
    """A head of the model in a folder, with weights drawn by numpy."""
    model = json.loads((model_dir / "config.json").read_text())
    windows = {"layer_types": layer_types, "use_sliding_window": True, "sliding_window": WINDOW} if layer_types else {}
    layer = Qwen3Config(
        vocab_size=model["vocab_size"], hidden_size=model["hidden_size"], intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        rope_theta=50_000.0, **windows)
    layer._attn_implementation = "eager"
    config, made = {"dflash": (DFlashSpeculatorConfig, DFlashDraftModel),
                    "dspark": (DSparkSpeculatorConfig, DSparkDraftModel)}[name]
    proposal = GreedyTokenProposalConfig(speculative_tokens=BLOCK - 1)
    config = config(
        transformer_layer_config=layer, draft_vocab_size=draft_vocab, block_size=BLOCK,
        aux_hidden_state_layer_ids=CAPTURES, mask_token_id=7,
        speculators_config=SpeculatorsConfig(
            algorithm=name, proposal_methods=[proposal], default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=model["architectures"])),
        **more)
    made = made(config).float().eval()
    draw = np.random.default_rng(SEED)
    with torch.no_grad():
        for of, value in made.named_parameters():
            drawn = draw.standard_normal(value.shape).astype(np.float32)
            scale = 0.1 if value.dim() == 1 else value.shape[-1] ** -0.5
            norm = value.dim() == 1 and of.endswith("norm.weight")
            drawn = torch.from_numpy(drawn * scale + (1.0 if norm else 0.0))
            value.copy_(drawn.bfloat16() if is_rounded else drawn)
        if made.d2t is not None:
            chosen = np.sort(draw.choice(layer.vocab_size, draft_vocab, replace=False))
            made.d2t.copy_(torch.from_numpy(chosen - np.arange(draft_vocab)))
            made.t2d.zero_()
            made.t2d[torch.from_numpy(chosen)] = True
    # A published head leaves out the parts that are the model's.
    tensors = load_file(model_dir / "model.safetensors")
    with torch.no_grad():
        made.embed_tokens.weight.copy_(tensors["model.embed_tokens.weight"].float())
        if made.d2t is None:
            made.lm_head.weight.copy_(tensors["lm_head.weight"].float())
    return made, draw


def logits(made, captured, token):
    """Logits of a block behind captured rows (T, 2, C), whose first token is `token`."""
    context = made.hidden_norm(made.fc(captured.reshape(1, ROWS, -1)))
    block = torch.full((1, BLOCK), made.mask_token_id)
    block[0, 0] = token
    x = made.embed_tokens(block)
    turns = made.rotary_emb(x, torch.arange(ROWS + BLOCK)[None])
    mask = torch.zeros(1, 1, BLOCK, ROWS + BLOCK)
    mask[..., :ROWS - WINDOW] = float("-inf")
    if not made.sliding_window_non_causal:
        mask[..., ROWS:] = torch.full((BLOCK, BLOCK), float("-inf")).triu(1)
    for i, layer in enumerate(made.layers):
        x = layer(hidden_states=x, target_hidden=context, position_embeddings=turns,
                  attention_mask=mask if i in made.sliding_window_indices else None)
    hidden = made.norm(x)
    return hidden, made.lm_head(hidden)[0]


def main():
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else REPOSITORY / "tests-data/golden/heads"
    model_dir = REPOSITORY / "tests-data/golden/hf/llama-untied-bf16"
    vocab = json.loads((model_dir / "config.json").read_text())["vocab_size"]
    windowed = {"layer_types": ["full_attention", "sliding_attention"], "markov_rank": 32}
    for name, draft_vocab, more in [
            ("dflash", vocab, {}), ("dspark", 96, {"markov_rank": 32}),
            ("dspark-gated", 96, {**windowed, "markov_head_type": "gated", "sliding_window_non_causal": True}),
            ("dspark-rnn", 96, {**windowed, "markov_head_type": "rnn", "sample_from_anchor": False})]:
        is_rounded = "-" in name  # half the bytes
        made, draw = head(model_dir, name.split("-")[0], draft_vocab, is_rounded, **more)
        width = made.config.transformer_layer_config.hidden_size
        captured = torch.from_numpy(draw.standard_normal((ROWS, 2, width)).astype(np.float32))
        token = torch.tensor(int(draw.integers(0, vocab)))
        golden = {"captured": captured, "token": token[None]}
        with torch.no_grad():
            hidden, of = logits(made, captured, token)
            golden["logits"] = of.contiguous()
            if name != "dflash":
                golden["previous"] = torch.from_numpy(draw.integers(0, vocab, BLOCK))
                first = 1 - int(made.config.sample_from_anchor)
                golden["previous"][:1 + first] = token
                bias = made.markov_head.block_bias(prev_token_ids=golden["previous"][None], hidden_states=hidden)
                golden["bias"] = bias[0].contiguous()
        save_file(golden, out / f"{name}.golden.safetensors")
        (made.bfloat16() if is_rounded else made).save_pretrained(out / name)
        (out / name / "config.py").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
