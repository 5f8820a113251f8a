#!/usr/bin/env python3
"""Issue 63 on MLX, of PACELINE_MLXC or of the engines in ~/.cache; as bar63_memory.py, and with its models.

    bar63_mlx.py PACELINE [--work /tmp/bar63] [--only answered,cluster,kv,used,on_faults]

answered   a dense model and one with experts under a limit, over one worker and two: the whole model's answer
cluster    the same by `load --memory` over two nodes; what `ps` and `--preview` say of their disks
kv         keys and values of 8 and 4 bits: perplexity over 256 tokens; bytes of a position
used       several answers at once, drafts, prompts kept on disk, a lost worker: the same answers
on_faults  kill -9 while packing, a full disk, a file cut while it is read by a server
"""
import argparse, concurrent.futures, glob, json, math, os, shutil, signal, time

from bar63_memory import HERE, answers, children, faults, make, over_nodes, packed_files
from common import ALONE, Server

MLX = ("--engine", "mlx")


def everything(args):
    [part(args) for part in (answered, cluster, kv, used, on_faults)]


def floats(args):
    """Models in F32, which MLX's CPU build multiplies fast: a dense one, and one with experts."""
    return [make(args, "floats", 30), make(args, "qwen3moe", 12, "--quant", "F32")]


def answered(args):
    for model, one, two in zip(floats(args), ["450M", "400M"], ["900M", "740M"]):
        answers(args, model, one, *MLX, tokens=12)
        for split in ["pipeline", "tensor"]:
            answers(args, model, two, *MLX, "--nodes", "2", "--split", split, workers=2, tokens=12)


def cluster(args):
    for model, memory in zip(floats(args), ["320M", "350M"]):
        over_nodes(args, model, "900M", memory, 12, *MLX)


def kv(args):
    """SmolLM2 in F32 on class mlx-f32, whose other keys and values are of 32 bits."""
    model = floats(args)[0]
    text = open(f"{HERE}/../../tests-data/austen-1056.txt").read()
    ask = {"max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
    found, sizes = {}, {}
    for kv in ["f32", "q8", "q4"]:
        own = [*ALONE, *MLX, "--class", "mlx-f32", "--parallel", "1", *(["--kv", kv] if kv != "f32" else [])]
        server = Server(args.binary, model, *own, "--context", "1024")
        name = server.call("GET", "/v1/models")["data"][0]["id"]
        ids = server.call("POST", "/tokenize", {"model": name, "content": text})["tokens"]
        said = server.call("POST", "/v1/completions", {**ask, "model": name, "prompt": ids})
        said = said["choices"][0]["logprobs"]
        best = [next(iter(top)) if top else None for top in said["top_logprobs"]]
        found[kv] = [p for p in said["token_logprobs"] if p is not None], best
        server.end()
        # The cache of 8,192 positions is there at once.
        rss = []
        for context in ["128", "8192"]:
            server = Server(args.binary, model, *own, "--context", context)
            rss.append(server.pss())
            server.end()
        sizes[kv] = (rss[1] - rss[0]) * (1 << 20) / (8192 - 128)
    (own, best), mean = found["f32"], lambda all: sum(all) / len(all)
    for kv in ["q8", "q4"]:
        other, others = found[kv]
        print(json.dumps({
            "kv": kv, "tokens": len(own), "perplexity": round(math.exp(-mean(own)), 4),
            "perplexity_change_percent": round(100 * (math.exp(mean(own) - mean(other)) - 1), 3),
            "same_best_token": round(mean([a == b for a, b in zip(best, others)]), 4),
            "bytes_a_position_over_f32": round(sizes[kv] / sizes["f32"], 3),
        }), flush=True)


def used(args):
    """One server under a limit: answers at once, drafts, pages on disk; then one whose worker ends."""
    model, home = floats(args)[0], f"{args.work}/used"
    shutil.rmtree(home, ignore_errors=True)
    words = "one two three four five six seven eight nine ten " * 8 + "one two three"
    prompts = [words, "The capital of France is", "Water boils at"]
    own = [*ALONE, *MLX, "--class", "mlx-f32", "--context", "1024"]

    def ask(server, prompt, tokens=8):
        name = server.call("GET", "/v1/models")["data"][0]["id"]
        request = {"model": name, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        return server.call("POST", "/v1/completions", request)

    def text(said):
        return said["choices"][0]["text"]

    def with_server(run, *more, home=None):
        server = Server(args.binary, model, *own, *more, home=home)
        try:
            return run(server)
        finally:
            server.end()

    def in_turn(server):
        return [text(ask(server, prompt)) for prompt in prompts]

    def at_once(server):
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            return [text(said) for said in pool.map(lambda prompt: ask(server, prompt), prompts)]

    def lose(server):
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            answer = pool.submit(ask, server, prompts[1], 16)
            time.sleep(2)
            command = lambda pid: open(f"/proc/{pid}/cmdline").read()
            os.kill([pid for pid in children(server.pid) if "\0worker\0" in command(pid)][-1], signal.SIGKILL)
            return text(answer.result())

    def tell(what, *found):
        print(json.dumps({what: found}), flush=True)
    whole, limit = with_server(in_turn), ["--memory", "600M"]
    tell("at once", with_server(at_once, *limit) == whole)
    tell("drafts", with_server(lambda it: text(ask(it, words)), *limit, "--drafts", "4") == whole[0])
    with_server(lambda it: ask(it, words), *limit, home=home)
    again = with_server(lambda it: ask(it, words), *limit, home=home)
    tell("second start", text(again) == whole[0], again["usage"], "streams", bool(packed_files(home)))
    two = ["--nodes", "2", "--split", "pipeline", "--parallel", "1"]
    unharmed = with_server(lambda it: text(ask(it, prompts[1], 16)), *two)
    tell("a lost worker", with_server(lose, "--memory", "800M", *two) == unharmed)
    for kv in ["q8", "q4"]:
        alone = with_server(in_turn, *limit, "--kv", kv)
        tell(f"{kv} at once", with_server(at_once, *limit, "--kv", kv) == alone)


def on_faults(args):
    args.dense = floats(args)[0]
    faults(args, *MLX)


for library in glob.glob(os.path.expanduser("~/.cache/paceline/engines/mlx/*/mlx/lib/libmlxc.so")):
    os.environ.setdefault("PACELINE_MLXC", library)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--work", default="/tmp/bar63")
    parser.add_argument("--only", default="answered,cluster,kv,used,on_faults")
    args = parser.parse_args()
    os.makedirs(args.work, exist_ok=True)
    for name in args.only.split(","):
        globals()[name](args)
