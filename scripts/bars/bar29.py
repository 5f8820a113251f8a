#!/usr/bin/env python3
"""Issue 29, no lost answer. PACELINE names the binary; SmolLM2 unless --model names a GGUF file.

    bar29.py [BAR..]        without names chaos, frozen and cost, some 9 min
    chaos       [--seed 1 --spare 0]   4 min  `paceline chaos`, 8 rounds on 3 nodes: lost, altered, detection, next token
    frozen      [--seconds 10]         2 min  all nodes frozen together (cgroup freezer; root), then one alone
    cost        [--runs 15]            3 min  tokens copied to a second node over none, decode; a core for each node
    chaos-long  [--parts 10 --part -1 --rounds 20 --seed 1 --spare 0]
                                       1 to 2 h  200 rounds on 4 nodes, in parts; one of them by --part N (5 to 12 min)
    calm        [--minutes 30]         full load on all cores, foreign load beside it: no false detection
    kills       [--minutes 10]         a SIGKILL every 15 s, to a worker and to a node in turn; every answer right

Chaos as root has all faults, else those of processes. Silence: freeze-node, freeze-worker, cut-node, split-node. Death: kill-node,
kill-worker, out-of-memory. Medians of death and of the next token are of rounds with one fault. The next token is that of answers
which had tokens before the fault, and whose client's node stayed: a client waits 6 s for a node that says nothing. `measured load
and prefill` is that of `paceline run` over as many nodes as a loss leaves, a prompt of some 300 tokens.
"""
import random
import chosen
from common32 import *

SILENT, DEAD = {"freeze-node", "freeze-worker", "cut-node", "split-node"}, {"kill-node", "kill-worker", "out-of-memory"}
FALSE = ("node_silent", "node_went", "fault")
PROMPT = 40  # tokens of a question of chaos in its template, at least


def load_and_prefill(nodes):
    """Seconds of both, and tokens of the prompt a second, medians of three behind one that measures the machine."""
    loads, prefills, rates, home = [], [], [], folder()
    for n in range(4):
        text = f"{n} " + "the stone at the road says how far it is to the next town. " * 20
        found = json.loads(run("run", a.model, text, "--raw", "--local", "--json", "--nodes", nodes, "--threads", 1, "--temperature", 0,
                               "--max-tokens", 4, env={"PACELINE_HOME": home}, timeout=120))
        loads.append(found["load_ms"] / 1e3)
        prefills.append(found["ttft_ms"] / 1e3)
        rates.append(found["prefill_tok_s"])
    return statistics.median(loads[1:]), statistics.median(prefills[1:]), statistics.median(rates[1:])


def played(seconds, *options):
    """The report of `paceline chaos`; None where it did not end well. It puts its namespaces and disks in order at SIGTERM."""
    spaces = ["--namespaces"] if os.geteuid() == 0 and shutil.which("ip") else []
    at = folder()
    child = start([BINARY, "chaos", a.model, *options, "--seed", a.seed, "--spare", a.spare, *spaces, "--json"], text=True,
                  env={**os.environ, "PACELINE_HOME": at, "TMPDIR": at}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        out, err = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        out, err = "", f"not within {seconds} s"
    finally:
        if child.poll() is None:
            child.terminate()  # it ends the round that it plays first
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.communicate(timeout=200)
        if child.poll() is None:
            kill(child)
            swept(child.pid, at)
    if child.returncode:
        print(f"  chaos: exit {child.returncode}: {err[-600:]}", flush=True)
    with contextlib.suppress(ValueError):
        return json.loads(out)


def swept(pid, folder):
    """Removes what a killed chaos has left: namespaces of its nodes, and their disks."""
    for name in os.listdir("/run/netns") if os.path.isdir("/run/netns") else []:
        if name.startswith(f"plc{pid}n"):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=30)
    with open("/proc/mounts") as f:
        disks = [line.split()[1] for line in f]
    for disk in disks:
        if disk.startswith(folder + "/"):
            subprocess.run(["umount", "-l", disk], capture_output=True, timeout=30)


def judged(name, reports, failed, nodes):
    """Bars over all rounds of the reports."""
    rounds, answers = [r for report in reports for r in report["rounds"]], sum(report["answers"] for report in reports)
    for r in rounds:
        if r["lost"] or r["altered"]:
            print(f"    {r}", flush=True)
    of = lambda kinds, key: [r[key] for r in rounds if r["fault"] in kinds and r["second"] is None and r[key] is not None]
    for fault in sorted({r["fault"] for r in rounds}):
        told(f"{fault}, detected after ({len([r for r in rounds if r['fault'] == fault])} rounds)", of({fault}, "detected_s"), "s")
        told(f"{fault}, next token after that", of({fault}, "resumed_s"), "s")
        told(f"{fault}, the same of clients that went on at another node", of({fault}, "moved_resumed_s"), "s")
    bar(f"{name}, answers lost of {answers} in {len(rounds)} rounds", sum(r["lost"] for r in rounds), "", 0, False)
    bar(f"{name}, answers altered", sum(r["altered"] for r in rounds), "", 0, False)
    bar(f"{name}, runs that did not end", failed, "", 0, False)
    silent = [r["detected_s"] for r in rounds if r["fault"] in SILENT and r["detected_s"] is not None]
    told(f"{name}, silence detected after", silent, "s")
    bar(f"{name}, slowest detection of silence of {len(silent)}", [max(silent)] if silent else [], "s", 2, False)
    bar(f"{name}, death of a process detected after", of(DEAD, "detected_s"), "s", 0.3, False)
    loading, prefill, rate = load_and_prefill(nodes - 1)
    print(f"  load {loading:.2f} s, prefill {prefill:.2f} s, {rate:.0f} tokens/s, on {nodes - 1} nodes of a thread", flush=True)
    own = [r["resumed_s"] - loading - (r.get("tokens", 0) + r["answers"] * PROMPT) / rate for r in rounds
           if r["fault"] in SILENT | DEAD and r["second"] is None and r["resumed_s"] is not None]
    told(f"{name}, next token beyond load and prefill of all that the answers had", own, "s")
    limit = prefill + 0.5 + (0 if a.spare else loading)
    what = "with a spare, prefill" if a.spare else "measured load, prefill"
    bar(f"{name}, next token after detection ({what} + 0.5 s)", of(SILENT | DEAD, "resumed_s"), "s", round(limit, 2), False)


def chaos():
    began = time.monotonic()
    report = played(420, "--rounds", 8)
    bar("chaos, 8 rounds take", time.monotonic() - began, "s", 180, False)
    judged("chaos", [report] if report else [], int(not report), 3)


def chaos_long():
    reports = []
    parts = list(range(a.parts)) if a.part < 0 else [a.part]
    for part in parts:
        report = played(1500, "--long", "--from", part * a.rounds, "--rounds", a.rounds)
        if report:
            reports.append(report)
            print(f"  part {part}: {len(report['rounds'])} rounds, {report['answers']} answers, {report['lost']} lost, "
                  f"{report['altered']} altered, {load()}", flush=True)
    judged("chaos --long", reports, len(parts) - len(reports), 4)


class Client(threading.Thread):
    """Asks one request after the other, of nodes at random, and goes on at another node with Last-Event-ID; counts lost and altered."""

    def __init__(self, cluster, model, bodies, right, over, seed):
        super().__init__(daemon=True)
        self.cluster, self.model, self.bodies, self.right, self.over = cluster, model, bodies, right, over
        self.random = random.Random(seed)
        self.done = self.moves = 0
        self.bad, self.pauses = [], []

    def run(self):
        while not self.over.is_set():
            which = self.random.randrange(len(self.bodies))
            try:
                text = self.answer(self.bodies[which])
                if text != self.right[which]:
                    self.bad.append(f"altered: {text[-60:]!r} for {self.right[which][-60:]!r}")
            except RuntimeError as error:
                self.bad.append(f"lost: {error}")
            self.done += 1

    def answer(self, body, limit=180):
        text, last, error, stop = "", None, None, time.monotonic() + limit
        at, pause, before = self.random.randrange(len(self.cluster.nodes)), 0, time.monotonic()
        while time.monotonic() < stop:
            node = self.cluster.nodes[at % len(self.cluster.nodes)]
            c = http.client.HTTPConnection("127.0.0.1", node.port, timeout=6)
            pending = None
            try:
                headers = {"Content-Type": "application/json", **({"Last-Event-ID": last} if last else {})}
                c.request("POST", "/v1/chat/completions", json.dumps({**body, "model": self.model, "stream": True}), headers)
                r = c.getresponse()
                if r.status != 200:
                    error = f"{r.status} {r.read()[:200]!r}"
                    if r.status == 404 and last:
                        raise RuntimeError(error)
                else:
                    for line in r:
                        line = line.strip()
                        if line.startswith(b"id: "):
                            pending = line[4:].decode()
                        elif line == b"data: [DONE]":
                            self.pauses.append(pause)
                            return text
                        elif line.startswith(b"data: "):
                            event = json.loads(line[6:])
                            if "error" in event:
                                if event["error"].get("code") == "shutting_down":
                                    break
                                raise RuntimeError(event["error"])
                            last, pending = pending or last, None
                            for choice in event.get("choices", []):
                                text += choice["delta"].get("content") or ""
                                text += choice.get("finish_reason") or ""
                            pause, before = max(pause, time.monotonic() - before), time.monotonic()
                    error = "the stream ended before the answer"
            except (OSError, http.client.HTTPException, ValueError) as why:
                error = repr(why)
            finally:
                c.close()
            at += 1
            self.moves += 1
            time.sleep(0.1)
        raise RuntimeError(f"not within {limit} s: {error}")


def bodies(tokens):
    return [{"messages": [{"role": "user", "content": f"Count from {n}."}], "temperature": 0 if n % 2 else 0.8, "seed": n,
             "max_tokens": tokens, "ignore_eos": True} for n in range(8)]


class Loaded:
    """A cluster with the model over all nodes and clients that ask all the time, for a `with`."""

    def __init__(self, tokens=200, groups=None, spare=None):
        self.clients, self.over = [], threading.Event()
        self.cluster = Cluster(a.nodes, groups=groups)
        more = [] if spare is None else ["--spare", spare]
        model = self.cluster.load(a.model, "--nodes", a.nodes, "--threads", 1, "--parallel", 4, "--context", 1024, *more)
        wanted = bodies(tokens)
        asker = Client(self.cluster, model, [], [], self.over, 0)
        self.right = [asker.answer(body) for body in wanted]  # undisturbed
        self.clients = [Client(self.cluster, model, wanted, self.right, self.over, n) for n in range(4)]
        [c.start() for c in self.clients]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.over.set()
        self.cluster.end()

    def seen(self):
        """How many events each node has told."""
        return [len(node.events()) for node in self.cluster.nodes]

    def detections(self, seen):
        """Events since then: nodes that went or were silent, faults, instances that recover or failed."""
        new = [e for node, at in zip(self.cluster.nodes, seen) for e in node.events()[at:]]
        return [e for e in new if e["kind"] in FALSE or e["kind"] == "instance" and e["state"] in ("recovering", "failed")]

    def stop(self):
        self.over.set()
        [c.join(200) for c in self.clients]

    def tell(self, name):
        bad = [b for c in self.clients for b in c.bad] + ["a client hangs" for c in self.clients if c.is_alive()]
        for what in bad[:5]:
            print("  BAD", what)
        told(f"{name}, answers", sum(c.done for c in self.clients))
        told(f"{name}, times a client went on at another node", sum(c.moves for c in self.clients))
        told(f"{name}, longest pause of an answer", [p for c in self.clients for p in c.pauses], "s")
        bar(f"{name}, answers lost or altered", len(bad), "", 0, False)


def calm():
    minutes = a.minutes or 30
    with Loaded() as loaded:
        for _ in range(a.burners):
            start([sys.executable, "-c", "while True: pass"])
        seen, stop = loaded.seen(), time.monotonic() + 60 * minutes
        while time.monotonic() < stop:
            time.sleep(min(60, max(0.1, stop - time.monotonic())))
            print(f"  {(time.monotonic() - stop) / 60 + minutes:.0f} min: {len(loaded.detections(seen))} detections, "
                  f"{sum(c.done for c in loaded.clients)} answers, {load()}", flush=True)
        found = loaded.detections(seen)
        loaded.stop()
        for what in found[:5]:
            print("  FALSE", what)
        loaded.tell("calm")
        bar(f"calm, false detections in {minutes:g} minutes", len(found), "", 0, False)


class Freezer:
    """A control group below which each node has one; version 1's freezer, else version 2's file."""

    def __init__(self, count):
        root = next((r for r in ["/sys/fs/cgroup/freezer", "/sys/fs/cgroup/unified", "/sys/fs/cgroup"] if os.path.exists(f"{r}/cgroup.procs")), None)
        if root is None:
            sys.exit("no control groups")
        self.folder = f"{root}/bar29-{os.getpid()}"
        self.old = root.endswith("freezer")
        self.groups = [f"{self.folder}/n{n}" for n in range(count)]
        os.mkdir(self.folder)
        [os.mkdir(g) for g in self.groups]

    def freeze(self, frozen, group=None):
        at = group or self.folder
        with open(f"{at}/freezer.state" if self.old else f"{at}/cgroup.freeze", "w") as f:
            f.write(("FROZEN" if frozen else "THAWED") if self.old else str(int(frozen)))

    def thaw(self):
        for group in [self.folder, *self.groups]:
            with contextlib.suppress(OSError):
                self.freeze(False, group)

    def end(self):
        self.thaw()
        for group in [*self.groups, self.folder]:
            for _ in range(50):
                try:
                    os.rmdir(group)
                    break
                except OSError:
                    time.sleep(0.1)


def frozen():
    freezer = Freezer(a.nodes)
    try:
        with Loaded(groups=freezer.groups) as loaded:
            try:
                freeze(freezer, loaded)
            finally:
                freezer.thaw()
    finally:
        freezer.end()


def freeze(freezer, loaded):
    time.sleep(5)
    seen = loaded.seen()
    # Clients wait too: theirs is a limit of 6 s for an event.
    freezer.freeze(True)
    time.sleep(a.seconds)
    freezer.freeze(False)
    time.sleep(10)
    found = loaded.detections(seen)
    for what in found[:5]:
        print("  FALSE", what)
    bar(f"frozen, all nodes for {a.seconds:g} s: detections", len(found), "", 0, False)
    entry, victim = loaded.cluster.nodes[0], loaded.cluster.nodes[-1]
    state = lambda: [(i["state"], i["epoch"], i["nodes"]) for i in entry.ps()]
    until("the model is ready on all nodes", lambda: (now := state()) and now[0][0] == "ready" and victim.name in now[0][2], 60)
    was, began, after = state(), time.monotonic(), None
    freezer.freeze(True, victim.group)
    while time.monotonic() < began + 10 and after is None:
        if (now := state()) and now != was:
            after = time.monotonic() - began
        time.sleep(0.02)
    bar("frozen, one node alone is silent after", after if after is not None else 99.0, "s", 2, False)
    freezer.freeze(False, victim.group)
    time.sleep(5)
    loaded.stop()
    loaded.tell("frozen")


def kills():
    """One after the other: a worker, a node. A node that was killed comes back 4 s later, at its ports, with its home."""
    minutes, r = a.minutes or 10, random.Random(a.seed)
    with Loaded(spare=a.spare) as loaded:
        stop, count = time.monotonic() + 60 * minutes, 0
        while time.monotonic() < stop:
            began = time.monotonic()
            victim = r.choice(loaded.cluster.nodes)
            if count % 2 == 0 and victim.workers():
                for pid in victim.workers():
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
            else:
                victim.child.kill()
                victim.child.wait()
                time.sleep(4)
                loaded.cluster.up(victim)
            count += 1
            time.sleep(max(0, 15 - (time.monotonic() - began)))
        loaded.stop()
        told("kills", count)
        loaded.tell("kills")


def cost():
    """A node of a cluster of two, whose answers are copied to the other one, beside a node without a cluster, on the same core."""
    if os.cpu_count() < 2:
        return skipped("cost", "it wants two cores")
    pair, alone = Cluster(2, cores=["0", "1"]), Cluster(1, cores=["0"])
    options = ["--threads", 1, "--parallel", 1, "--context", 1024, "--spare", 0, "--drafts", 0]
    name = pair.load(a.model, "--nodes", "n0", *options)
    alone.load(a.model, "--nodes", 1, *options)
    body = lambda n: {"model": name, "prompt": f"Story {n}. Once upon a time", "max_tokens": 256, "temperature": 0, "ignore_eos": True}
    rate = lambda cluster, n: stream(cluster.nodes[0].port, body(n), timeout=60)["rate"]
    ratios, seen = [], 0
    for n in range(a.runs + 1):
        rates = {id(c): rate(c, n) for c in ([pair, alone] if n % 2 else [alone, pair])}
        if n:
            ratios.append(100 * (rates[id(alone)] / rates[id(pair)] - 1))
        else:
            seen = len(pair.nodes[0].events("unprotected"))
    bar("cost, answers of the cluster of two that no other node had", len(pair.nodes[0].events("unprotected")) - seen, "", 0, False)
    bar("cost, tokens copied to a second node, time of decode more than without", ratios, "%", 3, False)
    pair.end()
    alone.end()


BARS = {"chaos": (chaos, 900), "frozen": (frozen, 600), "cost": (cost, 600), "chaos-long": (chaos_long, 16_000), "calm": (calm, 4000),
        "kills": (kills, 2400)}
a = chosen.parsed(arguments(__doc__, parts=10, part=-1, rounds=20, seed=1, spare=0, minutes=0.0, seconds=10.0, runs=15, model=SMOLLM2,
                            nodes=3, burners=2), BARS, ["chaos-long", "calm", "kills"])
chosen.play(a.bars, BARS)
