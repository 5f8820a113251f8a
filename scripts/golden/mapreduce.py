"""Small arrays and what Python's exact arithmetic says of them: tests-data/golden/mapreduce.

`sum` and `dot` by math.fsum and fractions, `mean` and `var` by fractions, rounded once by float();
extremes by NumPy. Texts, since not every reader of JSON rounds right.
Run from the root: python scripts/golden/mapreduce.py
"""

import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np

FOLDER = Path("tests-data/golden/mapreduce")
ROWS = 3000


def arrays():
    """Columns by name: four distributions, float32, integers beyond 2^53, two axes."""
    random = np.random.default_rng(36)
    signs = random.choice([-1.0, 1.0], ROWS)
    big = random.standard_normal(ROWS // 2) * 1e15
    yield "uniform", random.random(ROWS)
    yield "normal", random.standard_normal(ROWS)
    yield "mixed", signs * np.exp2(random.uniform(-300, 300, ROWS))
    yield "cancelling", random.permutation(np.concatenate([big, -big + 0.125]))
    yield "float32", random.standard_normal((ROWS // 10, 10)).astype(np.float32)
    yield "int64", random.integers(-(2**63), 2**63 - 1, ROWS)
    yield "uint8", random.integers(0, 256, ROWS).astype(np.uint8)


def exact(values):
    """The answers for one column."""
    integers = values.dtype.kind in "iu"
    flat = [int(v) if integers else float(v) for v in values.ravel()]
    fractions = [Fraction(v) for v in flat]
    count, total = len(flat), sum(fractions)
    mean = total / count
    var = sum(v * v for v in fractions) / count - mean * mean
    fsum = sum(flat) if integers else math.fsum(flat)
    assert float(total) == float(fsum)
    answers = {
        "sum": fsum,
        "mean": float(mean),
        "var": float(var),
        "std": math.sqrt(float(var)),
        "min": values.min().item(),
        "max": values.max().item(),
        "count": count,
        "dot": float(sum(v * v for v in fractions)) if not integers else sum(v * v for v in flat),
    }
    return {name: repr(answer) for name, answer in answers.items()}


def clusters(rows, k, iterations):
    """Lloyd's algorithm from the first k rows: float64 distances in order, exact means."""
    rows = rows.astype(np.float64)
    centroids = rows[:k].copy()
    for _ in range(iterations):
        distances = np.zeros((len(rows), k))
        for column in range(rows.shape[1]):
            difference = rows[:, column, None] - centroids[None, :, column]
            distances += difference * difference
        nearest = distances.argmin(axis=1)
        inertia = math.fsum(distances.min(axis=1))
        for cluster in range(k):
            members = rows[nearest == cluster]
            for column in range(rows.shape[1]):
                mean = sum(map(Fraction, members[:, column].tolist())) / len(members)
                centroids[cluster, column] = float(mean)
    return {
        "counts": np.bincount(nearest, minlength=k).tolist(),
        "inertia": repr(inertia),
        "centroids": [repr(value) for value in centroids.ravel().tolist()],
    }


def fnv(values):
    """FNV-1a of an array's bytes: a hash of a few lines in any language."""
    state = 0xCBF29CE484222325
    for byte in values.tobytes():
        state = (state ^ byte) * 0x100000001B3 % 2**64
    return f"{state:016x}"


def jobs(data):
    """What NumPy and math.fsum say of other jobs."""
    counts, _ = np.histogram(data["normal"], bins=16, range=(-2.5, 2.5))
    top = np.argsort(data["int64"])[::-1][:5]
    keys = data["uint8"]
    sums = {int(key): math.fsum(data["mixed"][keys == key]) for key in np.unique(keys)}
    mapped = data["uniform"] * data["uniform"] - 3 * data["normal"]
    return {
        "hist": counts.tolist(),
        "topk": {"values": data["int64"][top].tolist(), "indices": top.tolist()},
        "groupby": {str(key): repr(value) for key, value in sums.items()},
        "kmeans": clusters(data["float32"], 4, 5),
        "map": repr(math.fsum(mapped)),
        "sort": {name: fnv(np.sort(values.ravel())) for name, values in data.items()},
    }


def kept(name, values):
    """The array that is recorded, since np.exp2 differs in the last bit between machines."""
    path = FOLDER / f"{name}.npy"
    if not path.exists():
        np.save(path, values)
    return np.load(path)


def main():
    """Writes the arrays and index.json."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    data = {name: kept(name, values) for name, values in arrays()}
    index = {name: exact(values) for name, values in data.items()}
    index = {"numpy": np.__version__, "arrays": index, "jobs": jobs(data)}
    text = json.dumps(index, indent=1)
    (FOLDER / "index.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
