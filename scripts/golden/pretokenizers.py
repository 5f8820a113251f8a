#!/usr/bin/env python3
"""Ids that llama.cpp cuts random strings into, by pre-tokenizer: pretokenizers.py NPM_DIR [OUT]

NPM_DIR holds the npm package node-llama-cpp (see scripts/peers/llama_bench.py). OUT defaults to
crates/text/tests/golden/pretokenizers.json. Writes one vocabulary, trained on the strings
without any pre-tokenizer so that its merges reach over every border that one might cut at, and for
each NAME in `tokenizer.ggml.pre` a hash of the ids of every hundred of 10,000 strings. `gpt-4o` (also
minimax-m2's) and `tekken` are not among them: llama.cpp approximates their cases of letters, where
we have the models' own patterns.

The strings come from SplitMix64, so that a test makes the same ones: string i has n % 24 parts,
each of which is alphabet[n % len(alphabet)], n being the next number every time.
Needs tokenizers, gguf, numpy: requirements.txt.
"""

import json
import sys
import tempfile
from pathlib import Path

import gguf
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))
import golden_text  # noqa: E402

SEED, STRINGS, GROUP, VOCABULARY = 20261125, 10_000, 100, 2000
NAMES = ["kimi-k2", "deepseek-llm", "deepseek-v3", "llama-bpe", "qwen2", "glm4", "dbrx",
         "gpt-2", "smollm"]
ALPHABET = [
    *"abcdefgstxyzABCDEGLMRSTZ0123456789",
    "th", "The", "ing", "camelCase", "HTTPServer", "naïve", "élan", "ß", "ẞ", "ı", "İ", "ǅ", "ſ",
    "'s", "'S", "'t", "'re", "'RE", "'ve", "'Ll", "'d", "'x", "'", "’", "''",
    " ", " ", " ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", "\r", "\u00a0", "\u3000", "\u2003",
    "\u0085", "\u200b", ".", ",", "!", "?", ";", ":", "-", "_", "/", "//", "(", ")", "[", "]", "{",
    "}", "<", ">", "=", "==", "+", "*", "&", "%", "$", "#", "@", "^", "`", "~", "|", "\\", '"',
    "…", "—", "“", "”", "€", "£", "¥", "©", "°", "±", "×", "÷", "½", "²", "Ⅷ", "٣", "३", "五",
    "汉", "字", "漢字", "你好", "，", "。", "！", "々", "〇", "㐀", "豈", "𠀀", "ひらがな", "カタカナ",
    "ー", "한국어", "글", "ᄀ", "Привет", "ё", "Ж", "Ωμέγα", "ς", "שלום", "مرحبا", "हिन्दी", "क्ष",
    "ไทย", "தமிழ்", "e\u0301", "A\u030a", "\u0301", "🚴", "👍🏽", "👨\u200d👩\u200d👧", "🇫🇷", "Ａ",
    "ｚ", "！", "～", "𝔘", "ﬁ", "ʰ", "ª", "ꭰ", "Ꭰ", "Ა", "\u0000", "\u007f", "\ufffd", "\ue000",
]
MASK = (1 << 64) - 1


def numbers(seed):
    """SplitMix64 (Steele, Lea and Flood 2014)."""
    while True:
        seed = (seed + 0x9E3779B97F4A7C15) & MASK
        z = ((seed ^ seed >> 30) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK
        yield z ^ z >> 31


def strings():
    random = numbers(SEED)
    part = lambda: ALPHABET[next(random) % len(ALPHABET)]  # noqa: E731
    return ["".join(part() for _ in range(next(random) % 24)) for _ in range(STRINGS)]


def fnv(ids, value):
    """FNV-1a of 64 bits over the ids as bytes, and one more value that ends them."""
    for byte in b"".join(i.to_bytes(4, "little") for i in [*ids, 0xFFFFFFFF]):
        value = ((value ^ byte) * 0x100000001B3) & MASK
    return value


def vocabulary(texts):
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tok.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=VOCABULARY, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    model = json.loads(tok.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return tokens, [" ".join(merge) for merge in model["merges"]]


def write_gguf(path, name, tokens, merges):
    writer = gguf.GGUFWriter(path, "llama")
    for add in (writer.add_context_length, writer.add_embedding_length, writer.add_block_count,
                writer.add_head_count, writer.add_feed_forward_length):
        add(64)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(merges)
    writer.add_add_bos_token(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main():
    if not 2 <= len(sys.argv) <= 3 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    default = REPOSITORY / "crates/text/tests/golden/pretokenizers.json"
    out = Path(sys.argv[2]) if len(sys.argv) > 2 else default
    texts = strings()
    tokens, merges = vocabulary(texts)
    llama = golden_text.Llama(sys.argv[1])
    hashes = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in NAMES:
            path = str(Path(folder) / f"{name}.gguf")
            write_gguf(path, name, tokens, merges)
            llama.load(path)
            rows = []
            for first in range(0, STRINGS, GROUP):
                value = 0xCBF29CE484222325
                for text in texts[first:first + GROUP]:
                    value = fnv(llama.encode(text, False), value)
                rows.append(f"{value:016x}")
            hashes[name] = rows
    golden_text.write(out.parent, out.name, {
        "origin": "llama.cpp (node-llama-cpp 3.22.1); scripts/golden/pretokenizers.py",
        "seed": SEED, "strings": STRINGS, "group": GROUP,
        "alphabet": ALPHABET, "tokens": " ".join(tokens), "merges": "\n".join(merges),
        **hashes})


if __name__ == "__main__":
    main()
