#!/usr/bin/env python3
"""Tiny random GGUF files and what llama.cpp computes with them: llama_cpp_tiny.py NPM_DIR [OUT [NAME...]]

NPM_DIR holds the npm package node-llama-cpp (see scripts/peers/llama_bench.py). OUT defaults to
tests-data/golden/llama_cpp/tiny. For each NAME (all of them) it writes
    NAME.gguf                  float32 weights, no tokenizer
    NAME.golden.safetensors    "tokens" (positions,) int32; "logits" (positions, vocabulary) float32
and versions.json. llama.cpp leaves the activations of float32 weights alone and rounds keys and
values to half precision. The weights are drawn by numpy from a fixed seed.
Needs numpy, gguf, safetensors: requirements.txt.
"""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import save_file

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts/peers"))
import llama_bench  # noqa: E402

VOCABULARY, POSITIONS, WIDTH, HEADS, KV_HEADS, HEAD, LAYERS = 64, 80, 32, 4, 2, 16, 3
EXPERTS, USED, EXPERT_FFN, FFN = 4, 2, 32, 96
PER_LAYER = 32
Q, KV = HEADS * HEAD, KV_HEADS * HEAD


def gpt_oss(w, i):
    """Norms, biases, sinks and experts beyond the plain set."""
    w.norm(f"blk.{i}.post_attention_norm", WIDTH)
    for part, n in (("attn_q", Q), ("attn_k", KV), ("attn_v", KV), ("attn_output", WIDTH),
                    ("ffn_gate_inp", EXPERTS)):
        w.put(f"blk.{i}.{part}.bias", (n,), 0.5)
    w.put(f"blk.{i}.attn_sinks.weight", (HEADS,), 1.0)
    w.experts(i)
    for part, n in (("gate", EXPERT_FFN), ("up", EXPERT_FFN), ("down", WIDTH)):
        w.put(f"blk.{i}.ffn_{part}_exps.bias", (EXPERTS, n), 0.5)


def glm4moe(w, i):
    """The first layer is dense; the shared expert is as wide as two."""
    w.norm(f"blk.{i}.post_attention_norm", WIDTH)
    for part, n in (("attn_q", Q), ("attn_k", KV), ("attn_v", KV)):
        w.put(f"blk.{i}.{part}.bias", (n,), 0.5)
    w.norm(f"blk.{i}.attn_q_norm", HEAD)
    w.norm(f"blk.{i}.attn_k_norm", HEAD)
    if i == 0:
        return w.dense(i, "", FFN)
    w.experts(i)
    w.put(f"blk.{i}.exp_probs_b.bias", (EXPERTS,), 0.5)
    w.dense(i, "_shexp", 2 * EXPERT_FFN)


def minimax_m2(w, i):
    """Norms over all heads."""
    w.norm(f"blk.{i}.ffn_norm", WIDTH)
    w.norm(f"blk.{i}.attn_q_norm", Q)
    w.norm(f"blk.{i}.attn_k_norm", KV)
    w.experts(i)
    w.put(f"blk.{i}.exp_probs_b.bias", (EXPERTS,), 0.5)


def dbrx(w, i):
    """The norm before the experts has an unusual name."""
    w.norm(f"blk.{i}.attn_output_norm", WIDTH)
    w.experts(i)


LATENT, TURNED, PLAIN, VALUE, COMPRESSED = 32, 16, 32, 32, 32


def latent(w, i):
    """Latent attention, both halves of the expansion apart."""
    rows = HEADS * (PLAIN + TURNED)
    w.norm(f"blk.{i}.ffn_norm", WIDTH)
    w.matrix(f"blk.{i}.attn_q_a", COMPRESSED, WIDTH)
    w.norm(f"blk.{i}.attn_q_a_norm", COMPRESSED)
    w.matrix(f"blk.{i}.attn_q_b", rows, COMPRESSED)
    w.matrix(f"blk.{i}.attn_kv_a_mqa", LATENT + TURNED, WIDTH)
    w.norm(f"blk.{i}.attn_kv_a_norm", LATENT)
    w.matrix(f"blk.{i}.attn_k_b", HEADS, LATENT, PLAIN)
    w.matrix(f"blk.{i}.attn_v_b", HEADS, VALUE, LATENT)
    w.matrix(f"blk.{i}.attn_output", WIDTH, HEADS * VALUE)


def deepseek_v3(w, i):
    """The first layer is dense; groups of experts."""
    latent(w, i)
    if i == 0:
        return w.dense(i, "", FFN)
    w.experts(i, 2 * EXPERTS)
    w.put(f"blk.{i}.exp_probs_b.bias", (2 * EXPERTS,), 0.5)
    w.dense(i, "_shexp", EXPERT_FFN)


def mistral4(w, i):
    """Experts in every layer."""
    latent(w, i)
    w.experts(i)
    w.dense(i, "_shexp", EXPERT_FFN)


LATENT_KEYS = {
    "attention.kv_lora_rank": LATENT, "rope.dimension_count": TURNED, "rope.freq_base": 10000.0,
    "rope.scaling.type": "yarn", "rope.scaling.factor": 40.0,
    "rope.scaling.original_context_length": 1024,
    "expert_feed_forward_length": EXPERT_FFN, "attention.q_lora_rank": COMPRESSED, "attention.head_count_kv": 1,
    "attention.key_length": LATENT + TURNED, "attention.value_length": LATENT,
    "attention.key_length_mla": PLAIN + TURNED, "attention.value_length_mla": VALUE,
    "rope.scaling.yarn_log_multiplier": 0.1, "expert_shared_count": 1,
    "expert_weights_norm": True,
}

def gemma4(w, i, kinds):
    """All of a layer: heads of full layers are twice as wide; experts where there are no embeddings
    of layers. `kinds`: windowed layers, layers with a cache, whether there are experts."""
    windowed, cached, experts = kinds
    head = HEAD if windowed[i] else 2 * HEAD
    kv_heads = KV_HEADS if windowed[i] or not experts else 1
    w.norm(f"blk.{i}.attn_norm", WIDTH)
    w.matrix(f"blk.{i}.attn_q", HEADS * head, WIDTH)
    w.norm(f"blk.{i}.attn_q_norm", head)
    if i < cached:
        w.matrix(f"blk.{i}.attn_k", kv_heads * head, WIDTH)
        w.norm(f"blk.{i}.attn_k_norm", head)
        if windowed[i] or not experts:
            w.matrix(f"blk.{i}.attn_v", kv_heads * head, WIDTH)
    w.matrix(f"blk.{i}.attn_output", WIDTH, HEADS * head)
    for part in ("post_attention_norm", "ffn_norm", "post_ffw_norm"):
        w.norm(f"blk.{i}.{part}", WIDTH)
    w.put(f"blk.{i}.layer_output_scale.weight", (1,), 0.1, 0.9)
    if experts:
        w.dense(i, "", FFN)
        w.matrix(f"blk.{i}.ffn_gate_inp", EXPERTS, WIDTH)
        w.put(f"blk.{i}.ffn_gate_inp.scale", (WIDTH,), 0.3, 1.5)
        for part in ("post_ffw_norm_1", "pre_ffw_norm_2", "post_ffw_norm_2"):
            w.norm(f"blk.{i}.{part}", WIDTH)
        w.matrix(f"blk.{i}.ffn_gate_up_exps", EXPERTS, 2 * EXPERT_FFN, WIDTH)
        w.matrix(f"blk.{i}.ffn_down_exps", EXPERTS, WIDTH, EXPERT_FFN)
        w.put(f"blk.{i}.ffn_down_exps.scale", (EXPERTS,), 0.3, 1.5)
        return
    w.dense(i, "", FFN if i < cached else 2 * FFN)
    w.matrix(f"blk.{i}.inp_gate", PER_LAYER, WIDTH)
    w.matrix(f"blk.{i}.proj", WIDTH, PER_LAYER)
    w.norm(f"blk.{i}.post_norm", WIDTH)


def gemma4_file(w, kinds):
    """Gemma 4, whose layers differ in more than a few tensors."""
    windowed, _, experts = kinds
    w.put("token_embd.weight", (VOCABULARY, WIDTH), 0.2)
    w.put("output_norm.weight", (WIDTH,), 3.0)
    w.put("rope_freqs.weight", (HEAD,), 0.0, 1.0, from_=(HEAD // 4, 1e30))
    if not experts:
        layers = len(windowed) * PER_LAYER
        w.put("per_layer_token_embd.weight", (VOCABULARY, layers), 0.2)
        w.matrix("per_layer_model_proj", layers, WIDTH)
        w.norm("per_layer_proj_norm", PER_LAYER)
    for i in range(len(windowed)):
        gemma4(w, i, kinds)


GEMMA4 = {
    "attention.sliding_window": 24, "attention.key_length": 2 * HEAD,
    "attention.value_length": 2 * HEAD, "attention.key_length_swa": HEAD,
    "attention.value_length_swa": HEAD, "rope.freq_base": 1000000.0,
    "rope.freq_base_swa": 10000.0, "rope.dimension_count": 2 * HEAD,
    "rope.dimension_count_swa": HEAD, "final_logit_softcapping": 6.0,
}
GEMMA4_KINDS = {
    "gemma4": ([True, False] * 3, 4, False), "gemma4-moe": ([True, True, False], 3, True)}

# Gated delta nets: key and value heads, elements of each, inputs of the convolution.
KEY_HEADS, VALUE_HEADS, STATE, TAPS = 2, 4, 16, 4
KEYS, VALUES = KEY_HEADS * STATE, VALUE_HEADS * STATE
DELTA_NET = {
    "block_count": 4, "full_attention_interval": 2, "rope.freq_base": 10000000.0,
    "rope.dimension_count": HEAD // 2, "ssm.conv_kernel": TAPS, "ssm.state_size": STATE,
    "ssm.group_count": KEY_HEADS, "ssm.time_step_rank": VALUE_HEADS, "ssm.inner_size": VALUES,
    "expert_feed_forward_length": EXPERT_FFN, "expert_shared_feed_forward_length": FFN}
SECTIONS = {"rope.dimension_sections": [2, 1, 1, 0]}
DENSE = {"expert_count": 0, "expert_used_count": 0}


def mixer(w, i, joined, old):
    """Attention with gates in every second layer, a gated delta net in the others. `joined`: steps
    and decays in one matrix, as Qwen3-Next has them, and in old files all inputs in one too."""
    w.norm(f"blk.{i}.post_attention_norm", WIDTH)
    if i % 2 == 1:
        w.matrix(f"blk.{i}.attn_q", 2 * Q, WIDTH)
        w.matrix(f"blk.{i}.attn_k", KV, WIDTH)
        w.matrix(f"blk.{i}.attn_v", KV, WIDTH)
        w.matrix(f"blk.{i}.attn_output", WIDTH, Q)
        w.norm(f"blk.{i}.attn_q_norm", HEAD)
        return w.norm(f"blk.{i}.attn_k_norm", HEAD)
    if old:
        w.matrix(f"blk.{i}.ssm_in", 2 * KEYS + 2 * VALUES, WIDTH)
    else:
        w.matrix(f"blk.{i}.attn_qkv", 2 * KEYS + VALUES, WIDTH)
        w.matrix(f"blk.{i}.attn_gate", VALUES, WIDTH)
    if joined:
        w.matrix(f"blk.{i}.ssm_ba", 2 * VALUE_HEADS, WIDTH)
    else:
        w.matrix(f"blk.{i}.ssm_beta", VALUE_HEADS, WIDTH)
        w.matrix(f"blk.{i}.ssm_alpha", VALUE_HEADS, WIDTH)
    w.put(f"blk.{i}.ssm_conv1d.weight", (2 * KEYS + VALUES, TAPS), 0.5)
    w.put(f"blk.{i}.ssm_dt.bias", (VALUE_HEADS,), 0.5, -4.0)  # states that outlast a page
    w.put(f"blk.{i}.ssm_a", (VALUE_HEADS,), 0.2, -1.0)
    w.norm(f"blk.{i}.ssm_norm", STATE)
    return w.matrix(f"blk.{i}.ssm_out", WIDTH, VALUES)


def experts_and_shared(w, i):
    w.experts(i)
    w.put(f"blk.{i}.ffn_gate_inp_shexp.weight", (WIDTH,), 0.25)
    w.dense(i, "_shexp", FFN)


def qwen3next(w, i):
    mixer(w, i, joined=True, old=False)
    experts_and_shared(w, i)


def qwen3next_old(w, i):
    mixer(w, i, joined=True, old=True)
    experts_and_shared(w, i)


def qwen35(w, i):
    mixer(w, i, joined=False, old=False)
    w.dense(i, "", FFN)


def qwen35moe(w, i):
    mixer(w, i, joined=False, old=False)
    experts_and_shared(w, i)


# Name: (architecture, keys, what a layer has beyond the plain set).
MODELS = {
    "gpt-oss": ("gpt-oss", {
        "attention.sliding_window": 24, "rope.freq_base": 150000.0, "rope.scaling.type": "yarn",
        "rope.scaling.factor": 32.0, "rope.scaling.original_context_length": 1024,
        "expert_feed_forward_length": EXPERT_FFN}, gpt_oss),
    "glm4moe": ("glm4moe", {
        "rope.freq_base": 10000.0, "rope.dimension_count": HEAD // 2,
        "expert_feed_forward_length": EXPERT_FFN, "expert_shared_count": 2,
        "leading_dense_block_count": 1, "expert_weights_scale": 2.5, "expert_weights_norm": True,
        "expert_gating_func": 2}, glm4moe),
    "minimax-m2": ("minimax-m2", {
        "feed_forward_length": EXPERT_FFN,  # which llama.cpp has for experts here
        "rope.freq_base": 5000000.0, "rope.dimension_count": HEAD // 2,
        "expert_feed_forward_length": EXPERT_FFN, "expert_gating_func": 2}, minimax_m2),
    "deepseek2": ("deepseek2", LATENT_KEYS | {
        "leading_dense_block_count": 1, "expert_count": 2 * EXPERTS, "expert_used_count": 3,
        "expert_group_count": 4, "expert_group_used_count": 2, "expert_weights_scale": 2.5,
        "expert_gating_func": 2}, deepseek_v3),
    "mistral4": ("mistral4", LATENT_KEYS | {
        "attention.temperature_scale": 0.1, "attention.temperature_length": 16,
        "leading_dense_block_count": 0, "expert_weights_scale": 1.0,
        "expert_gating_func": 1}, mistral4),
    # Two layers use the caches of others and have a wider feed-forward.
    "gemma4": ("gemma4", GEMMA4 | {
        "block_count": 6, "attention.sliding_window_pattern": [True, False] * 3,
        "attention.shared_kv_layers": 2, "feed_forward_length": [FFN] * 4 + [2 * FFN] * 2,
        "embedding_length_per_layer_input": PER_LAYER, "expert_count": 0,
        "expert_used_count": 0}, None),
    # Experts beside feed-forwards; keys of the full layer are its values.
    "gemma4-moe": ("gemma4", GEMMA4 | {
        "attention.sliding_window_pattern": [True, True, False],
        "attention.head_count_kv": [KV_HEADS, KV_HEADS, 1], "attention.shared_kv_layers": 0,
        "embedding_length_per_layer_input": 0,
        "expert_feed_forward_length": EXPERT_FFN}, None),
    "qwen3next": ("qwen3next", DELTA_NET, qwen3next),
    "qwen3next-old": ("qwen3next", DELTA_NET, qwen3next_old),
    "qwen35": ("qwen35", DELTA_NET | SECTIONS | DENSE, qwen35),
    "qwen35moe": ("qwen35moe", DELTA_NET | SECTIONS, qwen35moe),
    # Queries are as wide as the residual, which llama.cpp takes for granted; a limit that cuts.
    "dbrx": ("dbrx", {
        "attention.head_count": WIDTH // HEAD, "attention.head_count_kv": 1,
        "attention.layer_norm_epsilon": 1e-5, "attention.clamp_kqv": 1.5,
        "rope.freq_base": 500000.0, "feed_forward_length": EXPERT_FFN}, dbrx),
}


class Weights:
    """A GGUF file that random tensors are added to."""

    def __init__(self, writer, seed):
        self.writer, self.rng = writer, np.random.default_rng(seed)

    def put(self, name, shape, deviation, mean=0.0, from_=None):
        values = self.rng.standard_normal(shape, dtype=np.float32) * deviation + mean
        if from_:
            values[from_[0]:] = from_[1]
        self.writer.add_tensor(name, values.astype(np.float32))

    def norm(self, stem, n):
        self.put(f"{stem}.weight", (n,), 0.3, 1.0)

    def matrix(self, stem, *shape):
        self.put(f"{stem}.weight", shape, 0.25)

    def dense(self, i, suffix, ffn):
        self.matrix(f"blk.{i}.ffn_gate{suffix}", ffn, WIDTH)
        self.matrix(f"blk.{i}.ffn_up{suffix}", ffn, WIDTH)
        self.matrix(f"blk.{i}.ffn_down{suffix}", WIDTH, ffn)

    def experts(self, i, count=EXPERTS):
        self.matrix(f"blk.{i}.ffn_gate_inp", count, WIDTH)
        self.matrix(f"blk.{i}.ffn_gate_exps", count, EXPERT_FFN, WIDTH)
        self.matrix(f"blk.{i}.ffn_up_exps", count, EXPERT_FFN, WIDTH)
        self.matrix(f"blk.{i}.ffn_down_exps", count, WIDTH, EXPERT_FFN)


def add(writer, key, value):
    """A metadata entry of the type of its value."""
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32,
             str: writer.add_string, list: writer.add_array}
    kinds[type(value)](key, value)


def write(path, name, seed):
    architecture, keys, layer = MODELS[name]
    writer = gguf.GGUFWriter(path, architecture)
    usual = {
        "block_count": LAYERS, "context_length": 4096, "embedding_length": WIDTH,
        "feed_forward_length": FFN, "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS, "attention.key_length": HEAD,
        "attention.value_length": HEAD, "attention.layer_norm_rms_epsilon": 1e-5,
        "expert_count": EXPERTS, "expert_used_count": USED, "vocab_size": VOCABULARY,
    }
    keys = usual | keys
    for key, value in keys.items():
        add(writer, f"{architecture}.{key}", value)
    add(writer, "tokenizer.ggml.model", "none")
    writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(VOCABULARY)])
    weights = Weights(writer, seed)
    if name in GEMMA4_KINDS:
        gemma4_file(weights, GEMMA4_KINDS[name])
    else:
        plain_file(weights, keys, layer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def plain_file(weights, keys, layer):
    """The plain set, and what each layer has besides."""
    weights.put("token_embd.weight", (VOCABULARY, WIDTH), 0.5)
    weights.norm("output_norm", WIDTH)
    weights.put("output.weight", (VOCABULARY, WIDTH), 0.5)
    for i in range(keys["block_count"]):
        weights.norm(f"blk.{i}.attn_norm", WIDTH)
        if "ssm.state_size" in keys:  # layers of two kinds
            layer(weights, i)
            continue
        if "attention.clamp_kqv" in keys:  # behind each other
            weights.matrix(f"blk.{i}.attn_qkv", WIDTH + 2 * HEAD, WIDTH)
            weights.matrix(f"blk.{i}.attn_output", WIDTH, WIDTH)
        elif "attention.kv_lora_rank" not in keys:
            weights.matrix(f"blk.{i}.attn_q", Q, WIDTH)
            weights.matrix(f"blk.{i}.attn_k", KV, WIDTH)
            weights.matrix(f"blk.{i}.attn_v", KV, WIDTH)
            weights.matrix(f"blk.{i}.attn_output", WIDTH, Q)
        layer(weights, i)


def join(path, old):
    """The model of `path` as files before 2025 have it, keys and values expanded by one matrix.
    llama.cpp keeps what was expanded of such, and so rounds other numbers to half precision."""
    sizes = {"attention.key_length": PLAIN + TURNED, "attention.value_length": VALUE,
             "attention.head_count_kv": HEADS}
    reader, writer = gguf.GGUFReader(path), gguf.GGUFWriter(old, "deepseek2")
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture" or key.endswith("_mla"):
            continue
        value = sizes.get(key.removeprefix("deepseek2."), field.contents())
        if field.types[0] == gguf.GGUFValueType.ARRAY:
            writer.add_array(key, value)
        else:
            writer.add_key_value(key, value, field.types[0])
    tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    for name, data in tensors.items():
        if "attn_v_b" in name:
            continue
        if "attn_k_b" in name:
            values = tensors[name.replace("attn_k_b", "attn_v_b")]
            heads = [np.concatenate([k.T, v]) for k, v in zip(data, values)]
            name, data = name.replace("attn_k_b", "attn_kv_b"), np.concatenate(heads)
        writer.add_tensor(name, np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main():
    if len(sys.argv) < 2 or sys.argv[-1].startswith("-"):
        sys.exit(__doc__)
    default = REPOSITORY / "tests-data/golden/llama_cpp/tiny"
    out = Path(sys.argv[2]) if len(sys.argv) > 2 else default
    out.mkdir(parents=True, exist_ok=True)
    llama = llama_bench.library(sys.argv[1])
    wanted = sys.argv[3:] or list(MODELS)
    for number, name in enumerate(MODELS):
        if name not in wanted:
            continue
        path = out / f"{name}.gguf"
        write(path, name, 20261124 + number)
        session = llama_bench.Session(llama, str(path))
        session.open(256, 1)
        tokens = np.random.default_rng(number).integers(0, VOCABULARY, POSITIONS)
        session.decode([int(t) for t in tokens], 0, all_logits=True)
        logits = np.stack([session.logits(i) for i in range(POSITIONS)]).astype(np.float32)
        golden = {"tokens": tokens.astype(np.int32), "logits": logits}
        save_file(golden, out / f"{name}.golden.safetensors")
        if name == "deepseek2":
            join(path, out / "deepseek2-old.gguf")
            save_file(golden, out / "deepseek2-old.golden.safetensors")
        print(f"{name}: std {logits.std():.3f}")
    (out / "versions.json").write_text(json.dumps({
        "made_by": "scripts/golden/llama_cpp_tiny.py",
        "versions": llama_bench.versions(sys.argv[1])}, indent=1) + "\n")


if __name__ == "__main__":
    main()
