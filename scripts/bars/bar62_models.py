#!/usr/bin/env python3
"""Issue 62: log-probabilities of tiny random models beside those of transformers, every family and variant.

    PACELINE=PROGRAM python scripts/bars/bar62_models.py [--only NAME,..] [--ways one,pipeline,tensor,mlx]

Needs scripts/golden/requirements.txt with transformers 5.24. Each row is made by its class, saved by `save_pretrained` (so with the
names of today), and asked for the log-probabilities of two prompts of 200 tokens, `--kv f32`; the scaled positions for 63, 127 and 383
tokens of contexts of 0.5, 1 and 3 times the trained 128. Bar: 1e-3 at every position. A row that is not loaded counts as missed.
"""
import os, sys, types
from pathlib import Path

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../golden"))
import numpy as np, torch  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402
import hf_tiny as tiny  # noqa: E402
from common32 import *  # noqa: E402, F403
from common32 import BINARY, REPO, Up, arguments, bar, end, folder, json, shutil, told  # noqa: E402

TOKENIZER = f"{REPO}/tests-data/golden/hf/llama-tied"
SLIDING, FULL = tiny.SLIDING, tiny.FULL
CONTEXTS = [64, 128, 384]  # 0.5, 1 and 3 times the trained length of the rows with scaled positions


def theta(**more):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **more}}


def scaled(kind, pairs, **more):
    own = {"yarn": {"factor": 4.0}, "dynamic": {"factor": 2.0},
           "longrope": {"short_factor": [1 + 0.05 * i for i in range(pairs)],
                        "long_factor": [1 + 0.5 * i for i in range(pairs)], "factor": 4.0}}[kind]
    if kind != "dynamic":
        own["original_max_position_embeddings"] = 128
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **own, **more},
            "max_position_embeddings": 128 if kind == "dynamic" else 512}


LLAMA = tiny.LLAMA | {"tie_word_embeddings": False}
LLAMA3 = theta(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
GEMMA = tiny.GEMMA3 | {"num_hidden_layers": 7, "num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 32,
                       "query_pre_attn_scalar": 32, "tie_word_embeddings": True}
GEMMA_ROPE = {"rope_parameters": {SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
                                  FULL: {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}}}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 64}
MSCALE = {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.707}}


def golden(name):
    """The configuration of a golden folder, its text part."""
    config = tiny.MODELS[name][0]
    return {k: v for k, v in config.get("text_config", config).items() if k not in ("torch_dtype", "dtype", "quantization_config")}


# Name: fields; "wrap" puts them into a multimodal folder of that type.
ROWS = {
    "llama plain": LLAMA | theta(), "llama tied": LLAMA | theta() | {"tie_word_embeddings": True},
    "llama llama3": LLAMA | LLAMA3, "llama linear": LLAMA | theta(rope_type="linear", factor=4.0),
    "llama biases": LLAMA | theta() | {"attention_bias": True, "mlp_bias": True},
    "llama head 48": LLAMA | theta() | {"head_dim": 48}, "llama head 80": LLAMA | theta() | {"head_dim": 80},
    "llama one KV head": LLAMA | theta() | {"num_key_value_heads": 1},
    "llama 9 heads, 3 KV": LLAMA | theta() | {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3},
    "llama 6 heads, 3 KV": LLAMA | theta() | {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3},
    "llama theta 5e5": LLAMA | theta(rope_theta=5e5), "llama vocabulary 321": LLAMA | theta() | {"vocab_size": 321},
    "qwen2 plain": tiny.QWEN2 | theta(), "qwen2 window from layer 1": tiny.QWEN2 | theta() | {"use_sliding_window": True},
    "qwen2 layer_types": tiny.QWEN2 | theta() | {"use_sliding_window": True, "layer_types": [SLIDING, FULL, SLIDING]},
    "qwen3 plain": tiny.QWEN3 | theta(), "qwen3 biases": tiny.QWEN3 | theta() | {"attention_bias": True},
    "qwen3 window": tiny.QWEN3 | theta() | {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    "gemma3 linear": GEMMA | GEMMA_ROPE, "gemma3 scalar": GEMMA | {"query_pre_attn_scalar": 24},
    "gemma3 untied": GEMMA | {"tie_word_embeddings": False}, "gemma3 pattern": GEMMA | {"layer_types": [FULL, SLIDING] * 3 + [FULL]},
    "gemma3 multimodal": GEMMA | GEMMA_ROPE | {"wrap": "gemma3"},
    "gemma4 embeddings, shared caches": golden("gemma4-e-bf16"), "gemma4 experts, K=V": golden("gemma4-moe-bf16"),
    "gemma4 multimodal": golden("gemma4-e-bf16") | {"wrap": "gemma4"},
    "mixtral": tiny.MIXTRAL | theta(), "dbrx clip": golden("dbrx-bf16"),
    "qwen2moe": tiny.QWEN2_MOE | theta() | {"mlp_only_layers": [], "decoder_sparse_step": 1},
    "qwen2moe norm_topk": tiny.QWEN2_MOE | theta() | {"norm_topk_prob": True},
    "qwen2moe step 2, dense 1": tiny.QWEN2_MOE | theta() | {"decoder_sparse_step": 2, "mlp_only_layers": [1]},
    "qwen3moe norm": tiny.QWEN3_MOE | theta() | {"norm_topk_prob": True},
    "qwen3moe no norm": tiny.QWEN3_MOE | theta() | {"norm_topk_prob": False},
    "qwen3moe dense 1": tiny.QWEN3_MOE | theta() | {"mlp_only_layers": [1], "norm_topk_prob": True},
    "qwen3moe window": tiny.QWEN3_MOE | theta() | {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    "gpt-oss yarn, sinks, window": tiny.GPT_OSS | {"rope_parameters": tiny.YARN | {"rope_theta": 150000.0}},
    "gpt-oss plain": tiny.GPT_OSS | theta(), "gpt-oss limit 3": tiny.GPT_OSS | theta() | {"swiglu_limit": 3.0},
    "glm4moe norm, bias, partial": golden("glm4moe-bf16"), "glm4moe no qk norm": golden("glm4moe-air-bf16"),
    "glm4moe 4 groups, 2 shared": golden("glm4moe-bf16") | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "n_shared_experts": 2,
                                                            "norm_topk_prob": False},
    "minimax-m2": golden("minimax-m2-bf16"), "deepseek v2": golden("deepseek-v2") | MSCALE,
    "deepseek v2 greedy": golden("deepseek-v2") | theta() | {"topk_method": "greedy", "q_lora_rank": 32},
    "deepseek v3": golden("deepseek-v3-bf16") | theta(), "deepseek v3 yarn": golden("deepseek-v3-bf16") | MSCALE,
    "deepseek v3 1 group": golden("deepseek-v3-bf16") | theta() | {"n_group": 1, "topk_group": 1},
    "deepseek v3 halves": golden("deepseek-v3-bf16") | theta() | {"rope_interleave": False},
    "deepseek v3 first_k 0": golden("deepseek-v3-bf16") | theta() | {"first_k_dense_replace": 0},
    "kimi_k2": golden("deepseek-v3-bf16") | theta() | {"n_group": 1, "topk_group": 1, "saved as": "kimi_k2"},
    "kimi_k25 multimodal": golden("deepseek-v3-bf16") | theta() | {"n_group": 1, "topk_group": 1, "wrap": "kimi_k25"},
    "glm4_moe_lite": golden("glm4-moe-lite-bf16"),
    "deepseek32 512 of 512": golden("deepseek-v32-bf16") | {"index_topk": 512},
    "deepseek32 26 of 201": golden("deepseek-v32-sparse-bf16") | {"index_topk": 26},
    "deepseek32 48 of 201": golden("deepseek-v32-sparse-bf16") | {"index_topk": 48},
    "glm_moe_dsa 26 of 201": golden("glm-dsa-sparse-bf16") | {"index_topk": 26},
    "glm_moe_dsa 48 of 201": golden("glm-dsa-sparse-bf16") | {"index_topk": 48},
    "qwen3next 3:1": golden("qwen3next-bf16"), "qwen3next dense 1": golden("qwen3next-bf16") | {"mlp_only_layers": [1]},
    "qwen35": golden("qwen35-bf16"), "qwen35 equal heads": golden("qwen35-bf16") | {"linear_num_value_heads": 2},
    "qwen35 multimodal": golden("qwen35-bf16") | {"wrap": "qwen3_5"},
    "qwen35moe": golden("qwen35moe-bf16"),
    "qwen4 pools": golden("qwen4-bf16"), "qwen4 all positions": golden("qwen4-bf16") | {"indexer_budget": 512},
    "qwen4 multimodal": golden("qwen4-bf16") | {"wrap": "qwen4_exp", "indexer_budget": 512},
    "qwen4 n-grams": golden("qwen4-ngrams-bf16"), "qwen4 sigmoid gates": golden("qwen4-bf16") | {"output_gate_type": "sigmoid"},
    "qwen4 n-grams of 4, one tap": golden("qwen4-ngrams-bf16") | {"ngram_size": 4, "heads_per_ngram": 2, "ple_conv_kernel_size": 1, "ple_layer_ids": [2]},
    "qwen4 n-grams of 2, five taps": golden("qwen4-ngrams-bf16") | {"ngram_size": 2, "heads_per_ngram": 4, "ple_embed_dim": 64,
                                                                   "ple_conv_kernel_size": 5, "seed": 5, "split_ngram_parts": 1},
    "mistral window": golden("mistral-bf16"), "ministral3": golden("ministral3-bf16"),
    "mistral3 multimodal": golden("ministral3-bf16") | {"wrap": "mistral3"},
    "glm5_next": golden("glm5-next-bf16"), "glm5_next all positions": golden("glm5-next-bf16") | {"index_topk": 512},
    "glm5_next four streams, pools of 16": golden("glm5-next-bf16") | {"hc_mult": 4, "index_kpool": 16, "index_topk": 64},
    "glm5_next no bound": golden("glm5-next-bf16") | {"linear_lower_bound": None},
    "kimi_k3": {"model_type": "kimi_k3"}, "kimi_k3 blocks of 3": {"model_type": "kimi_k3", "attn_res_block_size": 3},
    "kimi_k3 one stream": {"model_type": "kimi_k3", "attn_res_block_size": None},
    "kimi_k3 whole rows": {"model_type": "kimi_k3", "routed_expert_hidden_size": None, "latent_moe_use_norm": False},
    "kimi_k3 plain gates": {"model_type": "kimi_k3", "mla_use_output_gate": False, "activation_situ_linear_beta": None},
    "kimi_linear": golden("kimi-linear-bf16"),
    "kimi_linear groups, 2 shared": golden("kimi-linear-bf16") | {"num_expert_group": 2, "num_shared_experts": 2, "first_k_dense_replace": 2},
    "minimax_m3": golden("minimax-m3-bf16"), "minimax_m3 blocks": golden("minimax-m3-blocks-bf16"),
    "minimax_m3 two local blocks": golden("minimax-m3-blocks-bf16") | {"index_local_blocks": 2, "num_attention_heads": 6, "num_key_value_heads": 3,
                                                                      "index_n_heads": 3},
    "gemma3n": golden("gemma3n-bf16"), "gemma3n plain gates": golden("gemma3n-bf16") | {"activation_sparsity_pattern": [0.0] * 5},
    "gemma3n multimodal": golden("gemma3n-bf16") | {"wrap": "gemma3n"},
    "deepseek_v4": golden("deepseek-v4-bf16"),
    "deepseek_v4 runs of 128, all keys": golden("deepseek-v4-bf16") | {"compress_rate_hca": 128, "index_topk": 64, "sliding_window": 16},
    "deepseek_v4 two streams, four groups": golden("deepseek-v4-bf16") | {"hc_mult": 2, "hc_sinkhorn_iters": 3, "o_groups": 4, "num_hash_layers": 0,
                                                                           "compress_ratios": [128, 128, 4, 128, 0], "rope_scaling": None},
    "smollm3": golden("smollm3-bf16"), "granite": golden("granite-bf16"), "olmo2": golden("olmo2-bf16"),
    "olmo3": golden("olmo3-bf16"), "phi3 partial": golden("phi3-bf16"),
    "lfm2": golden("lfm2-bf16"), "lfm2 five taps": golden("lfm2-bf16") | {"conv_L_cache": 5},
    "lfm2_moe": golden("lfm2moe-bf16"), "nemotron_h": golden("nemotron-h-bf16"),
    "nemotron_h one group": golden("nemotron-h-bf16") | {"n_groups": 1, "ssm_state_size": 64},
}
for name, base, pairs in [("llama", LLAMA, 8), ("qwen2", tiny.QWEN2 | {"sliding_window": None}, 8), ("qwen3", tiny.QWEN3, 16),
                          ("qwen3moe", tiny.QWEN3_MOE, 16), ("mixtral", tiny.MIXTRAL | {"head_dim": 16}, 8), ("qwen2moe", tiny.QWEN2_MOE, 8)]:
    for kind in ["yarn", "longrope", "dynamic"]:
        ROWS[f"{name} {kind}"] = base | scaled(kind, pairs)
ROWS["phi3 longrope"] = golden("phi3-bf16") | scaled("longrope", 12, partial_rotary_factor=0.75) | {"sliding_window": None,
                                                                                                 "original_max_position_embeddings": 128}
ROWS["qwen3 yarn as Qwen advises"] = ROWS["qwen3 yarn"] | {"max_position_embeddings": 128, "old names": True}
KV = ["--kv", "f32"]
WAYS = {"one": KV, "pipeline": [*KV, "--nodes", 2, "--split", "pipeline"], "tensor": [*KV, "--nodes", 2, "--split", "tensor"],
        "mlx": ["--class", "mlx-f32"]}


def draw(model, seed):
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, values in [*model.named_parameters(), *model.named_buffers()]:
            shape = tuple(values.shape)
            noise = torch.from_numpy(rng.standard_normal(shape).astype(np.float32))
            if "e_score_correction_bias" in name:
                values.copy_(0.1 * noise)
            elif "tid2eid" in name:
                order = np.argsort(rng.random((len(values), model.config.n_routed_experts)))
                values.copy_(torch.from_numpy(order[:, :values.shape[1]]))
            elif name.endswith(("hc.scale", "hc_scale")):
                values.copy_(1 + 0.2 * noise)
            elif not isinstance(values, torch.nn.Parameter) or "A_log" in name or "dt_bias" in name:
                continue
            elif "norm" in name:
                values.copy_(values + 0.2 * noise)
            elif "embed" in name or "lm_head" in name or "wte" in name:
                values.copy_(0.4 * noise)
            elif len(shape) >= 2:
                values.copy_(noise * (1.2 / shape[-1] ** 0.5 if len(shape) == 2 else 0.2))
            else:
                values.copy_(0.2 * noise)


def of_mlx_lm(fields, path):
    """As made, of Kimi K3, by the class of mlx-lm (which kimi_k3_tiny.py needs) in float64."""
    import kimi_k3_tiny as k3
    text = {k: v for k, v in (k3.TEXT | fields | {"model_type": "kimi_linear"}).items() if v is not None}
    k3.write_folder(Path(path), text, 62, torch.float32)
    model = k3.wide(k3.load(Path(path)))
    return lambda tokens, use_cache: types.SimpleNamespace(logits=torch.from_numpy(k3.logits(model, tokens[0].tolist()))[None])


def made(fields, path):
    """Saves the row's model; returns it."""
    if fields["model_type"] == "kimi_k3":
        return of_mlx_lm(fields, path)
    fields = dict(fields)
    wrap, old, saved = fields.pop("wrap", None), fields.pop("old names", False), fields.pop("saved as", None)
    usual = {"vocab_size": tiny.VOCABULARY, "max_position_embeddings": 512, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    if fields["model_type"] == "dbrx":
        usual.pop("max_position_embeddings")
        fields["max_seq_len"] = 512
    fields = usual | fields
    torch.manual_seed(62)  # decays of recurrent layers stay as their class draws them
    config = AutoConfig.for_model(**{k: v for k, v in fields.items() if k != "architectures"})
    model = tiny.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    draw(model, 62)
    if isinstance(model, tiny.TextPart):
        config = json.loads(config.to_json_string(use_diff=False))
    else:
        model.save_pretrained(path)
        with open(f"{path}/config.json") as f:
            config = json.load(f)
    if old:
        scaling = config.pop("rope_parameters")
        config |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling | {"type": scaling.pop("rope_type")}}
    if saved:
        config["model_type"] = saved
    whole = fields["model_type"].removesuffix("_text")
    if whole in tiny.ON_THE_HUB:  # transformers' names of the text part alone are of no folder on the hub
        from safetensors.torch import save_file
        parts = (part for n, w in model.state_dict().items() for part in tiny.ON_THE_HUB[whole](n, w))
        save_file(dict(parts), f"{path}/model.safetensors", metadata={"format": "pt"})
        config = {"model_type": whole, "text_config": config}
    if wrap:
        from safetensors.torch import load_file, save_file
        weights = load_file(f"{path}/model.safetensors")
        weights = {k.replace("model.", "model.language_model.", 1): v for k, v in weights.items()}
        save_file(weights, f"{path}/model.safetensors", metadata={"format": "pt"})
        config = {"model_type": wrap, "text_config": config, "vision_config": {}, "tie_word_embeddings": config.get("tie_word_embeddings")}
    with open(f"{path}/config.json", "w") as f:
        json.dump(config, f)
    for name in ["tokenizer.json", "tokenizer_config.json"]:
        shutil.copy(f"{TOKENIZER}/{name}", path)
    return model


def expected(model, tokens):
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0].double()
    all_of = torch.log_softmax(logits, -1)
    return [all_of[i, token].item() for i, token in enumerate(tokens[1:])]


def found(path, prompts, context, way):
    server = Up(path, "--threads", 1, "--context", context, "--parallel", 1, "--drafts", 0, "--prefix-cache", "off", *WAYS[way], seconds=60)
    try:
        answers = []
        for prompt in prompts:
            body = {"model": server.model, "prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 0, "temperature": 0}
            answer = server.call("POST", "/v1/completions", body)
            answers.append(answer["choices"][0]["logprobs"]["token_logprobs"][1:len(prompt)])
        return answers
    finally:
        server.end()


def measured(name, fields, ways):
    path, rng = folder(), np.random.default_rng(len(name))
    model = made(fields, path)
    kind = fields.get("rope_parameters", {}).get("rope_type")
    is_scaled = kind in ("yarn", "longrope", "dynamic") and fields.get("max_position_embeddings", 0) in (128, 512)
    worst = {}
    for context in CONTEXTS if is_scaled else [256]:
        prompts = [rng.integers(3, tiny.VOCABULARY, context if is_scaled else 201).tolist() for _ in range(1 if is_scaled else 2)]
        wanted = [expected(model, prompt)[:-1] for prompt in prompts]
        for way in ways if context in (256, 384) else [way for way in ways if way in ("one", "mlx")]:
            got = found(path, [prompt[:-1] for prompt in prompts], context, way)
            far = max(abs(x - y) for a, b in zip(got, wanted) for x, y in zip(a, b, strict=True))
            worst[way] = max(far, worst.get(way, 0.0))
    spread = float(np.std([x for row in wanted for x in row]))
    print(f"  {name}: {', '.join(f'{way} {far:.1e}' for way, far in worst.items())} (spread {spread:.1f})", flush=True)
    return worst


def main():
    parser = arguments(__doc__, only="", ways="one,pipeline")
    a = parser.parse_args()
    names = [name for name in ROWS if not a.only or any(part in name for part in a.only.split(","))]
    worst, lost = {}, []
    for name in names:
        try:
            for way, far in measured(name, ROWS[name], a.ways.split(",")).items():
                worst.setdefault(way, {})[name] = far
        except (Exception, SystemExit) as why:  # noqa: BLE001, the row is reported
            if str(why) == "ended by SIGTERM":
                raise
            lost.append(name)
            print(f"  {name}: no answer: {str(why).strip().splitlines()[-1][-300:] if str(why) else repr(why)}", flush=True)
    told("program", len(BINARY))
    for way, of in worst.items():
        bar(f"{len(of)} rows, {way}, the furthest log-probability", max(of.values()), "", 1e-3, False)
    bar("rows without an answer", len(lost), "", 0, False)
    end()


main()
