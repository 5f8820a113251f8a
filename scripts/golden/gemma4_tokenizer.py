#!/usr/bin/env python3
"""A tiny vocabulary in the form of Gemma 4's GGUF files and the ids that llama.cpp gives:
gemma4_tokenizer.py NPM_DIR [OUT]

NPM_DIR holds the npm package node-llama-cpp. OUT defaults to
crates/text/tests/golden/gemma4-tiny.json: "tokens", "kinds", "merges" of the vocabulary,
"eog", and "as_text" and "parse", ids of the strings of scripts/golden_text.py.
Needs tokenizers and gguf: requirements.txt.
"""

import json
import sys
import tempfile
from pathlib import Path

from gguf import GGUFWriter
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))
import golden_text  # noqa: E402

CORPUS = [
    "A paceline is a line of riders who take turns at the front.\n\nThey go faster together",
    "The answer never depends on how many machines computed it.\n\n\nnaïve café 日本語 日本",
    "def f(x):\n    return x + 1\n\n\n        # two  spaces   three\n",
]
SPECIALS = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>"]


def vocabulary():
    """Tokens, their kinds and merges: special ones, bytes, then what was trained."""
    tok = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tok.normalizer = normalizers.Replace(" ", "\u2581")
    # No token of Gemma's has line breaks and other characters.
    tok.pre_tokenizer = pre_tokenizers.Split(Regex("[^\\n]+|\\n+"), "isolated")
    size = 500
    tok.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=size, show_progress=False))
    trained = tok.get_vocab()
    trained = [text for text, _ in sorted(trained.items(), key=lambda item: item[1])]
    # The model's own state has the merges in order.
    merges = json.loads(tok.to_str())["model"]["merges"]
    merges = [m if isinstance(m, str) else " ".join(m) for m in merges]
    tokens = SPECIALS + [f"<0x{byte:02X}>" for byte in range(256)] + trained
    kinds = [3, 3, 3, 2, 3, 3] + [6] * 256 + [1] * len(trained)
    return tokens, kinds, merges


def write_gguf(path, tokens, kinds, merges):
    w = GGUFWriter(path, "gemma4")
    w.add_tokenizer_model("gemma4")
    w.add_token_list(tokens)
    w.add_token_types(kinds)
    w.add_token_merges(merges)
    w.add_token_scores([-1000.0] * len(tokens))
    w.add_bos_token_id(2)
    w.add_eos_token_id(1)
    w.add_unk_token_id(3)
    w.add_pad_token_id(0)
    w.add_add_bos_token(False)  # as early files say, and llama.cpp does not believe
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def main():
    if not 2 <= len(sys.argv) <= 3 or sys.argv[-1].startswith("-"):
        sys.exit(__doc__)
    default = REPOSITORY / "crates/text/tests/golden/gemma4-tiny.json"
    out = Path(sys.argv[2]) if len(sys.argv) > 2 else default
    tokens, kinds, merges = vocabulary()
    llama = golden_text.Llama(sys.argv[1])
    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        write_gguf(file.name, tokens, kinds, merges)
        llama.load(file.name)
    golden_text.write(out.parent, out.name, {
        "origin": "llama.cpp (node-llama-cpp 3.22.1); scripts/golden/gemma4_tokenizer.py",
        "tokens": tokens, "kinds": kinds, "merges": merges, "eog": llama.eog(),
        "as_text": [llama.encode(s, False) for s in golden_text.STRINGS],
        "parse": [llama.encode(s, True) for s in golden_text.STRINGS],
    })


if __name__ == "__main__":
    main()
