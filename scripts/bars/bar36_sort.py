#!/usr/bin/env python3
"""Issue 36: sort of 50 M u32 beside np.sort; 8 GB under --memory 1G beside the disk.

    bar36_sort.py BINARY [--rounds 5]            1 min: one thread <= 2.2 x NumPy's time, two 1.5 x faster than one
    bar36_sort.py BINARY --large [--gb 8]        4 to 8 min and 24 GB of disk: right, >= 60 % of the disk's rate over its passes

The job reads a file and writes one, so NumPy's time is load + sort + save, and np.sort alone is printed too.
The disk's rate: dd-like writes with fsync and cold reads of 2 GB; the sort has two passes of each (in, parts, parts, out).
"""
import argparse
from bars36 import *

ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
ap.add_argument("binary"); ap.add_argument("--rounds", type=int, default=5); ap.add_argument("--large", action="store_true"); ap.add_argument("--gb", type=float, default=8)
a = ap.parse_args()
rng = np.random.default_rng(36)
out = f"{DATA}/sorted.npy"
if not a.large:
    path = npy("u32-50M", lambda: rng.integers(0, 2**32, 50_000_000, dtype=np.uint32))
    plain, whole, one, two = [], [], [], []
    for _ in range(a.rounds):
        began = time.perf_counter(); v = np.load(path); t0 = time.perf_counter(); v.sort(); t1 = time.perf_counter()
        np.save(f"{DATA}/np.npy", v); whole.append(time.perf_counter() - began); plain.append(t1 - t0)
        one.append(job(a.binary, "sort", path, "-o", out, "--threads", 1)[0]["seconds"])
        two.append(job(a.binary, "sort", path, "-o", out, "--threads", 2)[0]["seconds"])
    assert (np.load(out, mmap_mode="r") == np.load(f"{DATA}/np.npy", mmap_mode="r")).all(), "wrong order"
    print(f"np.sort {shown(plain)} s, with load and save {shown(whole)}; one thread {shown(one)}, two {shown(two)}")
    ratio, faster = statistics.median(o / w for o, w in zip(one, whole)), statistics.median(o / t for o, t in zip(one, two))
    bar("sort, one thread beside np.sort alone", f"{statistics.median(o / p for o, p in zip(one, plain)):.2f}", statistics.median(o / p for o, p in zip(one, plain)) <= 2.2, "<= 2.2")
    bar("sort, one thread beside load + sort + save", f"{ratio:.2f}", ratio <= 2.2, "<= 2.2")
    bar("sort, two threads", f"{faster:.2f} x", faster >= 1.5, ">= 1.5")
else:
    n = int(a.gb * 1e9 / 8)
    path = f"{DATA}/large.npy"
    if not os.path.exists(path):
        m = np.lib.format.open_memmap(path, "w+", np.uint64, (n,))
        for i in range(0, n, 1 << 24):
            m[i:i + (1 << 24)] = rng.integers(0, 2**64, min(1 << 24, n - i), dtype=np.uint64)
        m.flush(); del m
    block = os.urandom(1 << 24)
    began = time.perf_counter()
    with open(f"{DATA}/disk", "wb") as f:
        for _ in range(128):
            f.write(block)
        f.flush(); os.fsync(f.fileno())
    wrote = 128 * len(block) / (time.perf_counter() - began)
    fd = os.open(f"{DATA}/disk", os.O_RDONLY); os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    began = time.perf_counter(); total = 0
    while data := os.read(fd, 1 << 24):
        total += len(data)
    read = total / (time.perf_counter() - began); os.close(fd); os.remove(f"{DATA}/disk")
    fd = os.open(path, os.O_RDONLY); os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED); os.close(fd)
    child = subprocess.Popen([a.binary, "mapreduce", "sort", path, "-o", out, "--memory", "1G", "--json"], stdout=subprocess.PIPE, text=True)
    peak = 0
    while child.poll() is None:
        try:
            peak = max(peak, next(int(l.split()[1]) for l in open(f"/proc/{child.pid}/status") if l.startswith("RssAnon")))
        except (OSError, StopIteration):
            pass
        time.sleep(0.2)
    said = json.loads(child.stdout.read())
    v = np.load(out, mmap_mode="r"); last, right, check = 0, len(v) == n, 0
    src = np.load(path, mmap_mode="r"); total_in = 0
    for i in range(0, n, 1 << 24):
        p = v[i:i + (1 << 24)]; right &= bool((p[1:] >= p[:-1]).all()) and int(p[0]) >= last; last = int(p[-1]); check ^= int(np.bitwise_xor.reduce(p))
        total_in ^= int(np.bitwise_xor.reduce(src[i:i + (1 << 24)]))
    right &= check == total_in
    bytes_ = n * 8
    ideal = 2 * bytes_ / wrote + 2 * bytes_ / read
    share = ideal / said["seconds"]
    print(f"disk writes {wrote / 1e9:.2f}, reads {read / 1e9:.2f} GB/s; sort {said['seconds']:.1f} s, {said['buckets']} buckets, in memory {said['in_memory']}, RssAnon {peak / 1e6:.2f} GB")
    bar("sort of %.0f GB under 1G" % a.gb, f"right {right}, {share:.2f} of the disk's rate, {peak / 2**20:.2f} GiB", right and share >= 0.6 and peak <= 1.1 * 2**20, ">= 0.60, about 1 GiB")
    os.remove(out)
