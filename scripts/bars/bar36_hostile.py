#!/usr/bin/env python3
"""Issue 36: 1,000 hostile expressions, files and WGSL functions: refused (exit 1 or 2, one line) or right, never a crash, never
slow. 2 to 3 min. With a binary of feature gpu also --device gpu and --wgsl.

    bar36_hostile.py BINARY [--cases 1000] [--gpu]
"""
import argparse, random, struct
from bars36 import *

ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
ap.add_argument("binary"); ap.add_argument("--cases", type=int, default=1000); ap.add_argument("--gpu", action="store_true")
a = ap.parse_args()
r = random.Random(36)
x = npy("hostile", lambda: np.array([0.5, -3.0, np.nan, np.inf, -0.0, 1e308, 5e-324, 2.0]))
P = ["x", "y", "i", "1", "2.5", "1e308", "nan", "+", "-", "*", "/", "%", "^", "(", ")", "<", "==", "&&", "!", "select(", "sqrt(", "min(", ",", " ", "true", "é", "1e999", ";", "}", "fn", "o[0]", "'", "\"", "\n", "$(id)", "\\"]
W = ["fn f(x: f32) -> f32 {", "return x;", "}", "{", "(", ")", "x", "+", "loop {", "array<f32,9>", "@group(0)", "var<private> p: f32;", "fn g() {}", "/*", "//", "if x > 1.0 {", "é", "while true {}"]
crashes = refused = right = 0
slowest = 0.0


def run(*args):
    global crashes, refused, right, slowest
    began = time.perf_counter()
    d = subprocess.run([a.binary, "mapreduce", *args, "--json"], capture_output=True, timeout=60)
    slowest = max(slowest, time.perf_counter() - began)
    err = d.stderr.decode(errors="replace")
    if d.returncode == 0:
        json.loads(d.stdout); right += 1
    elif d.returncode in (1, 2) and err.strip() and "panicked" not in err:
        refused += 1
    else:
        crashes += 1
        print("CRASH", d.returncode, args[:6], err[-300:], flush=True)
    return d


device = ["--device", "gpu"] if a.gpu else []
texts = ["".join(r.choice(P) for _ in range(1 + r.randrange(12))) for _ in range(a.cases // 2)]
texts += ["(" * 3000 + "x" + ")" * 3000, "-" * 9000 + "x", "x+" * 9000 + "x", "x^" * 900 + "x", "sqrt(" * 300 + "x" + ")" * 300, "x" * 15000, " " * 16000, "\0x"[1:]]
for t in texts:
    plain = run("reduce", "sum", x, "--map=" + t)
    if device and plain.returncode == 0:
        other = run("reduce", "sum", x, "--map=" + t, *device)
        if other.returncode or json.loads(other.stdout)["value"] != json.loads(plain.stdout)["value"]:
            crashes += 1; print("DIFFERS", t, other.stderr[-200:])
good = open(x, "rb").read()
path = f"{DATA}/bad.npy"
for case in range(a.cases - len(texts)):
    kind, data = case % 5, bytearray(good)
    if kind == 0: data = data[: r.randrange(len(data))]
    elif kind == 1:
        for _ in range(1 + r.randrange(6)): data[r.randrange(128)] = r.randrange(256)
    elif kind == 2:
        shape = r.choice(["(18446744073709551615,)", "(4294967296, 4294967296)", "(-1,)", "()", "(0, 99)", "(8,8)", "('x',)", "(" * 500])
        head = f"{{'descr': '{r.choice(['<f8', '>f8', '<f2', '|O', '<c16', '<u8', 'x' * 300])}', 'fortran_order': {r.choice(['False', 'True', 'import os'])}, 'shape': {shape}, }}"
        head = head.ljust(117)[: 60000] + "\n"; data = b"\x93NUMPY\x01\0" + struct.pack("<H", len(head) & 0xffff) + head.encode() + bytes(64)
    elif kind == 3: data = r.randbytes(r.randrange(400))
    else: data[8:10] = struct.pack("<H", r.randrange(65536))
    open(path, "wb").write(data)
    run(*r.choice([("reduce", "sum", path), ("sort", path, "-o", f"{DATA}/o.npy"), ("hist", path, "--bins", "7"), ("kmeans", path, "-k", "2", "--iterations", "2"), ("groupby", "sum", path, x), ("topk", path, "-k", "3")]))
if a.gpu:
    for _ in range(200):
        text = r.choice(["", W[0]]) + " ".join(r.choice(W) for _ in range(1 + r.randrange(8))) + r.choice(["", " return x; }"])
        open(f"{DATA}/f.wgsl", "w").write(text)
        run("reduce", "sum", x, "--wgsl", f"{DATA}/f.wgsl", *device)
bar("hostile", f"{refused} refused, {right} computed, {crashes} crashes, slowest {slowest:.2f} s", crashes == 0 and slowest < 10, "0 crashes")
