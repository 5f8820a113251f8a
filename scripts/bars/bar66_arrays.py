#!/usr/bin/env python3
"""Issue 66: functions over blocks, products of matrices, joins and sorts of `paceline mapreduce`.

    bar66_arrays.py BINARY [--only gpu,matmul,join,sort] [--rows 100000000] [--kill]

gpu (a BINARY with --features gpu; lavapipe counts): n-body of 10^4 bodies within 1e-5 of NumPy's f64; heat on a plate, one worker and two: equal;
group-by and join equal the CPU's bits; matmul in f32. matmul: f64, two processes >= 1.7 times one (a quiet machine), equal bytes. join: beside NumPy.
sort: two machines (network namespaces, root and `ip`), each under 512 MB, 8 bytes a row: bytes between them <= 1.1 times what must move, which is the
half of the values that the other machine sorts. --kill: the other machine is killed on the way.
"""
import argparse
import numpy as np
from common31 import *

ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
ap.add_argument("binary"); ap.add_argument("--only", default="gpu,matmul,join,sort"); ap.add_argument("--rows", type=int, default=10**8)
ap.add_argument("--kill", action="store_true"); ap.add_argument("--side", type=int, default=5000); ap.add_argument("--folder", default="/var/tmp")
a = ap.parse_args()
DATA = tempfile.mkdtemp(prefix="bar66-", dir=a.folder)
WGSL = os.path.join(os.path.dirname(__file__), "../../docs/wgsl")
rng = np.random.default_rng(66)
failed = []


def check(what, ok, said=""):
    print(("ok     " if ok else "FAILED ") + what + (f": {said}" if said != "" else ""), flush=True)
    failed.extend([] if ok else [what])


def npy(name, values):
    np.save(f"{DATA}/{name}.npy", values)
    return f"{DATA}/{name}.npy"


def job(*words):
    done = subprocess.run([a.binary, "mapreduce", *map(str, words), "--local", "--json"], capture_output=True, text=True, timeout=3000)
    if done.returncode:
        sys.exit(f"{words}: {done.stderr}")
    return json.loads(done.stdout)


def written(*words):
    figures = job(*words, "-o", f"{DATA}/out.npy")
    return np.load(f"{DATA}/out.npy"), figures


def gpu():
    n = 10_000
    bodies = np.concatenate([rng.normal(size=(n, 3)), rng.normal(size=(n, 3)) * 0.1, rng.random((n, 1)) * 10 / n], 1).astype(np.float32)
    path = npy("bodies", bodies)
    nbody = ("map", path, "--wgsl", f"{WGSL}/nbody.wgsl", "--halo", "all", "--device", "gpu")
    one, figures = written(*nbody)
    b = bodies.astype(np.float64); pull = np.zeros((n, 3))
    for s in range(0, n, 500):
        away = b[None, :, :3] - b[s:s + 500, None, :3]; square = (away * away).sum(-1) + 1e-4
        pull[s:s + 500] = (away * (b[None, :, 6] / (square * np.sqrt(square)))[..., None]).sum(1)
    velocity = b[:, 3:6] + 0.001 * pull
    expected = np.concatenate([b[:, :3] + 0.001 * velocity, velocity, b[:, 6:]], 1)
    away = np.abs(one - expected).max() / np.abs(expected).max()
    check("n-body of 10^4 bodies within 1e-5", one.shape == (n, 7) and away <= 1e-5, f"{away:.1e}, {figures['seconds']:.1f} s on {figures['device']}")
    check("n-body over two workers equals one", np.array_equal(one, written(*nbody, "--nodes", 2)[0]))
    plate = rng.random((600, 400)).astype(np.float32)
    heat = ("map", npy("plate", plate), "--wgsl", f"{WGSL}/heat.wgsl", "--halo", 1, "--steps", 25, "--device", "gpu")
    one, _ = written(*heat)
    now = plate.astype(np.float64)
    for _ in range(25):
        p = np.pad(now, 1, mode="edge")
        now = now + 0.2 * (p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:] - 4 * now)
    away = np.abs(one - now).max()
    check("heat on a plate beside NumPy", away <= 1e-5, f"{away:.1e}")
    check("a stencil over two workers equals one", np.array_equal(one, written(*heat, "--nodes", 2)[0]))
    total = job("reduce", "sum", f"{DATA}/plate.npy", "--wgsl", f"{WGSL}/heat.wgsl", "--halo", 1, "--device", "gpu", "--nodes", 2)["value"]
    once = written(*heat[:-4], "--steps", 1, "--device", "gpu")[0]
    check("an exact sum over a function's results", total == __import__("math").fsum(once.ravel()), total)
    for what, text, told in [("beyond the halo", "fn f(row: i32) -> f32 { return x(row + 2, 0); }", "beyond its halo"),
                             ("an endless loop", "fn f(row: i32) -> f32 { loop { } return 1.0; }", "iterations of loops"),
                             ("a buffer", "var<private> p: f32; fn f(row: i32) -> f32 { return p; }", "1 variables")]:
        open(f"{DATA}/bad.wgsl", "w").write(text)
        done = subprocess.run([a.binary, "mapreduce", "map", f"{DATA}/plate.npy", "--wgsl", f"{DATA}/bad.wgsl", "--halo", "1", "--device", "gpu", "-o",
                               f"{DATA}/bad.npy", "--local", "--nodes", "2"], capture_output=True, text=True)
        check(f"refused: {what}", done.returncode == 1 and told in done.stderr, done.stderr.strip()[-160:])
    x, y = rng.normal(size=(300, 500)), rng.normal(size=(500, 400))
    product, figures = written("matmul", npy("x", x), npy("y", y), "--device", "gpu")
    away = np.abs(product - x @ y).max() / np.abs(x @ y).max()
    check("matmul in f32 on a device", away < 1e-5 and figures["device_parts"] > 0, f"{away:.1e}")
    tables(["--device", "gpu"])


def tables(device):
    keys, values = rng.integers(-10**12, 10**12, 3000), rng.normal(size=400_000) * 10.0 ** rng.integers(-9, 9, 400_000)
    left = npy("keys", rng.choice(keys, 400_000)), npy("values", values)
    right = npy("keys2", rng.choice(keys, 9000)), npy("values2", rng.normal(size=9000))
    for words in [("groupby", "sum", *left), ("groupby", "max", *left), ("join", "sum", *left, *right), ("join", "mean", *left, *right, "--map", "x - y")]:
        mine = job(*words, "--device", "cpu"); other = job(*words, *device)
        same = all(mine[k] == other[k] for k in ("keys", "values"))
        check(f"{' '.join(words[:2])} {' '.join(map(str, device))}: the bits of one CPU", same, f"{len(mine['keys'])} groups, {other['device_parts']} parts by a device")
        if "gpu" in device:
            check("and a device has partitioned them", other["device_parts"] > 0)


def join():
    tables(["--nodes", 2, "--device", "cpu"])
    k, v, k2, v2 = (np.load(f"{DATA}/{name}.npy") for name in ("keys", "values", "keys2", "values2"))
    found = job("join", "sum", *(f"{DATA}/{name}.npy" for name in ("keys", "values", "keys2", "values2")))
    order = np.argsort(k2, kind="stable"); first, last = (np.searchsorted(k2[order], k, side) for side in ("left", "right"))
    import math
    for key, value in list(zip(found["keys"], found["values"]))[::300]:
        rows = np.flatnonzero(k == key)
        exact = math.fsum(v[r] * w for r in rows for w in v2[order][first[r]:last[r]])
        check(f"join: key {key}", exact == value, value)


def matmul():
    n = a.side
    x, y = rng.normal(size=(n, n)), rng.normal(size=(n, n))
    words = ("matmul", npy("x", x), npy("y", y), "--threads", 1, "--device", "cpu")
    times = {1: [], 2: []}; products = {}
    for _ in range(3):
        for nodes in (1, 2):
            products[nodes], figures = written(*words, "--nodes", nodes)
            times[nodes].append(figures["seconds"])
    check("matmul f64: one and two processes, the same bits", np.array_equal(products[1], products[2]))
    check("matmul f64 beside NumPy", np.allclose(products[1], x @ y, rtol=1e-11, atol=1e-10))
    one, two = min(times[1]), min(times[2])
    check("two processes >= 1.7 times one", one / two >= 1.7, f"{one / two:.2f}; {2 * n**3 / one / 1e9:.1f} GFLOP/s of one")


def sort():
    path = f"{DATA}/large.npy"
    m = np.lib.format.open_memmap(path, "w+", np.float64, (a.rows,))
    for i in range(0, a.rows, 1 << 22):
        m[i:i + (1 << 22)] = rng.normal(size=min(1 << 22, a.rows - i))
    m.flush(); del m
    net = Net(2); machines = [Machine(a.binary, net, n, {"TMPDIR": DATA}) for n in range(2)]
    try:
        for machine in machines:
            machine.up("--arrays", DATA)
        form(machines)
        machines[0].until("knows ways", lambda: all(any(p["up"] for p in n.get("paths", [])) for n in machines[0].nodes()[:1]))
        before = sum(machine.received() for machine in machines)
        began = time.time()
        child = subprocess.Popen(["ip", "netns", "exec", machines[0].ns, a.binary, "mapreduce", "sort", path, "-o", f"{DATA}/sorted.npy", "--nodes", "2",
                                  "--threads", "1", "--memory", "600M", "--json"], env=machines[0].env, cwd=machines[0].home, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        peak, spilled, killed = {}, 0, False
        while child.poll() is None:
            for ns in net.hosts:
                for pid in ip("netns", "pids", ns).stdout.split():
                    try:
                        line = open(f"/proc/{pid}/cmdline").read().replace("\0", " ")
                        if "mapreduce" in line:
                            peak[ns] = max(peak.get(ns, 0), next(int(l.split()[1]) for l in open(f"/proc/{pid}/status") if l.startswith("VmHWM")) // 1024)
                        if a.kill and not killed and ns == net.hosts[1] and "worker" in line and time.time() - began > 6:
                            os.kill(int(pid), 9); killed = True
                    except (OSError, StopIteration):
                        pass
            time.sleep(0.1)
        out, said = child.communicate()
        check("a sort over two machines", child.returncode == 0, said.strip()[-400:])
        figures = json.loads(out)
        moved, must = sum(machine.received() for machine in machines) - before, 8 * a.rows / 2
        check("bytes between machines <= 1.1 of what must move", moved <= 1.1 * must, f"{moved / must:.3f}: {moved / 1e6:.0f} MB of {must / 1e6:.0f}, {time.time() - began:.0f} s, {figures['buckets']} buckets, lost {figures['lost']}")
        check("each machine under 512 MB", max(peak.values()) < 512, f"{peak} MB at most in a process")
        if a.kill:
            check("a lost machine's ranges are sorted here", killed and figures["lost"] == 1)
        got = np.load(f"{DATA}/sorted.npy", mmap_mode="r"); expected = np.sort(np.load(path))
        check("right", all(np.array_equal(got[i:i + (1 << 22)], expected[i:i + (1 << 22)]) for i in range(0, a.rows, 1 << 22)))
        check("nothing is left", not [name for name in os.listdir(DATA) if "sort" in name and name != "sorted.npy"], os.listdir(DATA))
    finally:
        for machine in machines:
            machine.end()
        net.end()


try:
    for part in a.only.split(","):
        {"gpu": gpu, "matmul": matmul, "join": join, "sort": sort}[part]()
finally:
    shutil.rmtree(DATA, ignore_errors=True)
sys.exit(f"{len(failed)} failed: {failed}" if failed else 0)
