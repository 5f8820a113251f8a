#!/usr/bin/env python3
"""Tiny random models of DeepSeek V4.1 and what mlx-lm computes with them: deepseek_v41_tiny.py [OUT [NAME..]]

transformers has no class of it. Writes OUT/NAME and its goldens as hf_tiny.py does for other families, whose
tokenizer it takes; OUT defaults to tests-data/golden/hf, names to both. Needs mlx (its CPU build will do), mlx-lm
0.32.2 and numpy. mlx-lm lacks the memory of n-grams: the functions of sglang 0.5.23 for it are taken from
$SGLANG/srt/layers/engram.py, of its unpacked wheel, and need torch, tokenizers and msgspec. "f64_matmul" is the distance to a pass that is cut, or whose embeddings are moved by two units in
the last place. Keys that differ in their last bit may be rounded to other numbers of 4 and 8 bits, so prompts where
one is are left out.
"""

import ast
import json
import os
import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import deepseek_v41

REPOSITORY = Path(__file__).resolve().parents[2]
NAMES, PROMPT, GREEDY, GAP, FAR = {"deepseek-v41-bf16": 20261130, "deepseek-v41-ngrams-bf16": 62}, 150, 16, 0.05, 2e-4
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
# N-grams of 2 to 4 tokens in two layers: the second, and the first behind a cut of a pipeline.
NGRAMS = {
    "engram_layer_ids": [1, 4], "engram_num_embeddings": [], "engram_max_ngram_size": 4, "engram_vocab_size": 50,
    "engram_n_heads": 2, "engram_head_dim": 16, "engram_pad_token_id": 0, "n_routed_experts": 4,
}


def of_sglang():
    """The functions of sglang's file that need no card."""
    path = Path(os.environ["SGLANG"]) / "srt/layers/engram.py"
    tree, names = ast.parse(path.read_text()), {
        "_MILLER_RABIN_WITNESSES", "_is_prime", "_find_next_prime", "build_compressed_token_map", "EngramLayout",
        "compute_hash_multipliers", "compute_engram_hash_ids", "engram_gate"}
    own = [part for part in tree.body
           if getattr(part, "name", None) in names or isinstance(part, ast.Assign) and part.targets[0].id in names]
    import msgspec
    import torch
    from typing import Optional
    scope = {"np": np, "torch": torch, "msgspec": msgspec, "Optional": Optional, "_cuda_kernels": lambda _: False,
             "__name__": "sglang_engram"}
    code = ast.Module([ast.parse("from __future__ import annotations").body[0], *own], [])
    exec(compile(code, str(path), "exec"), scope)
    return SimpleNamespace(**{name: scope[name] for name in names}, torch=torch)


def token_map(path):
    from tokenizers import Tokenizer

    class Whole(SimpleNamespace):
        def __len__(self):
            return self.backend_tokenizer.get_vocab_size()

    return of_sglang().build_compressed_token_map(Whole(backend_tokenizer=Tokenizer.from_file(str(path / "tokenizer.json"))))


def with_ngrams(model, path, config, weights):
    """Lets layers of `model` read the memory, by sglang's functions, before they compute."""
    own, args = of_sglang(), SimpleNamespace(**config)
    torch, (keys, count) = own.torch, token_map(path)
    layout = own.EngramLayout.from_config(args)
    flat = [[p for sizes in layer for p in sizes] for layer in layout.primes]
    tables = [torch.tensor(keys), own.compute_hash_multipliers(layout.layer_ids, layout.max_ngram_size, count),
              torch.tensor(layout.primes), torch.tensor(np.array([np.cumsum([0, *sizes[:-1]]) for sizes in flat]))]
    tensors = {name: torch.from_numpy(np.array(weight.astype(mx.float32))) for name, weight in weights.items()}
    read, compute, ids = type(model.model).__call__, deepseek_v41.DecoderLayer.__call__, []

    def called(self, inputs, cache=None):
        if cache is None or cache[0].offset == 0:
            ids.clear()
        ids.extend(inputs[0].tolist())
        return read(self, inputs, cache)

    def layer(self, streams, pre_mix, *, start_pos, **named):
        if self is not model.layers[self.layer_idx] or self.layer_idx not in layout.layer_ids:
            return compute(self, streams, pre_mix, start_pos=start_pos, **named)
        back = torch.arange(len(ids))[:, None] - torch.arange(layout.max_ngram_size)
        rows = own.compute_engram_hash_ids(torch.tensor(ids)[back.clamp_min(0)], back < 0, keys[args.engram_pad_token_id], *tables)
        rows = rows[start_pos:, layout.layer_ids.index(self.layer_idx)]
        of = f"layers.{self.layer_idx}.engram."
        kv = tensors[of + "embed.weight"][rows].flatten(-2) @ tensors[of + "wkv.weight"].T
        streams = torch.from_numpy(np.array(streams[0]))
        streams = own.engram_gate(streams, kv, tensors[of + "q_weight"], tensors[of + "k_weight"], args.rms_norm_eps, 1e-6)
        return compute(self, mx.array(streams.numpy())[None], pre_mix, start_pos=start_pos, **named)

    type(model.model).__call__, deepseek_v41.DecoderLayer.__call__ = called, layer
    return model


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


def drawn(model, config, rng):
    for layer, rows in zip(config["engram_layer_ids"], config.get("engram_num_embeddings", [])):
        dim, streams = config["engram_head_dim"], config["hc_mult"]
        width = (config["engram_max_ngram_size"] - 1) * config["engram_n_heads"] * dim
        for name, shape, size, mean in [
                ("embed.weight", (rows, dim), 0.35, 0.0), ("wkv.weight", ((streams + 1) * 64, width), 0.3, 0.0),
                ("q_weight", (streams, 64), 0.3, 1.0), ("k_weight", (streams, 64), 0.3, 1.0)]:
            values = mx.array(size * rng.standard_normal(shape, dtype=np.float32) + mean)
            yield f"layers.{layer}.engram.{name}", values.astype(mx.bfloat16)
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


def empty(config):
    return deepseek_v41.Model(deepseek_v41.ModelArgs.from_dict(config | {"engram_layer_ids": []}))


def loaded(path):
    config, stored = json.loads((path / "config.json").read_text()), mx.load(str(path / "model.safetensors"))
    model = empty(config)
    model.load_weights([(name, weight.astype(mx.float32)) for name, weight in model.sanitize(stored).items()], strict=True)
    return with_ngrams(model, path, config, stored) if config["engram_layer_ids"] else model


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


def made(out, name, rng):
    """A folder with drawn weights."""
    path, config = out / name, dict(CONFIG)
    path.mkdir(parents=True, exist_ok=True)
    for file in ["tokenizer.json", "tokenizer_config.json"]:
        shutil.copy(REPOSITORY / "tests-data/golden/hf/deepseek-v4-bf16" / file, path)
    if "ngrams" in name:
        config = CONFIG | NGRAMS | {"engram_compressed_vocab_size": token_map(path)[1]}
        primes = of_sglang().EngramLayout.from_config(SimpleNamespace(**config)).primes
        config["engram_num_embeddings"] = [sum(sum(sizes) for sizes in layer) for layer in primes]
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = dict(drawn(empty(config), config, rng))
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "pt"})
    return loaded(path)


def make(out, name, seed):
    rng = np.random.default_rng(seed)
    model = made(out, name, rng)
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
    mx.save_safetensors(str(out / f"{name}.golden.safetensors"), tensors)
    std = float(mx.std(tensors["logits"]))
    golden = {
        "made_by": "scripts/golden/deepseek_v41_tiny.py",
        "versions": {p: version(p) for p in ("mlx", "mlx-lm", "numpy")},
        "prompt": prompt, "greedy": ids[PROMPT:], "greedy_gaps": gaps, "logit_std": std,
        "max_abs_diff": {"f64_matmul": far, "kv_f16": far},
    }
    if "ngrams" in name:
        golden["token_keys"] = token_map(out / name)[0]
    (out / f"{name}.golden.json").write_text(json.dumps(golden, indent=1) + "\n")
    print(f"{name}: std {std:.2f}, cut {far:.1e}, gap {min(gaps)}")


def main():
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else REPOSITORY / "tests-data/golden/hf"
    mx.set_default_device(mx.cpu)
    for name in sys.argv[2:] or NAMES:
        make(out, name, NAMES[name])


if __name__ == "__main__":
    main()
