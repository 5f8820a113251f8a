#!/usr/bin/env python3
"""Issue 66: consent, `launch --nodes`, and own functions in Python over machines that are network namespaces (root and `ip`).

    bar66_programs.py BINARY PYTHON [--megabytes 40]   2 min; PYTHON has paceline (or PYTHONPATH names it), cloudpickle and NumPy

Consent: three machines with it, one without; the last runs nothing, whatever asks. Launch: ranks on three machines, exit codes, Ctrl-C,
kill -9 of a node. Functions: word count, a join with sums and five rounds of k-means over three machines with a kill -9 each: the answer
of one process, and bytes through the starter <= 5 % of the data. Dask, where PYTHON has it: an array sum and a join, a worker killed. A stranger in a further namespace sees no open port but the nodes' own,
and a word of the data is on no wire.
"""
import argparse, random, signal
from common31 import *

ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
ap.add_argument("binary"); ap.add_argument("python"); ap.add_argument("--megabytes", type=int, default=40); ap.add_argument("--only", default=""); ap.add_argument("--ray", default="", help="a Python with ray")
a = ap.parse_args()
net = Net(4)
machines = [Machine(a.binary, net, n, {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "PACELINE_BINARY": a.binary}) for n in range(4)]
DATA = tempfile.mkdtemp(prefix="bar66-")
failed = []


def check(what, ok, said=""):
    print(("ok     " if ok else "FAILED ") + what + (f": {said}" if said != "" else ""), flush=True)
    failed.extend([] if ok else [what])


def pids(ns):
    """Processes of a namespace by command line."""
    found = {}
    for pid in ip("netns", "pids", ns).stdout.split():
        try:
            found[int(pid)] = open(f"/proc/{pid}/cmdline").read().replace("\0", " ")
        except OSError:
            pass
    return found


def compute(*words):
    """A command whose keeper lives on: without a process namespace of its own."""
    return subprocess.run(["ip", "netns", "exec", machines[0].ns, a.binary, "compute", *words], env=machines[0].env, cwd=machines[0].home,
                          capture_output=True, text=True, timeout=300)


def consent():
    n0 = machines[0]
    check("nodes tells who runs programs", "programs of users may run on n0, n1, n2" in n0.told("nodes"), n0.told("nodes").splitlines()[-1])
    ids = {node["name"]: node["id"] for node in n0.nodes()}
    done = n0.run("programs", "--node", ids["n1"], "--", "/bin/sh", "-c", "echo out; echo err >&2; exit 7", check=False)
    check("a program there", (done.returncode, done.stdout, done.stderr) == (7, "out\n", "err\n"), done)
    done = n0.run("programs", "--node", ids["n3"], "--", "/usr/bin/touch", f"{DATA}/ran", check=False)
    check("nothing runs without consent", done.returncode == 1 and not os.path.exists(f"{DATA}/ran"), done.stderr.strip())
    done = n0.run("programs", "--node", ids["n3"], "--port", "52415", check=False)
    check("nothing connects without consent", done.returncode == 1, done.stderr.strip())
    done = n0.run("launch", "--nodes", "4", "--", "true", check=False)
    check("launch names the machine without consent", done.returncode == 1 and "not allowed on n3" in done.stderr, done.stderr.strip())
    done = n0.run("programs", "--node", ids["n1"], "--", "/nonexistent", check=False)
    check("a program that is not there", done.returncode == 1 and "cannot start /nonexistent" in done.stderr, done.stderr.strip())
    done = n0.run("programs", "--node", ids["n2"], "--", a.python, "-c", "bytearray(1 << 30)", check=False)
    check("--program-memory holds", done.returncode == 1 and "MemoryError" in done.stderr, done.stderr.strip().splitlines()[-1:])


def launch():
    n0 = machines[0]
    program = "import os,json,socket; print(os.environ['MLX_RANK'], json.load(open(os.environ['MLX_HOSTFILE'])), os.environ.get('X'))"
    began = time.time()
    done = n0.run("launch", "--nodes", "3", "--backend", "ring", "--env", "X=1", "--", a.python, "-c", program, check=False)
    ranks = sorted(line.split("] ", 1)[1] for line in done.stdout.splitlines())
    check("three ranks, MLX's variables", done.returncode == 0 and len(ranks) == 3 and all(r.startswith(f"{n} ") and r.endswith(" 1") for n, r in enumerate(ranks)),
          f"{time.time() - began:.1f} s {ranks[:1]} {done.stderr.strip()[-300:]}")
    check("addresses of the machines", all(f"10.77.0.{n + 1}" in ranks[0] for n in range(3)), ranks[0] if ranks else "")
    done = n0.run("launch", "--nodes", "3", "--", "sh", "-c", 'if [ $MLX_RANK = 2 ]; then exit 37; fi; sleep 60', check=False)
    check("the first failure is the exit code", done.returncode == 37, done.stderr.strip().splitlines()[:1])
    for how in (signal.SIGINT, signal.SIGKILL):
        child = subprocess.Popen(["ip", "netns", "exec", n0.ns, a.binary, "launch", "--nodes", "3", "--", "sleep", "98765"], env=n0.env, cwd=n0.home,
                                 stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        running = lambda: sum("sleep 98765" == line.strip() for m in machines for line in pids(m.ns).values())
        n0.until("runs", lambda: running() == 3, 20)
        child.send_signal(how); child.wait()
        end = time.time() + 8
        while running() and time.time() < end:
            time.sleep(0.1)
        check(f"{how.name}: no rank is left", running() == 0, f"after {8 - (end - time.time()):.1f} s")
    child = subprocess.Popen(["ip", "netns", "exec", n0.ns, a.binary, "launch", "--nodes", "3", "--", "sleep", "98765"], env=n0.env, cwd=n0.home,
                             stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    n0.until("runs", lambda: running() == 3, 20)
    machines[2].child.kill(); machines[2].child.wait()
    said = child.communicate(timeout=60)[1]
    check("kill -9 of a node ends the launch and its ranks", child.returncode != 0 and running() == 0, said.strip().splitlines()[:1])
    start(2)
    n0.until("sees all", lambda: sum(n["state"] == "alive" for n in n0.nodes()) == 4)


FUNCTIONS = r'''
import operator, os, sys, time, json
import paceline
from paceline import compute
data, nodes, killed = sys.argv[1], int(sys.argv[2]), sys.argv[3]
m = compute.connect(nodes, threads=1)
def told(what, answer, job):
    f = job.figures
    print(json.dumps({"what": what, "answer": answer, "starter": f.starter_bytes, "exchanged": f.exchanged_bytes, "lost": f.lost}), flush=True)
def signal_start(done, of):
    if done >= of // 4 and not os.path.exists(killed):
        open(killed, "w").write(done.__repr__())
def pause(x):  # so that a kill finds work
    time.sleep(float(os.environ.get("PAUSE", "0"))); return x
parts = [p for name in sorted(os.listdir(data)) if name.endswith(".txt") for p in compute.text_parts(os.path.join(data, name), 1 << 20)]
words = m.group_by(lambda w: w, operator.add, parts, each=lambda p: (w for line in pause(p) for w in line.split()), value=lambda w: 1, progress=signal_start)
told("words", sorted(words.items())[:50] + [len(words), sum(words.values())], m)
def rows(p):
    for line in pause(p):
        k, v = line.split(","); yield int(k), float(v)
orders = [p for p in compute.text_parts(os.path.join(data, "orders.csv"), 1 << 20)]
customers = [p for p in compute.text_parts(os.path.join(data, "customers.csv"), 1 << 18)]
joined = m.join(customers, orders, on=operator.itemgetter(0), each=rows, combine=lambda c, o: c[1] * o[1], by=lambda c, o: c[0] % 97,
                reduce=operator.add, progress=signal_start)
told("join", [repr(sum(joined.values())), len(joined), [repr(v) for k, v in sorted(joined.items())[:20]]], m)
centres = [0.0, 250.0, 500.0, 750.0]
start = exchanged = 0; lost = []
for _ in range(5):
    def nearest(row, centres=tuple(centres)):
        return min(range(len(centres)), key=lambda c: abs(row[1] - centres[c]))
    sums = m.group_by(nearest, lambda a, b: (a[0] + b[0], a[1] + b[1]), orders, each=rows, value=lambda row: (row[1], 1), progress=signal_start)
    centres = [sums[c][0] / sums[c][1] for c in sorted(sums)]
    start += m.figures.starter_bytes; exchanged += m.figures.exchanged_bytes; lost += m.figures.lost
m.figures.starter_bytes, m.figures.exchanged_bytes, m.figures.lost = start, exchanged, lost
told("k-means", [repr(c) for c in centres], m)
'''


def make_data():
    rng = random.Random(66)
    vocabulary = ["w%x" % rng.getrandbits(24) for _ in range(5000)] + ["marker-of-a-secret"]
    written = 0
    for n in range(4):
        with open(f"{DATA}/part{n}.txt", "w") as f:
            while f.tell() < a.megabytes * 1e6 / 4:
                f.write(" ".join(rng.choices(vocabulary, k=12)) + "\n")
            written += f.tell()
    with open(f"{DATA}/customers.csv", "w") as f:
        for k in range(20000):
            f.write(f"{k},{rng.random()}\n")
        customers = f.tell()
    with open(f"{DATA}/orders.csv", "w") as f:
        for _ in range(int(a.megabytes * 1e6 / 4 / 24)):
            f.write(f"{rng.randrange(20000)},{rng.random() * 1000}\n")
        orders = f.tell()
    return {"words": written, "join": customers + orders, "k-means": 5 * orders}


def functions():
    sizes = make_data()
    script = f"{DATA}/job.py"
    open(script, "w").write(FUNCTIONS)
    env = {**machines[0].env}
    begun = time.time()
    one = subprocess.run([a.python, script, DATA, "1", f"{DATA}/none"], env=env, capture_output=True, text=True, timeout=900)
    alone = [json.loads(line) for line in one.stdout.splitlines()]
    print(f"one process: {time.time() - begun:.1f} s {one.stderr[-500:]}")
    for victim in ("none", "worker", "node"):
        mark = f"{DATA}/killed-{victim}"
        # All frames of the bridge's ports, as a stranger at the switch has them.
        dump = subprocess.Popen(["ip", "netns", "exec", net.bridge, sys.executable, "-c", "import socket, sys\n"
            "s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))\nwith open(sys.argv[1], 'wb') as f:\n"
            " while True: f.write(s.recv(65535)); f.flush()", f"{DATA}/wire-{victim}"])
        begun = time.time()
        child = subprocess.Popen(["ip", "netns", "exec", machines[0].ns, a.python, script, DATA, "3", mark],
                                 env={**env, "PAUSE": "0.02"}, cwd=machines[0].home, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if victim != "none":
            end = time.time() + 300
            while not os.path.exists(mark) and child.poll() is None and time.time() < end:
                time.sleep(0.01)
            if victim == "worker":
                found = [pid for pid, line in pids(machines[1].ns).items() if line.rstrip().endswith("host")]
                [os.kill(pid, 9) for pid in found]
                check("a worker is there to be killed", len(found) > 0, found)
            else:
                machines[2].child.kill(); machines[2].child.wait()
        out, said = child.communicate(timeout=900)
        dump.terminate(); dump.wait()
        seen = open(f"{DATA}/wire-{victim}", "rb").read()
        check(f"{victim}: no word of the data on the wire", b"marker-of-a-secret" not in seen and len(seen) > 500_000, f"{len(seen)} bytes seen")
        told = [json.loads(line) for line in out.splitlines()]
        print(f"three machines, {victim} killed: {time.time() - begun:.1f} s {said[-800:]}")
        check(f"{victim}: three answers", len(told) == 3)
        for mine, other in zip(told, alone):
            share = mine["starter"] / sizes[mine["what"]]
            check(f"{victim}: {mine['what']} equal", mine["answer"] == other["answer"], f"lost {mine['lost']}")
            check(f"{victim}: {mine['what']} through the starter <= 5 %", share <= 0.05,
                  f"{share:.2%}, {mine['exchanged']} bytes between machines")
        left = [line for m in machines[1:] for line in pids(m.ns).values() if "paceline_worker" in line]
        end = time.time() + 5
        while left and time.time() < end:
            time.sleep(0.2)
            left = [line for m in machines[1:] for line in pids(m.ns).values() if "paceline_worker" in line]
        check(f"{victim}: no worker is left", not left, len(left))
        if victim == "node":
            start(2)
            machines[0].until("sees all", lambda: sum(n["state"] == "alive" for n in machines[0].nodes()) == 4)


DASK = r'''
import json, sys, time
import numpy as np, pandas as pd, dask.array as da, dask.dataframe as dd
from dask.distributed import Client, wait
client = Client("tcp://127.0.0.1:28786", timeout=60)
client.wait_for_workers(3, timeout=120)
print(json.dumps(sorted(w["name"] for w in client.scheduler_info(n_workers=-1)["workers"].values())), flush=True)
def slow(block):
    time.sleep(0.2); return block
x = da.arange(4_000_000, chunks=100_000, dtype="i8").map_blocks(slow)
total = client.compute((x * 3).sum())
print("begun", flush=True)
print(int(total.result(timeout=300)), flush=True)
left = pd.DataFrame({"k": np.arange(200_000) % 1000, "a": np.arange(200_000)})
right = pd.DataFrame({"k": np.arange(1000), "b": np.arange(1000) * 2})
joined = dd.from_pandas(left, npartitions=12).merge(dd.from_pandas(right, npartitions=4), on="k", shuffle_method="tasks")
print(int((joined.a * joined.b).sum().compute()), flush=True)
'''


def dask():
    n0 = machines[0]
    n0.until("knows who runs programs", lambda: "programs of users may run on n0, n1, n2" in n0.told("nodes"))
    began = time.time()
    done = compute("start", "dask", "--python", a.python)
    check("compute start dask", done.returncode == 0 and "worker on n2: runs" in done.stdout, f"{time.time() - began:.1f} s {done.stdout}{done.stderr}")
    check("a second one is refused", compute("start", "dask", "--python", a.python).returncode == 1)
    script = f"{DATA}/client.py"
    open(script, "w").write(DASK)
    client = subprocess.Popen(["ip", "netns", "exec", n0.ns, a.python, script], env=n0.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    check("three workers", json.loads(client.stdout.readline()) == ["n0", "n1", "n2"])
    client.stdout.readline()
    time.sleep(1)
    found = [pid for pid, line in pids(machines[1].ns).items() if "dask_worker" in line]
    [os.kill(pid, 9) for pid in found]
    stranger = subprocess.run(["ip", "netns", "exec", net.bridge, sys.executable, "-c",
        "import socket\nopen=[]\nfor h in range(1,4):\n for p in range(28786,28792):\n  s=socket.socket(); s.settimeout(1)\n"
        "  open += [(h,p)] if s.connect_ex((f'10.77.0.{h}',p)) == 0 else []\nprint(open)"], capture_output=True, text=True)
    check("a stranger sees no port", stranger.stdout.strip() == "[]", stranger.stdout + stranger.stderr)
    out, said = client.communicate(timeout=400)
    x, k = 3 * sum(range(4_000_000)), sum(i * (i % 1000) * 2 for i in range(200_000))
    check("array sum and join of dataframes, a worker killed", out.split() == [str(x), str(k)], f"{len(found)} killed {out.split()} {said[-500:]}")
    rejoined = lambda: any("dask_worker" in line for line in pids(machines[1].ns).values())
    n0.until("a killed worker comes back", rejoined, 30)
    machines[2].child.kill(); machines[2].child.wait()
    n0.until("a lost machine leaves", lambda: "worker on n2: ended" in compute("status").stdout, 30)
    start(2)
    n0.until("and comes back", lambda: "worker on n2: runs" in compute("status").stdout, 60)
    check("a lost machine leaves, and joins again", True)
    compute("stop")
    left = lambda: [line for m in machines for line in pids(m.ns).values() if "dask" in line]
    end = time.time() + 10
    while left() and time.time() < end:
        time.sleep(0.2)
    check("nothing is left after stop", not left(), left())


RAY = r'''
import json, logging, os, ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On
ray.init("127.0.0.1:28786", _node_ip_address="127.0.0.1", logging_level=logging.ERROR, log_to_driver=False)
import time
end = time.time() + 120
while sum(n["Alive"] for n in ray.nodes()) < 3 and time.time() < end:
    time.sleep(0.5)
ids = [n["NodeID"] for n in ray.nodes() if n["Alive"]]
@ray.remote
def where(): return os.readlink("/proc/self/ns/net")
@ray.remote
def make(n): return bytes(n)
@ray.remote
def length(x): return len(x)
on = lambda f, i: f.options(scheduling_strategy=On(ids[i], False))
print(len(ids), len(set(ray.get([on(where, i).remote() for i in range(len(ids))], timeout=120))))
print(sum(ray.get([on(length, (i + 1) % len(ids)).remote(on(make, i).remote(5_000_000)) for i in range(len(ids))], timeout=120)))
'''


def ray():
    if not a.ray:
        return print("SKIPPED ray: no --ray PYTHON")
    n0 = machines[0]
    began = time.time()
    done = compute("start", "ray", "--python", a.ray)
    check("compute start ray", done.returncode == 0, f"{time.time() - began:.1f} s {done.stdout}{done.stderr}")
    script = f"{DATA}/ray_client.py"
    open(script, "w").write(RAY)
    client = subprocess.run(["ip", "netns", "exec", n0.ns, a.ray, script], env=n0.env, capture_output=True, text=True, timeout=400)
    check("tasks on three machines, objects between them", client.stdout.split()[-3:] == ["3", "3", "15000000"], client.stdout[-300:] + client.stderr[-300:])
    open_ports = [line for m in machines[:3] for line in subprocess.run(["ip", "netns", "exec", m.ns, "ss", "-ltnH"], capture_output=True, text=True).stdout.splitlines()
                  if "127.0.0.1" not in line.split()[3] and ":52416" not in line.split()[3]]
    check("ray listens on loopback alone", not open_ports, open_ports)
    compute("stop")
    left = lambda: [line for m in machines for line in pids(m.ns).values() if "ray" in line and "paceline" not in line]
    end = time.time() + 15
    while left() and time.time() < end:
        time.sleep(0.2)
    check("nothing of ray is left after stop", not left(), [line[:80] for line in left()])


def start(number):
    memory = ["--program-memory", "512M"] if number == 2 else []
    machines[number].up(*(["--allow-programs", *memory] if number < 3 else []))


try:
    for number in range(4):
        start(number)
    form(machines)
    machines[0].until("knows ways", lambda: all(any(p["to"] == n["id"] and p["up"] for p in next(o for o in machines[0].nodes() if o["found_by"] == "self")["paths"])
                                                for n in machines[0].nodes() if n["found_by"] != "self"))
    for part in (consent, launch, functions, dask, ray):
        if not a.only or part.__name__ in a.only.split(","):
            part()
finally:
    for machine in machines:
        machine.end()
    net.end()
    shutil.rmtree(DATA, ignore_errors=True)
sys.exit(f"{len(failed)} failed: {failed}" if failed else 0)
