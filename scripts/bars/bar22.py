#!/usr/bin/env python3
"""Issue 22, speed of a binary beside another one, such as that of the commit before, in pairs; and of that one beside itself.

    bar22.py OLD [NEW] [--runs 15] [--rounds 3]     NEW is PACELINE's binary. SmolLM2, an idle machine.
    15 min each for --only one and --only two, 30 to 60 min for --only comm; all three without

One node: a thread, decode of 128 tokens behind 64 (bar 0.98). Two nodes: a thread each, tensor (0.95). bench comm: sums of 4 KiB (0.95)
and 16 MiB (0.90), by TCP and by shared memory. The ratio of a pair is new over old speed; `itself` is the same with OLD twice.
"""
from common32 import *

parser = arguments(__doc__, runs=15, rounds=3)
parser.add_argument("old")
parser.add_argument("new", nargs="?", default=BINARY)
parser.add_argument("--only", choices=["one", "two", "comm"])
a = parser.parse_args()
HOME = {"PACELINE_HOME": folder()}


def decode(binary, *more):
    found = bench("model", SMOLLM2, "--threads", 1, "--prompt", 64, "--gen", 128, "--runs", a.rounds, *more, binary=binary, env=HOME)
    return {"decode": found["paceline"]["decode_tok_s"]["median"]}


def sums(binary, transport):
    found = bench("comm", "--transport", transport, "--max-bytes", 16 << 20, binary=binary, env=HOME)
    wanted = {4096: "4 KiB", 16 << 20: "16 MiB"}
    return {wanted[row["bytes"]]: 1e6 / row["p50_us"] for row in found["rows"] if row["op"] == "all_reduce" and row["bytes"] in wanted}


def pairs(name, measure, limits):
    """New over old, and old over itself, in turns that change their order."""
    ratios, same = {key: [] for key in limits}, {key: [] for key in limits}
    for r in range(a.runs):
        order = [("new", a.new), ("old", a.old), ("again", a.old)]
        found = {which: measure(binary) for which, binary in (order if r % 2 else order[::-1])}
        for key in limits:
            ratios[key].append(found["new"][key] / found["old"][key])
            same[key].append(found["again"][key] / found["old"][key])
    for key, limit in limits.items():
        told(f"{name}, {key}: old over itself", same[key], "x")
        bar(f"{name}, {key}: new over old", ratios[key], "x", limit)


print(load(), a.old, a.new, flush=True)
if a.only in (None, "one"):
    pairs("one node", decode, {"decode": 0.98})
if a.only in (None, "two"):
    pairs("two nodes", lambda binary: decode(binary, "--nodes", 2, "--split", "tensor"), {"decode": 0.95})
if a.only in (None, "comm"):
    for transport in ["tcp", "shm"]:
        pairs(f"bench comm by {transport}", lambda binary, how=transport: sums(binary, how), {"4 KiB": 0.95, "16 MiB": 0.90})
end()
