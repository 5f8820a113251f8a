#!/usr/bin/env python3
"""Issue 62: the forms in which the families of 2026 are published, from the golden folders: FP8, MXFP8 and MXFP4 with their scales.

    PACELINE=PROGRAM python scripts/bars/bar62_forms.py [--only NAME,..]

Needs scripts/golden/requirements.txt with transformers 5.24, accelerate, mlx (its CPU build) and mlx-lm 0.32.2. Each row writes a golden folder
with the dtypes, names and configuration of the published one, and another with the values of its matrices in f32. Bars: paceline gives
both the same log-probabilities; a reference is at most 1e-3 away (for V4.1 its median: keys are rounded). The reference is the reader
of published folders of transformers for DeepSeek V4, that of mlx-lm for Kimi K3; and with the values mlx-lm for V4.1, else transformers.

Sources of the layouts, seen 2026-11-30: the files of deepseek-ai/DeepSeek-V4-Flash, -V4-Flash-Base and -V4.1-Flash, moonshotai/Kimi-K3,
MiniMaxAI/MiniMax-M3-MXFP8, zai-org/GLM-5.3-Flash and Qwen/Qwen3.8-Flash-Next-FP8 as public pages quote them.
"""
import os, sys
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../golden"))
import numpy as np, torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from common32 import *  # noqa: E402, F403
from common32 import REPO, Up, arguments, bar, end, folder, json, shutil, told  # noqa: E402

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
FP8, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


def wide(scales, shape):
    """Scales of equal tiles, one for each element."""
    rows, cols = (n // m for n, m in zip(shape, scales.shape))
    return scales.repeat_interleave(rows, 0).repeat_interleave(cols, 1)


def largest(weight, tile):
    rows, cols = tile
    return weight.abs().unflatten(0, (-1, rows)).unflatten(2, (-1, cols)).amax((1, 3)).clamp(min=1e-9)


def in_fp8(weight, tile, dtype, suffix):
    """The parts of a matrix in E4M3 by name, and its values."""
    scales = largest(weight, tile) / 448
    if dtype in (E8M0, torch.uint8):
        scales = scales.log2().ceil().exp2()
    scales = scales.to(E8M0 if dtype == torch.uint8 else dtype)
    of = wide(scales.float(), weight.shape)
    values = (weight / of).to(FP8)
    return {"weight": values, suffix: scales.view(dtype) if dtype == torch.uint8 else scales}, values.float() * of


def in_mxfp4(weight, names, dtypes):
    scales = (largest(weight, (1, 32)).log2().floor() - 2).exp2()
    of = wide(scales, weight.shape)
    codes = ((weight / of)[..., None] - E2M1).abs().argmin(-1).to(torch.uint8)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    parts = {names[0]: packed.view(dtypes[0]), names[1]: scales.to(E8M0).view(dtypes[1])}
    return parts, E2M1[codes.long()] * of


def tiles(dtype, suffix, tile=(32, 32)):
    return lambda weight: in_fp8(weight, tile, dtype, suffix)


def packed(weight):
    return in_mxfp4(weight, ["weight_packed", "weight_scale"], [torch.uint8, torch.uint8])


def named(weight):
    return in_mxfp4(weight, ["weight", "scale"], [torch.int8, E8M0])


def deepseek_v4(config):
    return config | {"expert_dtype": "fp4", "num_nextn_predict_layers": 1, "compress_ratios": [*config["compress_ratios"], 0]}


def deepseek_v41(config):
    text = {k: v for k, v in config.items() if k not in ("architectures", "model_type", "dtype")}
    return {"architectures": config["architectures"], "model_type": "deepseek_v41", "dtype": "bfloat16",
            "text_config": text | {"model_type": "deepseek_v41_text", "compress_ratios": [*text["compress_ratios"], 0]}}


def kimi(config):
    groups = {"group_0": {"format": "mxfp4-pack-quantized", "targets": ["Linear"], "weights": {"group_size": 32, "num_bits": 4, "type": "float"}}}
    own = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "config_groups": groups, "ignore": ["re:.*self_attn.*"]}
    return config | {"text_config": config["text_config"] | {"quantization_config": own}}


def minimax(config):
    text = dict(config["text_config"])
    kinds, sparse = text.pop("mlp_layer_types"), [int(kind == "minimax_m3_sparse") for kind in text.pop("layer_types")]
    rope = text.pop("rope_parameters")
    old = {"sparse_num_index_heads": "index_n_heads", "sparse_index_dim": "index_head_dim", "sparse_block_size": "index_block_size",
           "sparse_topk_blocks": "index_topk_blocks", "sparse_local_block": "index_local_blocks"}
    del text["model_type"]
    own = {name: text.pop(new) for name, new in old.items()} | {"use_sparse_attention": True, "sparse_attention_freq": sparse}
    text |= {"architectures": ["MiniMaxM3SparseForCausalLM"], "hidden_act": "swigluoai", "use_gemma_norm": True, "use_qk_norm": True,
             "attention_output_gate": False, "scoring_func": "sigmoid", "use_routing_bias": True, "n_shared_experts": 1,
             "moe_layer_freq": [int(kind == "sparse") for kind in kinds], "rope_theta": rope["rope_theta"], "swiglu_alpha": 1.702,
             "partial_rotary_factor": 0.5, "sparse_attention_config": own}
    return config | {"text_config": text}


def glm(config):
    text = dict(config["text_config"])
    net = {new: text.pop(old) for new, old in [("head_dim", "linear_head_dim"), ("num_heads", "linear_num_heads"),
                                               ("short_conv_kernel_size", "linear_conv_kernel_dim"), ("gate_lower_bound", "linear_lower_bound")]}
    kinds = [kind.replace("indexed", "deepseek_sparse") for kind in text["layer_types"]]
    return config | {"text_config": text | {"layer_types": kinds, "linear_attn_config": net, "mhc": True, "index_kpool_compress": True}}


def qwen(config):
    text = config | {"mtp_num_hidden_layers": 1}
    return {"model_type": "qwen4_exp", "architectures": ["Qwen4ExpForConditionalGeneration"], "text_config": text}


def same(config):
    return config


DEEPSEEK = [".attn.w", ".indexer.wq_b", ".shared_experts."]
USUAL = ["_proj.", ".experts.", ".in_proj_qkv", ".in_proj_z"]
# Row: golden folder, `quantization_config`, its configuration as published, and the form of a matrix with a part of a name.
ROWS = {
    "DeepSeek V4 Flash": ("deepseek-v4-bf16", {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [32, 32]}, deepseek_v4,
                          {".ffn.experts.": named} | dict.fromkeys(DEEPSEEK, tiles(E8M0, "scale"))),
    "DeepSeek V4 Flash Base": ("deepseek-v4-bf16", {"quant_method": "fp8", "weight_block_size": [32, 32]}, same,
                               dict.fromkeys([".ffn.experts.", *DEEPSEEK], tiles(torch.float32, "scale"))),
    "DeepSeek V4.1 Flash": ("deepseek-v41-bf16", {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [32, 32]}, deepseek_v41,
                            {".ffn.experts.": named} | dict.fromkeys(DEEPSEEK, tiles(E8M0, "scale"))),
    "Kimi K3": ("kimi-k3-bf16", None, kimi, {".experts.": packed}),
    "MiniMax M3 MXFP8": ("minimax-m3-blocks-bf16", {"quant_method": "mxfp8", "weight_block_size": [1, 32]}, minimax,
                         dict.fromkeys(USUAL, tiles(torch.uint8, "weight_scale_inv", (1, 32)))),
    "GLM 5.3 Flash": ("glm5-next-bf16", {"quant_method": "fp8", "weight_block_size": [32, 32]}, glm,
                      dict.fromkeys(USUAL, tiles(torch.float32, "weight_scale_inv"))),
    "Qwen 3.8 Flash Next FP8": ("qwen4-ngrams-bf16", {"quant_method": "fp8", "weight_block_size": [32, 32]}, qwen,
                                dict.fromkeys(USUAL, tiles(torch.bfloat16, "weight_scale_inv"))),
}


# Of parts that are not used.
OTHERS = {"deepseek-v4-bf16": ["mtp.0.attn.wq_a.weight"], "deepseek-v41-bf16": ["mtp.0.attn.wq_a.weight", "layers.0.ffn.gate.bias_vl"],
          "qwen4-ngrams-bf16": ["mtp.fc.weight"], "kimi-k3-bf16": ["vision_tower.patch_embed.proj.weight"]}


def source(name):
    """A golden folder; that of Qwen with rows of n-grams as wide as blocks of FP8 are."""
    golden = Path(f"{REPO}/tests-data/golden/hf/{name}")
    if not name.startswith("qwen"):
        return golden
    import hf_tiny as tiny
    path = Path(folder()) / name
    tiny.write_folder(path, tiny.MODELS[name][0] | {"ple_embed_dim": 192}, torch.bfloat16, 1, 62)
    shutil.copy(golden / "tokenizer_config.json", path)
    return path


def with_tables(form, values):
    """Tables of n-grams in E4M3: all parts of one have its scale. All names are those of a model with pictures."""
    tables = {key.split(".shard_")[0] for key in form if ".shard_" in key}
    for table in tables:
        parts = [key for key in form if key.startswith(f"{table}.shard_")]
        scale = (max(form[key].float().abs().max() for key in parts) / 448).to(torch.bfloat16).reshape(1)
        form[f"{table}.weight_scale"] = scale
        for key in parts:
            form[key] = (form[key].float() / scale.float()).to(FP8)
            values[key] = form[key].float() * scale.float()
    if tables:
        for key in [key for key in form if key.startswith("model.")]:
            form[key.replace("model.", "model.language_model.", 1)] = form.pop(key)


def fits(weight):
    return weight.dim() == 2 and not weight.shape[0] % 32 and not weight.shape[1] % 32


def written(name, quantisation, published, forms):
    """Folders of the published form and of its values, from a golden folder; Kimi K3's vectors of heads are longer than their heads."""
    golden, paths = source(name), [Path(folder()) / name for _ in range(2)]
    states = {}, {}
    for key, weight in load_file(golden / "model.safetensors").items():
        make = next((make for part, make in forms.items() if part in key and key.endswith(".weight") and fits(weight)), None)
        parts, values = make(weight.float()) if make else ({}, weight)
        states[0].update({key.removesuffix("weight") + part: tensor for part, tensor in parts.items()} or {key: weight})
        states[1][key] = values
        if name.startswith("kimi") and key.endswith("A_log"):
            states[0][key] = torch.cat([weight, torch.zeros(2)])
    for other in OTHERS.get(name, []):
        states[0][other] = torch.zeros(64, 128)
    with_tables(*states)
    config = json.loads((golden / "config.json").read_text())
    own = {"quantization_config": quantisation} if quantisation else {}
    for path, state, stated in zip(paths, states, [published(config) | own, config]):
        path.mkdir()
        save_file({key: tensor.contiguous() for key, tensor in state.items()}, path / "model.safetensors", {"format": "pt"})
        (path / "config.json").write_text(json.dumps(stated))
        for file in ["tokenizer.json", "tokenizer_config.json"]:
            shutil.copy(golden / file, path)
    return paths


def by_transformers(form, values):
    import hf_tiny as tiny
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config
    if "v4" in form.name:
        own = FineGrainedFP8Config(dequantize=True, weight_block_size=(32, 32))
        model = AutoModelForCausalLM.from_pretrained(form, dtype=torch.float32, attn_implementation="eager", quantization_config=own).eval()
    else:
        model = tiny.load(values)

    def logits(prompt):
        with torch.no_grad():
            return model(torch.tensor([prompt]), use_cache=False).logits[0].double()
    return logits


def by_mlx_lm(form, values):
    import mlx.core as mx
    mx.set_default_device(mx.cpu)
    if "v41" in form.name:
        import deepseek_v41_tiny
        model = deepseek_v41_tiny.loaded(values)
    else:
        import kimi_k3_tiny
        model = kimi_k3_tiny.wide(kimi_k3_tiny.load(values))
    return lambda prompt: torch.from_numpy(np.array(model(mx.array([prompt]))[0])).double()


def found(path, prompts):
    server = Up(path, "--threads", 1, "--context", 256, "--parallel", 1, "--prefix-cache", "off", "--class", "cpu-f32", "--kv", "f32", seconds=60)
    try:
        rows = []
        for prompt in prompts:
            body = {"model": server.model, "prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 0, "temperature": 0}
            answer = server.call("POST", "/v1/completions", body)["choices"][0]
            rows.append(answer["logprobs"]["token_logprobs"][1:len(prompt)])
        return np.array(rows)
    finally:
        server.end()


def measured(row):
    form, values = written(*ROWS[row])
    rng = np.random.default_rng(62)
    prompts = [rng.integers(3, 300, 201).tolist() for _ in range(2)]
    got, plain = found(form, prompts), found(values, prompts)
    is_mlx = form.name.startswith(("kimi", "deepseek-v41"))
    logits = (by_mlx_lm if is_mlx else by_transformers)(form, values)
    wanted = [torch.log_softmax(logits(prompt), -1) for prompt in prompts]
    wanted = np.array([[float(of[i, token]) for i, token in enumerate(prompt[1:])] for of, prompt in zip(wanted, prompts)])
    far = np.abs(got - wanted)
    bar(f"{row}: the form beside its values", float(np.abs(got - plain).max()), "", 0, False)
    bar(f"{row}: the reference", float(np.median(far) if "V4.1" in row else far.max()), "", 1e-3, False)


def main():
    a = arguments(__doc__, only="").parse_args()
    names = [row for row in ROWS if not a.only or any(part in row for part in a.only.split(","))]
    for row in names:
        measured(row)
    told("rows", len(names))
    end()


main()
