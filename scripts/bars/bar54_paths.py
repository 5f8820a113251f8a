#!/usr/bin/env python3
"""Issue 54: an instance over three machines of which two lose their path, returns of a machine, losses during a first load.

    bar54_paths.py BINARY MODEL.gguf pairs|returns|loads ROUNDS      wants root and `ip`

pairs    two of three machines cannot speak (each pair in turn) while 4 streams run at the first one; then the path heals
returns  a cable is out for some seconds, in every other round while streams run; time until all three compute again
loads    the worker, or the whole node, of the second machine is killed while a model loads; does the load answer?
"""
import random
from common31 import *

binary, model, what, rounds = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[2]), sys.argv[3], int(sys.argv[4])
PROMPTS = ["Once upon a time, there was", "The history of the sea begins", "A recipe for bread:", "In the year 2040 the"]
CLIENT = r'''
import hashlib, json, sys, time, urllib.request
prompt, tokens = sys.argv[1], int(sys.argv[2])
body = json.dumps({"model": sys.argv[3], "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True})
request = urllib.request.Request("http://127.0.0.1:52415/v1/completions", body.encode(), {"Content-Type": "application/json"})
text, gap, last, end = "", 0, time.monotonic(), "cut"
for line in urllib.request.urlopen(request, timeout=120):
    if not line.startswith(b"data: "):
        continue
    if line[6:].strip() == b"[DONE]":
        end = "whole"
        break
    event = json.loads(line[6:])
    if "error" in event:
        end = event["error"]["code"]
        break
    piece, now = event["choices"][0].get("text", ""), time.monotonic()
    if piece:
        gap, last, text = max(gap, now - last), now, text + piece
print(json.dumps([end, gap, hashlib.sha256(text.encode()).hexdigest()]))
'''
net = Net(3)
machines = [Machine(binary, net, n) for n in range(3)]
first = machines[0]


def port(n, *state):
    ip("-n", net.bridge, "link", "set", "dev", f"p{n}", *state)


def streams(tokens, meanwhile=lambda: None):
    """[end, longest gap, hash of the text] of each of 4 streams."""
    start = ["ip", "netns", "exec", first.ns, sys.executable, "-c", CLIENT]
    clients = [subprocess.Popen([*start, prompt, str(tokens), model], stdout=subprocess.PIPE, text=True) for prompt in PROMPTS]
    time.sleep(1.5)
    meanwhile()
    return [json.loads(client.communicate(timeout=150)[0] or '["died", 0, ""]') for client in clients]


def shown():
    told = json.loads(first.told("ps", "--json"))
    return told[0] if told else {}


def all_compute():
    it = shown()
    return it.get("state") == "ready" and len(it["nodes"]) == 3 and not it.get("computing")


def seconds_until(done, limit):
    began = time.monotonic()
    while not done() and time.monotonic() - began < limit:
        time.sleep(0.2)
    return time.monotonic() - began


def told(name, answers, whole):
    equal = sum(one[0] == "whole" and one[2] == other[2] for one, other in zip(answers, whole))
    print(f"{name}: {equal} of 4 equal, longest gap {max(one[1] for one in answers):.1f} s", [one[0] for one in answers], flush=True)


def pairs():
    whole = streams(150)
    for round in range(rounds):
        a, b = [(1, 2), (0, 1), (0, 2)][round % 3]
        isolate = lambda state: [port(n, "type", "bridge_slave", "isolated", state) for n in (a, b)]
        answers = streams(150, lambda: isolate("on"))
        told(f"n{a} and n{b} apart", answers, whole)
        print("  ", shown().get("reason"))
        isolate("off")
        print(f"   all compute {seconds_until(all_compute, 60):.1f} s after it healed", flush=True)


def returns():
    whole, took = streams(300), []
    for round in range(rounds):
        n, busy = random.choice([1, 2]), round % 2 == 1

        def cut():
            port(n, "down")
            time.sleep(6)
            port(n, "up")
            took.append(seconds_until(all_compute, 60))
        if busy:
            told(f"n{n} out while streams run", streams(300, cut), whole)
        else:
            cut()
        print(f"n{n} is used {took[-1]:.1f} s after its return, {'busy' if busy else 'idle'}", flush=True)
    print(f"{sum(s <= 30 for s in took)} of {rounds} within 30 s, longest {max(took):.1f} s")


def children(ns):
    """(pid, command line) of the processes in a namespace."""
    for pid in ip("netns", "pids", ns).stdout.split():
        try:
            yield int(pid), open(f"/proc/{pid}/cmdline").read().replace("\0", " ")
        except OSError:
            pass


def loads():
    ready = 0
    for round in range(rounds):
        of_node, second = round % 2 == 1, machines[1]
        load = subprocess.Popen(first.command("load", model, "--nodes", "n0,n1", "--threads", "1"), env=first.env,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        began, victim = time.monotonic(), None
        while victim is None and time.monotonic() - began < 30:
            victim = next((pid for pid, line in children(second.ns) if " worker" in line), None)
        time.sleep(random.random() / 2)
        if of_node:
            second.child.kill()
            second.child.wait()
            time.sleep(random.random())
            second.up()
        else:
            try:
                os.kill(victim, 9)
            except ProcessLookupError:
                pass
        said = load.communicate(timeout=120)[0].strip().splitlines()
        ready += load.returncode == 0
        print(f"{'node' if of_node else 'worker'} killed: {said[-1]} after {time.monotonic() - began:.1f} s", flush=True)
        first.told("unload", model)
    print(f"{ready} of {rounds} loads answer")


try:
    for machine in machines:
        machine.up()
    form(machines)
    if what != "loads":
        first.told("load", model, "--nodes", "3", "--threads", "1")
    {"pairs": pairs, "returns": returns, "loads": loads}[what]()
finally:
    for machine in machines:
        machine.end()
    net.end()
