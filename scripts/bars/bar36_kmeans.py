#!/usr/bin/env python3
"""Issue 36: k-means 1 M x 16 f32, k = 64: processor seconds an iteration (bar 0.15), NumPy beside; the difference of 3 and 13
iterations, so that starting and reading the header do not count. Histogram of raw u32 beside. 1 min.

    bar36_kmeans.py BINARY [--rounds 5]
"""
import argparse
from bars36 import *

ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
ap.add_argument("binary"); ap.add_argument("--rounds", type=int, default=5)
a = ap.parse_args()
rng = np.random.default_rng(36)
path = npy("points", lambda: rng.random((1_000_000, 16), dtype=np.float32))
each = []
for _ in range(a.rounds):
    few, many = (job(a.binary, "kmeans", path, "-k", 64, "--iterations", i, "--threads", 1) for i in (3, 13))
    each.append((many[2] - few[2]) / (many[0]["iterations"] - few[0]["iterations"]))
x = np.load(path); c = x[:64].copy(); peers = []
for _ in range(3):
    t = time.process_time()
    d = (c * c).sum(1) - 2 * (x @ c.T); w = d.argmin(1)
    sums = np.stack([np.bincount(w, x[:, j], 64) for j in range(16)], 1)
    peers.append(time.process_time() - t)
print(f"paceline {shown(each)}, NumPy (one expression, all threads) {shown(peers)} processor s an iteration")
bar("k-means", f"{statistics.median(each):.3f} s", statistics.median(each) <= 0.15, "<= 0.15")
