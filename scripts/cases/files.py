"""Recipes for the files of cases: each function writes one file or folder below the current one.

Standard library only, so that a case needs nothing but Python. Random values have fixed seeds.
"""

import hashlib
import json
import os
import random
import struct
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

# Shape of the tiny llama: one token per byte, four control tokens, no merges.
WIDTH, HEADS, KV_HEADS, HEAD, FEED, VOCAB = 64, 4, 2, 16, 128, 272
CONTROL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>"]


def text(path, content, encoding="utf-8"):
    """A file of text, or of bytes."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "wb") as file:
        file.write(content if isinstance(content, bytes) else content.encode(encoding))


def rows(path, *objects):
    """JSON Lines."""
    text(path, "".join(json.dumps(o) + "\n" for o in objects))


def npy(path, kind, values, shape=None, descr=None, version=1, fortran=False, end="<", after=b""):
    """An array with `values` of struct's `kind`; `shape` is the header's text, so it may be odd."""
    names = {"d": "f8", "f": "f4", "e": "f2", "q": "i8", "i": "i4", "B": "u1", "H": "u2"}
    descr = descr or f"{'|' if kind == 'B' else end}{names[kind]}"
    shape = f"({len(values)},)" if shape is None else shape
    head = f"{{'descr': '{descr}', 'fortran_order': {fortran}, 'shape': {shape}, }}"
    start = 10 if version == 1 else 12
    head += " " * (-(start + len(head) + 1) % 64) + "\n"
    length = struct.pack("<H" if version == 1 else "<I", len(head))
    packed = struct.pack(f"{end}{len(values)}{kind}", *values)
    text(path, b"\x93NUMPY" + bytes([version, 0]) + length + head.encode() + packed + after)


def safetensors(path, tensors):
    """A file of f32 tensors: name to (shape, values)."""
    header, blobs, at = {}, [], 0
    for name, (shape, values) in tensors.items():
        blob = struct.pack(f"<{len(values)}f", *values)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + len(blob)]}
        at += len(blob)
        blobs.append(blob)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    text(path, struct.pack("<Q", len(head)) + head + b"".join(blobs))


def gauss(seed, scale, *shape):
    """A tensor of `shape`."""
    source = random.Random(seed)
    count = 1
    for length in shape:
        count *= length
    return list(shape), [source.gauss(0, scale) for _ in range(count)]


def byte_letters():
    """The letter that a byte-level BPE writes for each byte."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in printed}
    others = [byte for byte in range(256) if byte not in letters]
    return letters | {byte: chr(256 + i) for i, byte in enumerate(others)}


def tokenizer(path):
    """A tokenizer.json: byte b is the token b, control tokens follow."""
    added = [
        {"id": 256 + i, "content": name, "special": True, "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False} for i, name in enumerate(CONTROL)]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
             "vocab": {letter: byte for byte, letter in byte_letters().items()}, "merges": []}
    text(path, json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": None, "pre_tokenizer": level, "post_processor": None, "decoder": level,
        "model": model}))


def llama(folder, template=None, config=None, tokenizer_config=None, tied=True, layers=1):
    """A folder with a random llama. A None in `config` takes the key out."""
    tokenizer(f"{folder}/tokenizer.json")
    named = {"bos_token": "<s>", "eos_token": "<|im_end|>", "add_bos_token": False}
    text(f"{folder}/tokenizer_config.json", json.dumps(named | (tokenizer_config or {})))
    if template is not None:
        text(f"{folder}/chat_template.jinja", template)
    whole = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": WIDTH,
        "intermediate_size": FEED, "num_hidden_layers": layers, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "vocab_size": VOCAB,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "hidden_act": "silu", "tie_word_embeddings": tied, "bos_token_id": 259,
        "eos_token_id": 257, "torch_dtype": "float32"} | (config or {})
    whole = {key: value for key, value in whole.items() if value is not None}
    text(f"{folder}/config.json", json.dumps(whole))
    ones = ([WIDTH], [1.0] * WIDTH)
    tensors = {"model.embed_tokens.weight": gauss(0, 0.08, VOCAB, WIDTH), "model.norm.weight": ones}
    if not tied:
        tensors["lm_head.weight"] = gauss(1, 0.08, VOCAB, WIDTH)
    products = [
        ("self_attn.q_proj", HEADS * HEAD, WIDTH), ("self_attn.k_proj", KV_HEADS * HEAD, WIDTH),
        ("self_attn.v_proj", KV_HEADS * HEAD, WIDTH), ("self_attn.o_proj", WIDTH, HEADS * HEAD),
        ("mlp.gate_proj", FEED, WIDTH), ("mlp.up_proj", FEED, WIDTH), ("mlp.down_proj", WIDTH, FEED)]
    for layer in range(layers):
        at = f"model.layers.{layer}."
        for i, (name, out, into) in enumerate(products):
            tensors[f"{at}{name}.weight"] = gauss(10 * layer + i + 2, 0.08, out, into)
        tensors |= {f"{at}input_layernorm.weight": ones, f"{at}post_attention_layernorm.weight": ones}
    safetensors(f"{folder}/model.safetensors", tensors)


def adapter(folder, config=None, name="base_model.model.{n}.lora_{h}.weight", extra=(), layers=1,
            rank=4):
    """A PEFT adapter of `llama`'s queries; `extra` has tensors by name and shape."""
    tensors = {}
    for layer in range(layers):
        module = f"model.layers.{layer}.self_attn.q_proj"
        tensors[name.format(n=module, h="A")] = gauss(layer, 0.3, rank, WIDTH)
        tensors[name.format(n=module, h="B")] = gauss(layer + 50, 0.3, WIDTH, rank)
    for i, (key, shape) in enumerate(extra):
        tensors[key] = gauss(90 + i, 0.3, *shape)
    text(f"{folder}/adapter_config.json", json.dumps({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 8,
        "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False, "target_modules": ["q_proj"],
        "modules_to_save": None, "use_dora": False, "use_rslora": False} | (config or {})))
    safetensors(f"{folder}/adapter_model.safetensors", tensors)


def hub(*names):
    """A hub with the repository `o/r`, whose files have these names and 64 bytes each: its URL."""
    def content(name):
        return hashlib.sha512(name.encode()).digest()

    class Hub(BaseHTTPRequestHandler):
        def answer(self):
            path, body = self.path.split("?")[0], None
            if path == "/api/models/o/r":
                files = [{"rfilename": n, "size": 64, "lfs": {
                    "sha256": hashlib.sha256(content(n)).hexdigest(), "size": 64}} for n in names]
                body = json.dumps({"id": "o/r", "sha": "0" * 40, "siblings": files}).encode()
            elif path.startswith("/o/r/resolve/") and path.split("/", 5)[5] in names:
                body = content(path.split("/", 5)[5])
            self.send_response(404 if body is None else 200)
            self.send_header("Content-Length", str(len(body or b"")))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body or b"")

        do_GET = do_HEAD = answer

        def log_message(self, *_):
            """No log."""

    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"
