"""Array jobs beside NumPy and SQL engines, in turns: processor seconds (all threads) and wall seconds.

Run from the root: python scripts/bench/mapreduce.py target/release/paceline FOLDER [ROWS]
FOLDER gets the columns (0.8 GB for 50 M rows). Engines that are not installed are skipped by name.
"""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

PACELINE, FOLDER = sys.argv[1], Path(sys.argv[2])
ROWS = int(sys.argv[3]) if len(sys.argv) > 3 else 50_000_000
GROUPS = 100_000


def columns():
    """Files of the columns, made once: u (u32), v (f64), k (i32), the rows shuffled, points."""
    files = {name: FOLDER / f"{name}-{ROWS}.npy" for name in ["u", "v", "k", "v2", "k2", "points"]}
    if all(path.exists() for path in files.values()):
        return files
    FOLDER.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(36)
    u = random.integers(0, 2**32, ROWS, dtype=np.uint32)
    v = random.standard_normal(ROWS) * np.exp2(random.integers(-20, 20, ROWS))
    k = random.integers(0, GROUPS, ROWS, dtype=np.int32)
    order = random.permutation(ROWS)
    points = random.standard_normal((1_000_000, 16)).astype(np.float32)
    for name, values in {"u": u, "v": v, "k": k, "v2": v[order], "k2": k[order]}.items():
        np.save(files[name], values)
    np.save(files["points"], points)
    return files


def paceline(*args):
    """What a job prints, its processor seconds (workers too) and wall seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    command = [PACELINE, "mapreduce", *map(str, args), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = sum(getattr(after, f) - getattr(before, f) for f in ["ru_utime", "ru_stime"])
    return json.loads(done.stdout), processor, wall


def here(function):
    """Processor and wall seconds of a function."""
    before, start = time.process_time(), time.perf_counter()
    function()
    return time.process_time() - before, time.perf_counter() - start


def show(name, processor, wall):
    print(f"{name:48} {processor:8.2f} s processor {wall:8.2f} s wall", flush=True)


def sorts(files):
    """Sorts of u32: ours from file to file, NumPy's in memory and from file to file."""
    out, values = FOLDER / "sorted.npy", np.load(files["u"])
    for _ in range(3):
        copy = values.copy()
        show("np.sort in memory", *here(lambda: copy.sort()))
        show("np.load, sort, np.save", *here(lambda: np.save(out, np.sort(np.load(files["u"])))))
        for threads in [1, 2]:
            _, *times = paceline("sort", files["u"], "-o", out, "--threads", threads)
            show(f"paceline sort, threads {threads}", *times)
    assert (np.load(out) == np.sort(values)).all()
    _, *times = paceline("sort", files["u"], "-o", out, "--memory", "100M")
    show("paceline sort, memory 100M", *times)
    assert (np.load(out) == np.sort(values)).all()
    out.unlink()


def kmeans(files):
    """Iterations over a million rows: the difference of a run with 6 and one with 1."""
    run = lambda n: paceline("kmeans", files["points"], "-k", 64, "--iterations", n, "--threads", 1)
    (_, one, wall), (_, six, wall6) = run(1), run(6)
    show("paceline k-means, an iteration", (six - one) / 5, (wall6 - wall) / 5)


def groups(files):
    """The same groups over workers, threads and shuffled rows; then what engines take."""
    seen = set()
    for nodes, threads, name in [(1, 1, ""), (1, 2, ""), (1, 3, "2"), (2, 1, ""), (4, 1, "2")]:
        columns = files[f"k{name}"], files[f"v{name}"]
        job = "groupby", "sum", *columns, "--nodes", nodes, "--threads", threads
        said, *times = paceline(*job)
        seen.add(json.dumps([said["keys"], said["values"]]))
        show(f"groupby, nodes {nodes}, threads {threads}{', shuffled' * bool(name)}", *times)
    assert len(seen) == 1, "groups differ"
    print(f"{GROUPS} groups: the same bits in all runs")
    k, v = np.load(files["k"]), np.load(files["v"])
    show("np.bincount", *here(lambda: np.bincount(k, weights=v)))
    engines(k, v)


def engines(k, v):
    """Groups that differ between one and two threads."""
    try:
        import duckdb
        import pyarrow
    except ImportError as missing:
        print(f"SKIPPED DuckDB: {missing}")
        return
    table, sums = pyarrow.table({"k": k, "v": v}), []
    for threads in [1, 2]:
        session = duckdb.connect(config={"threads": threads})
        session.register("t", table)
        query = "select k, sum(v) from t group by k order by k"
        fetch = lambda: sums.append(session.execute(query).fetchnumpy()["sum(v)"])
        show(f"DuckDB {duckdb.__version__}, threads {threads}", *here(fetch))
    print(f"DuckDB: {int((sums[0] != sums[1]).sum())} of {GROUPS} groups differ")


def reductions(files):
    """Sums and histograms."""
    for _ in range(3):
        said, *times = paceline("reduce", "sum", files["v"], "--threads", 1)
        show(f"exact sum, {said['gb_s']:.1f} GB/s", *times)
        said, *times = paceline("hist", files["u"], "--threads", 1)
        show(f"histogram, {said['gb_s']:.1f} GB/s", *times)
    u = np.load(files["u"])
    assert said["counts"] == np.bincount(u >> 24, minlength=256).tolist()


def main():
    print(f"{ROWS} rows, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    files = columns()
    for part in [reductions, sorts, kmeans, groups]:
        part(files)


if __name__ == "__main__":
    main()
