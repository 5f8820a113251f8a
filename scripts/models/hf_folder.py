#!/usr/bin/env python3
"""A GGUF file of the llama family as a Hugging Face folder: hf_folder.py MODEL.gguf OUT

For conversions that start from such folders, where only the GGUF file can be had. Weights are
decoded and written in bfloat16 (a quantised file stays as coarse as it was); queries and keys go
back to the hub's order of rows. The tokenizer is what transformers makes of the file. Needs
gguf, numpy, safetensors, transformers: scripts/mlx/requirements-lm.txt.
"""

import json
import sys
from pathlib import Path

import gguf
import numpy as np

LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def config(reader):
    field = lambda key: reader.fields[f"llama.{key}"].contents()
    names = {t.name for t in reader.tensors}
    tokens = lambda key: reader.fields[f"tokenizer.ggml.{key}_token_id"].contents()
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": field("embedding_length"), "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": field("attention.head_count"),
        "num_key_value_heads": field("attention.head_count_kv"),
        "rms_norm_eps": field("attention.layer_norm_rms_epsilon"),
        "rope_theta": field("rope.freq_base"), "max_position_embeddings": field("context_length"),
        "vocab_size": len(reader.fields["tokenizer.ggml.tokens"].data),
        "tie_word_embeddings": "output.weight" not in names, "attention_bias": False,
        "mlp_bias": False, "torch_dtype": "bfloat16",
        "bos_token_id": tokens("bos"), "eos_token_id": tokens("eos"),
    }


def tokenizer(reader):
    """tokenizer.json and tokenizer_config.json."""
    field = lambda key: reader.fields[f"tokenizer.{key}"].contents()
    assert (field("ggml.model"), field("ggml.pre")) == ("gpt2", "smollm"), "another tokenizer"
    tokens, kinds = field("ggml.tokens"), field("ggml.token_type")
    special = [
        {"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for i, (token, kind) in enumerate(zip(tokens, kinds)) if kind == gguf.TokenType.CONTROL]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                  "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    whole = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special,
        "normalizer": None, "post_processor": None, "decoder": byte_level,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]},
        "model": {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)},
                  "merges": [merge.split(" ") for merge in field("ggml.merges")]},
    }
    named = lambda key: tokens[field(f"ggml.{key}_token_id")]
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": named("bos"),
              "eos_token": named("eos"), "chat_template": field("chat_template"),
              "clean_up_tokenization_spaces": False}
    return whole, config


def hub_name(name):
    if name.startswith("blk."):
        _, layer, part, kind = name.split(".")
        return f"model.layers.{layer}.{LAYER[part]}.{kind}"
    part, kind = name.split(".")
    return f"{TOP[part]}.{kind}"


def hub_order(values, heads):
    """Rows of queries or keys: llama.cpp keeps the two that turn together side by side, the hub half
    a head apart (`LlamaModel.permute` of convert_hf_to_gguf.py, backwards)."""
    rows, cols = values.shape
    return values.reshape(heads, rows // heads // 2, 2, cols).swapaxes(1, 2).reshape(rows, cols)


def bfloat16(values):
    """The upper halves, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def write_safetensors(path, tensors):
    """numpy has no bfloat16, so the header is written here."""
    header, at = {}, 0
    for name, values in tensors.items():
        header[name] = {"dtype": "BF16", "shape": list(values.shape),
                        "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    text = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for values in tensors.values():
            file.write(values.tobytes())


def main():
    source, out = sys.argv[1:]
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(source)
    settings = config(reader)
    tensors = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        values = values.reshape(tensor.shape[::-1])
        if ".attn_q." in tensor.name:
            values = hub_order(values, settings["num_attention_heads"])
        if ".attn_k." in tensor.name:
            values = hub_order(values, settings["num_key_value_heads"])
        tensors[hub_name(tensor.name)] = bfloat16(values)
    write_safetensors(out / "model.safetensors", tensors)
    words, words_config = tokenizer(reader)
    for name, value in (("config", settings), ("tokenizer", words),
                        ("tokenizer_config", words_config)):
        (out / f"{name}.json").write_text(json.dumps(value, ensure_ascii=False) + "\n")


main()
