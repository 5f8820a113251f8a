#!/usr/bin/env python3
"""Issue 62: decode of a small DeepSeek V3.2 at 16k positions beside that at 2k.

    PACELINE=PROGRAM python scripts/bars/bar62_indexer.py [--tokens 48] [--threads 1] [--rounds 3] [--far 16000]

Needs scripts/golden/requirements.txt with transformers 5.24. The model has V3.2's shape at a quarter of its width: 32 heads of the
same latent, 16 index heads of 128, the best 2,048 positions, 2 of 8 experts, 3 layers, random weights. A prompt is read once and
continued from the prefix cache; the figure is the time of a token behind the first. Bar: at 16k not above 1.5 times that at 2k.
"""
import os, random, sys, time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../golden"))
from common32 import *  # noqa: E402, F403
from common32 import MADE, REPO, Up, arguments, bar, end, json, shutil, told  # noqa: E402

PATH = f"{MADE}/deepseek-v32-quarter"
NEAR = 2000
CONFIG = {
    "model_type": "deepseek_v32", "vocab_size": 320, "hidden_size": 1792, "num_hidden_layers": 3, "num_attention_heads": 32,
    "num_key_value_heads": 32, "q_lora_rank": 384, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "intermediate_size": 4608, "moe_intermediate_size": 512, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "index_n_heads": 16, "index_head_dim": 128,
    "index_topk": 2048, "max_position_embeddings": 20000, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "dtype": "bfloat16",
}


def made():
    """The model's folder, made once."""
    if os.path.exists(f"{PATH}/tokenizer.json"):
        return
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    torch.manual_seed(62)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG), dtype=torch.bfloat16)
    model.save_pretrained(PATH)
    for name in ["tokenizer_config.json", "tokenizer.json"]:
        shutil.copy(f"{REPO}/tests-data/golden/hf/llama-tied/{name}", PATH)


def token_ms(server, prompt, tokens):
    """Milliseconds of a token of an answer behind the first."""
    return 1e3 / server.ask(prompt, tokens=tokens, ignore_eos=True)["rate"]


def main():
    parser = arguments(__doc__, tokens=48, threads=1, rounds=3, far=16000)
    a = parser.parse_args()
    made()
    rng = random.Random(62)
    prompts = [[rng.randrange(3, 300) for _ in range(n)] for n in [NEAR, a.far]]
    server = Up(PATH, "--threads", a.threads, "--context", 17000, "--parallel", 1, "--drafts", 0, seconds=600)
    for prompt in prompts:
        began = time.monotonic()
        for upto in range(NEAR, len(prompt) + 1, NEAR):  # each within the server's deadline, on a busy machine too
            server.ask(prompt[:upto], tokens=1)
        told(f"prompt of {len(prompt)}", time.monotonic() - began, "s")
    ratios, each = [], {n: [] for n in [NEAR, a.far]}
    for _ in range(a.rounds):
        for prompt in prompts:
            each[len(prompt)].append(token_ms(server, prompt, a.tokens))
        ratios.append(each[a.far][-1] / each[NEAR][-1])
    server.end()
    for n, found in each.items():
        told(f"a token at {n}", found, "ms")
    bar(f"a token at {a.far} beside one at {NEAR}", ratios, "times", 1.5, False)
    end()


main()
