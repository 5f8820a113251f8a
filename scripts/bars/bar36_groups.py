#!/usr/bin/env python3
"""Issue 36: 50 M rows, 10^5 groups: the same bits over nodes, threads, shuffled rows, a killed worker, --device gpu; peers beside.

    bar36_groups.py BINARY [--rows 50000000] [--gpu BINARY_WITH_FEATURE_GPU]     4 min; peers twice each
"""
import argparse, hashlib, signal
from bars36 import *

ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
ap.add_argument("binary"); ap.add_argument("--rows", type=int, default=50_000_000); ap.add_argument("--gpu")
a = ap.parse_args()
n, rng = a.rows, np.random.default_rng(36)
keys = npy(f"keys-{n}", lambda: rng.integers(0, 100_000, n, dtype=np.int32))
values = npy(f"values-{n}", lambda: (rng.random(n) - 0.5) * np.exp2(rng.integers(-20, 20, n)))
order = None


def shuffled(path):
    global order
    if order is None:
        order = np.random.default_rng(1).permutation(n)
    return np.load(path)[order]


keys2, values2 = npy(f"keys2-{n}", lambda: shuffled(keys)), npy(f"values2-{n}", lambda: shuffled(values))
order = None
digest = lambda said: hashlib.sha256(json.dumps([said["keys"], said["values"]]).encode()).hexdigest()[:16]
seen = {}
for name, binary, args in [
    ("1 node, 1 thread", a.binary, [keys, values, "--threads", 1]), ("1 node, 3 threads", a.binary, [keys, values, "--threads", 3]),
    ("2 nodes", a.binary, [keys, values, "--nodes", 2]), ("4 nodes, 2 threads", a.binary, [keys, values, "--nodes", 4, "--threads", 2]),
    ("shuffled, 3 nodes", a.binary, [keys2, values2, "--nodes", 3]),
    *([("device gpu", a.gpu, [keys, values, "--device", "gpu"])] if a.gpu else []),
]:
    said, wall, cpu = job(binary, "groupby", "sum", *args)
    seen[name] = digest(said)
    print(f"{name}: {seen[name]} {wall:.2f} s, {cpu:.2f} processor s, device {said['device']}", flush=True)
child = subprocess.Popen([a.binary, "mapreduce", "groupby", "sum", keys, values, "--nodes", "3", "--json"], stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL)
time.sleep(0.4)
workers = open(f"/proc/{child.pid}/task/{child.pid}/children").read().split()
for task in os.listdir(f"/proc/{child.pid}/task"):
    workers += open(f"/proc/{child.pid}/task/{task}/children").read().split()
if workers:
    os.kill(int(workers[0]), signal.SIGKILL)
said = json.loads(child.communicate()[0])
seen[f"killed worker (lost {said['lost']})"] = digest(said)
bar("groups", f"{len(set(seen.values()))} different results of {len(seen)}", len(set(seen.values())) == 1 and said["lost"] == 1, "1, one worker lost")


def differ(name, run):
    try:
        runs = [run(threads) for threads in (1, 2, 2)]
    except ImportError as error:
        return print(f"{name}: not installed ({error})")
    bits = [np.asarray(r, dtype=np.float64).view(np.int64) for r in runs]
    print(f"{name}: {int((bits[0] != bits[1]).sum())} of {len(bits[0])} groups differ between 1 and 2 threads, "
          f"{int((bits[1] != bits[2]).sum())} between two runs of 2", flush=True)


def duck(threads):
    import duckdb
    con = duckdb.connect(config={"threads": threads})
    k, v = np.load(keys), np.load(values)
    con.register("t", {"k": k, "v": v})
    return con.sql("select k, sum(v) s from t group by k order by k").fetchnumpy()["s"]


differ("DuckDB", duck)
script = "import os,sys,numpy as np\nimport polars as pl\nk,v=np.load(sys.argv[1]),np.load(sys.argv[2])\n" \
         "np.save(sys.argv[3], pl.DataFrame({'k':k,'v':v}).lazy().group_by('k').agg(pl.col('v').sum()).sort('k').collect(engine='streaming')['v'].to_numpy())"


def polars(threads):
    import polars  # noqa: F401
    subprocess.run([sys.executable, "-c", script, keys, values, f"{DATA}/p.npy"], check=True, env={**os.environ, "POLARS_MAX_THREADS": str(threads)})
    return np.load(f"{DATA}/p.npy")


differ("Polars", polars)


def datafusion(threads):
    import datafusion as df, pyarrow as pa
    ctx = df.SessionContext(df.SessionConfig().with_target_partitions(threads))
    t = pa.table({"k": np.load(keys), "v": np.load(values)})
    ctx.register_record_batches("t", [t.to_batches(max_chunksize=8192)])
    return pa.Table.from_batches(ctx.sql("select k, sum(v) s from t group by k order by k").collect())["s"].to_numpy()


differ("DataFusion", datafusion)
