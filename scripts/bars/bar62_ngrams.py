#!/usr/bin/env python3
"""Issue 62: the last tokens that a memory of n-grams reads, where a sequence does not run through.

    PACELINE=PROGRAM python scripts/bars/bar62_ngrams.py

Answers of both golden folders with n-grams, in the same log-probabilities as one prompt at a time without prefixes and drafts:
prompts that begin as known ones, at every distance from a page; known prompts of an earlier process, from its disk; six prompts at
once; drafts; a pipeline and a tensor split, with a rank that is killed in the middle of an answer.
"""
import concurrent.futures, os, random, signal, sys  # noqa: E401

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from common32 import REPO, Up, arguments, bar, end, folder, told  # noqa: E402

OPTIONS = ["--threads", 1, "--context", 256, "--kv", "f32"]
SPLITS = {way: ["--nodes", 2, "--split", way] for way in ("pipeline", "tensor")}


def with_server(prompts, *more, home=None, tokens=40, at_once=1):
    """Log-probabilities of each answer, and how many tokens of its prompt were known."""
    server = Up(path, *OPTIONS, *more, home=home, seconds=60)

    def ask(prompt):
        body = {"model": server.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": 0, "ignore_eos": True}
        found = server.call("POST", "/v1/completions", body)
        known = (found["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return found["choices"][0]["logprobs"]["token_logprobs"], found["choices"][0]["text"], known

    try:
        with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(ask, prompts))
    finally:
        server.end()


def wrong(found, expected):
    return sum(a[:2] != b[:2] for a, b in zip(found, expected, strict=True))


def after_a_kill(prompt, *more):
    """An answer in whose middle the rank that does not lead is killed."""
    server = Up(path, *OPTIONS, "--drafts", 0, *more, seconds=60)
    ranks = []

    def kill(n):
        if n >= 3 and not ranks:
            ranks.extend(pid for pid in server.tree()[1:] if not open(f"/proc/{pid}/cmdline").read().endswith("\0template\0"))
            os.kill(ranks[0], signal.SIGKILL)

    try:
        return server.ask(prompt, 80, ignore_eos=True, on_event=kill)["text"], len(ranks)
    finally:
        server.end()


def measured(name):
    r = random.Random(62)
    base = [2, *(r.randrange(3, 300) for _ in range(199))]
    prompts = [base[:n] + [r.randrange(3, 300) for _ in range(12)] for n in (*range(58, 72), 100, 120, 127, 128, 129, 150)]
    repeated = [[2, *[20 + i % 7 for i in range(100)]], [2, 30, 31, 32] * 20]
    plain = ["--prefix-cache", "off", "--drafts", 0]
    expected = with_server(prompts, *plain)
    home = folder()
    for what in ("prefixes of the same process", "prefixes from the disk"):
        found = with_server([base, *prompts], "--drafts", 0, home=home)[1:]
        told(f"{name}: {what}, known tokens", sum(known for *_, known in found))
        bar(f"{name}: {what}, wrong answers of {len(prompts)}", wrong(found, expected), "", 0, False)
    found = with_server(prompts[:6], *plain, "--parallel", 6, at_once=6)
    bar(f"{name}: six at once, wrong answers", wrong(found, expected[:6]), "", 0, False)
    longer = with_server(repeated, *plain, tokens=80)
    for way, more in {"one": [], **SPLITS}.items():
        found = with_server(repeated, "--prefix-cache", "off", "--drafts", 8, *more, tokens=80)
        bar(f"{name}: drafts, {way}, wrong answers of 2", wrong(found, longer), "", 0, False)
    for way, more in SPLITS.items():
        found, ranks = after_a_kill(repeated[0], *more)
        told(f"{name}: {way}, ranks at the kill", ranks)
        bar(f"{name}: {way}, wrong answers after a kill", int(found != longer[0][1]), "", 0, False)


arguments(__doc__).parse_args()
for name in ("qwen4-ngrams-bf16", "deepseek-v41-ngrams-bf16"):
    path = f"{REPO}/tests-data/golden/hf/{name}"
    measured(name)
end()
