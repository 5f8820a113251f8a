"""Log-probabilities of five families over machines on MLX, beside those of one machine.

Four network namespaces compute tiny folders of tests-data in class mlx-f32: a pipeline of three
(equal bits), tensor over 2 and 2x2 (1e-3), and the pipeline cpu,mlx,mlx (5e-3).

usage: PACELINE_MLXC=LIBMLXC bar53_families.py PROGRAM [FOLDER..]
"""

import json
import os
import subprocess
import sys

PROGRAM = os.path.abspath(sys.argv[1])
os.environ.setdefault("PACELINE", PROGRAM)
import common31  # noqa: E402, reads PACELINE

GOLDEN = os.path.join(os.path.dirname(__file__), "../../tests-data/golden/hf")
FIVE = ["llama-untied-bf16", "qwen3-bf16", "gemma3-bf16", "gpt-oss-mxfp4", "deepseek-v3-bf16"]
FOLDERS = [os.path.abspath(os.path.join(GOLDEN, name)) for name in sys.argv[2:] or FIVE]
MLX = ["--engine", "mlx", "--class", "mlx-f32"]
THREE = ["--nodes", "n0,n1,n2", "--split", "pipeline"]
# Name, options, largest distance of log-probabilities.
WAYS = [
    ("pipeline of 3", [*THREE, *MLX], 0.0),
    ("tensor over 2", ["--nodes", "n0,n1", "--split", "tensor", *MLX], 1e-3),
    ("2x2", ["--nodes", "n0,n1,n2,n3", "--split", "2x2", *MLX], 1e-3),
    ("cpu,mlx,mlx", [*THREE, "--engine", "cpu,mlx,mlx", "--class", "mlx-f32"], 5e-3),
    # No bar: how far class cpu is, which rounds activations to 15 bits.
    ("cpu alone", ["--nodes", "n0", "--engine", "cpu"], float("inf")),
]


def values(machine, path):
    """Tokens and log-probabilities of a greedy answer, with the alternatives of each token."""
    body = {"model": path, "prompt": "The quick brown fox jumps over the lazy dog. " * 3}
    body |= {"max_tokens": 32, "temperature": 0, "logprobs": 5, "ignore_eos": True}
    url = "http://127.0.0.1:52415/v1/completions"
    command = ["ip", "netns", "exec", machine.ns, "curl", "-s", "-m", "90", url]
    command += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    answer = json.loads(done.stdout)
    if "choices" not in answer:
        sys.exit(f"{path}: {answer}")
    said = answer["choices"][0]["logprobs"]
    return said["tokens"], said["token_logprobs"], said["top_logprobs"]


def loaded(machine, path, options):
    """The values over these machines; None and the reason where the split is refused."""
    common = ["--threads", 1, "--context", 512, "--parallel", 1, "--spare", 0]
    done = machine.run("load", path, *common, *options, check=False)
    if done.returncode:
        return None, done.stderr.strip().splitlines()[0]
    found = values(machine, path)
    machine.told("unload", path)
    machine.until("is gone", lambda: machine.told("ps", "--json") == "[]")
    return found, None


def distance(one, other):
    """Largest distance up to and with the first other token."""
    far = 0.0
    for a, p, b, q in zip(one[0], one[1], other[0], other[1]):
        far = max(far, abs(p - q)) if a == b else far
        if a != b:
            break
    return far, one[0] == other[0], one == other


net, machines, missed = common31.Net(4), [], 0
try:
    environment = {"PACELINE_MLXC": os.environ["PACELINE_MLXC"]}
    machines = [common31.Machine(PROGRAM, net, n, environment) for n in range(4)]
    for machine in machines:
        machine.up()
    common31.form(machines)
    has_mlx = lambda node: any(device["engine"] == "mlx" for device in node.get("devices", []))
    machines[0].until("engines", lambda: all(map(has_mlx, machines[0].nodes())))
    for path in FOLDERS:
        name = os.path.basename(path)
        alone, why = loaded(machines[0], path, ["--nodes", "n0", *MLX])
        if alone is None:
            sys.exit(f"{name} alone: {why}")
        for way, options, limit in WAYS:
            found, why = loaded(machines[0], path, options)
            if found is None:
                print(f"{name}, {way}: refused: {why}", flush=True)
                continue
            far, tokens, equal = distance(alone, found)
            held = equal if limit == 0 else far <= limit
            missed += not held
            bits = "equal bits" if equal else f"{far:.1e}"
            same = "" if tokens else ", other tokens"
            verdict = "no bar" if limit == float("inf") else "held" if held else "MISSED"
            print(f"{name}, {way}: {bits}{same} ({verdict})", flush=True)
finally:
    for machine in machines:
        machine.end()
    net.end()
sys.exit(1 if missed else 0)
