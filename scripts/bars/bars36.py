"""What bar36_sort.py uses: files in /tmp/bars/data36, jobs with their processor seconds, bars.

Peers: `python3 -m venv /tmp/bars/venv36 && /tmp/bars/venv36/bin/pip install numpy duckdb polars datafusion pyarrow`;
run the scripts with /tmp/bars/venv36/bin/python.
"""
import json, os, resource, statistics, subprocess, sys, time
import numpy as np

DATA = "/tmp/bars/data36"
os.makedirs(DATA, exist_ok=True)


def npy(name, make):
    """The path of an array, made once."""
    path = f"{DATA}/{name}.npy"
    if not os.path.exists(path):
        np.save(path + ".part.npy", make())
        os.rename(path + ".part.npy", path)
    return path


def job(binary, *args, env=None, ok=True):
    """(JSON of a job, wall seconds, processor seconds of it and its workers)"""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([binary, "mapreduce", *map(str, args), "--json"], capture_output=True, text=True,
                          env={**os.environ, **(env or {})}, timeout=580)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if ok and done.returncode:
        sys.exit(f"{args}: {done.stderr[-600:]}")
    return (json.loads(done.stdout) if done.returncode == 0 else done), wall, cpu


def bar(name, value, met, wanted):
    print(f"BAR {name}: {value} ({wanted}) {'MET' if met else 'MISSED'}  load {os.getloadavg()[0]:.1f}", flush=True)


def shown(values):
    v = sorted(values)
    return f"{statistics.median(v):.3f} ({v[len(v) // 10]:.3f} .. {v[-1 - len(v) // 10]:.3f})"
