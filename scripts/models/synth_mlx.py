#!/usr/bin/env python3
"""Write a random llama in MLX's form, 4 bits in groups of 64, for speed tests.

    synth_mlx.py TOKENIZER_FOLDER OUT [LAYERS WIDTH FFN HEADS KV_HEADS VOCAB]

Default shape: that of Llama 3.1 8B (32 layers, width 4096, feed-forward 14336, 32 heads, 8 KV heads,
vocabulary 128256); 4.5 GB, a file for each layer. Values are spread as a trained model's, so that
nothing overflows; it says nothing of sense. TOKENIZER_FOLDER gives tokenizer.json and its settings
(the folder that mlx_folder.py makes). The same arguments give the same bytes, and nothing is done
where they are there. Needs numpy.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np

DEFAULT = (32, 4096, 14336, 32, 8, 128256)
BITS, GROUP = 4, 64
POOL = 1 << 22  # random words drawn once; every matrix is stretches of them from random starts


def bfloat16(values):
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


class Random:
    def __init__(self):
        self.generator = np.random.Generator(np.random.PCG64(7))
        self.pool = self.generator.integers(0, 1 << 32, POOL, dtype=np.uint32)

    def words(self, count):
        parts = []
        while count > 0:
            start = int(self.generator.integers(0, POOL // 2))
            part = self.pool[start:start + min(count, POOL // 2)]
            parts.append(part)
            count -= len(part)
        return np.concatenate(parts)


def matrix(random, name, rows, cols):
    """Integers 0 to 15 are s times (q - 7.5): as wide as 1 / sqrt(cols), since they spread by 4.6."""
    step = 1 / (4.6 * cols ** 0.5)
    groups = np.full((rows, cols // GROUP), step)
    return {
        f"{name}.weight": ("U32", random.words(rows * cols * BITS // 32)
                           .reshape(rows, cols * BITS // 32)),
        f"{name}.scales": ("BF16", bfloat16(groups)),
        f"{name}.biases": ("BF16", bfloat16(-7.5 * groups)),
    }


def norm(name, width):
    return {f"{name}.weight": ("BF16", bfloat16(np.ones(width)))}


def write(path, tensors):
    header, at = {"__metadata__": {"format": "mlx"}}, 0
    for name, (dtype, values) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(values.shape),
                        "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, values in tensors.values():
            file.write(values.tobytes())


def layer(random, index, width, ffn, heads, kv_heads):
    dim, name = width // heads, f"model.layers.{index}"
    tensors = {}
    for part, rows, cols in [
            ("self_attn.q_proj", heads * dim, width), ("self_attn.k_proj", kv_heads * dim, width),
            ("self_attn.v_proj", kv_heads * dim, width), ("self_attn.o_proj", width, heads * dim),
            ("mlp.gate_proj", ffn, width), ("mlp.up_proj", ffn, width),
            ("mlp.down_proj", width, ffn)]:
        tensors |= matrix(random, f"{name}.{part}", rows, cols)
    for part in ("input_layernorm", "post_attention_layernorm"):
        tensors |= norm(f"{name}.{part}", width)
    return tensors


def config(layers, width, ffn, heads, kv_heads, vocab):
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": width, "intermediate_size": ffn, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "max_position_embeddings": 8192, "vocab_size": vocab,
        "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
        "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
        "quantization": {"group_size": GROUP, "bits": BITS},
    }


def main():
    source, out = Path(sys.argv[1]), Path(sys.argv[2])
    shape = tuple(map(int, sys.argv[3:])) or DEFAULT
    layers, width, ffn, heads, kv_heads, vocab = shape
    done = out / "made.json"
    if done.exists() and json.loads(done.read_text()) == list(shape):
        return
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (source / name).exists():
            shutil.copy(source / name, out / name)
    random, places = Random(), {}
    parts = [lambda i=i: layer(random, i, width, ffn, heads, kv_heads) for i in range(layers)]
    parts.append(lambda: matrix(random, "model.embed_tokens", vocab, width)
                 | norm("model.norm", width) | matrix(random, "lm_head", vocab, width))
    for i, make in enumerate(parts, 1):
        name, tensors = f"model-{i:05}-of-{len(parts):05}.safetensors", make()
        write(out / name, tensors)
        places |= dict.fromkeys(tensors, name)
    (out / "config.json").write_text(json.dumps(config(*shape)))
    (out / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": places}))
    done.write_text(json.dumps(shape))


if __name__ == "__main__":
    main()
