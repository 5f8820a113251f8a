#!/usr/bin/env python3
"""Speed and answers of llama.cpp as its maintainers build it, for side-by-side runs.

    npm install --prefix DIR --no-save --ignore-scripts node-llama-cpp@3.22.1        # once
    llama_bench.py DIR MODEL.gguf [--threads 2] [--prompt 512] [--gen 128] [--depth N] [--runs 5]
                   [--tokens FILE.json | --text FILE.txt [--limit N]] [--serve]

Drives the prebuilt libllama of the npm package `node-llama-cpp` through ctypes. That package ships
one CPU library per instruction set and picks the best for this machine (AMX and VNNI included),
which the wheel `xllamacpp` does not (AVX2 only: about four times slower on a Sapphire Rapids
machine, so no fair peer there).

Decodes behind the prompt, or behind --depth ids, which are read once and kept. With --serve it runs
once for each line on standard input, after one run to warm up, and prints `[prefill, decode]`: so
whoever takes turns with it need not wait for a model to be loaded.

Prints one JSON object: medians and all runs, tokens per second, and the load average at the start
(time on an idle machine only). --runs 0 leaves the timing out. With --tokens (a JSON list of ids)
or --text (cut into ids by llama.cpp's tokenizer, with BOS where the model asks for it, then cut to
--limit ids) also:
    tokens      the ids
    nll         mean negative log-likelihood of ids 1.. given those before, nats
    nlls        the same for each of them
    argmax      the greedy next id after each position
    second      the runner-up
    gaps        first less second logit
These need numpy.
"""

import argparse
import ctypes as C
import glob
import json
import os
import statistics
import sys
import time

BATCH = 2048  # ids per call at most: llama.cpp's default n_batch, checked in `context_params`


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir")
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--gen", type=int, default=128)
    parser.add_argument("--depth", type=int)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--serve", action="store_true")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--tokens")
    source.add_argument("--text")
    parser.add_argument("--limit", type=int)
    args = parser.parse_args()
    if args.prompt > BATCH:
        parser.error(f"--prompt: at most {BATCH}")
    return args


class Opaque(C.Structure):
    """Larger than any version's parameter struct; the callee reads only its own part."""

    _fields_ = [("words", C.c_int32 * 128)]


class Batch(C.Structure):
    """`llama_batch` of llama.h."""

    _fields_ = [
        ("n_tokens", C.c_int32), ("token", C.POINTER(C.c_int32)), ("embd", C.c_void_p),
        ("pos", C.POINTER(C.c_int32)), ("n_seq_id", C.POINTER(C.c_int32)),
        ("seq_id", C.POINTER(C.POINTER(C.c_int32))), ("logits", C.POINTER(C.c_int8)),
    ]


SIGNATURES = [
    ("llama_model_default_params", Opaque, []),
    ("llama_context_default_params", Opaque, []),
    ("llama_model_load_from_file", C.c_void_p, [C.c_char_p, Opaque]),
    ("llama_init_from_model", C.c_void_p, [C.c_void_p, Opaque]),
    ("llama_set_n_threads", None, [C.c_void_p, C.c_int32, C.c_int32]),
    ("llama_get_memory", C.c_void_p, [C.c_void_p]),
    ("llama_memory_seq_rm", C.c_bool, [C.c_void_p, C.c_int32, C.c_int32, C.c_int32]),
    ("llama_batch_init", Batch, [C.c_int32, C.c_int32, C.c_int32]),
    ("llama_decode", C.c_int32, [C.c_void_p, Batch]),
    ("llama_synchronize", None, [C.c_void_p]),
    ("llama_get_logits_ith", C.POINTER(C.c_float), [C.c_void_p, C.c_int32]),
    ("llama_model_get_vocab", C.c_void_p, [C.c_void_p]),
    ("llama_vocab_n_tokens", C.c_int32, [C.c_void_p]),
    ("llama_tokenize", C.c_int32, [C.c_void_p, C.c_char_p, C.c_int32, C.POINTER(C.c_int32),
                                   C.c_int32, C.c_bool, C.c_bool]),
]

LOG = C.CFUNCTYPE(None, C.c_int, C.c_char_p, C.c_void_p)
QUIET = LOG(lambda level, text, user: None)  # kept for the life of the process


def library(prefix):
    """The prebuilt libllama under an npm prefix, with its CPU back ends loaded."""
    bins = os.path.join(prefix, "node_modules/@node-llama-cpp/linux-x64/bins/*/")
    found = glob.glob(bins + "libllama.v*.so") or glob.glob(bins + "libllama.so")
    if not found:
        sys.exit(f"no prebuilt libllama under {prefix}: npm install --prefix {prefix} --no-save "
                 "--ignore-scripts node-llama-cpp@3.22.1")
    folder = os.path.dirname(found[0])
    for pattern in ("libggml-base*.so", "libggml.v*.so", "libggml.so"):
        for path in glob.glob(os.path.join(folder, pattern)):
            ggml = C.CDLL(path, mode=C.RTLD_GLOBAL)
    llama = C.CDLL(found[0])
    for name, restype, argtypes in SIGNATURES:
        function = getattr(llama, name)
        function.restype, function.argtypes = restype, argtypes
    llama.llama_log_set(QUIET, None)
    ggml.ggml_backend_load_all_from_path.argtypes = [C.c_char_p]
    ggml.ggml_backend_load_all_from_path(folder.encode())
    llama.llama_backend_init()
    return llama


def versions(prefix):
    """What the package says it is made from."""
    modules = os.path.join(prefix, "node_modules")
    with open(os.path.join(modules, "node-llama-cpp/package.json")) as file:
        package = json.load(file)["version"]
    release = "unknown"
    for path in glob.glob(os.path.join(
            modules, "@node-llama-cpp/linux-x64/bins/*/_nlcBuildMetadata.json")):
        with open(path) as file:
            release = json.load(file)["buildOptions"]["llamaCpp"]["release"]
    return {"npm node-llama-cpp": package, "llama.cpp release": release}


class Session:
    """One model and one context."""

    def __init__(self, llama, path):
        self.llama = llama
        model = llama.llama_model_load_from_file(
            path.encode(), llama.llama_model_default_params())
        if not model:
            sys.exit(f"llama.cpp cannot load {path}")
        self.model, self.context = model, None
        self.vocab = llama.llama_model_get_vocab(model)
        self.n_vocab = llama.llama_vocab_n_tokens(self.vocab)
        self.batch = llama.llama_batch_init(BATCH, 0, 1)

    def tokenize(self, text):
        """Ids of the bytes `text`, special tokens not recognised in it, BOS as the model wants."""
        room = len(text) + 8
        ids = (C.c_int32 * room)()
        count = self.llama.llama_tokenize(
            self.vocab, text, len(text), ids, room, True, False)
        return list(ids[:count])

    def open(self, n_ctx, threads):
        params = self.llama.llama_context_default_params()
        # n_ctx, n_batch, n_ubatch: the only fields that this script relies on.
        if list(params.words[:3]) != [512, BATCH, 512]:
            sys.exit(f"unknown llama_context_params layout: {list(params.words[:8])}")
        params.words[0] = n_ctx
        self.context = self.llama.llama_init_from_model(self.model, params)
        self.llama.llama_set_n_threads(self.context, threads, threads)

    def forgets(self, start):
        """Drops what the context holds from position `start` on; whether it could. The states of
        recurrent layers can only be dropped whole."""
        memory = self.llama.llama_get_memory(self.context)
        return self.llama.llama_memory_seq_rm(memory, 0, start, -1)

    def forget(self):
        """Drops all that the context holds."""
        if not self.forgets(0):
            sys.exit("llama_memory_seq_rm failed")

    def decode(self, ids, start, all_logits=False):
        batch = self.batch
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, start + i, 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = 1 if all_logits or i == len(ids) - 1 else 0
        if self.llama.llama_decode(self.context, batch) != 0:
            sys.exit("llama_decode failed")
        self.llama.llama_synchronize(self.context)

    def logits(self, row):
        import numpy as np
        pointer = self.llama.llama_get_logits_ith(self.context, row)
        return np.ctypeslib.as_array(pointer, (self.n_vocab,)).astype(np.float64)


def score(session, tokens):
    """Likelihood, winner and runner-up at each position."""
    import numpy as np
    nlls, argmax, second, gaps, chunk = [], [], [], [], 256
    for base in range(0, len(tokens), chunk):
        part = tokens[base : base + chunk]
        session.decode(part, base, all_logits=True)
        for i in range(len(part)):
            row = session.logits(i)
            first = int(row.argmax())
            top = row[first]
            if base + i + 1 < len(tokens):
                log_sum = top + np.log(np.exp(row - top).sum())
                nlls.append(round(float(log_sum - row[tokens[base + i + 1]]), 6))
            row[first] = -np.inf
            argmax.append(first)
            second.append(int(row.argmax()))
            gaps.append(round(float(top - row.max()), 6))
    return {"nll": statistics.fmean(nlls), "nlls": nlls, "argmax": argmax, "second": second,
            "gaps": gaps}


def ids_from(session, first, count):
    """Ids spread over the vocabulary."""
    return [(i * 7919) % (session.n_vocab - 100) + 50 for i in range(first, first + count)]


def timed(session, ids, start, step):
    """Ids per second when `ids` are computed `step` at a time from position `start`."""
    begin = time.perf_counter()
    for i in range(0, len(ids), step):
        session.decode(ids[i : i + step], start + i)
    return len(ids) / (time.perf_counter() - begin)


class Speed:
    """(prefill, decode) in tokens per second, once for each call."""

    def __init__(self, session, args):
        self.session, self.prompt, self.gen = session, args.prompt, args.gen
        self.first = args.prompt if args.depth is None else args.depth
        self.shallow = self.deep = session.context
        if self.first != self.prompt:  # a context of its own, which keeps what was read
            session.open(self.first + self.gen + 64, args.threads)
            self.deep = session.context
            self.read()

    def read(self):
        """Reads what decode stands behind."""
        timed(self.session, ids_from(self.session, 0, self.first), 0, BATCH)

    def __call__(self):
        session = self.session
        session.context = self.shallow
        session.forget()
        prefill = timed(session, ids_from(session, 0, self.prompt), 0, BATCH)
        session.context = self.deep
        decode = timed(session, ids_from(session, self.first, self.gen), self.first, 1)
        if self.deep != self.shallow and not session.forgets(self.first):
            session.forget()
            self.read()
        return prefill, decode


def main():
    args = arguments()
    load = round(os.getloadavg()[0], 2)
    session = Session(library(args.dir), args.model)
    tokens = None
    if args.tokens:
        with open(args.tokens) as file:
            tokens = json.load(file)
    elif args.text:
        with open(args.text, "rb") as file:
            tokens = session.tokenize(file.read())
    tokens = tokens[: args.limit] if tokens else None
    session.open(max(args.prompt + args.gen, len(tokens or [])) + 64, args.threads)
    out = {"engine": "llama.cpp", "versions": versions(args.dir),
           "model": os.path.basename(args.model), "threads": args.threads, "load": load}
    if tokens:
        out |= {"tokens": tokens} | score(session, tokens)
    if args.serve:
        run = Speed(session, args)
        run()  # warm-up
        for _ in sys.stdin:
            print(json.dumps(run()), flush=True)
        return
    if args.runs:
        run = Speed(session, args)
        run()  # warm-up
        runs = [run() for _ in range(args.runs)]
        out |= {"prompt": args.prompt, "gen": args.gen, "depth": run.first,
                "prefill_tok_s": round(statistics.median(r[0] for r in runs), 2),
                "decode_tok_s": round(statistics.median(r[1] for r in runs), 2),
                "runs": [[round(x, 2) for x in r] for r in runs]}
    print(json.dumps(out))


if __name__ == "__main__":
    main()
