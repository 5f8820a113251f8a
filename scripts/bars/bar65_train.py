#!/usr/bin/env python3
"""Bars of training: bar65_train.py PACELINE memory|stages|rows|hang|faults|torch [--rows N]
[--tokens N] [--layers N] [--class mlx-f32] [--avx2]

A llama of 30 million numbers (17 layers of width 384), trained whole, with `stages` by adapters.
memory  most resident bytes of every rank, `--shard all`, 1 to 4 ranks, also with two kills; bytes
        sent over ZeRO's
stages  seconds of a step over two stages against one process, one thread each, and the share of it
        in which the least busy stage computes; with `--class mlx-f32` on MLX's CPU build
        (PACELINE_MLXC), of 4 layers and shorter rows
rows    the same of a row of 8,192 tokens that is cut over two ranks, 1 layer
hang    a stage's main thread stops and its heartbeats go on: seconds until it is named, same bytes
faults  2 layers: a full disk at a checkpoint, a cut checkpoint, other ranks at --resume; the error
        of each, and whether the run then ends with the bytes of one process
torch   processor seconds of a step against PyTorch's, one thread; needs torch and transformers
Prints one JSON object. `memory` alone counts on a machine that does other things.
"""

import argparse
import ctypes
import json
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

GOLDEN = Path(__file__).resolve().parents[2] / "tests-data/golden/hf/llama-untied-bf16"
WIDTH, FFN, HEADS = 384, 1024, 6


def make_model(to, layers):
    to.mkdir()
    for path in GOLDEN.glob("*.json"):
        shutil.copy(path, to / path.name)
    config = json.loads((to / "config.json").read_text())
    config |= {"hidden_size": WIDTH, "intermediate_size": FFN, "num_hidden_layers": layers,
               "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
               "head_dim": WIDTH // HEADS, "max_position_embeddings": 16384,
               "dtype": "float32", "torch_dtype": "float32"}
    (to / "config.json").write_text(json.dumps(config))
    vocab = config["vocab_size"]
    shapes = {"model.embed_tokens": (vocab, WIDTH), "lm_head": (vocab, WIDTH),
              "model.norm": (WIDTH,)}
    for i in range(layers):
        at = f"model.layers.{i}."
        shapes |= {f"{at}self_attn.{n}_proj": (WIDTH, WIDTH) for n in "qkvo"}
        shapes |= {f"{at}mlp.gate_proj": (FFN, WIDTH), f"{at}mlp.up_proj": (FFN, WIDTH),
                   f"{at}mlp.down_proj": (WIDTH, FFN), f"{at}input_layernorm": (WIDTH,),
                   f"{at}post_attention_layernorm": (WIDTH,)}
    header, start, numbers = {}, 0, 0
    for name, shape in shapes.items():
        n = 1
        for size in shape:
            n *= size
        header[f"{name}.weight"] = {"dtype": "F32", "shape": shape,
                                    "data_offsets": [start, start + 4 * n]}
        start, numbers = start + 4 * n, numbers + n
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    # Differing numbers from one block, cut at another place for each tensor.
    block = [((i * 7919) % 2003) / 40060 - 0.025 for i in range(1 << 16)]
    with open(to / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for k, shape in enumerate(shapes.values()):
            n = shape[0] * (shape[1] if len(shape) > 1 else 1)
            values = [1.0] * n if len(shape) == 1 else None
            if values is None:
                turned = block[k * 977 % len(block):] + block[:k * 977 % len(block)]
                packed = struct.pack(f"<{len(turned)}f", *turned)
                file.write((packed * (n // len(turned) + 1))[:4 * n])
            else:
                file.write(struct.pack(f"<{n}f", *values))
    return numbers


def make_data(to, rows, tokens):
    words = ["turn", "front", "rider", "line", "machine", "wind"]
    lines = (" ".join(words[(i * 7 + j * j) % 6] for j in range(tokens)) for i in range(rows))
    to.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))


def descendants(pid):
    found, todo = [], [pid]
    while todo:
        at = todo.pop()
        try:
            for task in os.listdir(f"/proc/{at}/task"):
                todo += map(int, Path(f"/proc/{at}/task/{task}/children").read_text().split())
        except OSError:
            continue
        found.append(at)
    return found


class Peaks(threading.Thread):
    """Most resident bytes of every process of a run, and of which kind they were."""

    def __init__(self, pid):
        super().__init__(daemon=True)
        self.pid, self.most, self.over = pid, {}, False

    def run(self):
        while not self.over:
            for pid in descendants(self.pid):
                try:
                    fields = dict(line.split(":", 1) for line in
                                  Path(f"/proc/{pid}/status").read_text().splitlines())
                    self.most[pid] = int(fields["VmHWM"].split()[0]) << 10
                except (OSError, KeyError, ValueError):
                    continue
            time.sleep(0.02)


def train(paceline, home, model, data, steps, *more, method="full", watch=None):
    output = home / f"out-{time.monotonic_ns()}"
    command = [paceline, "train", model, "--data", data, "--output", output, "--method", method,
               "--lr", "1e-3", "--steps", str(steps), "--local", "--json", "--threads", "1", *more]
    child = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True,
                             stderr=subprocess.PIPE if watch else None,
                             env={**os.environ, "PACELINE_HOME": str(home / "home")})
    peaks = Peaks(child.pid)
    peaks.start()
    told = watch(child, output) if watch else None
    out, errors = child.communicate()
    peaks.over = True
    if child.returncode:
        sys.exit(f"{command}: {child.returncode}, {told}, {errors}")
    metrics = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    ranks = {pid: most for pid, most in peaks.most.items() if pid != child.pid}
    shutil.rmtree(output)
    return {"digest": json.loads(out).get("digest"), "own": peaks.most.get(child.pid),
            "ranks": sorted(ranks.values()), "metrics": metrics, "told": told}


def kill_two(child, output):
    for step in (1, 3):
        await_step(output, step)
        os.kill(workers(child)[step], signal.SIGKILL)


def await_step(output, step):
    metrics = output / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < step:
        time.sleep(0.05)


def workers(child):
    named = (pid for pid in descendants(child.pid)
             if b"train-worker" in Path(f"/proc/{pid}/cmdline").read_bytes())
    return sorted(named)


def memory(args, home, model, data, numbers):
    report = {}
    for ranks, watch in ((1, None), (2, None), (3, None), (4, None), (4, kill_two)):
        more = ["--nodes", ranks, "--shard", "all"] if ranks > 1 else []
        done = train(args.paceline, home, model, data, 5, "--batch", args.rows, *more, watch=watch)
        ranks = f"{ranks}, two killed" if watch else ranks
        most = max(done["ranks"], default=done["own"])
        report[ranks] = {"digest": done["digest"], "MiB": most >> 20,
                         "all_MiB": [bytes_ >> 20 for bytes_ in done["ranks"]]}
        report[ranks]["over_one"] = round(report[ranks]["MiB"] / report[1]["MiB"], 3)
        if ranks not in (1, "4, two killed"):
            sent = max(m["sent_bytes"] for m in done["metrics"] if m.get("sent_bytes"))
            report[ranks]["over_zero"] = round(sent / (12 * numbers * (ranks - 1) / ranks), 3)
    return report


def stages(args, home, model, data, _, two=("--stages", 2), steps=6):
    report = {}
    for name, more in (("one", ()), ("two", ("--nodes", 2, *two))):
        done = train(args.paceline, home, model, data, steps, "--batch", args.rows,
                     "--max-tokens-per-row", 8192, "--class", args.class_, *more, method="lora")
        times = [m["step_s"] for m in done["metrics"]][1:]
        report[name] = {"digest": done["digest"], "step_s": median(times)}
        busy = [m["busy_share"] for m in done["metrics"] if "busy_share" in m][1:]
        report[name]["least_busy"] = round(median(busy), 3) if busy else None
    report["times"] = round(report["one"]["step_s"] / report["two"]["step_s"], 3)
    return report


def rows(args, home, model, data, numbers):
    return stages(args, home, model, data, numbers, two=("--shard", "rows"), steps=2)


def hang(args, home, model, data, _):
    libc = ctypes.CDLL(None, use_errno=True)
    seize, interrupt = 0x4206, 0x4207

    def stop_one(child, output):
        await_step(output, 3)
        worker, computes = workers(child)[-1], 0
        while computes < 5:  # a thread that is stopped in a wait for others is no hang
            state = Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[0]
            computes = computes + 1 if state == "R" else 0
            time.sleep(0.005)
        for request in (seize, interrupt):  # the main thread alone
            if libc.ptrace(request, worker, None, None):
                sys.exit(f"ptrace: {os.strerror(ctypes.get_errno())}")
        began, found = time.monotonic(), {}

        def read():
            for line in child.stderr:
                if "hangs" in line:
                    found.update(seconds=round(time.monotonic() - began, 1), line=line.strip())
                    return

        reader = threading.Thread(target=read)
        reader.start()
        while os.WIFSTOPPED(os.waitpid(worker, 0x40000000)[1]):  # its tracer reaps it too: __WALL
            pass
        reader.join()
        return found

    two = ["--batch", args.rows, "--nodes", 2]
    report = {}
    for how in (["--stages", 2], ["--shard", "all"]):
        calm = train(args.paceline, home, model, data, 12, *two, *how)
        rough = train(args.paceline, home, model, data, 12, *two, *how, watch=stop_one)
        report[how[0]] = {**(rough["told"] or {}), "same": calm["digest"] == rough["digest"]}
    return report


def faults(args, home, model, data, numbers):
    def run(output, ranks, *more, before=()):
        command = [*before, args.paceline, "train", model, "--data", data, "--output", output,
                   "--method", "full", "--lr", "1e-3", "--steps", 6, "--save-every", 2, "--batch",
                   args.rows, "--local", "--json", "--threads", 1, "--nodes", ranks,
                   *(["--shard", "all"] if ranks > 1 else []), *more]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True,
                              env={**os.environ, "PACELINE_HOME": str(home / "home")})
        if done.returncode:
            return {"rc": done.returncode, "error": done.stderr.strip().splitlines()[-2:]}
        return json.loads(done.stdout)["digest"]

    def steps(output):
        return sorted(path.name for path in output.glob("step-*"))

    one, small, left = home / "one", home / "small", home / "left"
    expected = run(one, 1)
    small.mkdir()
    # A checkpoint has 12 bytes a number, and so have the files of its ranks: no room for a second.
    mount = (f'mount -t tmpfs -o size={30 * numbers} none {small}; "$@"; rc=$?; '
             f"cp -r {small} {left}; exit $rc")
    report = {"disk full": run(small, 2, before=["unshare", "-rm", "sh", "-c", mount, "sh"]),
              "its checkpoints": steps(left)}
    report["then three ranks with room: same"] = run(left, 3, "--resume") == expected
    shutil.rmtree(one / steps(one)[-1])
    for name in ("params", "optimiser"):
        cut = home / name
        shutil.copytree(one, cut)
        file = cut / steps(cut)[-1] / f"{name}.safetensors"
        os.truncate(file, file.stat().st_size // 2)
        report[f"{name} cut"] = run(cut, 3, "--resume")
    return report


def torch_seconds(model, data, rows, steps):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    torch.set_num_threads(1)
    tokens = AutoTokenizer.from_pretrained(model)
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimiser = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.0)
    texts = [json.loads(line)["text"] for line in data.read_text().splitlines()][:rows]
    ids = [torch.tensor([tokens(text)["input_ids"]]) for text in texts]
    found = []
    for _ in range(steps):
        began = time.process_time()
        optimiser.zero_grad()
        for row in ids:
            (net(row, labels=row).loss / len(ids)).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()
        found.append(time.process_time() - began)
    return median(found[1:])


def torch(args, home, model, data, _):
    if args.avx2:
        os.environ |= {"PACELINE_CPU": "avx2", "ATEN_CPU_CAPABILITY": "avx2",
                       "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
    spent = []
    for steps in (2, 6):  # the difference is of steps alone
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = train(args.paceline, home, model, data, steps, "--batch", args.rows)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append((after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime,
                      after.ru_minflt - before.ru_minflt))
    user, system, faults = ((six - two) / 4 for two, six in zip(*spent))
    report = {"own_s": round(user + system, 3), "own_system_s": round(system, 3),
              "own_faults": int(faults), "own_MiB": done["own"] >> 20}
    theirs = torch_seconds(model, data, args.rows, 5)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return report | {"torch_s": round(theirs, 3), "torch_MiB": memory >> 10,
                     "over": round((user + system) / theirs, 3)}


def main():
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("paceline")
    args.add_argument("bar", choices=["memory", "stages", "rows", "hang", "faults", "torch"])
    args.add_argument("--rows", type=int, help="rows of a step, a leaf each")
    args.add_argument("--tokens", type=int, help="words of a row")
    args.add_argument("--class", dest="class_", default="cpu", help="arithmetic of stages")
    args.add_argument("--avx2", action="store_true", help="torch: both without AVX-512")
    args.add_argument("--layers", type=int, help="17 without it; rows 1, faults 2, MLX 4")
    args = args.parse_args()
    args.rows = args.rows or {"memory": 8, "rows": 1}.get(args.bar, 4)
    usual = (80, 17) if args.class_ == "cpu" else (20, 4)  # MLX's CPU build takes most of a minute
    args.tokens = args.tokens or {"memory": 4, "faults": 4, "rows": 4000}.get(args.bar, usual[0])
    args.layers = args.layers or {"rows": 1, "faults": 2}.get(args.bar, usual[1])
    with tempfile.TemporaryDirectory() as home:
        home = Path(home)
        model, data = home / "model", home / "data.jsonl"
        numbers = make_model(model, args.layers)
        make_data(data, args.rows, args.tokens)
        bar = {"memory": memory, "stages": stages, "rows": rows, "hang": hang,
               "faults": faults, "torch": torch}[args.bar]
        print(json.dumps({"numbers": numbers, args.bar: bar(args, home, model, data, numbers)}))


main()
