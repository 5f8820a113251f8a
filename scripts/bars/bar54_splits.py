"""The split that `load` takes beside all that can be asked for, over machines with a delay between them (issue 54).

usage: bar54_splits.py PROGRAM MILLISECONDS MACHINES TOKENS MODEL..       MODEL is a file

Machines are network namespaces on one machine: speeds say which split is best, not how fast it is elsewhere.
"""
import json, os, sys, time

PROGRAM, DELAY_MS, N, TOKENS, MODELS = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:]
os.environ.setdefault("PACELINE", PROGRAM)
import common31  # noqa: E402, reads PACELINE
from delay_net import DelayNet  # noqa: E402


def answer(machine, path, tokens):
    """None before the instance itself answers."""
    done = machine.run("run", path, "Count to forty: one, two,", "--temperature", 0, "--max-tokens", tokens, "--json",
                       check=False, timeout=200)
    return json.loads(done.stdout) if done.returncode == 0 and "asking the instance" in done.stderr else None


def measured(machine, path, split):
    machine.told("load", path, "--nodes", ",".join(f"n{i}" for i in range(N)), "--threads", 1, "--context", 512,
                 "--spare", 0, "--split", split)
    machine.until("answers", lambda: answer(machine, path, 2))
    tok_s = answer(machine, path, TOKENS)["decode_tok_s"]
    used = json.loads(machine.told("ps", "--json"))[0]["split"]
    machine.told("unload", path)
    time.sleep(0.5)
    return used, tok_s


net, machines = DelayNet(N, DELAY_MS), []
try:
    machines = [common31.Machine(PROGRAM, net, n) for n in range(N)]
    for machine in machines:
        machine.up("--threads", 1)
    common31.form(machines)
    for path in MODELS:
        used, tok_s = measured(machines[0], path, "auto")
        speeds = {split: measured(machines[0], path, split)[1] for split in ["pipeline", "tensor"]}
        print(f"{path}: auto is {used}, {tok_s:.2f} tok/s", {k: round(v, 2) for k, v in speeds.items()}, flush=True)
finally:
    for machine in machines:
        machine.end()
    net.end()
