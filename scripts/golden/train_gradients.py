#!/usr/bin/env python3
"""Gradients by PyTorch, transformers and peft: train_gradients.py [OUT [MODEL...]]

OUT defaults to tests-data/golden/train. For tiny models of tests-data/golden/hf it writes
    NAME.safetensors  gradients of the mean loss in float64, rounded to float32: of every adapter tensor under PEFT's name,
                      and "full.TENSOR": 32 evenly spaced elements of each weight's gradient;
                      "aux.TENSOR": the same with the routers' loss (BALANCED), "experts.TENSOR": the same of
                      adapters of routed experts (EXPERTS)
    NAME.json         loss, and by tensor how far float32 is from float64 (L2, relative)
    adapter/          peft's files of a small adapter, and logits with it

The values of adapters are formulas (`number`), so that files need not carry them; the test has the
same. Two sequences, of which some tokens are judged. Everything runs on one thread.
Needs torch (a CPU build will do), transformers, peft, safetensors, numpy: requirements.txt.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from peft.utils import transformers_weight_conversion as conversion
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM

REPOSITORY = Path(__file__).resolve().parents[2]
MODELS = ["llama-tied", "llama-rope3-sharded", "qwen2-f16", "qwen3-bf16", "gemma3-linear-bf16",
          "qwen3moe-bf16", "mixtral", "qwen2moe-bf16", "gpt-oss-bf16", "deepseek-v2",
          "deepseek-v3-bf16", "qwen35-bf16"]
BALANCED, BALANCE = "qwen3moe-bf16", 0.5  # with the routers' auxiliary loss, times this
EXPERTS = ["qwen3moe-bf16", "gpt-oss-bf16"]
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Else peft makes adapters of experts out of these names, and changes those of dense layers.
conversion.convert_peft_config_for_transformers = lambda *_, **__: None
RANK, ALPHA, LENGTHS, SAMPLES = 2, 4, [13, 21], 32


def number(j):
    """Element j of all adapters' numbers, in -0.1..0.1, as float32."""
    return np.float32(((j * 2654435761 + 12345) % 2**32) / 2**32 * 0.2 - 0.1)


def token(sequence, i):
    return (7 + 31 * i + 101 * sequence + i * i) % 300


def judged(sequence, i):
    return sequence == 1 or i % 3 != 0


def loss_of(model):
    """Mean over judged tokens of both sequences; token i + 1 is what token i is judged by."""
    total, count = 0, 0
    for sequence, length in enumerate(LENGTHS):
        ids = torch.tensor([[token(sequence, i) for i in range(length)]])
        logits = model(ids, use_cache=False).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
        mask = torch.tensor([judged(sequence, i) for i in range(1, length)])
        total, count = total + losses[mask].sum(), count + int(mask.sum())
    return total / count


def load(name, dtype):
    folder = REPOSITORY / "tests-data/golden/hf" / name
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager",
        experts_implementation="eager")  # others have no float64
    return model.to(dtype).train()


def adapted(name, dtype):
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=TARGETS)
    model = get_peft_model(load(name, dtype), config)
    j = 0
    by_name = dict(model.named_parameters())
    for layer in range(model.config.num_hidden_layers):
        for target in TARGETS:
            block = "self_attn" if target in TARGETS[:4] else "mlp"
            plain = not (hasattr(model.config, "kv_lora_rank") or name.startswith("qwen35"))
            if target in TARGETS[:3] and not plain:
                continue  # ours has none there; peft's begins as 0
            for half in "AB":
                key = f"base_model.model.model.layers.{layer}.{block}.{target}.lora_{half}"
                if f"{key}.default.weight" not in by_name:
                    continue  # a layer with experts
                tensor = by_name[f"{key}.default.weight"]
                n = tensor.numel()
                values = np.array([number(j + i) for i in range(n)], np.float32)
                tensor.data = torch.from_numpy(values.reshape(tensor.shape)).to(dtype)
                j += n
    return model


def auxiliary(model, run):
    """Switch Transformer's loss of every router over all rows; `run` computes them."""
    seen, total = {}, 0
    for name, module in model.named_modules():
        if name.endswith(".mlp.gate"):
            module.register_forward_pre_hook(
                lambda module, args, name=name: seen.setdefault(name, []).append(
                    args[0].reshape(-1, module.weight.shape[1]) @ module.weight.T))
    loss = run()
    for rows in seen.values():
        logits = torch.cat([own[:-1] for own in rows])  # the last token is a target alone
        chosen = torch.topk(logits, model.config.num_experts_per_tok, dim=-1).indices
        uses = torch.nn.functional.one_hot(chosen, logits.shape[1]).sum(1).to(logits.dtype).mean(0)
        total = total + logits.shape[1] * (uses * logits.softmax(-1).mean(0)).sum()
    return loss + BALANCE * total


def gradients(model, rename, balanced=False):
    loss = auxiliary(model, lambda: loss_of(model)) if balanced else loss_of(model)
    model.zero_grad()
    loss.backward()
    # A bias of the choice alone has no gradient.
    still = {rename(n): np.zeros(b.shape) for n, b in model.named_buffers()
             if n.endswith("e_score_correction_bias")}
    found = still | {rename(n): p.grad.double().numpy() for n, p in model.named_parameters()
             if p.grad is not None}
    return float(loss), found


def by_expert(name, grads):
    """Gradients of transformers' stacks of experts, under the names of each expert in files."""
    block, parts = "mlp", ("gate_proj", "up_proj", "down_proj")
    if name == "mixtral":
        block, parts = "block_sparse_moe", ("w1", "w3", "w2")
    found = {}
    for full, values in grads.items():
        stem, _, last = full.rpartition(".mlp.experts.")
        if stem and name.startswith("gpt-oss"):  # alternating, and inputs by outputs
            bias = last.endswith("_bias")
            for i, part in enumerate(parts[:2] if last.startswith("gate_up") else parts[2:]):
                own = values[..., i::2] if last.startswith("gate_up") else values
                found[f"{stem}.mlp.experts.{part}.{'bias' if bias else 'weight'}"] = (
                    own if bias else own.swapaxes(1, 2))
            continue
        if not stem:
            found[full.replace(".mlp.gate.", f".{block}.gate.")] = values
            continue
        for expert, own in enumerate(values):
            halves = np.split(own, 2) if last == "gate_up_proj" else [own]
            names = parts[:2] if last == "gate_up_proj" else parts[2:]
            for part, half in zip(names, halves):
                found[f"{stem}.{block}.experts.{expert}.{part}.weight"] = half
    return found


def of_experts(name, dtype):
    """The loss, and gradients of adapters of all experts, which are put into the stacks' values."""
    model, halves, stacks, j = load(name, dtype), {}, {}, 0
    for layer in range(model.config.num_hidden_layers):
        stem = f"model.layers.{layer}.mlp.experts"
        names = [f"{stem}.{part}" for part in ("gate_up_proj", "down_proj")]
        if names[0] not in dict(model.named_parameters()):
            continue  # a dense layer
        own = map(model.get_parameter, names)
        is_oss = name.startswith("gpt-oss")  # inputs by outputs, gate and up alternate
        both, down = (w.detach().mT if is_oss else w.detach() for w in own)
        cut = (both[:, ::2], both[:, 1::2]) if is_oss else both.chunk(2, dim=1)
        changed = {"gate_proj": [], "up_proj": [], "down_proj": []}
        for expert in range(down.shape[0]):
            for part, weights in zip(changed, (*cut, down)):
                rows, cols = weights.shape[1:]
                pair = []
                for half, sizes in (("A", (RANK, cols)), ("B", (rows, RANK))):
                    n = sizes[0] * sizes[1]
                    values = np.array([number(j + i) for i in range(n)], np.float32)
                    pair.append(torch.from_numpy(values.reshape(sizes)).to(dtype).requires_grad_())
                    halves[f"base_model.model.{stem}.{expert}.{part}.lora_{half}.weight"] = pair[-1]
                    j += n
                changed[part].append(weights[expert] + ALPHA / RANK * (pair[1] @ pair[0]))
        gate, up, down = map(torch.stack, changed.values())
        both = torch.stack([gate, up], 2).flatten(1, 2) if is_oss else torch.cat([gate, up], 1)
        stacks |= {n: w.mT if is_oss else w for n, w in zip(names, (both, down))}
    loss = loss_of(lambda *args, **more: torch.func.functional_call(model, stacks, args, more))
    loss.backward()
    return float(loss), {n: (torch.zeros_like(t) if t.grad is None else t.grad).double().numpy()
                         for n, t in halves.items()}


def sample(grads, kind="full"):
    def some(values):
        flat = values.reshape(-1)
        return flat[:: max(1, len(flat) // SAMPLES)][:SAMPLES].copy()
    return {f"{kind}.{name}": some(values) for name, values in grads.items()}


def main():
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else REPOSITORY / "tests-data/golden/train"
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for name in sys.argv[2:] or MODELS:
        found = []
        for dtype in (torch.float64, torch.float32):
            loss, lora = gradients(adapted(name, dtype), lambda n: n.replace(".default", ""))
            full_loss, full = gradients(load(name, dtype), lambda n: n)
            all_of_it = lora | sample(by_expert(name, full))
            if name == BALANCED:
                _, even = gradients(load(name, dtype), lambda n: n, balanced=True)
                all_of_it |= sample(by_expert(name, even), "aux")
            experts_loss, own = of_experts(name, dtype) if name in EXPERTS else (None, {})
            all_of_it |= sample(own, "experts")
            found.append((loss, full_loss, experts_loss, all_of_it))
        (loss, full_loss, experts_loss, exact), (*_, single) = found
        # An expert without rows has no gradient.
        distance = {n: float(np.linalg.norm(single[n] - exact[n])
                             / (np.linalg.norm(exact[n]) or 1.0)) for n in exact}
        save_file({n: g.astype(np.float32) for n, g in exact.items()}, out / f"{name}.safetensors")
        distance = {n: off for n, off in distance.items() if not n.startswith("experts.")}
        about = {"loss": loss, "full_loss": full_loss, "experts_loss": experts_loss,
                 "float32_distance": distance,
                 "versions": {p: version(p) for p in ("torch", "transformers", "peft")}}
        (out / f"{name}.json").write_text(json.dumps(about, indent=1) + "\n")
        print(name, loss, full_loss, max(distance.values()), min(distance.values()))
    if sys.argv[2:]:
        return
    model = adapted("llama-tied", torch.float32).eval()
    model.peft_config["default"].base_model_name_or_path = "hf/llama-tied"
    model.save_pretrained(out / "adapter")
    (out / "adapter/README.md").unlink(missing_ok=True)
    with torch.no_grad():
        ids = torch.tensor([[token(0, i) for i in range(LENGTHS[0])]])
        logits = model(ids).logits[0].numpy()
    save_file({"logits": logits}, out / "adapter.logits.safetensors")


main()
