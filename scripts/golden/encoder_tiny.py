#!/usr/bin/env python3
"""Tiny random encoders and what `transformers` computes with them: encoder_tiny.py [OUT]

OUT defaults to tests-data/golden/encoder of this repository. For each model it writes
    NAME/                 config.json, model.safetensors, tokenizer.json, and the files of
                          sentence-transformers that say how rows are pooled
    NAME.golden.json      texts, their token ids by `tokenizers`, their vectors of length 1
With a folder of all-MiniLM-L6-v2 as MINILM in the environment, minilm.golden.json too.

Needs torch (a CPU build will do), transformers, tokenizers, safetensors, numpy: requirements.txt.
"""

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModel

REPOSITORY = Path(__file__).resolve().parents[2]
AUSTEN = REPOSITORY / "tests-data/austen-1056.txt"
TEXTS = [
    "It is a truth universally acknowledged, that a single man must want a wife.",
    "CAFÉ: naïve façade — 12,5 €?", "", "a", "你好 world", "Zebra\tquartz\n\nfox!", "word " * 40,
]
BERT = {
    "architectures": ["BertModel"], "model_type": "bert", "hidden_act": "gelu", "hidden_size": 48,
    "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 300,
    "max_position_embeddings": 64, "type_vocab_size": 2, "layer_norm_eps": 1e-12,
    "pad_token_id": 0, "position_embedding_type": "absolute",
}
ROBERTA = {
    "architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta", "hidden_act": "gelu_new",
    "hidden_size": 40, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 5,
    "vocab_size": 300, "max_position_embeddings": 66, "type_vocab_size": 1, "layer_norm_eps": 1e-5,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
}
# As Qwen3-Embedding: names without a prefix, a tied head, a last token that is not the EOS.
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu",
    "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "vocab_size": 300,
    "max_position_embeddings": 2048, "rope_theta": 1000000, "attention_bias": False,
    "tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": None,
    "max_window_layers": 3,
}
# As EmbeddingGemma: rows see later ones, of windows on both sides in most layers, and two products
# follow the mean. The fields of its text class that have other defaults are stated.
GEMMA3 = {
    "architectures": ["Gemma3TextModel"], "model_type": "gemma3_text", "hidden_size": 48,
    "hidden_activation": "gelu_pytorch_tanh", "intermediate_size": 96, "num_hidden_layers": 3,
    "head_dim": 16, "num_attention_heads": 3, "num_key_value_heads": 1, "rms_norm_eps": 1e-6,
    "vocab_size": 300, "max_position_embeddings": 2048, "query_pre_attn_scalar": 16,
    "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "sliding_window": 18,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "use_bidirectional_attention": True, "attention_bias": False, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}
DENSE = [(48, 80), (80, 48)]  # inputs, outputs
MODULES = ["Transformer", "Pooling", "Dense", "Dense", "Normalize"]


def wordpiece():
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=special, show_progress=False)
    tokenizer.train([str(AUSTEN)], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def byte_bpe(special, post):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train([str(AUSTEN)], trainer)
    tokenizer.post_processor = post
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def roberta_tokenizer():
    post = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    return byte_bpe(["<s>", "<pad>", "</s>", "<unk>"], post)


def qwen_tokenizer():
    post = processors.TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)])
    return byte_bpe(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], post)


def draw(model, rng):
    """Weights large enough that each part matters."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shape = tuple(parameter.shape)
            values = rng.standard_normal(shape).astype(np.float32)
            is_scale = "norm.weight" in name.lower()
            values = 1 + 0.2 * values if is_scale else values * (0.3 if len(shape) == 2 else 0.1)
            parameter.copy_(torch.from_numpy(values.astype(np.float32)))


def dense_modules(folder, rng):
    """Writes the products behind the pooling and `modules.json`; returns the matrices."""
    modules = []
    for i, kind in enumerate(MODULES):
        path = f"{i}_{kind}" if i else ""
        kind = f"sentence_transformers.models.{kind}"
        modules.append({"idx": i, "name": str(i), "path": path, "type": kind})
    (folder / "modules.json").write_text(json.dumps(modules, indent=1) + "\n")
    matrices = []
    for i, (inputs, outputs) in enumerate(DENSE, 2):
        (folder / f"{i}_Dense").mkdir(exist_ok=True)
        matrix = torch.from_numpy(rng.standard_normal((outputs, inputs)).astype(np.float32))
        settings = {"in_features": inputs, "out_features": outputs, "bias": False,
                    "activation_function": "torch.nn.modules.linear.Identity"}
        (folder / f"{i}_Dense/config.json").write_text(json.dumps(settings) + "\n")
        save_file({"linear.weight": matrix}, folder / f"{i}_Dense/model.safetensors",
                  metadata={"format": "pt"})
        matrices.append(matrix.double())
    return matrices


def vectors(model, all_ids, pooling, dense):
    rows = []
    for ids in all_ids:
        with torch.no_grad():
            hidden = model(input_ids=torch.tensor([ids])).last_hidden_state[0].double()
        pooled = {"mean_tokens": hidden.mean(0), "lasttoken": hidden[-1]}.get(pooling, hidden[0])
        for matrix in dense:
            pooled = matrix @ pooled
        rows.append((pooled / pooled.norm()).numpy().tolist())
    return rows


def write_golden(path, tokenizer, model, pooling, most, dense=()):
    tokenizer.no_padding()
    tokenizer.no_truncation()
    ids = [tokenizer.encode(text).ids for text in TEXTS]
    kept = [(text, i) for text, i in zip(TEXTS, ids) if len(i) <= most]
    rows = vectors(model, [i for _, i in kept], pooling, dense)
    cases = [{"text": text, "ids": i, "vector": [round(x, 9) for x in row]}
             for (text, i), row in zip(kept, rows)]
    versions = {name: version(name) for name in ("torch", "transformers", "tokenizers")}
    path.write_text(json.dumps({"versions": versions, "cases": cases}, ensure_ascii=False) + "\n")


def write(out, name, config, tokenizer, pooling, longest, prefix, has_dense=False):
    folder = out / name
    (folder / "1_Pooling").mkdir(parents=True, exist_ok=True)
    model = AutoModel.from_config(
        AutoConfig.for_model(**config), attn_implementation="eager").eval()
    rng = np.random.default_rng(28)
    draw(model, rng)
    tensors = {prefix + n: p.contiguous() for n, p in model.state_dict().items()
               if "pooler" not in n}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    kinds = ["cls_token", "mean_tokens", "max_tokens"]
    kinds += [pooling] if pooling not in kinds else []
    mode = {f"pooling_mode_{kind}": kind == pooling for kind in kinds}
    settings = {"word_embedding_dimension": config["hidden_size"], **mode}
    (folder / "1_Pooling/config.json").write_text(json.dumps(settings) + "\n")
    (folder / "sentence_bert_config.json").write_text(
        json.dumps({"max_seq_length": longest, "do_lower_case": False}) + "\n")
    dense = dense_modules(folder, rng) if has_dense else ()
    write_golden(out / f"{name}.golden.json", tokenizer, model, pooling, longest, dense)


def main():
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else REPOSITORY / "tests-data/golden/encoder"
    out.mkdir(parents=True, exist_ok=True)
    write(out, "bert-mean", BERT, wordpiece(), "mean_tokens", 60, "")
    write(out, "roberta-first", ROBERTA, roberta_tokenizer(), "cls_token", 64, "roberta.")
    write(out, "qwen3-last", QWEN3, qwen_tokenizer(), "lasttoken", 2048, "")
    (out / "qwen3-last/tokenizer_config.json").write_text(
        json.dumps({"add_bos_token": False, "eos_token": "<|im_end|>"}) + "\n")
    write(out, "gemma3-mean", GEMMA3, qwen_tokenizer(), "mean_tokens", 2048, "", has_dense=True)
    minilm = os.environ.get("MINILM")
    if minilm:
        model = AutoModel.from_pretrained(minilm, attn_implementation="eager").float().eval()
        tokenizer = Tokenizer.from_file(f"{minilm}/tokenizer.json")
        write_golden(out / "minilm.golden.json", tokenizer, model, "mean_tokens", 256)


if __name__ == "__main__":
    main()
