"""The shapes of Qwen2.5 0.5B (Q5_0) and 1.5B (Q4_K_M) with random weights: /tmp/bars/qwen25-KIND.gguf, made once.

    python3 models32.py 0.5b|1.5b [--repo TREE]     (needs gguf and numpy: common.MLX_PYTHON; some 20 s, 0.35 and 1.0 GB)
"""
import os, subprocess, sys
SHAPES = {"0.5b": (24, 896, 4864, 14, 2), "1.5b": (28, 1536, 8960, 12, 2)}
VOCAB = 151936


REPO = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def path(kind, repo=REPO):
    from common import MLX_PYTHON
    out = f"/tmp/bars/qwen25-{kind}.gguf"
    if not os.path.exists(out):
        if not os.path.exists(MLX_PYTHON):
            sys.exit(f"no {out}, and no {MLX_PYTHON} with gguf and numpy to make it")
        os.makedirs(os.path.dirname(out), exist_ok=True)
        subprocess.run([MLX_PYTHON, __file__, kind, "--repo", repo], check=True, timeout=400)
    return out


def share_of_layers(kind):
    """Weights of layers over those of layers and head, in multiplications of a row."""
    layers, d, ff, heads, kv = SHAPES[kind]
    head = d // heads
    each = 2 * d * d + 2 * d * kv * head + 3 * d * ff
    return layers * each / (layers * each + d * VOCAB)


def make(kind, repo):
    sys.path.insert(0, f"{repo}/scripts/models")
    import types
    import synth_gguf as s
    import gguf
    from common import SMOLLM2
    layers, d, ff, heads, kv = SHAPES[kind]
    out = f"/tmp/bars/qwen25-{kind}.gguf"
    args = types.SimpleNamespace(seed=32, base=SMOLLM2, out=out + ".new", quant="Q5_0", raw_blocks=True, layers=None)
    m = s.Synth(args)
    Q = s.Q
    if kind == "0.5b":
        low = high = embed = lambda *shape: m.matrix(*shape)
    else:
        low = lambda *shape: m.blocks(Q.Q4_K, shape, [(0, 0.0002), (2, 0.0016)])
        high = embed = lambda *shape: m.blocks(Q.Q6_K, shape, [(208, 0.00001)])
    k = kv * d // heads
    zeros = lambda n: (m.normal(n, scale=0.01), Q.F32)
    tensors = [("token_embd.weight", embed(VOCAB, d)), ("output_norm.weight", m.ones(d))]
    for i in range(layers):
        p = f"blk.{i}."
        h = high if i % 2 == 0 else low
        tensors += [(p + "attn_norm.weight", m.ones(d)), (p + "attn_q.weight", low(d, d)), (p + "attn_q.bias", zeros(d)),
                    (p + "attn_k.weight", low(k, d)), (p + "attn_k.bias", zeros(k)), (p + "attn_v.weight", h(k, d)),
                    (p + "attn_v.bias", zeros(k)), (p + "attn_output.weight", low(d, d)), (p + "ffn_norm.weight", m.ones(d)),
                    (p + "ffn_gate.weight", low(ff, d)), (p + "ffn_up.weight", low(ff, d)), (p + "ffn_down.weight", h(d, ff))]
    w = m.writer("qwen2", f"synthetic qwen2.5-{kind} shapes")
    w.add_quantization_version(2)
    w.add_block_count(layers); w.add_context_length(32768); w.add_embedding_length(d); w.add_feed_forward_length(ff)
    w.add_head_count(heads); w.add_head_count_kv(kv); w.add_layer_norm_rms_eps(1e-6); w.add_rope_freq_base(1000000.0)
    tokens = m.value("tokenizer.ggml.tokens"); kinds = m.value("tokenizer.ggml.token_type")
    more = VOCAB - len(tokens)
    for key in ["model", "pre", "merges", "bos_token_id", "eos_token_id", "add_bos_token", "chat_template"]:
        for name in (f"tokenizer.ggml.{key}", f"tokenizer.{key}"):
            if name in m.base.fields:
                m.copy(w, name)
    w.add_token_list(tokens + [f"xq{i}" for i in range(more)])
    w.add_token_types(list(kinds) + [1] * more)
    m.finish(w, tensors)
    os.rename(out + ".new", out)


if __name__ == "__main__":
    make(sys.argv[1], sys.argv[3] if len(sys.argv) > 3 else REPO)
