"""Kills ranks and machines of an instance on MLX in turn, each within an answer.

Three nodes of this machine compute class mlx-f32 as a pipeline, a fourth one asks. Every answer has
to end whole; one that a kill interrupted has to end with a fingerprint in `+continued`. A kill that
comes after the last token interrupts nothing.

usage: PACELINE=PROGRAM PACELINE_MLXC=LIBMLXC near_kills.py MODEL.gguf ROUNDS
"""

import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

PROGRAM, MODEL, ROUNDS = os.environ["PACELINE"], os.path.abspath(sys.argv[1]), int(sys.argv[2])
ROOT = tempfile.mkdtemp(prefix="near-kills-")
PORTS = {name: 27100 + number for number, name in enumerate("abcd")}
ROLES = ["worker a", "worker b", "worker c", "machine c", "machine b", "machine a"]
TOKENS = 200
processes, addresses, logs = {}, {}, {name: [] for name in PORTS}


def run(name, *arguments):
    """The output of a command on a node."""
    done = subprocess.run([PROGRAM, *arguments], env=environment(name), capture_output=True, text=True)
    return done.stdout


def environment(name):
    kept = {key: os.environ[key] for key in ("PATH", "PACELINE_MLXC")}
    return {**kept, "PACELINE_HOME": f"{ROOT}/{name}"}


def start(name):
    """Starts a node, and waits until it listens."""
    peers = [f"--peer=127.0.0.1:{port}" for other, port in PORTS.items() if other != name]
    command = [PROGRAM, "up", "--no-beacons", "--port", "0", "--name", name, *peers]
    command += ["--control-port", str(PORTS[name])]
    process = subprocess.Popen(
        command, env=environment(name), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    processes[name], listens = process, threading.Event()

    def read():
        for line in process.stderr:
            logs[name].append(line.rstrip())
            if found := re.search(r"listening on (http://\S+)", line):
                addresses[name] = found[1]
                listens.set()

    threading.Thread(target=read, daemon=True).start()
    if not listens.wait(60):
        sys.exit(f"{name} does not listen: {logs[name]}")


def until(what, is_done, limit=90):
    end = time.monotonic() + limit
    while time.monotonic() < end:
        try:
            if is_done():
                return
        except (ValueError, LookupError):
            pass  # the node does not answer yet
        time.sleep(0.1)
    sys.exit(f"not within {limit} s: {what}: {logs}")


def nodes():
    return json.loads(run("d", "nodes", "--json"))


def has_mlx(node):
    return node["state"] == "alive" and any(it["engine"] == "mlx" for it in node["devices"])


def workers(name):
    found = subprocess.run(
        ["pgrep", "-P", str(processes[name].pid), "-f", "worker"], capture_output=True, text=True
    )
    return [int(pid) for pid in found.stdout.split()]


def kill(role):
    kind, name = role.split()
    if kind == "worker":
        own = workers(name) or [pid for other in "abc" for pid in workers(other)]
        os.kill(own[0], signal.SIGKILL)
        return
    for pid in workers(name):
        os.kill(pid, signal.SIGKILL)
    processes[name].kill()
    processes[name].wait()


def answer(role):
    """Events of a streamed answer with a kill in it, its last fingerprint, the longest gap."""
    body = {"model": MODEL, "prompt": "Once", "max_tokens": TOKENS, "ignore_eos": True}
    body |= {"stream": True, "temperature": 0}
    request = urllib.request.Request(
        addresses["d"] + "/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    events, gap, last, fingerprint = 0, 0.0, None, ""
    for line in urllib.request.urlopen(request, timeout=200):
        name, _, data = line.decode().strip().partition(": ")
        if name != "data":
            continue  # an id, or the empty line between events
        if data == "[DONE]":
            return events, fingerprint, gap
        now = time.monotonic()
        gap, last = max(gap, now - last if events > 20 else 0.0), now
        event = json.loads(data)
        if "error" in event:
            break
        events, fingerprint = events + 1, event["system_fingerprint"]
        if events == 20:
            kill(role)
    return 0, fingerprint, gap


def form():
    """Four nodes become a cluster, and three of them load the model."""
    for name in PORTS:
        start(name)
    token = f"{ROOT}/token"
    with open(token, "w", encoding="utf-8") as file:
        file.write(run("a", "key", "cluster", "show").strip())
    for name in "bcd":
        run(name, "join", "--token-file", token)
    until("all list MLX", lambda: len(nodes()) == 4 and all(map(has_mlx, nodes())))
    where = ["--nodes", "a,b,c", "--engine", "mlx", "--class", "mlx-f32", "--threads", "1"]
    run("a", "load", MODEL, *where)


def is_ready():
    return json.loads(run("d", "ps", "--json"))[0]["state"] == "ready"


def main():
    form()
    until("the instance answers", is_ready)
    lost, gaps, whole = 0, [], None
    for number in range(ROUNDS):
        role = ROLES[number % len(ROLES)]
        events, fingerprint, gap = answer(role)
        whole = whole or events
        lost += events == 0 or events != whole
        marked = fingerprint.endswith("+continued")
        if marked:
            gaps.append(gap)
        print(f"{number:3} {role:10} {events} events, marked {marked}, gap {gap:.2f} s", flush=True)
        if role.startswith("machine"):
            start(role[-1])
        until("all live", lambda: sum(node["state"] == "alive" for node in nodes()) == 4)
        until("the instance answers", is_ready)
    print(f"{ROUNDS} kills: {lost} answers lost, {len(gaps)} continued and marked")
    print(f"gap: median {statistics.median(gaps):.2f} s, longest {max(gaps):.2f} s")


try:
    main()
finally:
    for process in processes.values():
        process.terminate()
    shutil.rmtree(ROOT, ignore_errors=True)
