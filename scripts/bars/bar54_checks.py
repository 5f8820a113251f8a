#!/usr/bin/env python3
"""Issue 54: how much longer a start takes because it compares the weights that it reads with their checksums.

    bar54_checks.py BINARY MODEL.gguf [--pairs N] [--cold]     --cold empties the file's page cache before each start

The model is linked into a store of its own, whose first start makes the checksums. Then starts alternate between that
model and a link without checksums: `run --max-tokens 1`, wall and processor seconds, medians of ratios of pairs.
"""
import argparse, hashlib, resource
from common import *

args = argparse.ArgumentParser(description=__doc__)
args.add_argument("binary")
args.add_argument("model")
args.add_argument("--pairs", type=int, default=5)
args.add_argument("--cold", action="store_true")
args = args.parse_args()
home = tempfile.mkdtemp(prefix="bars-home-", dir=os.path.dirname(os.path.abspath(args.model)))
folder = f"{home}/models/own--big--big.gguf"
os.makedirs(folder)
os.link(args.model, f"{folder}/big.gguf")
os.link(args.model, f"{home}/plain.gguf")
with open(args.model, "rb") as file:
    sha256 = hashlib.file_digest(file, "sha256").hexdigest()
record = {"version": 1, "name": "own/big:big.gguf", "kind": "gguf", "source": "hub own/big at main",
          "files": [{"path": "big.gguf", "bytes": os.path.getsize(args.model), "sha256": sha256}], "pulled_at": 1}
json.dump(record, open(f"{folder}/paceline.json", "w"))


def start(model):
    """Wall and processor seconds of a start."""
    if args.cold:
        with open(args.model, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run([args.binary, "run", model, "a", "--raw", "--max-tokens", "1", "--local"], check=True,
                   env={**os.environ, "PACELINE_HOME": home}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


try:
    start("own/big")
    assert os.path.exists(f"{folder}/big.gguf.tree"), "no checksums"
    ratios = []
    for pair in range(args.pairs):
        order = ["own/big", f"{home}/plain.gguf"]
        took = {model: start(model) for model in (order if pair % 2 else order[::-1])}
        checked, plain = took[order[0]], took[order[1]]
        ratios.append([one / other for one, other in zip(checked, plain)])
        print(f"checked {checked[0]:.2f} s ({checked[1]:.2f} of processors), plain {plain[0]:.2f} s ({plain[1]:.2f})")
    for name, of in zip(["wall", "processor"], zip(*ratios)):
        print(f"{name}: {statistics.median(of):.3f} ({min(of):.3f} .. {max(of):.3f})")
finally:
    shutil.rmtree(home)
