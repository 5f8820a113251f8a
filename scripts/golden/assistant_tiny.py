#!/usr/bin/env python3
"""A tiny random Gemma 4 assistant and what `transformers` computes with it: assistant_tiny.py [OUT]

OUT defaults to tests-data/golden/heads of this repository. It writes
    assistant/                   config.json, model.safetensors: a head of the model `gemma4-e-bf16`
    assistant.golden.safetensors "captured" (T, 3, C): rows of that model, the inputs of its last layers with a cache
                                 of their own and the normed output; "dense" and "ordered" (DRAFTS, V): logits
                                 of each draft without and with `use_ordered_embeddings`; "dense.tokens" and
                                 "ordered.tokens" (T + 1 + DRAFTS,): a text, the token after it, and the drafts;
                                 all float32, tokens int64

Needs torch (a CPU build will do), transformers 5.24, safetensors, numpy.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4ForCausalLM, Gemma4TextConfig

REPOSITORY = Path(__file__).resolve().parents[2]
ROWS, DRAFTS, SEED = 70, 3, 63  # more rows than a page of 64, and than the window of 8
CENTROIDS, CHOSEN = 20, 4


def head(model):
    """A head of a model's configuration, with weights drawn by numpy and rounded to bfloat16."""
    kept = ["head_dim", "global_head_dim", "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "sliding_window",
            "rope_parameters", "vocab_size", "max_position_embeddings", "pad_token_id", "eos_token_id", "bos_token_id"]
    text = Gemma4TextConfig(
        **{name: model[name] for name in kept}, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_kv_shared_layers=3, layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        hidden_size_per_layer_input=0, vocab_size_per_layer_input=0, tie_word_embeddings=True)
    config = Gemma4AssistantConfig(
        text_config=text, backbone_hidden_size=model["hidden_size"], use_ordered_embeddings=True,
        num_centroids=CENTROIDS, centroid_intermediate_top_k=CHOSEN)
    config._attn_implementation = "eager"
    made = Gemma4AssistantForCausalLM(config).float().eval()
    draw = np.random.default_rng(SEED)
    with torch.no_grad():
        for name, value in [*made.named_parameters(), *made.named_buffers()]:
            drawn = draw.standard_normal(value.shape).astype(np.float32)
            if name.endswith("token_ordering"):
                value.copy_(torch.from_numpy(draw.permutation(len(value))))
            elif name.endswith(("layer_scalar", "norm.weight")):
                value.copy_(torch.from_numpy(1 + 0.1 * drawn).bfloat16())
            elif value.dim() == 2:
                value.copy_(torch.from_numpy(drawn * value.shape[-1] ** -0.5).bfloat16())
    return made, draw


def main():
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else REPOSITORY / "tests-data/golden/heads"
    folder = REPOSITORY / "tests-data/golden/hf/gemma4-e-bf16"
    model = json.loads((folder / "config.json").read_text())
    made, draw = head(model)
    target = Gemma4ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = torch.from_numpy(draw.integers(3, model["vocab_size"], ROWS + 1))
    own = model["num_hidden_layers"] - model["num_kv_shared_layers"]
    kinds = model["layer_types"][:own]
    last = sorted(own - 1 - kinds[::-1].index(kind) for kind in set(kinds))
    with torch.no_grad():
        of = target(tokens[None, :ROWS], output_hidden_states=True, return_shared_kv_states=True)
        captured = torch.stack([of.hidden_states[layer][0] for layer in [*last, -1]], dim=1)
        # A query sees its window, itself included; transformers cuts keys where a cache does.
        keys = {kind: tuple(x[:, :, -(model["sliding_window"] - 1):] if kind == "sliding_attention" else x for x in kv)
                for kind, kv in of.shared_kv_states.items()}
        golden = {"captured": captured.contiguous()}
        for name, is_ordered in [("dense", False), ("ordered", True)]:
            made.config.use_ordered_embeddings = is_ordered
            hidden, text, logits = of.hidden_states[-1][:, -1:], tokens, []
            for _ in range(DRAFTS):
                embedded = target.get_input_embeddings()(text[None, -1:])
                step = made(inputs_embeds=torch.cat([embedded, hidden], dim=-1), shared_kv_states=keys,
                            position_ids=torch.tensor([[ROWS]]))
                hidden = step.last_hidden_state
                logits.append(step.logits[0, 0])
                text = torch.cat([text, step.logits[0, 0].argmax()[None]])
            golden[name], golden[f"{name}.tokens"] = torch.stack(logits).contiguous(), text
    made.config.use_ordered_embeddings = True
    made.bfloat16().save_pretrained(out / "assistant")
    (out / "assistant" / "generation_config.json").unlink(missing_ok=True)
    save_file(golden, out / "assistant.golden.safetensors")


if __name__ == "__main__":
    main()
