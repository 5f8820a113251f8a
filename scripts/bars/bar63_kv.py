#!/usr/bin/env python3
"""Issue 63: decode at depth 16k with keys and values in 8 bits over 16 bits, on a quiet machine.

    bar63_kv.py PACELINE [--work /tmp/bar63] [--pairs 3] [--layers 2] [--depth 16384]

Two layers of Qwen3-30B-A3B's attention without experts. The order alternates from pair to pair.
About four minutes a pair, which read the prompt of 16k twice; 0.2 GB.
"""
import argparse, json, os, subprocess

from bar63_memory import make


def decode(args, model, form):
    command = [args.binary, "bench", "model", model, "--prompt", "32", "--gen", "32", "--runs", "5",
               "--depth", str(args.depth), "--kv", form, "--json"]
    env = {**os.environ, "PACELINE_HOME": f"{args.work}/home"}
    told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env)
    return json.loads(told.stdout)["paceline"]["decode_tok_s"]["median"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--work", default="/tmp/bar63")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--depth", type=int, default=16384)
    args = parser.parse_args()
    os.makedirs(args.work, exist_ok=True)
    model, ratios = make(args, "qwen3-dense", args.layers), []
    for n in range(args.pairs):
        order = ("f16", "q8") if n % 2 == 0 else ("q8", "f16")
        speeds = {form: decode(args, model, form) for form in order}
        ratios.append(round(speeds["q8"] / speeds["f16"], 3))
        print(json.dumps(speeds), flush=True)
    print(json.dumps({"q8 over f16": sorted(ratios)[len(ratios) // 2], "of": sorted(ratios)}), flush=True)


if __name__ == "__main__":
    main()
