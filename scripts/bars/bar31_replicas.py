#!/usr/bin/env python3
"""Issue 31, replicas: 16 streams in pairs with a shared prefix, two replicas against one, one thread each on two cores.

    bar31_replicas.py BINARY [--model GGUF] [--tokens 64] [--rounds 5]     3 minutes; two nodes on loopback, each on its own core

Pairs: the second request of a pair has the prefix (some 400 tokens) of the first and comes when that has its first token. Where a
request went is told by `paceline ps --json` (asked). Throughput: all tokens over the time of all 16 streams, median of rounds.
"""
import argparse, sys, os
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from common import *

ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
ap.add_argument("binary")
ap.add_argument("--model", default=SMOLLM2)
ap.add_argument("--tokens", type=int, default=64)
ap.add_argument("--rounds", type=int, default=5)
a = ap.parse_args()


class Node:
    def __init__(self, name, core, *args):
        self.home = tempfile.mkdtemp(prefix="b31-rep-")
        self.env = {**os.environ, "PACELINE_HOME": self.home}
        self.name, self.log, self.core = name, open(f"{self.home}/log", "w+"), core
        self.args = ["taskset", "-c", str(core), a.binary, "up", "--port", "0", "--name", name, "--discovery", "none",
                     "--control-port", "0", *args]

    def start(self, *more):
        self.child = subprocess.Popen([*self.args, *more], env=self.env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self.log)
        for _ in range(200):
            found = re.search(r"listening on http://127\.0\.0\.1:(\d+)", open(self.log.name).read())
            if found:
                self.port = int(found[1])
                return
            time.sleep(0.1)
        sys.exit(open(self.log.name).read())

    def run(self, *args, stdin=None):
        done = subprocess.run([a.binary, *map(str, args)], env=self.env, input=stdin, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{args}: {done.stderr}")
        return done.stdout.strip()

    def end(self):
        self.child.kill(); self.child.wait(); shutil.rmtree(self.home, ignore_errors=True)


def stream(port, model, prompt, first):
    c = http.client.HTTPConnection("127.0.0.1", port, timeout=580)
    body = {"model": model, "prompt": prompt, "max_tokens": a.tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    c.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    r, n = c.getresponse(), 0
    if r.status != 200:
        sys.exit(r.read())
    for line in r:
        if line.startswith(b"data: ") and b"[DONE]" not in line:
            event = json.loads(line[6:])
            if any(choice.get("text") for choice in event.get("choices", [])):
                first.set()
            n += 1
    first.set()
    return n


def asked(node):
    return {it["nodes"][0]: it["asked"] for it in json.loads(node.run("ps", "--json"))}


def measure(node, model, round_no):
    total, lock = [0], threading.Lock()

    def pair(i):
        prefix = f"Round {round_no} of pair {i}. " + f"The stone at mile {i} of the road to the {i * 7}th town says so. " * 22
        first, threads = threading.Event(), []

        def one(end, event):
            n = stream(node.port, model, prefix + end, event)
            with lock:
                total[0] += n
        threads.append(threading.Thread(target=one, args=("A", first))); threads[0].start()
        first.wait()
        threads.append(threading.Thread(target=one, args=("B", threading.Event()))); threads[1].start()
        [t.join() for t in threads]
    began = time.perf_counter()
    pairs = [threading.Thread(target=pair, args=(i,)) for i in range(8)]
    [p.start() for p in pairs]; [p.join() for p in pairs]
    return 8 * 2 * a.tokens / (time.perf_counter() - began)


def hits(node, model):
    """Second requests, one after the other, that went where the first of their pair did."""
    hit = 0
    for i in range(20):
        prefix = f"Alone {i}: " + f"a field of {i} rows lies fallow in the {i}th year. " * 30
        went = []
        for end in "AB":
            before = asked(node)
            stream(node.port, model, prefix + end, threading.Event())
            after = asked(node)
            went.append([name for name in after if after[name] > before[name]])
        hit += went[0] == went[1]
    return hit / 20


one, two = Node("one", 0), Node("two", 1)
try:
    one.start()
    token = one.run("key", "cluster", "show")
    two.run("join", "--token-file", "-", stdin=token + "\n")
    control = json.loads(one.run("nodes", "--json"))[0]["port"]
    two.start("--peer", f"127.0.0.1:{control}")
    while sum(n["state"] == "alive" for n in json.loads(one.run("nodes", "--json"))) < 2:
        time.sleep(0.1)
    speeds = {}
    for replicas in [1, 2]:
        one.run("load", a.model, "--replicas", replicas, "--threads", 1, "--parallel", 16, "--context", 2048)
        names = {it["model"] for it in json.loads(one.run("ps", "--json"))}
        model = next(iter(names))
        time.sleep(2)
        measure(one, model, 1000 + replicas)
        speeds[replicas] = sorted(measure(one, model, r + 10 * replicas) for r in range(a.rounds))
        print(f"{replicas} replicas, tokens/s: {spread(speeds[replicas], 1)}", flush=True)
        if replicas == 2:
            verdict("second requests on the cached replica", hits(one, model), 0.9)
        one.run("unload", model)
        while one.run("ps", "--json") != "[]":
            time.sleep(0.1)
    verdict("two replicas over one", statistics.median(speeds[2]) / statistics.median(speeds[1]), 1.8)
    print(load())
finally:
    one.end(); two.end()
