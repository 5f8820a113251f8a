#!/usr/bin/env python3
"""A tiny random Kimi K3 and what mlx-lm computes with it: kimi_k3_tiny.py [OUT]

OUT defaults to tests-data/golden/hf of this repository. It writes NAME/ and the goldens of NAME as
hf_tiny.py does, whose file says what is in them. transformers has no class of Kimi K3, so the
logits are those of mlx-lm's, in float64 on the CPU. "hidden.I" has all residual streams, (positions,
streams, width): the sum since the current block of layers began, then the blocks; of blocks that
have not begun the embedding. "f64_matmul" is how far the logits in float32 are.
Needs requirements.txt, mlx[cpu] and mlx-lm 0.32.2.
"""

import json
import sys
import types
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
from mlx.utils import tree_map
from mlx_lm.models import base, cache, gated_delta, kimi_k3, kimi_linear, mla, switch_layers
from mlx_lm.models.cache import KVCache
from safetensors.torch import load_file, save_file

import hf_tiny as tiny

NAME, SEED, STEPS = "kimi-k3-bf16", 7, 150
TEXT = {
    "model_type": "kimi_linear", "hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 4, "intermediate_size": 96, "rms_norm_eps": 1e-5,
    "vocab_size": tiny.VOCABULARY, "max_position_embeddings": 256, "tie_word_embeddings": False,
    "linear_attn_config": {
        "head_dim": 32, "num_heads": 2, "short_conv_kernel_size": 4, "kda_layers": [1, 2, 4],
        "full_attn_layers": [3, 5], "gate_lower_bound": -5.0, "use_full_rank_gate": True},
    "hidden_act": "situ", "activation_situ_beta": 1.5, "activation_situ_linear_beta": 2.0,
    "attn_res_block_size": 2, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 32, "mla_use_nope": True, "mla_use_output_gate": True,
    "num_experts": 6, "num_experts_per_token": 3, "num_shared_experts": 1,
    "moe_intermediate_size": 32, "moe_router_activation_func": "sigmoid", "moe_renormalize": True,
    "routed_scaling_factor": 2.4, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "num_expert_group": 1, "topk_group": 1, "routed_expert_hidden_size": 32,
    "latent_moe_use_norm": True, "dtype": "bfloat16", "pad_token_id": tiny.PAD,
    "eos_token_id": tiny.EOS, "bos_token_id": tiny.BOS,
}


def on_the_hub(text):
    """Names of all weights under the prefix of the text part, as on the hub, and their shapes."""
    width, net = text["hidden_size"], text["linear_attn_config"]
    heads, (own, dim) = text["num_attention_heads"], (net["num_heads"], net["head_dim"])
    plain, turned, value = text["qk_nope_head_dim"], text["qk_rope_head_dim"], text["v_head_dim"]
    latent, query = text["kv_lora_rank"], text["q_lora_rank"]

    def feed_forward(ffn):
        return {"gate_proj": (ffn, width), "up_proj": (ffn, width), "down_proj": (width, ffn)}

    yield "model.embed_tokens.weight", (text["vocab_size"], width)
    yield "model.norm.weight", (width,)
    yield "lm_head.weight", (text["vocab_size"], width)
    if text.get("attn_res_block_size"):
        yield "model.output_attn_res_proj.weight", (1, width)
        yield "model.output_attn_res_norm.weight", (width,)
    for layer in range(text["num_hidden_layers"]):
        parts = {"input_layernorm": (width,), "post_attention_layernorm": (width,)}
        if text.get("attn_res_block_size"):
            parts |= {f"{half}_res_proj": (1, width) for half in ("self_attention", "mlp")}
            parts |= {f"{half}_res_norm": (width,) for half in ("self_attention", "mlp")}
        if layer + 1 in net["kda_layers"]:
            all_of = own * dim
            low = {"f_a_proj": (dim, width), "f_b_proj": (all_of, dim), "b_proj": (own, width)}
            gate = {"g_proj": (all_of, width)} if net.get("use_full_rank_gate") else {
                "g_a_proj": (dim, width), "g_b_proj": (all_of, dim)}
            attention = low | gate | {f"{x}_proj": (all_of, width) for x in "qkv"}
            attention |= {f"{x}_conv1d": (all_of, 1, net["short_conv_kernel_size"]) for x in "qkv"}
            attention |= {"o_norm": (dim,), "o_proj": (width, all_of)}
            yield f"model.layers.{layer}.self_attn.A_log", (own,)
            yield f"model.layers.{layer}.self_attn.dt_bias", (all_of,)
        else:
            attention = {
                "q_a_proj": (query, width), "q_a_layernorm": (query,),
                "q_b_proj": (heads * (plain + turned), query),
                "kv_a_proj_with_mqa": (latent + turned, width), "kv_a_layernorm": (latent,),
                "kv_b_proj": (heads * (plain + value), latent), "o_proj": (width, heads * value)}
            if text.get("mla_use_output_gate"):
                attention["g_proj"] = (heads * value, width)
        parts |= {f"self_attn.{name}": shape for name, shape in attention.items()}
        if layer < text["first_k_dense_replace"]:
            parts |= {f"mlp.{n}": s for n, s in feed_forward(text["intermediate_size"]).items()}
        else:
            ffn, row = text["moe_intermediate_size"], text.get("routed_expert_hidden_size")
            block = {f"shared_experts.{n}": s for n, s in
                     feed_forward(ffn * text["num_shared_experts"]).items()}
            block["gate"] = (text["num_experts"], width)
            if row:
                block |= {"routed_expert_down_proj": (row, width),
                          "routed_expert_up_proj": (width, row)}
            if text.get("latent_moe_use_norm"):
                block["routed_expert_norm"] = (row,)
            for expert in range(text["num_experts"]):
                row = row or width
                block |= {f"experts.{expert}.w1": (ffn, row), f"experts.{expert}.w3": (ffn, row),
                          f"experts.{expert}.w2": (row, ffn)}
            parts |= {f"block_sparse_moe.{name}": shape for name, shape in block.items()}
            yield (f"model.layers.{layer}.block_sparse_moe.gate.e_score_correction_bias",
                   (text["num_experts"],))
        for name, shape in parts.items():
            yield f"model.layers.{layer}.{name}.weight", shape


def drawn(text, seed):
    """Random weights by name, float32: sizes that keep scores and logits well away from flat."""
    rng = np.random.default_rng(seed)
    for name, shape in sorted(on_the_hub(text)):
        values = rng.standard_normal(shape, dtype=np.float32)
        if name.endswith("dt_bias"):
            values = 0.5 * values - 4.0  # states that outlast a chunk
        elif "norm" in name:
            values = 0.3 * values + 1.0
        elif "conv1d" in name or name.endswith("A_log"):
            values *= 0.5
        elif "embed" in name or "lm_head" in name or "_res_proj" in name:
            values *= 0.35
        elif not name.endswith("bias") and ".gate." not in name:
            values *= 0.2
        yield f"language_model.{name}", torch.from_numpy(values)


def write_folder(folder, text, seed, dtype):
    """One model folder as the hub would hold it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3",
              "tie_word_embeddings": False, "text_config": text, "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    kept = ("A_log", "dt_bias", "e_score_correction_bias")
    state = {name: weight if name.endswith(kept) else weight.to(dtype)
             for name, weight in drawn(text, seed)}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    tiny.tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tiny.TOKENIZER_CONFIG, indent=2) + "\n")


class Wide(types.ModuleType):
    """mlx.core with float64 in the place of float32, for modules that name it."""

    def __getattr__(self, name):
        others = {"float32": mx.float64, "gather_mm": lambda a, b, rhs_indices, **_: a @ b[rhs_indices]}
        return others[name] if name in others else getattr(mx, name)


def wide(model):
    """The model in float64; models that are made before stay as they are, but must not run."""
    for module in (base, cache, gated_delta, kimi_k3, kimi_linear, mla, switch_layers):
        module.mx = Wide("wide")
    model.update(tree_map(lambda x: x.astype(mx.float64), model.parameters()))
    for layer in model.layers:
        layer._attn_res_w_eff = None
    model.model._output_res_w_eff = None
    return model


def load(folder):
    """The model of a folder, weights widened to float32."""
    config = json.loads((folder / "config.json").read_text())
    model = kimi_k3.Model(kimi_k3.ModelArgs.from_dict(config))
    state = load_file(folder / "model.safetensors")
    state = {name: mx.array(weight.float().numpy()) for name, weight in state.items()}
    model.load_weights(list(model.sanitize(state).items()))
    model.eval()
    return model


class HalfCache(KVCache):
    """Rounds what attention keeps to half precision, as our cache holds it."""

    def update_and_fetch(self, keys, values):
        half = (x.astype(mx.float16).astype(x.dtype) for x in (keys, values))
        return super().update_and_fetch(*half)


def logits(model, tokens, half=False):
    cache = [HalfCache() if half and isinstance(one, KVCache) else one for one in model.make_cache()]
    return np.array(model(mx.array([tokens]), cache=cache)[0])


def greedy(model, prompt):
    ids, gaps = list(prompt), []
    for _ in range(tiny.GREEDY):
        last = logits(model, ids)[-1]
        best = np.argsort(-last)[:2]
        ids.append(int(best[0]))
        gaps.append(round(float(last[best[0]] - last[best[1]]), 5))
    return ids[len(prompt):], gaps


def choose_prompt(model, seed):
    """As hf_tiny.py does."""
    rng = np.random.default_rng([seed, 1])
    for _ in range(200):
        prompt = [tiny.BOS, *rng.integers(3, tiny.VOCABULARY, STEPS - 1).tolist()]
        ids, gaps = greedy(model, prompt)
        if min(gaps) < tiny.GREEDY_GAP or len(set(ids)) <= tiny.GREEDY // 2:
            continue
        own = logits(model, prompt)
        if np.abs(logits(model, prompt, half=True) - own).max() < 0.1 * own.std():
            return prompt, ids, gaps
    sys.exit("no prompt with a decided continuation")


def trace(model, prompt):
    """Logits and residual streams of every position."""
    inner, block = model.model, TEXT["attn_res_block_size"]
    count = -(-TEXT["num_hidden_layers"] // block)
    embedded = np.array(inner.embed_tokens(mx.array([prompt]))[0])
    stream, layers = [np.stack([embedded] * (1 + count), 1)], inner.layers
    blocks, h = kimi_k3.ResidualBlocks(inner.args.rms_norm_eps), inner.embed_tokens(mx.array([prompt]))
    mask = kimi_k3.create_attention_mask(h, KVCache(), return_array=True)
    for layer in layers:
        h, blocks = layer(h, mask=None if layer.is_linear else mask, blocks=blocks)
        begun = [np.array(one[0]) for one in blocks.raw]
        stream.append(np.stack([np.array(h[0]), *begun, *[embedded] * (count - len(begun))], 1))
    final = np.array(inner(mx.array([prompt]))[0])
    hidden = {f"hidden.{i}": s[:130] for i, s in enumerate(stream)}
    return {"logits": logits(model, prompt), "final": final} | hidden


def main():
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else tiny.REPOSITORY / "tests-data/golden/hf"
    folder = out / NAME
    write_folder(folder, TEXT, SEED, torch.bfloat16)
    prompt, ids, gaps = choose_prompt(model := load(folder), SEED)
    narrow = logits(model, prompt)
    tensors = trace(model := wide(load(folder)), prompt)
    save_file({n: torch.from_numpy(t.astype(np.float32)) for n, t in tensors.items()},
              out / f"{NAME}.golden.safetensors")
    own = tensors["logits"]
    golden = {
        "made_by": "scripts/golden/kimi_k3_tiny.py",
        "versions": {p: version(p) for p in ("mlx", "mlx-lm", "numpy", "safetensors")},
        "prompt": prompt, "greedy": ids, "greedy_gaps": gaps, "logit_std": float(own.std()),
        "max_abs_diff": {
            "f64_matmul": float(np.abs(narrow - own).max()),
            "kv_f16": float(np.abs(logits(model, prompt, half=True) - own).max()),
        },
    }
    (out / f"{NAME}.golden.json").write_text(json.dumps(golden, indent=1) + "\n")
    print(f"{NAME}: std {golden['logit_std']:.2f}, {golden['max_abs_diff']}, gap {min(gaps)}")


if __name__ == "__main__":
    main()
