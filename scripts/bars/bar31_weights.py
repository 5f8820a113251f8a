#!/usr/bin/env python3
"""Issue 31, weights travel once: hub bytes, bytes received per node, a flipped bit, a full disk, a vanishing source.

    bar31_weights.py BINARY [--model GGUF] [--small GGUF]      root; 5 to 8 minutes with 1.0 GB; 5 GB of disk in /tmp

Three namespaces. n0 pulls the model (default: the 1.5B shapes of models32.py, made once) from a hub that counts, then loads it
over three nodes with --weights shard: pipeline, then a tensor split of three; received bytes are those of eth0 from `load` to
`ready`, against the shard's bytes in the file by the split that the instance tells. Then --weights auto: its figures until ready.
The lie: n1 is sent the whole file, one bit of its copy is flipped at 16 places, n2 loads from both: it names n1 and answers alike.
The disk: n2's copies lie on a tmpfs of 64 MB: the load fails by name and nothing wrong is kept. The source: n1 is killed midway.
"""
import argparse
sys_path = __import__("sys").path
sys_path.insert(0, __import__("os").path.dirname(__import__("os").path.abspath(__file__)))
from common31 import *

ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
ap.add_argument("binary")
ap.add_argument("--model")
a = ap.parse_args()
if not a.model:
    import models32
    a.model = models32.path("1.5b")
size = os.path.getsize(a.model)
sizes, header = tensors(a.model)
net = Net(3)
hub = Hub(net, a.model)
machines = [Machine(a.binary, net, n, hub.env) for n in range(3)]
n0, n1, n2 = machines
MODEL = "bars/model"


def ready(machine=n0):
    return json.loads(machine.told("ps", "--json"))[0]


def unload():
    n0.run("unload", MODEL)
    n0.until("unloads", lambda: n0.told("ps", "--json") == "[]")


def clean():
    """No copies on n1 and n2."""
    n0.run("rm", MODEL, "--node", "n1,n2", check=False)


def shards():
    """Bytes of each rank's part of the file, by the split that the dashboard tells; nodes in rank order."""
    it = n0.get("/v1/paceline/status")["instances"][0]
    tied = "output.weight" not in sizes
    head = sizes["token_embd.weight"] if tied else sizes["output.weight"]
    parts = {}
    all_shards = it["portrait"]["shards"]
    end = max(s["end_layer"] for s in all_shards)
    for name, s in zip(it["nodes"], all_shards):
        part = s["share"] * layers(sizes, s["first_layer"], s["end_layer"])
        embeds, heads = s["first_layer"] == 0, s["end_layer"] == end
        part += sizes["token_embd.weight"] if embeds else 0
        part += 0 if embeds and heads and tied else (s["share"] * head if heads else 0)
        parts[name] = part + header
    return it["portrait"]["split"], parts


def load(split, weights):
    before = {m.name: m.received() for m in machines}
    began = time.time()
    n0.run("load", MODEL, "--nodes", "n0,n1,n2", "--split", split, "--weights", weights, "--threads", "1")
    took = time.time() - began
    got = {m.name: m.received() - before[m.name] for m in machines}
    told, parts = shards()
    print(f"{split}, --weights {weights}: {told}, ready after {took:.1f} s; received MB: "
          + ", ".join(f"{name} {got[name] / 1e6:.1f} of a shard of {parts[name] / 1e6:.1f}" for name in got), flush=True)
    return got, parts


def answer(machine):
    done = machine.run("run", MODEL, "The river rises", "--json", "--temperature", "0", "--max-tokens", "16")
    return json.loads(done.stdout)["tokens"]


try:
    for machine in machines:
        machine.up()
    form(machines)
    n0.run("pull", MODEL)
    alone = json.loads(n0.run("run", MODEL, "The river rises", "--json", "--local", "--temperature", "0", "--max-tokens", "16").stdout)["tokens"]
    for split, bar in [("pipeline", 1.05), ("tensor", 1.6)]:
        got, parts = load(split, "shard")
        for name in ["n1", "n2"]:
            verdict(f"{split}: bytes received by {name} over its shard", got[name] / parts[name], bar, at_least=False)
        print("same tokens as n0 alone:", answer(n2) == alone)
        unload()
        clean()
    got, parts = load("pipeline", "auto")
    for name in ["n1", "n2"]:
        verdict(f"auto, until ready: {name}", got[name] / parts[name], 1.05, at_least=False)
    n0.until("has a second whole copy", lambda: "too" in n0.said(), 300)
    unload()
    clean()
    verdict("bytes of the hub over the file", hub.sent() / size, 1.02, at_least=False)

    n0.run("pull", MODEL, "--to", "n1")
    [copy] = [f for f in os.listdir(f"{n1.home}/copies") if f.endswith(".gguf")]
    with open(f"{n1.home}/copies/{copy}", "r+b") as f:
        for i in range(16):
            at = header + 1000 + (size - header - 2000) * i // 16
            f.seek(at)
            byte = f.read(1)[0]
            f.seek(at)
            f.write(bytes([byte ^ 1]))
    n0.run("load", MODEL, "--nodes", "n0,n2", "--split", "pipeline", "--weights", "whole", "--threads", "1")
    lies = re.findall(r"warning: .*n1: it gave wrong bytes.*", n2.said())
    print("n2 says:", lies[:1])
    verdict("lies found", len(lies), 1)
    verdict("same answer after it", int(answer(n2) == alone), 1)
    with open(a.model, "rb") as f, open(f"{n2.home}/copies/{copy}", "rb") as g:
        same = all(x == y for x, y in zip(iter(lambda: f.read(1 << 20), b""), iter(lambda: g.read(1 << 20), b"")))
    verdict("n2's copy is the model", int(same), 1)
    unload()
    clean()

    # A source that goes: n1 has a right whole copy, and is killed while n2 fetches.
    n0.run("pull", MODEL, "--to", "n1")
    pull = subprocess.Popen(n0.command("pull", MODEL, "--to", "n2"), env=n0.env, cwd=n0.home, stderr=subprocess.PIPE, text=True)
    n2.until("fetches", lambda: n2.received() > size // 8)
    n1.child.kill()
    said = pull.communicate()[1]
    verdict("a vanished source costs nothing but time", int(pull.returncode == 0), 1)
    n0.run("rm", MODEL, "--node", "n2", check=False)
    n2.end()

    # A full disk.
    full = Machine(a.binary, net, 2, hub.env)
    full.name = "n3"
    os.makedirs(f"{full.home}/copies")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", f"{full.home}/copies"], check=True)
    machines.append(full)
    full.up()
    full.told("join", "--token-file", "-", stdin=n0.told("key", "cluster", "show") + "\n")
    n0.until("sees n3", lambda: any(n["name"] == "n3" and n["state"] == "alive" for n in n0.nodes()))
    failed = n0.run("pull", MODEL, "--to", "n3", check=False)
    print("n0 says:", failed.stderr.strip())
    verdict("a full disk is named", int("n3: " in failed.stderr and "No space left" in failed.stderr), 1)
    subprocess.run(["umount", "-l", f"{full.home}/copies"])
finally:
    for machine in machines:
        machine.end()
    hub.end()
    net.end()
