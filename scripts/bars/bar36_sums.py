#!/usr/bin/env python3
"""Issue 36: sums of 10^8 f64 of four distributions equal to math.fsum, over 1 to 4 nodes; 3 to 4 min (fsum takes most).

    bar36_sums.py BINARY [--n 100000000] [--only NAME]

The ratio to a plain 32-lane sum and histogram to plain reads are measured inside one process:
    PACELINE_TEST_LONG=1 cargo test --release -p paceline-mapreduce --lib bars -- --nocapture --test-threads 1
prints `exact sum: .. share` (bar 0.35), `histogram of u32: .. share` (0.2), k-means (0.15 s) and radix sort.
"""
import argparse, math
from bars36 import *

ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
ap.add_argument("binary"); ap.add_argument("--n", type=int, default=100_000_000); ap.add_argument("--only")
a = ap.parse_args()
rng = np.random.default_rng(36)
n = a.n


def cancelling():
    v = rng.random(n) * 1e16
    v[1::2] = -v[::2][: n // 2] + 1e-8
    return v


kinds = {
    "uniform": lambda: rng.random(n),
    "mixed": lambda: (rng.random(n) - 0.5) * np.exp2(rng.integers(-20, 20, n)),
    "wide": lambda: (rng.random(n) - 0.5) * np.exp2(rng.integers(-300, 300, n)),
    "cancelling": cancelling,
}
for name, make in kinds.items():
    if a.only and a.only != name:
        continue
    path = npy(f"{name}-{n}", make)
    values = np.load(path, mmap_mode="r")
    expected = math.fsum(memoryview(values))
    got = [job(a.binary, "reduce", "sum", path, "--nodes", k)[0] for k in (1, 2, 3, 4)]
    same = all(g["value"] == expected for g in got)
    bar(f"sum of {name}", f"{got[0]['value']!r} at {got[0]['gb_s']:.2f} GB/s, math.fsum {expected!r}", same, "equal over 1 to 4 nodes")
    os.remove(path)
