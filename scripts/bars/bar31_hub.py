#!/usr/bin/env python3
"""Issue 31, bytes that no node has: the hub gives them, pinned to the commit; without a network the error names what to do.

    bar31_hub.py BINARY [--model GGUF]      root; 2 to 4 minutes; 3 GB in /tmp

Two namespaces. n0 pulls the model, loads it over n0 and n1 (pipeline, --weights shard) and is killed: n1 takes over, has half of the
file, and reads the other half from the hub. Then n1's files are removed and its node is started again: all of it comes from the hub.
Then the hub's namespace is cut off and the same again: the load fails, and the error names `paceline pull .. --to`.
"""
import argparse, sys, os
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import common31
from common31 import *

ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
ap.add_argument("binary")
ap.add_argument("--model")
a = ap.parse_args()
if not a.model:
    import models32
    a.model = models32.path("0.5b")
size = os.path.getsize(a.model)
# The hub sends just the range that is asked for.
common31.HUB = (common31.HUB
    .replace('start = 0\n', 'start, end = 0, size\n')
    .replace(r'r"bytes=(\d+)-"', r'r"bytes=(\d+)-(\d*)"')
    .replace('start = int(found[1])', 'start, end = int(found[1]), int(found[2]) + 1 if found[2] else size')
    .replace('str(size - start)', 'str(end - start)')
    .replace('{start}-{size - 1}/{size}', '{start}-{end - 1}/{size}')
    .replace('for block in iter(lambda: f.read(1 << 20), b""):\n                self', 'for block in iter(lambda: f.read(min(1 << 20, end - f.tell())), b""):\n                self'))
assert "end - f.tell()" in common31.HUB
net = Net(2)
hub = Hub(net, a.model)
n0, n1 = (Machine(a.binary, net, n, hub.env) for n in range(2))
MODEL = "bars/model"


def only(machine):
    done = machine.run("ps", "--json", check=False)
    return (json.loads(done.stdout or "[]") or [{}])[0]


def answer(machine):
    done = machine.run("run", MODEL, "The river rises", "--json", "--temperature", "0", "--max-tokens", "16")
    return json.loads(done.stdout)["tokens"]


def again():
    """n1 anew, without any file of the model."""
    n1.child.kill()
    n1.child.wait()
    for folder in ["copies", "models"]:
        shutil.rmtree(f"{n1.home}/{folder}", ignore_errors=True)
    before = hub.sent()
    n1.up()
    return before


try:
    n0.up()
    n1.up()
    form([n0, n1])
    n0.run("pull", MODEL)
    n0.run("load", MODEL, "--nodes", "n0,n1", "--split", "pipeline", "--weights", "shard", "--threads", "1")
    expected = answer(n1)
    verdict("the hub gave the file once", hub.sent() / size, 1.02, at_least=False)

    before = hub.sent()
    n0.child.kill()
    n1.until("takes over", lambda: only(n1).get("state") == "ready" and only(n1)["nodes"] == ["n1"], 180)
    print("n1 says:", [line for line in n1.said().splitlines() if "asking the hub" in line][:1])
    verdict("missing part: bytes of the hub over the file", (hub.sent() - before) / size, 0.8, at_least=False)
    verdict("same answer", int(answer(n1) == expected), 1)

    before = again()
    n1.until("is ready again", lambda: only(n1).get("state") == "ready", 180)
    verdict("all of it: bytes of the hub over the file", (hub.sent() - before) / size, 1.02, at_least=False)
    verdict("same answer again", int(answer(n1) == expected), 1)

    ip("-n", net.bridge, "addr", "del", "10.77.0.254/24", "dev", "br0")
    again()
    n1.until("fails", lambda: only(n1).get("state") == "failed", 180)
    reason = only(n1)["reason"]
    print("n1 says:", reason)
    verdict("the error names what to do", int(f"paceline pull {MODEL} --to n1" in reason and "cannot reach" in reason), 1)
finally:
    n0.end()
    n1.end()
    hub.end()
    net.end()
