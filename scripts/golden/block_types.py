#!/usr/bin/env python3
"""What `transformers` computes with tiny models of new storage types: block_types.py MODELS [OUT]

MODELS is a folder that the test block_types of paceline-model fills, from a seed:
    PACELINE_GOLDEN_MODELS=MODELS cargo test --release -p paceline-model --test all types_with
OUT defaults to tests-data/golden/block_types.json of this repository. For each model it gets the
largest logits of the last position and every eighth one, and the NLL of each id of the prompt.

Folders are read by transformers itself: FP8 in tiles by its own code, all others by
compressed-tensors, which makes the weights float32 again. Weights of GGUF files are those of the
`gguf` package, in a Qwen 3 of transformers. All is computed in float32 with eager attention.
"max_abs_diff" has the largest change of a logit by products in float64, by keys and values in half
precision, and by activations of 8 bits for 32 columns.
Needs torch (a CPU build will do), transformers, compressed-tensors, gguf, numpy: requirements.txt.
"""

import functools
import json
import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import gguf
import numpy as np
import torch
from compressed_tensors.compressors.nvfp4 import base as nvfp4
from hf_tiny import half_kv  # noqa: F401 (which registers it)
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config, Qwen3Config)

REPOSITORY = Path(__file__).resolve().parents[2]
PROMPT = [i * 37 % 300 for i in range(40)]
TOP, EVERY = 8, 8
# Names of a layer's parts in GGUF files and in transformers.
PARTS = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ENDS = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight"}


# compressed-tensors gives NVFP4 as bfloat16 otherwise, which rounds values times scales.
nvfp4.unpack_fp4_from_uint8 = functools.partial(nvfp4.unpack_fp4_from_uint8, dtype=torch.float32)


def widened(path, out):
    """A copy of a folder with its bfloat16 in float32: compressed-tensors computes a weight in the
    type of its scale."""
    shutil.copy(path / "config.json", out)
    state = load_file(path / "model.safetensors")
    state = {n: w.float() if w.dtype == torch.bfloat16 else w for n, w in state.items()}
    save_file(state, out / "model.safetensors", {"format": "pt"})
    return out


def from_folder(path):
    """The folder's model, with weights in float32."""
    stated = json.loads((path / "config.json").read_text())["quantization_config"]
    if stated["quant_method"] == "fp8":
        how = FineGrainedFP8Config(weight_block_size=stated["weight_block_size"],
                                   modules_to_not_convert=[], dequantize=True)
    else:
        how = CompressedTensorsConfig(dequantize=True)
    with tempfile.TemporaryDirectory() as out:
        return AutoModelForCausalLM.from_pretrained(
            widened(path, Path(out)), dtype=torch.float32, quantization_config=how,
            attn_implementation="eager")


def name_of(tensor):
    if tensor in ENDS:
        return ENDS[tensor]
    _, layer, part, suffix = tensor.split(".")
    return f"model.layers.{layer}.{PARTS[part]}.{suffix}"


def from_gguf(path):
    """The file's weights in a model of transformers."""
    reader = gguf.GGUFReader(path)
    key = lambda name: reader.fields[f"qwen3.{name}"].contents()
    state = {}
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        state[name_of(tensor.name)] = torch.from_numpy(np.ascontiguousarray(values))
    config = Qwen3Config(
        hidden_size=key("embedding_length"), num_hidden_layers=key("block_count"),
        intermediate_size=key("feed_forward_length"), head_dim=key("attention.key_length"),
        num_attention_heads=key("attention.head_count"), tie_word_embeddings=False,
        num_key_value_heads=key("attention.head_count_kv"), vocab_size=300,
        rms_norm_eps=key("attention.layer_norm_rms_epsilon"), attention_bias=False,
        rope_parameters={"rope_type": "default", "rope_theta": key("rope.freq_base")})
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager")
    model.load_state_dict(state)
    return model


def eight_bits(_, inputs):
    """Activations as integers of 8 bits with a scale for 32 columns."""
    x = inputs[0].unflatten(-1, (-1, 32))
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (torch.where(scale > 0, (x / scale).round() * scale, x).flatten(-2),)


def logits(model):
    with torch.no_grad():
        return model(torch.tensor([PROMPT]), use_cache=False).logits[0].double()


def answer(model):
    """What is recorded of a model."""
    model = model.float().eval()  # of an FP8 folder, embeddings and norms are still bfloat16
    plain = logits(model)
    apart = lambda: float((logits(model) - plain).abs().max())
    diffs = {"f64_matmul": float((logits(model.double()) - plain).abs().max())}
    model.float().set_attn_implementation("half_kv")
    diffs["kv_f16"] = apart()
    model.set_attn_implementation("eager")
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(eight_bits)
    diffs["act_q8"] = apart()
    last, chosen = plain[-1], range(0, plain.shape[1], EVERY)
    entry = lambda i: {"id": int(i), "logit": round(float(last[i]), 7)}
    nlls = -plain[:-1].log_softmax(-1)[range(len(PROMPT) - 1), PROMPT[1:]]
    return {
        "prompt": PROMPT, "max_abs_diff": diffs,
        "top": [entry(i) for i in last.topk(TOP).indices], "logits": [entry(i) for i in chosen],
        "nlls": [round(float(x), 7) for x in nlls]}


def main():
    if len(sys.argv) not in (2, 3) or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    default = REPOSITORY / "tests-data/golden/block_types.json"
    models = {}
    for path in sorted(Path(sys.argv[1]).iterdir()):
        model = from_folder(path) if path.is_dir() else from_gguf(path)
        models[path.name] = answer(model)
        diffs = models[path.name]["max_abs_diff"]
        top = models[path.name]["top"][0]["logit"]
        print(f"{path.name}: largest logit {top:.3f}, {diffs}", file=sys.stderr)
    packages = ("torch", "transformers", "compressed-tensors", "gguf", "numpy")
    golden = {"made_by": "scripts/golden/block_types.py", "models": models,
              "versions": {name: version(name) for name in packages}}
    text = json.dumps(golden, separators=(",", ":")).replace('},"', '},\n"')
    Path(sys.argv[2] if len(sys.argv) > 2 else default).write_text(text + "\n")


if __name__ == "__main__":
    main()
