#!/usr/bin/env python3
"""Issue 38, the new families on MLX, whose CPU build is a test bed. PACELINE names the binary.

    bar38.py [BAR..]        without names agreement and goldens, some 5 min
    agreement [--tokens 40]  4 min  every folder of tests-data/golden/hf: log-probabilities of a text by mlx-f32, and by pipelines of
                                    cpu and mlx-f32 and of cpu and mlx, beside cpu-f32
    goldens                  1 min  every folder of tests-data/golden/mlx: mlx-f32 beside the logits that MLX gave
    ci                       2 min  the wall time of MLX's tests as CI runs them, behind a build (cargo, up to half an hour)

PACELINE_MLXC names libmlxc, else the one that `cargo xtask mlx` or `paceline engines install mlx` left is taken. --folders A,B: only these.

Bounds: mlx-f32 1e-3 at every position. A pipeline's middle position, over the spread of the log-probabilities: cpu and mlx-f32 5e-3 (as in
crates/model-mlx/tests/all.rs: keys and values are f16 on the CPU), cpu and mlx 0.06 (5.6 % of the logits' size, docs/numerics.md). The middle,
because a rounded activation may turn a choice of experts, which moves all of that row.
"""
import array, glob, math
import chosen, common32
from common32 import *

GOLDEN = f"{REPO}/tests-data/golden"
WAYS = {"mlx-f32": (["--class", "mlx-f32"], 1e-3),
        "cpu and mlx-f32 in stages": (["--engine", "cpu,mlx", "--class", "mlx-f32", "--nodes", 2, "--split", "pipeline"], 5e-3),
        "cpu and mlx in stages": (["--engine", "cpu,mlx", "--nodes", 2, "--split", "pipeline"], 0.06)}


def mlx():
    """The environment that names MLX; None where there is none, with a line that says why."""
    installed = sorted(glob.glob(f"{os.path.dirname(MODELS)}/engines/mlx/*/lib/libmlxc.*"))
    env = {"PACELINE_MLXC": installed[-1]} if installed and not os.environ.get("PACELINE_MLXC") else {}
    found = next(e for e in json.loads(run("engines", "--json", env=env, timeout=60))["engines"] if e["name"] == "mlx")
    if not found["ready"]:
        return skipped("MLX", f"{found['problem']}: cargo xtask mlx, or PACELINE_MLXC")
    return {"PACELINE_MLXC": found["library"]}


def folders(kind):
    found = [path[:-len(".golden.json")] for path in sorted(glob.glob(f"{GOLDEN}/{kind}/*.golden.json"))]
    return [path for path in found if os.path.isdir(path) and (not a.folders or os.path.basename(path) in a.folders.split(","))]


def prompt(path):
    with open(path + ".golden.json") as f:
        return json.load(f)["prompt"][:a.tokens]


def logprobs(env, path, how):
    """Log-probabilities of the prompt's tokens but the first, by a server of its own; why there are none, where there is none."""
    server, tokens = None, prompt(path)
    try:
        server = Up(path, "--threads", 1, "--context", 64, "--parallel", 1, "--drafts", 0, "--prefix-cache", "off", *how, env=env, seconds=60)
        answer = server.call("POST", "/v1/completions", {"model": server.model, "prompt": tokens, "max_tokens": 1, "echo": True, "logprobs": 0,
                                                         "temperature": 0})
    except SystemExit as why:
        if isinstance(why, chosen.Late) or str(why) == "ended by SIGTERM":
            raise
        lines = str(why).strip().splitlines()
        return next((line for line in lines if "error: " in line), lines[-1])[-300:]
    finally:
        if server:
            server.end()
        else:
            kill(common32._children[-1])
    found = answer["choices"][0]["logprobs"]["token_logprobs"][:len(tokens)]
    if found[0] is not None or None in found[1:]:
        sys.exit(f"{path}: not a log-probability for each token of the prompt: {found}")
    return found[1:]


def golden(path):
    """The same from the logits of a golden file."""
    with open(path + ".golden.safetensors", "rb") as f:
        table = json.loads(f.read(int.from_bytes(f.read(8), "little")))["logits"]
        begin, end = table["data_offsets"]
        f.seek(begin, 1)
        logits = array.array("f", f.read(end - begin))
    vocab, found = table["shape"][1], []
    for i, token in enumerate(prompt(path)[1:]):
        row = logits[i * vocab:(i + 1) * vocab]
        top = max(row)
        found.append(row[token] - top - math.log(sum(math.exp(x - top) for x in row)))
    return found


def apart(found, expected):
    return [abs(x - y) for x, y in zip(found, expected, strict=True)]


def agreement():
    env, worst, silent = mlx(), {way: {} for way in WAYS}, []
    if env is None:
        return
    for path in folders("hf"):
        name = os.path.basename(path)
        expected = logprobs(env, path, ["--class", "cpu-f32"])
        if isinstance(expected, str):
            silent.append(f"{name} by cpu-f32: {expected}")
            continue
        shown_of = []
        for way, (how, _) in WAYS.items():
            found = logprobs(env, path, how)
            if isinstance(found, str):
                silent.append(f"{name} by {way}: {found}")
                continue
            far = apart(found, expected)
            worst[way][name] = max(far) if way == "mlx-f32" else statistics.median(far) / statistics.pstdev(expected)
            shown_of.append(f"{way} {worst[way][name]:.2e} (the most {max(far):.2e})")
        print(f"  {name}: {'; '.join(shown_of)}", flush=True)
    for line in silent:
        print(f"  no answer: {line}", flush=True)
    for way, (_, limit) in WAYS.items():
        what = "the most apart" if way == "mlx-f32" else "the middle position over the spread"
        if worst[way]:
            bar(f"agreement, {way}, {what}, the worst of {len(worst[way])} folders", max(worst[way].values()), "", limit, False)
    bar("agreement, folders and ways without an answer", len(silent), "", 0, False)


def goldens():
    env, far = mlx(), {}
    if env is None:
        return
    for path in folders("mlx"):
        found = logprobs(env, path, ["--class", "mlx-f32"])
        if isinstance(found, str):
            sys.exit(f"{os.path.basename(path)}: {found}")
        far[path] = max(apart(found, golden(path)))
        print(f"  {os.path.basename(path)}: {far[path]:.2e}", flush=True)
    bar(f"goldens, mlx-f32 beside MLX's own log-probabilities, the worst of {len(far)} folders", max(far.values()), "", 1e-3, False)


def ci():
    env = mlx()
    if env is None or not shutil.which("cargo"):
        return skipped("ci, MLX's tests", "there is no MLX or no cargo")
    test = ["cargo", "test", "--release", "-p", "paceline-model", "--test", "mlx"]
    more = {"cwd": REPO, "env": {**os.environ, **env, "PACELINE_TEST_MODELS": MODELS}}
    if start([*test, "--no-run"], **more).wait(1800):
        sys.exit("the tests do not build")
    began = time.monotonic()
    passed = start(test, **more).wait(900) == 0
    bar("ci, MLX's tests passed", int(passed), "", 1)
    bar("ci, MLX's tests, wall time", time.monotonic() - began, "s", 120, False)


BARS = {"agreement": (agreement, 1200), "goldens": (goldens, 300), "ci": (ci, 2800)}
parser = arguments(__doc__, tokens=40, folders="")
a = chosen.parsed(parser, BARS, ["ci"])
chosen.play(a.bars, BARS)
