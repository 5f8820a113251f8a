#!/usr/bin/env python3
"""A tiny random model of DeepSeek V4.1 and what mlx-lm computes with it: deepseek_v41_tiny.py [OUT [SEED]]

transformers has no class of it. Writes OUT/deepseek-v41-bf16 and its goldens as hf_tiny.py does for other
families, whose tokenizer it takes; OUT defaults to tests-data/golden/hf. Needs mlx (its CPU build will do), mlx-lm
0.32.2 and numpy. "f64_matmul" is the distance to a pass that is cut, or whose embeddings are moved by two units in
the last place. Keys that differ in their last bit may be rounded to other numbers of 4 and 8 bits, so prompts where
one is are left out.
"""

import json
import shutil
import sys
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import deepseek_v41

REPOSITORY = Path(__file__).resolve().parents[2]
NAME, PROMPT, GREEDY, GAP, FAR = "deepseek-v41-bf16", 150, 16, 0.05, 2e-4
# Layers: a window; keys of four positions; the same keys and choice; the same keys; every key alone; the same.
CONFIG = {
    "architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41", "vocab_size": 300, "hidden_size": 64,
    "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32, "q_lora_rank": 32,
    "qk_rope_head_dim": 16, "o_groups": 2, "o_lora_rank": 32, "moe_intermediate_size": 32, "n_routed_experts": 6,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "scoring_func": "sqrtsoftplus", "norm_topk_prob": True,
    "routed_scaling_factor": 1.5, "swiglu_limit": 1.5, "rms_norm_eps": 1e-6, "sliding_window": 24,
    "compress_ratios": [0, 4, 4, 4, 1, 1], "kv_source_layer_ids": [1, 4], "index_source_layer_ids": [1, 3, 4],
    "candidate_source_layer_id": -1, "index_n_heads": 8,
    "index_head_dim": 32, "index_topk": 8, "rope_theta": 10000.0, "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1},
    "max_position_embeddings": 256, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "engram_layer_ids": [],
    "tie_word_embeddings": False, "dtype": "bfloat16", "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
}


def on_the_hub(name, weight):
    """The parts of a weight under the names of the hub, which `Model.sanitize` reads."""
    name = name.removeprefix("model.")
    if ".switch_mlp." in name:
        stem, part = name.removesuffix(".weight").split(".mlp.experts.switch_mlp.")
        part = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}[part]
        for expert, matrix in enumerate(weight):
            yield f"{stem}.ffn.experts.{expert}.{part}.weight", matrix
        return
    if name.endswith("o_a_proj.weight"):
        weight = weight.reshape(-1, weight.shape[-1])
    for own, other in [
            ("embed_tokens", "embed"), ("lm_head", "head"), ("attn_hc.", "hc_attn_"), ("ffn_hc.", "hc_ffn_"),
            ("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm"), ("self_attn", "attn"),
            ("shared_experts.gate_proj", "shared_experts.w1"), ("shared_experts.down_proj", "shared_experts.w2"),
            ("shared_experts.up_proj", "shared_experts.w3"), ("mlp.", "ffn."), ("sinks", "attn_sink"),
            ("q_a_proj", "wq_a"), ("q_b_proj", "wq_b"), ("o_a_proj", "wo_a"), ("o_b_proj", "wo_b"),
            ("q_a_norm", "q_norm"), ("compressor.kv_norm", "compressor.norm"), ("indexer.k_proj", "indexer.wk"),
            ("kv_proj", "wkv"), ("gate_proj", "wgate"), ("gate.e_score_correction_bias", "gate.bias")]:
        name = name.replace(own, other)
    yield name, weight


def drawn(model, rng):
    for name, weight in sorted(tree_flatten(model.parameters())):
        values = rng.standard_normal(weight.shape, dtype=np.float32)
        if "norm" in name:
            values = 0.3 * values + 1.0
        elif name.endswith("hc.scale"):
            values = 0.3 * values + 1.0
        elif name.endswith("bias"):
            values *= 0.5
        elif "embed" in name or "lm_head" in name:
            values *= 0.35
        elif not name.endswith("sinks"):
            values *= 0.2
        yield from on_the_hub(name, mx.array(values).astype(mx.bfloat16))


def loaded(path):
    model = deepseek_v41.Model(deepseek_v41.ModelArgs.from_dict(CONFIG))
    weights = model.sanitize(mx.load(str(path / "model.safetensors")))
    model.load_weights([(name, weight.astype(mx.float32)) for name, weight in weights.items()], strict=True)
    return model


def traced(model, prompt):
    """Logits and hidden states of every position, as in hf_tiny.py."""
    states, layer = [], deepseek_v41.DecoderLayer.__call__

    def kept(self, streams, *arguments, **named):
        if not states:
            states.append(streams)
        out = layer(self, streams, *arguments, **named)
        states.append(out[0])
        return out

    deepseek_v41.DecoderLayer.__call__ = kept
    final = model.model(mx.array([prompt]))
    deepseek_v41.DecoderLayer.__call__ = layer
    tensors = {f"hidden.{i}": state[0][:112].astype(mx.float32) for i, state in enumerate(states)}
    return tensors | {"final": final[0], "logits": model.lm_head(final)[0]}


def cut(model, prompt):
    """Logits of a prompt in two steps and a few of one token."""
    cache, at, rows = model.make_cache(), 0, []
    for n in [70, 59, *[1] * (len(prompt) - 129)]:
        rows.append(model(mx.array([prompt[at:at + n]]), cache)[0])
        at += n
    return mx.concatenate(rows)


def moved(model, prompt, rng):
    """Logits of a prompt with embeddings that differ in their last bits."""
    embedding = model.model.embed_tokens
    weight = embedding.weight
    embedding.weight = weight * mx.array(1 + 2.0 ** -22 * rng.choice([-1, 1], weight.shape).astype(np.float32))
    logits = model(mx.array([prompt]))[0]
    embedding.weight = weight
    return logits


def main():
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else REPOSITORY / "tests-data/golden/hf"
    rng = np.random.default_rng(int(sys.argv[2]) if len(sys.argv) > 2 else 20261130)
    mx.set_default_device(mx.cpu)
    path = out / NAME
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    for name in ["tokenizer.json", "tokenizer_config.json"]:
        shutil.copy(REPOSITORY / "tests-data/golden/hf/deepseek-v4-bf16" / name, path)
    model = deepseek_v41.Model(deepseek_v41.ModelArgs.from_dict(CONFIG))
    mx.save_safetensors(str(path / "model.safetensors"), dict(drawn(model, rng)), {"format": "pt"})
    model = loaded(path)
    for _ in range(200):
        prompt = [2, *rng.integers(3, 300, PROMPT - 1).tolist()]
        tensors = traced(model, prompt)
        others = [cut(model, prompt), moved(model, prompt, np.random.default_rng(1))]
        far = max(float(mx.abs(other - tensors["logits"]).max()) for other in others)
        if far > FAR:
            continue
        ids, gaps = list(prompt), []
        for _ in range(GREEDY):
            row = np.array(model(mx.array([ids]))[0, -1])
            best, second = np.argsort(row)[::-1][:2]
            ids.append(int(best))
            gaps.append(round(float(row[best] - row[second]), 5))
        if min(gaps) >= GAP and len(set(ids[PROMPT:])) > GREEDY // 2:
            break
    else:
        sys.exit("no prompt with a decided continuation")
    mx.save_safetensors(str(out / f"{NAME}.golden.safetensors"), tensors)
    std = float(mx.std(tensors["logits"]))
    golden = {
        "made_by": "scripts/golden/deepseek_v41_tiny.py",
        "versions": {p: version(p) for p in ("mlx", "mlx-lm", "numpy")},
        "prompt": prompt, "greedy": ids[PROMPT:], "greedy_gaps": gaps, "logit_std": std,
        "max_abs_diff": {"f64_matmul": far, "kv_f16": far},
    }
    (out / f"{NAME}.golden.json").write_text(json.dumps(golden, indent=1) + "\n")
    print(f"{NAME}: std {std:.2f}, cut {far:.1e}, gap {min(gaps)}")


if __name__ == "__main__":
    main()
