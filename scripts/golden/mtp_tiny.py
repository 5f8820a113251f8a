#!/usr/bin/env python3
"""Tiny models with a multi-token prediction layer and what it computes: mtp_tiny.py [OUT [NAME...]]

OUT defaults to tests-data/golden/hf of this repository. For each model NAME (all of them) it writes
    NAME-mtp/                    the folder NAME with one more layer, under the names of the hub
    NAME-mtp.golden.safetensors  "captured" (T, C): random rows; "tokens" (T + 1,); "logits"
                                 (T, vocabulary) after each row; "chained.logits" (vocabulary,)
                                 after one more token, whose feature is the layer's output

The layer, norms and rotations are those of `transformers`; they are joined as in vLLM's
deepseek_mtp.py, glm4_moe_mtp.py and qwen3_next_mtp.py.
Needs torch (a CPU build will do), transformers, safetensors, numpy.
"""

import copy
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

REPOSITORY = Path(__file__).resolve().parents[2]
GOLDEN = REPOSITORY / "tests-data/golden/hf"
ROWS, SEED = 70, 62  # more rows than a page of 64
MODELS = ["deepseek-v3-bf16", "glm4moe-bf16", "qwen3next-bf16"]
QWEN = {"enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden",
        "eh_proj": "mtp.fc", "shared_head.norm": "mtp.norm"}


def drawn(name, shape, draw, centred):
    """Values of a new weight, rounded to bf16."""
    values = draw.standard_normal(shape).astype(np.float32)
    if len(shape) == 1:
        values = values * 0.1 + (0.0 if centred else 1.0)
    else:
        values = values * shape[-1] ** -0.5
    return torch.from_numpy(values).bfloat16().float()


def write(name, out):
    source = GOLDEN / name
    config = json.loads((source / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, attn_implementation="eager").eval()
    draw = np.random.default_rng(SEED)
    body, n, width = model.model, config["num_hidden_layers"], config["hidden_size"]
    is_qwen = config["model_type"].startswith("qwen3")
    layer = copy.deepcopy(body.layers[-1])
    norms = {part: copy.deepcopy(body.norm) for part in ("enorm", "hnorm", "shared_head.norm")}
    mix = drawn("", (width, 2 * width), draw, False)
    new = {"eh_proj.weight": mix}
    with torch.no_grad():
        for part, norm in norms.items():
            norm.weight.copy_(drawn(part, (width,), draw, is_qwen))
            new[f"{part}.weight"] = norm.weight.detach().clone()
        for part, value in layer.named_parameters():
            # Norms of Qwen's attention are centred as well.
            value.copy_(drawn(part, tuple(value.shape), draw, is_qwen))
    stored = load_file(source / "model.safetensors")
    begin = "mtp.layers.0." if is_qwen else f"model.layers.{n}."
    old = f"model.layers.{n - 1}."
    saved = dict(stored)
    names = {key[len(old):] for key in stored if key.startswith(old)}
    values = dict(layer.state_dict())
    for key in sorted(names):
        value = values.get(key)
        if value is None:  # one expert's matrix of a stack
            _, _, expert, matrix, _ = key.rsplit(".", 4) if key.count(".") >= 4 else (None,) * 5
            value = of_expert(values, int(expert), matrix)
        saved[begin + key] = value.to(stored[old + key].dtype).contiguous()
    for key, value in new.items():
        part = key.removesuffix(".weight")
        full = QWEN[part] if is_qwen else f"model.layers.{n}.{part}"
        saved[full + ".weight"] = value.bfloat16().contiguous()

    captured = torch.from_numpy(draw.standard_normal((ROWS, width)).astype(np.float32))
    tokens = torch.from_numpy(draw.integers(0, config["vocab_size"], ROWS + 1))

    def run(features):
        rows = len(features)
        embedded = norms["enorm"](body.embed_tokens(tokens[:rows]))
        x = torch.cat([embedded, norms["hnorm"](features)], dim=-1) @ mix.T
        positions = torch.arange(rows)[None]
        mask = torch.full((rows, rows), float("-inf")).triu(1)[None, None]
        turns = body.rotary_emb(x[None], positions)
        y = layer(x[None], attention_mask=mask, position_ids=positions, position_embeddings=turns)
        y = (y[0] if isinstance(y, tuple) else y).reshape(rows, width)
        return y, model.lm_head(norms["shared_head.norm"](y))

    with torch.no_grad():
        hidden, logits = run(captured)
        _, chained = run(torch.cat([captured, hidden[-1:]]))
    folder = out / f"{name}-mtp"
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder / file.name)
    if not is_qwen:
        config["num_nextn_predict_layers"] = 1
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
    save_file({"captured": captured, "tokens": tokens, "logits": logits.contiguous(),
               "chained.logits": chained[-1].contiguous()}, out / f"{name}-mtp.golden.safetensors")


def of_expert(values, expert, matrix):
    """A matrix of an expert whose model stacks all experts."""
    both = values["mlp.experts.gate_up_proj"][expert]
    half = both.shape[0] // 2
    return {"gate_proj": both[:half], "up_proj": both[half:],
            "down_proj": values["mlp.experts.down_proj"][expert]}[matrix]


def main():
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else GOLDEN
    for name in sys.argv[2:] or MODELS:
        write(name, out)


if __name__ == "__main__":
    main()
