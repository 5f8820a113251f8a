#!/usr/bin/env python3
"""Issue 34, training. PACELINE names the binary; TORCH_PYTHON a Python with torch, transformers, peft, gguf, safetensors (CPU builds).

    bar34.py step    [--runs 5]    6 min   processor seconds of a step in turns with PyTorch + peft: SmolLM2's shapes, f32, 1 x 256, LoRA 8
    bar34.py threads [--runs 5]    4 min   two threads over one, wall time of a step (an idle machine); resident memory
    bar34.py qlora   --big FILE    3 min   resident memory of QLoRA on a 1B Q4_K_M
    bar34.py workers               2 min   1, 2, 3, 4 and 6 workers, 50 steps of the toy: SHA-256 of adapter and curve; stages too
    bar34.py faults  [--minutes 10] 25 min  a kill every 15 s to one of 3 workers: bytes, and wall time over the undisturbed run
    bar34.py resume  [--runs 20]   3 min   kill -9 at random moments and --resume, until it ends: SHA-256
    bar34.py austen  --deb FILE [--steps 120]  20 min  two nodes on Emma (apt-get download r-cran-janeaustenr): held-out loss, loss.svg

A step's cost is the difference of a run of few steps and one of 8 more, so start and end do not count. The toy is
tests-data/golden/hf/llama-tied, 3 layers, 12 rows a step.
"""
import hashlib, random
from common32 import *

parser = arguments(__doc__, runs=0, minutes=10.0, steps=120, seed=34, big="", deb="")
parser.add_argument("what", choices=["step", "threads", "qlora", "workers", "faults", "resume", "austen", "all"])
a = parser.parse_args()
PYTHON = os.environ.get("TORCH_PYTHON", "")
TOY = f"{REPO}/tests-data/golden/hf/llama-tied"
FEW, MORE = 3, 8
HOME = {"PACELINE_HOME": folder()}


def timed(*args, ok=True, stop_after=None):
    """(wall seconds, processor seconds with its workers, largest resident MiB of a process) of a command, killed after a while if asked."""
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as said:
        child = start([BINARY, *args], env={**os.environ, **HOME}, stdout=subprocess.DEVNULL, stderr=said)
        timer = threading.Timer(stop_after or 3600, lambda: kill_now(child))
        timer.start()
        _, status, used = os.wait4(child.pid, 0)
        timer.cancel()
        child.returncode = os.waitstatus_to_exitcode(status)
        if ok and child.returncode:
            said.seek(0)
            sys.exit(f"{' '.join(map(str, args))}: exit {child.returncode}: {said.read()[-800:]}")
    return time.perf_counter() - began, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def kill_now(child):
    with contextlib.suppress(OSError):
        os.kill(child.pid, signal.SIGKILL)


def base():
    """SmolLM2's weights as a folder in f32, made once; both programs read it."""
    out = f"{MADE}/smollm2-f32"
    if not os.path.exists(f"{out}/config.json"):
        os.makedirs(MADE, exist_ok=True)
        half = folder() + "/half"
        subprocess.run([PYTHON, f"{REPO}/scripts/models/hf_folder.py", SMOLLM2, half], check=True)
        program = ("import sys, torch, shutil, glob, os\nfrom transformers import AutoModelForCausalLM as M\n"
                   "m = M.from_pretrained(sys.argv[1], dtype=torch.float32); m.save_pretrained(sys.argv[2] + '.new')\n"
                   "[shutil.copy(f, sys.argv[2] + '.new') for f in glob.glob(sys.argv[1] + '/tokenizer*')]\nos.rename(sys.argv[2] + '.new', sys.argv[2])")
        subprocess.run([PYTHON, "-c", program, half, out], check=True)
    return out


def texts(name, rows, words):
    """Lines of text that are longer than a row."""
    path = f"{folder()}/{name}.jsonl"
    r = random.Random(34)
    vocabulary = "the a stone river road bird winter letter house light answer field town says far near old new and of".split()
    with open(path, "w") as f:
        for _ in range(rows):
            print(json.dumps({"text": " ".join(r.choice(vocabulary) for _ in range(words))}), file=f)
    return path


def training(model, data, output, steps, *more, method="lora"):
    return ["train", model, "--data", data, "--method", method, "--rank", 8, "--output", output, "--steps", steps, "--train-on", "all",
            "--save-every", 100000, "--eval-every", 100000, "--seed", 1, "--local", *more]


def a_step(model, data, threads, *more):
    """(wall, processor) seconds of a step."""
    found = [timed(*training(model, data, f"{folder()}/out", steps, "--batch", 1, "--max-tokens-per-row", 256, "--threads", threads, *more))
             for steps in (FEW, FEW + MORE)]
    return [(long - short) / MORE for short, long in zip(found[0][:2], found[1][:2])]


TORCH = r"""
import json, os, resource, sys, time, torch
from transformers import AutoModelForCausalLM
from peft import LoraConfig, get_peft_model
torch.set_num_threads(int(sys.argv[2]))
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=names, task_type="CAUSAL_LM"))
model.train()
how = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)
ids = torch.tensor([[(i * 7919) % 48000 + 100 for i in range(256)]])
def step():
    how.zero_grad(); loss = model(input_ids=ids, labels=ids, use_cache=False).loss; loss.backward()
    torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0); how.step()
step(); step()
print("ready", flush=True)
for line in sys.stdin:
    began = time.process_time()
    for _ in range(int(line)): step()
    print(json.dumps([(time.process_time() - began) / int(line), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]), flush=True)
"""


def step():
    if not PYTHON:
        return skipped("step beside PyTorch", "TORCH_PYTHON names no Python with torch and peft")
    model, data = base(), texts("step", 24, 400)
    peer = start([PYTHON, "-c", TORCH, model, 1], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                 env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"})
    if peer.stdout.readline().strip() != "ready":
        sys.exit("PyTorch did not start, its message is above")
    ours, theirs = [], []
    for _ in range(a.runs or 5):
        ours.append(a_step(model, data, 1)[1])
        print(MORE, file=peer.stdin, flush=True)
        theirs.append(json.loads(peer.stdout.readline()))
    kill(peer)
    told("step, ours", ours, "processor s")
    told("step, PyTorch f32", [t[0] for t in theirs], "processor s")
    told("step, PyTorch's resident memory", [t[1] for t in theirs], "MiB")
    bar("step, processor seconds over PyTorch + peft", [o / t[0] for o, t in zip(ours, theirs)], "x", 0.7, False)


def threads():
    model, data = base() if PYTHON else SMOLLM2, texts("threads", 24, 400)
    ratios, walls = [], []
    for _ in range(a.runs or 5):
        one, two = (a_step(model, data, n)[0] for n in (1, 2))
        walls.append(one)
        ratios.append(one / two)
    told("threads, a step on one thread", walls, "s")
    bar("threads, two over one", ratios, "x", 1.7)
    memory = timed(*training(model, data, f"{folder()}/out", 4, "--batch", 1, "--max-tokens-per-row", 256, "--threads", 1))[2]
    bar("threads, resident memory", memory / 1024, "GiB", 1.0, False)


def qlora():
    big = a.big or next((p for p in [f"{MADE}/1b-q4_k_m.gguf", f"{MODELS}/synth-llama-1b.Q4_K_M.gguf"] if os.path.exists(p)), None)
    if not big:
        return skipped("qlora, resident memory", "--big FILE: a 1B in Q4_K_M (scripts/models/synth_llama.py, then quantize.py)")
    data = texts("qlora", 8, 400)
    memory = timed(*training(big, data, f"{folder()}/out", 3, "--batch", 1, "--max-tokens-per-row", 256, "--threads", 1, method="qlora"))[2]
    bar("qlora on a 1B Q4_K_M, resident memory", memory / 1024, "GiB", 1.5, False)


def toy_data():
    path = f"{folder()}/toy.jsonl"
    with open(path, "w") as f:
        for i in range(36):
            answer = ["the front", "a line of riders", "one machine alone"][i % 3]
            print(json.dumps({"prompt": f"who rides at {i}", "completion": answer + " again" * (i % 5)}), file=f)
    return path


def toy(data, output, *more, steps=50):
    return ["train", TOY, "--data", data, "--output", output, "--method", "lora", "--rank", 4, "--batch", 12, "--lr", "1e-2", "--seed", 3,
            "--steps", steps, "--local", *more]


def digest(output):
    """SHA-256 of the adapter, and of the curve without times."""
    with open(f"{output}/adapter_model.safetensors", "rb") as f:
        adapter = hashlib.sha256(f.read()).hexdigest()
    with open(f"{output}/metrics.jsonl") as f:
        curve = [[m.get(k) for k in ("step", "loss", "lr", "grad_norm", "judged", "val_loss")] for m in map(json.loads, f)]
    return adapter, hashlib.sha256(json.dumps(curve).encode()).hexdigest(), len(curve)


def workers():
    data, found = toy_data(), {}
    cases = [(n, 1, 1) for n in (1, 2, 3, 4, 6)] + [(1, 1, 3), (2, 2, 1), (4, 2, 1)]
    for nodes, stages, count in cases:
        output = f"{folder()}/out"
        run(*toy(data, output, "--nodes", nodes, "--stages", stages, "--threads", count), env=HOME)
        found[nodes, stages, count] = digest(output)
        print(f"  {nodes} workers, {stages} stages, {count} threads: {found[nodes, stages, count][0][:16]} {found[nodes, stages, count][1][:16]}", flush=True)
    bar(f"workers, different SHA-256 of adapter and curve over {len(cases)} ways", len(set(found.values())), "", 1, False)


def worker_pids(pid):
    """Its children that are workers."""
    found = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as f:
                found += map(int, f.read().split())
    return found


def faults():
    """SmolLM2 over three workers of a thread: calibrated, undisturbed, and with a kill every 15 s."""
    data, r = texts("faults", 64, 90), random.Random(a.seed)
    with_nodes = lambda output, steps: training(SMOLLM2, data, output, steps, "--batch", 6, "--max-tokens-per-row", 64, "--nodes", 3, "--threads", 1)
    short, long = (timed(*with_nodes(f"{folder()}/out", n))[0] for n in (3, 9))
    each = max(0.02, (long - short) / 6)
    steps = max(20, int(60 * a.minutes / each))
    print(f"  {each:.2f} s a step, {steps} steps", flush=True)
    calm_at, hit_at = f"{folder()}/calm", f"{folder()}/hit"
    calm_wall = timed(*with_nodes(calm_at, steps))[0]
    child = start([BINARY, *with_nodes(hit_at, steps)], env={**os.environ, **HOME}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    said = []
    threading.Thread(target=lambda: said.extend(child.stderr), daemon=True).start()
    began, kills, next_at = time.monotonic(), 0, 15.0
    while child.poll() is None:
        gone = time.monotonic() - began
        if gone > 3 * calm_wall + 120:
            kill(child)
            sys.exit("the disturbed run does not end: " + "".join(said[-5:]))
        if gone >= next_at and (pids := worker_pids(child.pid)):
            with contextlib.suppress(OSError):
                os.kill(r.choice(pids), signal.SIGKILL)
                kills += 1
            next_at += 15
        time.sleep(0.1)
    wall = time.monotonic() - began
    if child.returncode:
        sys.exit("the disturbed run failed: " + "".join(said[-5:]))
    print(f"  {kills} kills, {sum('was lost' in line for line in said)} told; {calm_wall:.0f} s undisturbed, {wall:.0f} s disturbed")
    bar("faults, the same SHA-256 of adapter and curve", int(digest(calm_at) == digest(hit_at)), "", 1)
    bar(f"faults, wall time with a kill every 15 s ({kills})", wall / calm_wall, "x", 1.25, False)


def resume():
    data, r = toy_data(), random.Random(a.seed)
    right_at = f"{folder()}/right"
    how = ["--nodes", 2, "--threads", 1, "--save-every", 3, "--eval-every", 10]
    whole = timed(*toy(data, right_at, *how))[0]
    right, wrong, kills = digest(right_at), 0, 0
    for _ in range(a.runs or 20):
        output, more = f"{folder()}/out", []
        for attempt in range(60):
            # Ever longer, so that it ends.
            timed(*toy(data, output, *how, *more), ok=False, stop_after=r.uniform(0.02, whole * (1 + attempt / 4)))
            if os.path.exists(f"{output}/adapter_model.safetensors") and digest(output)[2] == right[2]:
                break
            kills += 1
            more = ["--resume"]
        wrong += not os.path.exists(f"{output}/adapter_model.safetensors") or digest(output) != right
    bar(f"resume, runs with other bytes after {kills} kills in {a.runs or 20} runs", wrong, "", 0, False)


def austen():
    if not a.deb:
        return skipped("austen", "--deb FILE: apt-get download r-cran-janeaustenr")
    at = folder()
    subprocess.run([sys.executable, f"{REPO}/scripts/golden/austen.py", a.deb, f"{at}/emma.txt"], check=True)
    with open(f"{at}/emma.txt") as f:
        text = f.read()
    pieces = [text[i:i + 1500] for i in range(0, len(text), 1500)]
    for name, part in [("train", pieces[:-24]), ("valid", pieces[-24:])]:
        with open(f"{at}/{name}.jsonl", "w") as f:
            [print(json.dumps({"text": p}), file=f) for p in part]
    output = f"{MADE}/austen"
    shutil.rmtree(output, ignore_errors=True)
    found = json.loads(run("train", SMOLLM2, "--data", f"{at}/train.jsonl", "--valid", f"{at}/valid.jsonl", "--output", output, "--method", "lora",
                           "--rank", 8, "--batch", 4, "--max-tokens-per-row", 256, "--train-on", "all", "--steps", a.steps, "--eval-every", 20,
                           "--warmup", 5, "--nodes", 2, "--threads", 1, "--local", "--seed", 1, "--json", env=HOME, timeout=3 * 3600))
    print(f"  held-out loss {found['first_val_loss']:.4f} -> {found['val_loss']:.4f}; the curve is {output}/loss.svg")
    bar("austen, held-out loss at the end less that before", found["val_loss"] - found["first_val_loss"], "", -0.01, False)


print(load(), BINARY, flush=True)
for what in ["step", "threads", "qlora", "workers", "faults", "resume", "austen"] if a.what == "all" else [a.what]:
    globals()[what]()
end()
