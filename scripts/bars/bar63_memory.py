#!/usr/bin/env python3
"""Issue 63: models larger than memory, on Linux, as root (cgroups; drop_caches).

    bar63_memory.py PACELINE [--work /tmp/bar63] [--layers 17] [--memory 2G] [--only moe,two,cluster,dense,..]

moe     Qwen3-30B-A3B's shape (17 layers: 6 GB) under --memory in a cgroup of that size: the whole
        model's answer, most resident memory, tokens/s over rate / missed bytes a token, speed and
        prediction (also under 5/4 of the limit), and the bytes that a prompt of 512 tokens reads
        over those of all experts
two     the same over two workers, each in a cgroup of half of it
cluster `load --memory` over two nodes in namespaces, each in a cgroup of --machine: the whole's answer
dense   a dense model of 4 GB under 1 GB: the same answer
mlx     all of bar63_mlx.py
faults  kill -9 while packing, a full disk, a file cut while it is read by a server
start   the second start of a packed model over the time to read its file
Needs numpy and gguf for the models (PYTHON=...). Disk: two and a half times the models.
"""
import argparse, json, os, re, shutil, signal, subprocess, sys, threading, time

import common31
from common import ALONE, MLX_PYTHON, SMOLLM2, Server

PIECE = 1 << 20
HERE = os.path.dirname(os.path.abspath(__file__))
GROUPS = "/sys/fs/cgroup/memory" if os.path.isdir("/sys/fs/cgroup/memory") else "/sys/fs/cgroup"
LIMIT = "memory.limit_in_bytes" if GROUPS.endswith("memory") else "memory.max"


def size_of(text):
    return int(text[:-1]) << {"M": 20, "G": 30}[text[-1]]


def pread_rate(path, most=1 << 30):
    """Bytes a second by 16 threads past the cache."""
    import mmap
    fd, at, lock = os.open(path, os.O_RDONLY | os.O_DIRECT), [0], threading.Lock()
    n = min(os.path.getsize(path), most) // PIECE

    def read():
        buffer = mmap.mmap(-1, PIECE)
        while True:
            with lock:
                i, at[0] = at[0], at[0] + 1
            if i >= n:
                return
            os.preadv(fd, [buffer], i * PIECE)
    threads = [threading.Thread(target=read) for _ in range(16)]
    began = time.perf_counter()
    [t.start() for t in threads]
    [t.join() for t in threads]
    os.close(fd)
    return n * PIECE / (time.perf_counter() - began)


def drop_caches():
    subprocess.run("sync; echo 3 > /proc/sys/vm/drop_caches", shell=True, check=True)


def packed_files(home):
    found = subprocess.run(["find", f"{home}/packed", "-name", "*.packed"], capture_output=True, text=True)
    return found.stdout.split()


def fields(pid):
    try:
        status, io = open(f"/proc/{pid}/status").read(), open(f"/proc/{pid}/io").read()
    except OSError:
        return 0, 0
    rss = re.search(r"VmRSS:\s+(\d+)", status)
    return int(rss[1]) << 10 if rss else 0, int(re.search(r"read_bytes: (\d+)", io)[1])


def children(pid):
    text = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout
    return [int(child) for child in text.split()]


class Run:
    """An answer of `paceline run`, in a cgroup: text, figures, memory and bytes read."""

    def __init__(self, binary, home, model, prompt, tokens, *args, limit=None, workers=0):
        command = [binary, "run", model, prompt, "--local", "--raw", "--temperature", "0",
                   "--max-tokens", str(tokens), *args]
        groups = []

        def group(name, pid, bytes_):
            path = f"{GROUPS}/{name}"
            os.makedirs(path, exist_ok=True)
            open(f"{path}/{LIMIT}", "w").write(str(bytes_))
            open(f"{path}/cgroup.procs", "w").write(str(pid))
            groups.append(path)

        def enter():
            if limit and not workers:
                group(f"bar63-{os.getpid()}", os.getpid(), limit)
        env = {**os.environ, "PACELINE_HOME": home}
        child = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                 preexec_fn=enter)
        self.most, self.io, self.text = {}, [], b""
        over, stderr, placed = threading.Event(), [], set()

        def watch():
            while not over.is_set():
                for pid in children(child.pid) if workers else [child.pid]:
                    if workers and limit and pid not in placed:
                        placed.add(pid)
                        group(f"bar63-{pid}", pid, limit // workers)
                    rss, _ = fields(pid)
                    self.most[pid] = max(self.most.get(pid, 0), rss)
                time.sleep(0.02)
        watching = threading.Thread(target=watch)
        watching.start()
        reading = threading.Thread(target=lambda: stderr.append(child.stderr.read()))
        reading.start()
        fd = child.stdout.fileno()
        while chunk := os.read(fd, 4096):
            pids = children(child.pid) if workers else [child.pid]
            self.io.append((time.perf_counter(), sum(fields(pid)[1] for pid in pids)))
            self.text += chunk
        self.code = child.wait()
        reading.join()
        over.set()
        watching.join()
        self.stderr = stderr[0].decode(errors="replace")
        for path in groups:
            try:
                os.rmdir(path)
            except OSError:
                pass
        found = re.search(r"decode ([0-9.]+) tokens/s(?: \(([0-9.]+) predicted\))?", self.stderr)
        self.decode = float(found[1]) if found else 0.0
        self.predicted = float(found[2]) if found and found[2] else None
        if self.code:
            print("exit", self.code, self.stderr[-500:])


def make(args, kind, layers, *more):
    path = f"{args.work}/{kind}-{layers}.gguf"
    if not os.path.exists(path):
        python = os.environ.get("PYTHON", MLX_PYTHON)
        script = f"{HERE}/../models/synth_gguf.py"
        command = [python, script, kind, SMOLLM2, path + ".new", "--layers", str(layers), *more]
        subprocess.run(command, check=True)
        os.rename(path + ".new", path)
    return path


def answers(args, model, memory, *options, workers=0, tokens=48):
    """The whole model's answer and the streamed one's, which must be equal."""
    home = f"{args.work}/home"
    prompt = "The disk reads what memory does not hold"
    options = ("--context", "2048", *options)
    engine = [one for one in options if one in ("--engine", "mlx")]
    whole = Run(args.binary, home, model, prompt, tokens, "--context", "2048", *engine)
    first = Run(args.binary, home, model, prompt, 2, "--memory", memory, *options,
                limit=size_of(memory), workers=workers)
    streamed = Run(args.binary, home, model, prompt, tokens, "--memory", memory, *options,
                   limit=size_of(memory), workers=workers)
    # Another limit, whose prediction has the reuse of experts that the answer before showed.
    more = size_of(memory) * 5 // 4
    other = Run(args.binary, home, model, prompt, tokens, "--memory", f"{more >> 20}M", *options,
                limit=more, workers=workers)
    rate = pread_rate(max(packed_files(home), key=os.path.getsize))
    (t0, io0), (t1, io1) = streamed.io[0], streamed.io[-2]
    missed = (io1 - io0) / max(len(streamed.io) - 2, 1)
    most = max(streamed.most.values(), default=0)
    budget = size_of(memory) // max(workers, 1)
    print(json.dumps({
        "model": os.path.basename(model), "bytes": os.path.getsize(model), "memory": memory,
        "equal": whole.text == streamed.text and len(whole.text) > 1 and first.code == 0,
        "resident_over_budget": round(most / budget, 3), "whole_tok_s": whole.decode,
        "tok_s": streamed.decode, "predicted_tok_s": streamed.predicted,
        "other_limit_tok_s": other.decode, "other_limit_predicted": other.predicted,
        "rate_mb_s": round(rate / 1e6), "missed_mb_a_token": round(missed / 1e6, 1),
        "tok_s_over_bound": round(streamed.decode * missed / rate, 3),
    }), flush=True)


def moe(args):
    model = make(args, "qwen3-30b", args.layers)
    answers(args, model, args.memory)
    words = " ".join(["disk"] * 511)
    run = Run(args.binary, f"{args.work}/home", model, words, 2, "--memory", args.memory, "--context", "2048",
              limit=size_of(args.memory))
    all_bytes = os.path.getsize(max(packed_files(f"{args.work}/home"), key=os.path.getsize))
    print(json.dumps({"prompt": re.search(r"\[prompt (\d+)", run.stderr)[1],
                      "prompt_reads_over_file": round(run.io[0][1] / all_bytes, 3)}), flush=True)


def two(args):
    answers(args, make(args, "qwen3-30b", args.layers), args.memory, "--nodes", "2", "--split", "pipeline",
            workers=2)


def cluster(args):
    over_nodes(args, make(args, "qwen3-30b", args.layers), args.machine, args.node_memory, 24)


def over_nodes(args, model, limit, memory, tokens, *engine):
    """The answer by `load --memory` over two nodes, each in a cgroup of `limit`."""
    words = "The disk reads what memory does not hold"
    whole = Run(args.binary, f"{args.work}/home", model, words, tokens, "--context", "2048", *engine)

    class Limited(common31.Machine):
        def command(self, *more):
            group, up = groups + self.name, more[0] == "up"
            if up:
                os.makedirs(group, exist_ok=True)
                open(f"{group}/{LIMIT}", "w").write(str(size_of(limit)))
            enter = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]
            return [*(enter if up else []), *super().command(*more)]
    net, groups = common31.Net(2), f"{GROUPS}/bar63-{os.getpid()}-{os.path.basename(model)}-"
    env = {key: os.environ[key] for key in ["PACELINE_MLXC"] if key in os.environ}
    machines = [Limited(args.binary, net, n, env) for n in range(2)]
    try:
        [machine.up("--discovery", "all") for machine in machines]
        common31.form(machines)
        owner = machines[0]
        ask = [model, "--nodes", 2, "--split", "pipeline", "--context", 2048, "--parallel", 1, "--memory", memory, *engine]
        for _ in range(60):  # until the machines have measured their engines
            preview = json.loads(owner.told("load", *ask, "--preview", "--json"))
            if preview["placements"]:
                break
            time.sleep(1)
        owner.told("load", *ask)
        shown = owner.told("ps").splitlines()[2:]
        name = owner.get("/v1/models")["data"][0]["id"]
        request = {"model": name, "prompt": words, "max_tokens": tokens, "temperature": 0}
        curl = ["curl", "-s", "-m", "590", "-d", json.dumps(request), "-H", "Content-Type: application/json",
                "http://127.0.0.1:52415/v1/completions"]
        began = time.perf_counter()
        done = subprocess.run(["ip", "netns", "exec", owner.ns, *curl], capture_output=True, text=True)
        took = time.perf_counter() - began
        text = json.loads(done.stdout)["choices"][0]["text"]
        peak = "/memory.max_usage_in_bytes" if LIMIT != "memory.max" else "/memory.peak"
        most = [int(open(groups + machine.name + peak).read()) / size_of(limit) for machine in machines]
        packed = [sum(map(os.path.getsize, packed_files(machine.home))) >> 20 for machine in machines]
        print(json.dumps({"cluster": memory, "machine": limit, "engine": engine, "seconds": round(took, 1),
                          "equal": text.strip() == whole.text.decode().strip(), "ps": shown,
                          "packed_mib": packed,
                          "preview": [(it["split"], it.get("from_disk")) for it in preview["placements"]] or preview["notes"],
                          "peak_over_machine": [round(share, 3) for share in most]}), flush=True)
    finally:
        [machine.end() for machine in machines]
        net.end()
        for machine in machines:
            try:
                os.rmdir(groups + machine.name)
            except OSError:
                pass


def mlx(args):
    import bar63_mlx
    bar63_mlx.everything(args)


def dense(args):
    answers(args, make(args, "qwen3-dense", args.dense_layers), args.dense_memory, tokens=8)


def faults(args, *engine):
    model, home = args.dense or make(args, "qwen3-dense", 12), f"{args.work}/faults"
    shutil.rmtree(home, ignore_errors=True)
    memory = ["--memory", "450M" if engine else "500M", "--context", "1024", *engine]
    whole = Run(args.binary, home, model, "One disk", 8, "--context", "1024", *engine)
    env = {**os.environ, "PACELINE_HOME": home}
    command = [args.binary, "run", model, "One disk", "--local", "--raw", "--temperature", "0",
               "--max-tokens", "8", *memory]
    child = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.time() + 60
    while time.time() < until and not subprocess.run(
            f"find {home}/packed -name '*.part' -size +20M | grep -q .", shell=True).returncode == 0:
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    after = Run(args.binary, home, model, "One disk", 8, *memory)
    print(json.dumps({"kill -9 while packing": after.text == whole.text}), flush=True)
    full = f"{args.work}/full"
    os.makedirs(f"{full}/packed", exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64M", "none", f"{full}/packed"], check=True)
    try:
        run = Run(args.binary, full, model, "One disk", 8, *memory)
        named = ".part" in run.stderr and "No space left" in run.stderr and run.text == b""
        print(json.dumps({"disk full": named, "error": run.stderr.strip()[-300:]}), flush=True)
    finally:
        subprocess.run(["umount", f"{full}/packed"], check=True)
    server = Server(args.binary, model, *ALONE, "--memory", "700M", "--context", "512", *engine)
    name = server.call("GET", "/v1/models")["data"][0]["id"]
    ask = {"model": name, "prompt": "One disk", "max_tokens": 8, "temperature": 0}
    before = server.call("POST", "/v1/completions", ask)["choices"][0]["text"]
    [packed] = packed_files(server.home)
    os.truncate(packed, os.path.getsize(packed) // 3)
    text = server.call("POST", "/v1/completions", {**ask, "prompt": "One disk"})["choices"][0]["text"]
    told = [line.strip() for line in server.log if ".packed" in line]
    print(json.dumps({"file cut while it is read": text == before, "told": told[-1:]}), flush=True)
    server.end()


def start(args):
    model, home = make(args, "qwen3-dense", args.dense_layers), f"{args.work}/home"
    Run(args.binary, home, model, "One", 2, "--packed")
    ratios = []
    for _ in range(3):
        drop_caches()
        run = subprocess.run([args.binary, "run", model, "One", "--local", "--raw", "--max-tokens", "1",
                              "--packed", "--json"], env={**os.environ, "PACELINE_HOME": home},
                             capture_output=True, text=True)
        figures = json.loads(run.stdout)
        drop_caches()
        packed = max(packed_files(home), key=os.path.getsize)
        read = os.path.getsize(packed) / pread_rate(packed, 1 << 40)
        ratios.append(round(figures["load_ms"] / 1e3 / read, 2))
    print(json.dumps({"second start over reading its file": ratios}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--work", default="/tmp/bar63")
    parser.add_argument("--layers", type=int, default=17)
    parser.add_argument("--memory", default="2G")
    parser.add_argument("--machine", default="1G")
    parser.add_argument("--node-memory", default="700M")
    parser.add_argument("--dense", help="another dense model for faults")
    parser.add_argument("--dense-layers", type=int, default=76)
    parser.add_argument("--dense-memory", default="1G")
    parser.add_argument("--only", default="moe,two,dense,faults,start")
    args = parser.parse_args()
    os.makedirs(args.work, exist_ok=True)
    for name in args.only.split(","):
        globals()[name](args)


if __name__ == "__main__":
    main()
