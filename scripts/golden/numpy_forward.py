#!/usr/bin/env python3
"""Reference forward pass over a GGUF file in numpy.

    numpy_forward.py MODEL.gguf [--ids 504,3575,... | --tokens FILE.json] [--top N]

Weights dequantised to float32, activations in float32, full attention over the whole sequence in
one pass, nothing cached. Families: llama, qwen3, gemma3 (dense). It is short so that it can
be checked by eye against the published descriptions; no speed is sought (SmolLM2, 256 ids: 3 s).
FILE is a JSON list of ids or an object with one under "tokens".

`--kv-f16` rounds keys and values to half precision, `--act-q8` rounds the input of every product of
a quantised matrix to 8 bits with one scale per 32 values: the two roundings that fast engines do.
They show how far such an engine may be from this reference.

As a module: `Model(path).logits(ids)` is (positions, vocabulary). Needs numpy and gguf (0.19.0).
"""

import argparse
import json
import sys

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q
from gguf import GGUFReader

FAMILIES = ("llama", "qwen3", "gemma3")
FLOATS = (Q.F32, Q.F16, Q.BF16)

# Constants of gemma3 that its GGUF files leave out; source: llama.cpp, src/llama-model.cpp
# (every sixth layer is full) and the base frequency of the windowed layers.
GEMMA3_PERIOD = 6
GEMMA3_LOCAL_BASE = 10000.0


def norm(x, weight, eps):
    """RMS norm over the last axis. Gemma's files hold the weight with the one already added."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps)) * weight


def silu(x):
    return x / (1 + np.exp(-x))


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(np.float32(np.sqrt(2 / np.pi)) * (x + 0.044715 * x**3)))


def softmax(x):
    x = np.exp(x - x.max(axis=-1, keepdims=True))
    return x / x.sum(axis=-1, keepdims=True)


def round_q8(x):
    """Each run of 32 values on a grid of 255 steps over its own range, as Q8_0 does."""
    runs = x.reshape(*x.shape[:-1], -1, 32)
    scale = np.abs(runs).max(axis=-1, keepdims=True) / 127
    steps = np.round(runs / np.where(scale == 0, 1, scale))
    return (steps * scale).reshape(x.shape).astype(np.float32)


def log_softmax(row):
    row = row.astype(np.float64) - row.max()
    return row - np.log(np.exp(row).sum())


class Model:
    """One GGUF file; `kv_f16` and `act_q8` as said at the head of this file."""

    def __init__(self, path, kv_f16=False, act_q8=False):
        self.reader = GGUFReader(path)
        self.kv_f16, self.act_q8 = kv_f16, act_q8
        self.arch = self.reader.fields["general.architecture"].contents()
        if self.arch not in FAMILIES:
            sys.exit(f"{path}: architecture {self.arch}, expected one of {', '.join(FAMILIES)}")
        self.tensors = {t.name: t for t in self.reader.tensors}
        self.decoded = {}
        self.width = self.get("embedding_length")
        self.heads = self.get("attention.head_count")
        self.kv_heads = self.get("attention.head_count_kv", self.heads)
        self.head_dim = self.get("attention.key_length", self.width // self.heads)
        self.eps = self.get("attention.layer_norm_rms_epsilon")
        self.gemma = self.arch == "gemma3"

    def get(self, key, default=None):
        field = self.reader.fields.get(f"{self.arch}.{key}")
        return default if field is None else field.contents()

    # ---- weights ----

    def weight(self, name):
        """A tensor as float32, rows first; None when the file has none of that name."""
        if name not in self.decoded:
            t = self.tensors.get(name)
            shape = None if t is None else tuple(int(n) for n in reversed(t.shape))
            self.decoded[name] = None if t is None else np.ascontiguousarray(
                gguf.quants.dequantize(t.data, t.tensor_type).reshape(shape), np.float32)
        return self.decoded[name]

    def product(self, x, name):
        """x (n, in) times the matrix (out, in): (n, out)."""
        if self.act_q8 and self.tensors[name].tensor_type not in FLOATS:
            x = round_q8(x)
        return x @ self.weight(name).T

    # ---- one layer ----

    def windowed(self, layer):
        return self.gemma and (layer + 1) % GEMMA3_PERIOD != 0

    def rotate(self, x, layer):
        """Rotary positions on x (n, heads, head_dim)."""
        half = self.head_dim // 2
        base = GEMMA3_LOCAL_BASE if self.windowed(layer) else self.get("rope.freq_base", 10000.0)
        frequency = 1.0 / base ** (np.arange(half) / half)
        factors = self.weight("rope_freqs.weight")
        if factors is not None:
            frequency = frequency / factors
        angle = np.arange(len(x))[:, None, None] * frequency
        cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        if self.arch == "llama":  # these files hold q and k rows permuted for neighbouring pairs
            a, b = x[..., 0::2], x[..., 1::2]
            return np.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def visible(self, n, layer):
        """(n, n): whether the row's position sees the column's."""
        distance = np.arange(n)[:, None] - np.arange(n)[None, :]
        window = self.get("attention.sliding_window") if self.windowed(layer) else n
        return (distance >= 0) & (distance < window)

    def attention(self, x, layer):
        p, n = f"blk.{layer}.attn_", len(x)
        q = self.product(x, p + "q.weight").reshape(n, self.heads, self.head_dim)
        k = self.product(x, p + "k.weight").reshape(n, self.kv_heads, self.head_dim)
        v = self.product(x, p + "v.weight").reshape(n, self.kv_heads, self.head_dim)
        if self.weight(p + "q_norm.weight") is not None:
            q = norm(q, self.weight(p + "q_norm.weight"), self.eps)
            k = norm(k, self.weight(p + "k_norm.weight"), self.eps)
        q, k = self.rotate(q, layer), self.rotate(k, layer)
        if self.kv_f16:
            k, v = (t.astype(np.float16).astype(np.float32) for t in (k, v))
        k, v = (np.repeat(t, self.heads // self.kv_heads, axis=1) for t in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k, optimize=True) / np.float32(self.head_dim**0.5)
        scores = np.where(self.visible(n, layer), scores, np.float32(-np.inf))
        mixed = np.einsum("hqk,khd->qhd", softmax(scores), v, optimize=True)
        return self.product(mixed.reshape(n, -1), p + "output.weight")

    def feed_forward(self, x, layer):
        p = f"blk.{layer}.ffn_"
        act = gelu_tanh if self.gemma else silu
        gated = act(self.product(x, p + "gate.weight")) * self.product(x, p + "up.weight")
        return self.product(gated, p + "down.weight")

    def layer(self, x, layer):
        p = f"blk.{layer}."
        y = self.attention(norm(x, self.weight(p + "attn_norm.weight"), self.eps), layer)
        if self.gemma:
            y = norm(y, self.weight(p + "post_attention_norm.weight"), self.eps)
        x = x + y
        y = self.feed_forward(norm(x, self.weight(p + "ffn_norm.weight"), self.eps), layer)
        if self.gemma:
            y = norm(y, self.weight(p + "post_ffw_norm.weight"), self.eps)
        return x + y

    # ---- whole model ----

    def logits(self, ids):
        """Logits after each of `ids`: (len(ids), vocabulary), float32."""
        x = self.weight("token_embd.weight")[ids]
        if self.gemma:
            x = x * np.float32(self.width**0.5)
        for layer in range(self.get("block_count")):
            x = self.layer(x, layer)
        x = norm(x, self.weight("output_norm.weight"), self.eps)
        head = "output.weight" if "output.weight" in self.tensors else "token_embd.weight"
        return self.product(x, head)


def nlls(logits, ids):
    """Negative log-likelihood of each id after the first, nats."""
    return [float(-log_softmax(logits[i])[ids[i + 1]]) for i in range(len(ids) - 1)]


def top(row, count):
    """The first `count` ids of one position, with logit and log-probability."""
    order = np.argsort(-row, kind="stable")[:count]
    logp = log_softmax(row)
    return [{"id": int(i), "logit": float(row[i]), "logprob": float(logp[i])} for i in order]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--ids")
    source.add_argument("--tokens")
    parser.add_argument("--top", type=int, default=5)
    parser.add_argument("--kv-f16", action="store_true")
    parser.add_argument("--act-q8", action="store_true")
    args = parser.parse_args()
    if args.ids:
        ids = [int(i) for i in args.ids.split(",")]
    else:
        with open(args.tokens) as file:
            ids = json.load(file)
        ids = ids["tokens"] if isinstance(ids, dict) else ids
    logits = Model(args.model, args.kv_f16, args.act_q8).logits(ids)
    each = nlls(logits, ids)
    print(json.dumps({
        "nll": float(np.mean(each)), "nlls": [round(x, 6) for x in each],
        "argmax": logits.argmax(axis=-1).tolist(), "top": top(logits[-1], args.top)}))


if __name__ == "__main__":
    main()
