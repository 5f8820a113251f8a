#!/usr/bin/env python3
"""Issue 56: after each of many faults, do `ps` and the status of every machine name the machines that compute?

    bar56_truth.py BINARY MODEL.gguf ROUNDS [SEED]      wants root and `ip`

Three machines hold one instance. A round is a fault: a worker or a node killed, a node ended, a machine that leaves, is forgotten,
comes back or joins, a cable out and in again, a load over another number of machines; an answer runs meanwhile. From 5 s after the fault
on, every machine that has its cable must name what /proc of the namespaces shows: for each machine its number of workers.
"""
import collections, random, signal
from common31 import *

binary, model, rounds = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2]), int(sys.argv[3])
seed = int(sys.argv[4]) if len(sys.argv) > 4 else 56
draw = random.Random(seed)
LIMIT_S = 5  # the bar
net = Net(3)
machines = [Machine(binary, net, n) for n in range(3)]
out = set()  # machines without their cable
signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))


def lives(machine):
    return machine.child is not None


def connected():
    """Machines with a node and a cable."""
    return [m for m in machines if lives(m) and m.name not in out]


def workers(machine):
    """Processes in the machine's namespace that are workers, and run."""
    found = []
    for pid in ip("netns", "pids", machine.ns, check=False).stdout.split():
        try:
            line = open(f"/proc/{pid}/cmdline").read().split("\0")
            state = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if "worker" in line[1:2] and state != "Z":
            found.append(int(pid))
    return found


def real():
    """Workers of each machine that is reachable. Those of a machine without its cable belong to no group."""
    return collections.Counter({m.name: len(workers(m)) for m in machines if m.name not in out and workers(m)})


def named(instances):
    """Workers of each machine by what a node says: none of an instance that does not answer."""
    ready = [it for it in instances if it["state"] == "ready"]
    return collections.Counter(name for it in ready for name in it.get("computing") or it["nodes"])


def ask(machine, *command):
    done = subprocess.run(["ip", "netns", "exec", machine.ns, *command], env=machine.env, capture_output=True, text=True, timeout=30)
    try:
        told = json.loads(done.stdout)
    except ValueError:
        return None
    return named(told["instances"] if isinstance(told, dict) else told)


def mismatches():
    """Each wrong statement, read between two equal readings of /proc."""
    before, said = real(), []
    for m in connected():
        for what, command in [("ps", (binary, "ps", "--json")),
                              ("status", ("curl", "-s", "-m", "5", "http://127.0.0.1:52415/v1/paceline/status"))]:
            said.append((f"{m.name} {what}", ask(m, *command)))
    if real() != before:
        return ["/proc changes"]
    return [f"{who}: {dict(count) if count is not None else None}, /proc: {dict(before)}" for who, count in said if count != before]


def cable(machine, state):
    ip("-n", net.bridge, "link", "set", "dev", f"p{machine.name[1:]}", state)
    (out.add if state == "down" else out.discard)(machine.name)


def kill_node(machine, signal=9):
    pids = ip("netns", "pids", machine.ns).stdout.split()
    node = [p for p in pids if open(f"/proc/{p}/cmdline").read().split("\0")[1:2] == ["up"]]
    for pid in node:
        os.kill(int(pid), signal)
    machine.child.wait(30)
    machine.child = None


def load(count):
    first = connected()[0]
    first.run("unload", model, check=False)
    first.run("load", model, "--nodes", str(count), "--threads", "1", check=False, timeout=60)


def start(machine):
    machine.log = open(os.path.join(machine.home, "log"), "a+")
    peers = [m.address for m in connected() if m is not machine]
    machine.child = subprocess.Popen(machine.command("up", "--name", machine.name, *[w for p in peers for w in ("--peer", p)]),
                                     env=machine.env, cwd=machine.home, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=machine.log)
    machine.until("is up", lambda: machine.nodes())


def join(machine):
    token = next(m for m in connected() if m is not machine).told("key", "cluster", "show")
    machine.run("join", "--token-file", "-", stdin=token + "\n", check=False)


def faults():
    """The faults that are possible now, by name."""
    there, found = connected(), {}
    for m in machines:
        if m.name in out:
            found[f"{m.name}'s cable in"] = lambda m=m: cable(m, "up")
        elif not lives(m):
            found[f"{m.name} starts"] = lambda m=m: start(m)
            if m.name in {n["name"] for n in there[0].nodes()}:
                found[f"nodes rm {m.name}"] = lambda m=m: there[0].run("nodes", "rm", m.name, check=False)
        else:
            if workers(m):
                found[f"{m.name}'s worker killed"] = lambda m=m: os.kill(draw.choice(workers(m)), 9)
            if len(there) > 1:
                found[f"{m.name}'s node killed"] = lambda m=m: kill_node(m)
                found[f"{m.name}'s node ended"] = lambda m=m: kill_node(m, 15)
                found[f"{m.name}'s cable out"] = lambda m=m: cable(m, "down")
                found[f"{m.name} leaves"] = lambda m=m: (m.run("leave", check=False), join(m))
    for count in range(1, len(there) + 1):
        found[f"load over {count}"] = lambda count=count: load(count)
    return found


def answer(machine):
    """A client whose answer outlasts the round."""
    body = json.dumps({"model": model, "prompt": "Once upon a time", "max_tokens": 3000, "temperature": 0, "stream": True})
    curl = ["curl", "-sN", "-m", "20", "-H", "Content-Type: application/json", "-d", body, "http://127.0.0.1:52415/v1/completions"]
    return subprocess.Popen(["ip", "netns", "exec", machine.ns, *curl], stdout=subprocess.DEVNULL)


def round_(number):
    possible = faults()
    # Machines come back as often as they go, and an instance grows as often as it shrinks.
    names = sorted(possible)
    back = [name for name in names if name.endswith(("starts", "cable in"))]
    back = back or [name for name in names if name == "load over 3" and len(real()) < 3]
    name = draw.choice(back if back and draw.random() < 0.5 else names)
    client = answer(draw.choice(connected()))
    try:
        possible[name]()
        return judge(number, name)
    finally:
        client.kill()
        client.wait()


def judge(number, name):
    began, wrong_until, last = time.monotonic(), 0.0, []
    while time.monotonic() - began < LIMIT_S:
        wrong = mismatches()
        if wrong:
            wrong_until, last = time.monotonic() - began, wrong
        time.sleep(0.2)
    # Another change may just be under way at the end: three readings in a row must be wrong.
    wrong = [mismatches() for _ in range(3)]
    is_right = not all(wrong)
    print(f"{number} {name}: right {wrong_until:.1f} s after it" if is_right else f"{number} {name}: WRONG {wrong[-1]}", flush=True)
    if not is_right:
        end = time.monotonic() + 60
        while mismatches() and time.monotonic() < end:
            time.sleep(0.3)
        print(f"   right after {time.monotonic() - began:.1f} s; {connected()[0].told('ps')}", flush=True)
        for m in machines:
            print("   ", m.name, "\n        ".join(m.said().splitlines()[-6:]))
    return is_right, wrong_until


try:
    for m in machines:
        m.up()
    form(machines)
    load(3)
    done = [round_(n) for n in range(rounds)]
    slowest = sorted(seconds for _, seconds in done)
    print(f"{sum(right for right, _ in done)} of {rounds} right within {LIMIT_S} s (seed {seed}); median {slowest[len(slowest) // 2]:.1f} s")
finally:
    for m in machines:
        m.end()
    net.end()
