#!/usr/bin/env python3
"""Issue 34, training. PACELINE names the binary.

    bar34.py [BAR..]        without names all but faults-long and austen, some 11 min
    step     [--runs 5]      3 min  processor seconds of a step in turns with PyTorch + peft: SmolLM2's shapes, f32, 1 x 256, LoRA 8
    threads  [--runs 5]      3 min  two threads over one, wall time of a step (an idle machine)
    memory                   2 min  resident: LoRA of SmolLM2, QLoRA of a 1B in Q4_K_M (random weights, or --big FILE)
    workers                  1 min  1, 2, 3, 4 and 6 workers, stages, threads: 50 steps of a toy, SHA-256 of adapter and curve
    faults                   1 min  three workers on the toy, 20 s: three kills, a stop, joins; SHA-256 of the undisturbed run
    resume   [--runs 20]     2 min  kill -9 at random moments and --resume, until it ends: SHA-256
    faults-long [--minutes 10] 22 min  a kill every 15 s: SHA-256, and wall time over the undisturbed run (--smollm2: not the toy)
    austen --deb FILE [--steps 60] 6 min  two nodes on Emma (apt-get download r-cran-janeaustenr): held-out loss, loss.svg

TORCH_PYTHON names a Python with PyTorch, without which `step` is skipped:
    python3 -m venv X && X/bin/pip install torch transformers peft numpy safetensors && export TORCH_PYTHON=X/bin/python
Weights are made by the Python of cargo xtask's mlx-lm (gguf, numpy).

A step's cost is the difference of a run of 2 steps and one of 5 more, so start and end do not count. The toy is
tests-data/golden/hf/llama-tied with a fourth layer. Its steps have 13 rows, so that no number of workers has even shares.
"""
import hashlib, random
import chosen
from common32 import *

PYTHON = os.environ.get("TORCH_PYTHON", "")
FEW, MORE = 2, 5
HOME = {"PACELINE_HOME": folder()}


def timed(*args, kill_after=None, limit=900):
    """(wall seconds, processor seconds, largest resident MiB) of a command, of its workers too. Only what was to be killed may fail."""
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as said:
        child = start([BINARY, *args], env={**os.environ, **HOME}, stdout=subprocess.DEVNULL, stderr=said)
        timer = threading.Timer(kill_after or limit, hit, [child.pid, signal.SIGKILL])
        timer.daemon = True
        timer.start()
        try:
            _, status, used = os.wait4(child.pid, 0)
        finally:
            timer.cancel()
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode and not (kill_after and child.returncode == -signal.SIGKILL):
            said.seek(0)
            sys.exit(f"{' '.join(map(str, args))}: exit {child.returncode}: {said.read()[-800:]}")
    return time.perf_counter() - began, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def hit(pid, number):
    with contextlib.suppress(OSError):
        os.kill(pid, number)


def made(out, *command):
    """A file or folder that is made once: `command` gets a name to write to."""
    if not os.path.exists(out):
        os.makedirs(MADE, exist_ok=True)
        shutil.rmtree(out + ".new", ignore_errors=True)
        subprocess.run([MLX_PYTHON, *command, out + ".new"], check=True, timeout=300)
        os.rename(out + ".new", out)
    return out


def base():
    """SmolLM2's weights as a folder in bf16. Both programs unpack them to the same f32."""
    return made(f"{MADE}/smollm2-hf", f"{REPO}/scripts/models/hf_folder.py", SMOLLM2)


def make(out):
    """The synthetic 1B (scripts/models/synth_llama.py) in Q4_K_M, of random blocks."""
    import types
    sys.path.insert(0, f"{REPO}/scripts/models")
    import gguf, synth_gguf
    d, ff, kv = 2048, 8192, 512
    m = synth_gguf.Synth(types.SimpleNamespace(seed=34, base=SMOLLM2, out=out, quant="Q4_K", raw_blocks=True, layers=None))
    q4 = lambda *shape: m.blocks(gguf.GGMLQuantizationType.Q4_K, shape, [(0, 0.0001), (2, 0.00075)])
    q6 = lambda *shape: m.blocks(gguf.GGMLQuantizationType.Q6_K, shape, [(208, 0.000015)])
    tensors = [("token_embd.weight", q4(m.vocab, d)), ("output_norm.weight", m.ones(d)), ("output.weight", q6(m.vocab, d))]
    for i in range(16):
        p, high = f"blk.{i}.", q6 if i % 2 == 0 else q4
        tensors += [(p + "attn_norm.weight", m.ones(d)), (p + "attn_q.weight", q4(d, d)), (p + "attn_k.weight", q4(kv, d)),
                    (p + "attn_v.weight", high(kv, d)), (p + "attn_output.weight", q4(d, d)), (p + "ffn_norm.weight", m.ones(d)),
                    (p + "ffn_gate.weight", q4(ff, d)), (p + "ffn_up.weight", q4(ff, d)), (p + "ffn_down.weight", high(d, ff))]
    w = m.writer("llama", "synthetic 1b")
    w.add_quantization_version(2); w.add_file_type(int(gguf.LlamaFileType.MOSTLY_Q4_K_M))
    w.add_block_count(16); w.add_context_length(8192); w.add_embedding_length(d); w.add_feed_forward_length(ff)
    w.add_head_count(32); w.add_head_count_kv(8); w.add_layer_norm_rms_eps(1e-5); w.add_rope_freq_base(500000.0)
    w.add_rope_dimension_count(64)
    m.copy(w, "tokenizer.")
    m.finish(w, tensors)


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


def rows_of_256(model, data, steps, threads, **more):
    """A run whose rows go through the model as 256 positions: the last token of 257 is a target alone."""
    return timed(*training(model, data, f"{folder()}/out", steps, "--batch", 1, "--max-tokens-per-row", 257, "--threads", threads, **more))


def a_step(model, data, threads):
    """(wall, processor) seconds of a step."""
    short, long = (rows_of_256(model, data, steps, threads) for steps in (FEW, FEW + MORE))
    return [(more - few) / MORE for few, more in zip(short[:2], long[:2])]


TORCH = r"""
import json, os, resource, sys, time, torch
from transformers import AutoModelForCausalLM
from peft import LoraConfig, get_peft_model
torch.set_num_threads(int(sys.argv[2]))
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).float()
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
        return skipped("step, beside PyTorch", "TORCH_PYTHON names no Python with torch, transformers and peft")
    model, data = base(), texts("step", 24, 400)
    peer = start([PYTHON, "-c", TORCH, model, 1], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                 env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    if not any(line.strip() == "ready" for line in iter(peer.stdout.readline, "")):
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
    if os.cpu_count() < 2:
        return skipped("threads", "it wants two cores")
    model, data, ratios, walls = base(), texts("threads", 24, 400), [], []
    for r in range(a.runs or 5):
        took = {n: a_step(model, data, n)[0] for n in ((2, 1) if r % 2 else (1, 2))}
        walls.append(took[1])
        ratios.append(took[1] / took[2])
    told("threads, a step on one thread", walls, "s")
    bar("threads, two over one", ratios, "x", 1.7)


def memory():
    lora = rows_of_256(base(), texts("memory", 8, 400), 3, 1)[2]
    bar("memory, LoRA of SmolLM2 in f32, resident", lora / 1024, "GiB", 1.0, False)
    big = a.big or made(f"{MADE}/synth-1b-q4_k_m.gguf", os.path.abspath(__file__), "--make")
    qlora = rows_of_256(big, texts("memory", 8, 400), 2, os.cpu_count(), method="qlora")[2]
    bar("memory, QLoRA of a 1B in Q4_K_M, resident", qlora / 1024, "GiB", 1.5, False)


def toy_model():
    """The tiny llama of the tests with its last layer once more."""
    source, out = f"{REPO}/tests-data/golden/hf/llama-tied", folder()
    shutil.copytree(source, out, dirs_exist_ok=True)
    with open(f"{source}/config.json") as f:
        config = json.load(f)
    last = config["num_hidden_layers"]
    with open(f"{out}/config.json", "w") as f:
        json.dump({**config, "num_hidden_layers": last + 1}, f)
    with open(f"{source}/model.safetensors", "rb") as f:
        size = int.from_bytes(f.read(8), "little")
        table, data = json.loads(f.read(size)), f.read()
    table.pop("__metadata__", None)
    for name in [n for n in table if n.startswith(f"model.layers.{last - 1}.")]:
        begin, end = table[name]["data_offsets"]
        table[name.replace(f".{last - 1}.", f".{last}.", 1)] = {**table[name], "data_offsets": [len(data), len(data) + end - begin]}
        data += data[begin:end]
    head = json.dumps(table).encode()
    head += b" " * (-len(head) % 8)
    with open(f"{out}/model.safetensors", "wb") as f:
        f.write(len(head).to_bytes(8, "little") + head + data)
    return out


def toy_data():
    path = f"{folder()}/toy.jsonl"
    with open(path, "w") as f:
        for i in range(39):
            answer = ["the front", "a line of riders", "one machine alone"][i % 3]
            print(json.dumps({"prompt": f"who rides at {i}", "completion": answer + " again" * (i % 5)}), file=f)
    return path


def toy(model, data, output, *more, steps=50, lr=1e-2):
    return ["train", model, "--data", data, "--output", output, "--method", "lora", "--rank", 4, "--batch", 13, "--lr", lr, "--seed", 3,
            "--steps", steps, "--local", *more]


def digest(output):
    """SHA-256 of the adapter, and of the curve without times."""
    with open(f"{output}/adapter_model.safetensors", "rb") as f:
        adapter = hashlib.sha256(f.read()).hexdigest()
    with open(f"{output}/metrics.jsonl") as f:
        curve = [[m.get(k) for k in ("step", "loss", "lr", "grad_norm", "judged", "val_loss")] for m in map(json.loads, f)]
    return adapter, hashlib.sha256(json.dumps(curve).encode()).hexdigest(), len(curve)


def workers():
    model, data, found = toy_model(), toy_data(), {}
    cases = [(n, 1, 1) for n in (1, 2, 3, 4, 6)] + [(1, 1, 3), (2, 2, 1), (4, 2, 1)]
    for nodes, stages, count in cases:
        output = f"{folder()}/out"
        timed(*toy(model, data, output, "--nodes", nodes, "--stages", stages, "--threads", count), limit=120)
        found[nodes, stages, count] = digest(output)
        print(f"  {nodes} workers, {stages} stages, {count} threads: {' '.join(d[:16] for d in found[nodes, stages, count][:2])}", flush=True)
    steps = {one[2] for one in found.values()}
    if steps != {50}:
        sys.exit(f"curves of {steps} steps")
    bar(f"workers, different SHA-256 of adapter and curve in {len(cases)} runs", len(set(found.values())), "", 1, False)


def worker_pids(pid):
    """Its children that are workers."""
    found = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as f:
                found += map(int, f.read().split())

    def trains(child):
        with contextlib.suppress(OSError), open(f"/proc/{child}/cmdline", "rb") as f:
            return b"\0train-worker\0" in f.read()
    return [child for child in found if trains(child)]


def broken(name, seconds, events):
    """The same run twice, the second with signals to one of its three workers. Wall seconds of both, and how many were told as lost."""
    r = random.Random(a.seed)
    if a.smollm2:
        model, data, few, many = base(), texts("faults", 64, 90), 3, 9
        how = lambda output, steps: training(model, data, output, steps, "--batch", 6, "--max-tokens-per-row", 64, "--nodes", 3, "--threads", 1)
    else:
        model, data, few, many = toy_model(), toy_data(), 50, 250
        how = lambda output, steps: toy(model, data, output, "--nodes", 3, "--threads", 1, steps=steps, lr=1e-4)
    short, long = (timed(*how(f"{folder()}/out", n))[0] for n in (few, many))
    steps = max(20, int(seconds / max(0.001, (long - short) / (many - few))))
    calm_at, hit_at = f"{folder()}/calm", f"{folder()}/hit"
    calm = timed(*how(calm_at, steps), limit=3 * seconds + 60)[0]
    print(f"  {name}: {steps} steps, undisturbed {calm:.1f} s", flush=True)
    child = start([BINARY, *how(hit_at, steps)], env={**os.environ, **HOME}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    said, sent, began = [], [], time.monotonic()
    reader = threading.Thread(target=lambda: said.extend(child.stderr), daemon=True)
    reader.start()
    at, number = next(events)
    while child.poll() is None:
        gone = time.monotonic() - began
        if gone > 3 * calm + 60:
            sys.exit(f"{name}: it does not end: " + "".join(said[-5:]))
        if gone >= at and (pids := worker_pids(child.pid)):
            hit(r.choice(pids), number)
            sent.append(number)
            at, number = next(events, (float("inf"), 0))
        time.sleep(0.05)
    wall = time.monotonic() - began
    reader.join(5)
    if child.returncode:
        sys.exit(f"{name}: exit {child.returncode}: " + "".join(said[-5:]))
    kills, lost = sent.count(signal.SIGKILL), sum("a worker was lost" in line for line in said)
    print(f"  {name}: {kills} kills, {len(sent) - kills} stops, {lost} told; disturbed {wall:.1f} s", flush=True)
    if at != float("inf") and kills < 3:
        sys.exit(f"{name}: it was over before the faults")
    if lost < len(sent) - 1:  # the last may have come too late to matter
        sys.exit(f"{name}: of {len(sent)} faults {lost} were told")
    bar(f"{name}, the same SHA-256 of adapter and curve", int(digest(calm_at) == digest(hit_at)), "", 1)
    return wall / calm, kills


def faults():
    kill_9, stop = signal.SIGKILL, signal.SIGSTOP
    broken("faults", 20, iter([(3, kill_9), (6, kill_9), (9, stop), (16, kill_9)]))


def faults_long():
    ratio, kills = broken("faults-long", 60 * a.minutes, ((15 * n, signal.SIGKILL) for n in range(1, 1 << 20)))
    bar(f"faults-long, wall time with {kills} kills over undisturbed", ratio, "x", 1.25, False)


def resume():
    model, data, r = toy_model(), toy_data(), random.Random(a.seed)
    how, output = ["--nodes", 2, "--threads", 1, "--save-every", 3], f"{folder()}/right"
    whole = timed(*toy(model, data, output, *how), limit=120)[0]
    right, wrong, kills = digest(output), 0, 0
    for _ in range(a.runs or 20):
        output, more = f"{folder()}/out", []
        for attempt in range(60):
            # Ever longer, so that it ends.
            timed(*toy(model, data, output, *how, *more), kill_after=r.uniform(0.02, whole * (1 + attempt / 4)))
            if os.path.exists(f"{output}/adapter_model.safetensors"):
                break
            kills += 1
            more = ["--resume"]
        else:
            sys.exit("it does not end in 60 attempts")
        wrong += digest(output) != right
    bar(f"resume, runs with other bytes after {kills} kills in {a.runs or 20} runs", wrong, "", 0, False)


def austen():
    if not a.deb:
        return skipped("austen", "--deb FILE: apt-get download r-cran-janeaustenr")
    at = folder()
    subprocess.run([sys.executable, f"{REPO}/scripts/golden/austen.py", a.deb, f"{at}/emma.txt"], check=True, timeout=60)
    with open(f"{at}/emma.txt") as f:
        text = f.read()
    pieces = [text[i:i + 1500] for i in range(0, len(text), 1500)]
    for name, part in [("train", pieces[:-24]), ("valid", pieces[-24:])]:
        with open(f"{at}/{name}.jsonl", "w") as f:
            [print(json.dumps({"text": p}), file=f) for p in part]
    output = f"{MADE}/austen"
    shutil.rmtree(output, ignore_errors=True)
    os.makedirs(MADE, exist_ok=True)
    found = json.loads(run("train", SMOLLM2, "--data", f"{at}/train.jsonl", "--valid", f"{at}/valid.jsonl", "--output", output, "--method", "lora",
                           "--rank", 8, "--batch", 4, "--max-tokens-per-row", 256, "--train-on", "all", "--steps", a.steps, "--eval-every", 20,
                           "--warmup", 5, "--nodes", 2, "--threads", 1, "--local", "--seed", 1, "--json", env=HOME, timeout=1700))
    print(f"  held-out loss {found['first_val_loss']:.4f} -> {found['val_loss']:.4f}; the curve is {output}/loss.svg")
    bar("austen, held-out loss at the end less that before", found["val_loss"] - found["first_val_loss"], "", -0.01, False)


BARS = {"step": (step, 900), "threads": (threads, 900), "memory": (memory, 600), "workers": (workers, 300), "faults": (faults, 300),
        "resume": (resume, 600), "faults-long": (faults_long, 5400), "austen": (austen, 1800)}
parser = arguments(__doc__, runs=0, minutes=10.0, steps=60, seed=34, big="", deb="")
parser.add_argument("--smollm2", action="store_true")
parser.add_argument("--make", help=argparse.SUPPRESS)
a = chosen.parsed(parser, BARS, ["faults-long", "austen"])
if a.make:
    make(a.make)
    sys.exit()
chosen.play(a.bars, BARS)
