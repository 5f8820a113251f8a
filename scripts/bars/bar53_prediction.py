"""Predicted beside measured decode of MLX over machines, and the split that `load` chooses.

Machines are network namespaces with a delay between them; all share this machine's cores.

usage: PACELINE_MLXC=LIBMLXC bar53_prediction.py PROGRAM MILLISECONDS MACHINES SPLITS MODEL..
       SPLITS such as pipeline,tensor; MODEL is a file of ~/.cache/paceline/test-models
"""

import json
import os
import sys
import time

PROGRAM, DELAY_MS, N = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
SPLITS, MODELS = sys.argv[4].split(","), sys.argv[5:]
os.environ.setdefault("PACELINE", PROGRAM)
import common31  # noqa: E402, reads PACELINE
from delay_net import DelayNet  # noqa: E402

FOLDER = os.path.expanduser("~/.cache/paceline/test-models/")
LIBRARY = os.environ["PACELINE_MLXC"]
ANSWER = ["Count to forty: one, two,", "--temperature", 0, "--max-tokens", 24, "--json"]


def has_rates(machines):
    nodes = machines[0].nodes()
    on_mlx = lambda node: any(d["engine"] == "mlx" and d.get("rates") for d in node["devices"])
    return len(nodes) == N and all(map(on_mlx, nodes))


def warm(machine, path):
    """Answers until one comes from the instance itself."""
    end = time.time() + 90
    while time.time() < end:
        done = machine.run("run", path, *ANSWER, check=False, timeout=100)
        if done.returncode == 0 and "asking the instance" in done.stderr:
            return
        time.sleep(0.5)


def measured(machine, path, options):
    machine.told("load", path, *options)
    warm(machine, path)
    done = machine.run("run", path, *ANSWER, timeout=100)
    machine.told("unload", path)
    return json.loads(done.stdout)["decode_tok_s"]


def compare(machine, name):
    path = FOLDER + name
    options = ["--nodes", ",".join(f"n{i}" for i in range(N)), "--engine", "mlx"]
    options += ["--class", "mlx-f32", "--threads", 1, "--context", 1024]
    said = json.loads(machine.told("load", path, *options, "--preview", "--json"))
    predicted = {it["split"]: it["decode_tok_s"] for it in said["placements"]}
    found = {}
    for split in SPLITS if N > 1 else ["auto"]:
        more = ["--split", split, "--spare", 0] if N > 1 else []
        found[split] = measured(machine, path, options + more)
        by = predicted.get(split) or next(iter(predicted.values()))
        ratio = by / found[split]
        print(f"{name} {split}: {found[split]:.2f} tok/s, predicted {by:.2f} ({ratio:.2f})")
    first = said["placements"][0]["split"]
    if first in found:
        print(f"{name} chosen: {first}, {found[first] / max(found.values()):.2f} of the best")


net, machines = DelayNet(max(N, 2), DELAY_MS), []
try:
    environment = {"PACELINE_MLXC": LIBRARY}
    machines = [common31.Machine(PROGRAM, net, n, environment) for n in range(N)]
    for machine in machines:
        machine.up()
    if N > 1:
        common31.form(machines)
    machines[0].until("rates", lambda: has_rates(machines), 60)
    for name in MODELS:
        compare(machines[0], name)
finally:
    for machine in machines:
        machine.end()
    net.end()
