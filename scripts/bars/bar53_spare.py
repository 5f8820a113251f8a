"""The pause of an answer of class mlx-f32 after a kill, without and with a spare on another machine.

Three machines (namespaces) compute a pipeline. Ranks and machines other than the one that is asked
are killed in turn, each at the 20th token of an answer. Bars: the next token within the time of a
load, of reading the answer's tokens, and 1 s; with a spare without that of a load.

usage: PACELINE_MLXC=LIBMLXC bar53_spare.py PROGRAM MODEL.gguf [KILLS]
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import time

PROGRAM, MODEL = (os.path.abspath(path) for path in sys.argv[1:3])
KILLS = int(sys.argv[3]) if len(sys.argv) > 3 else 8
os.environ.setdefault("PACELINE", PROGRAM)
import common31  # noqa: E402, reads PACELINE

URL = "http://127.0.0.1:52415/v1/completions"
PROMPT, TOKENS, AT = "Once upon a time", 40, 20


def workers(machine):
    """Process ids of a machine's workers."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                is_own = f"PACELINE_HOME={machine.home}".encode() in file.read()
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                is_own &= b"\0worker" in file.read()
        except OSError:
            continue
        found += [int(pid)] * is_own
    return found


def kill(role):
    machine, kind = role
    if kind == "worker":
        for pid in workers(machine)[:1]:
            os.kill(pid, signal.SIGKILL)
        return
    machine.child.kill()
    machine.child.wait()


def answer(machine, number, at_20=lambda: None):
    """Seconds to the first token and the longest pause after the 20th, tokens, fingerprint."""
    body = {"model": MODEL, "prompt": f"{number} {PROMPT}", "max_tokens": TOKENS, "stream": True}
    body = json.dumps(body | {"ignore_eos": True, "temperature": 0})
    curl = ["curl", "-sN", "-m", "120", "-H", "Content-Type: application/json", "-d", body, URL]
    begun, last, events, gap, first, name = time.monotonic(), None, 0, 0.0, None, ""
    with subprocess.Popen(["ip", "netns", "exec", machine.ns, *curl], stdout=subprocess.PIPE) as child:
        for line in child.stdout:
            text = line.decode().strip().removeprefix("data: ")
            if not text.startswith("{"):
                continue
            event, now = json.loads(text), time.monotonic()
            assert "error" not in event, event
            events, name = events + 1, event["system_fingerprint"]
            first = first or now - begun
            gap, last = max(gap, now - last if events > AT else 0.0), now
            if events == AT:
                at_20()
    return first, gap, events, name


def settled(machines, count):
    """Waits for `count` workers that have not changed for 5 s."""
    known, since = None, time.monotonic()
    while known is None or len(known) < count or time.monotonic() - since < 5:
        now = sorted(pid for machine in machines for pid in workers(machine))
        if now != known:
            known, since = now, time.monotonic()
        time.sleep(0.2)


def measure(machines, spare):
    first = machines[0]
    where = ["--nodes", "n0,n1,n2", "--split", "pipeline", "--engine", "mlx", "--class", "mlx-f32"]
    ready = lambda: [it["state"] for it in json.loads(first.told("ps", "--json"))] == ["ready"]  # noqa: E731
    for again in range(2):
        begun = time.monotonic()
        first.told("load", MODEL, *where, "--spare", spare, "--threads", 1)
        first.until("answers", ready)
        load = time.monotonic() - begun  # the second one finds the files
        if not again:
            first.told("unload", MODEL)
    # As many tokens as there are when the kill comes.
    read, _, whole, _ = answer(first, "and " * AT)
    print(f"spare {spare}: load {load:.2f} s, reading {read:.2f} s", flush=True)
    gaps, lost, marked = [], 0, 0
    for number in range(KILLS):
        role = [(machines[1 + number % 2], kind) for kind in ("worker", "machine")][number // 2 % 2]
        settled(machines, 3 + 3 * spare)
        _, gap, events, name = answer(first, number, lambda: kill(role))
        lost += events != whole
        marked += name.endswith("+continued")
        gaps.append(gap)
        print(f"  {role[1]} of {role[0].name}: {events} events, pause {gap:.2f} s", flush=True)
        if role[1] == "machine":
            role[0].up()
        first.until("sees all", lambda: sum(n["state"] == "alive" for n in first.nodes()) == 3)
        first.until("answers", ready)
    first.told("unload", MODEL)
    bar = read + 1 + (0 if spare else load)
    print(f"spare {spare}: {lost} of {KILLS} lost, {marked} marked; "
          f"pause {statistics.median(gaps):.2f} (most {max(gaps):.2f}), bar {bar:.2f} s")


net, machines = common31.Net(3), []
try:
    library = {"PACELINE_MLXC": os.environ["PACELINE_MLXC"]}
    machines += [common31.Machine(PROGRAM, net, n, library) for n in range(3)]
    for machine in machines:
        machine.up()
    common31.form(machines)
    has_mlx = lambda node: any(it["engine"] == "mlx" for it in node.get("devices", []))  # noqa: E731
    machines[0].until("lists MLX", lambda: all(map(has_mlx, machines[0].nodes())))
    for spare in (0, 1):
        measure(machines, spare)
finally:
    for machine in machines:
        machine.end()
    net.end()
