#!/usr/bin/env python3
"""Issue 26, a cluster without a master. PACELINE names the binary. All but `handshakes` want root and `ip`.

    bar26.py [BAR..]          without names all but decode-1.5b, some 9 min
    discovery  [--runs 10]       1 min  from the later `up` until both nodes list both alive, fresh homes, an isolated segment
    idle       [--seconds 60]    2 min  three joined nodes without an instance: processor, resident memory, files that grow
    decode     [--runs 9]        5 min  SmolLM2 over two machines, tensor split: encrypted over plain, and over processes of this
                                        machine by TCP
    decode-1.5b [--runs 9]      10 min  the same of the 1.5B shapes (models32.py: gguf and numpy)
    handshakes [--count 10000]   1 min  malformed handshakes on the control port: no crash, bounded memory, members get in
"""
import random
import chosen, common31
from common32 import *


@contextlib.contextmanager
def network(count, more=(), joined=True, name=""):
    """Machines on a network of their own, joined and up unless they are not to be. They end with their namespaces."""
    if os.geteuid():
        sys.exit("namespaces want root")
    net = common31.Net(count, name)
    found = [common31.Machine(BINARY, net, n) for n in range(count)]
    try:
        if joined:
            for machine in found:
                machine.up("--discovery", "all", *more)
            common31.form(found)
        yield found
    finally:
        for machine in found:
            machine.end()  # unshare has --kill-child
        net.end()


def alive(machine):
    told = ask_node(machine.home, "nodes", seconds=5) or {"nodes": []}
    return sum(n["state"] == "alive" for n in told["nodes"])


def spawn(machine):
    """Starts `up` and does not wait for it."""
    machine.log = open(os.path.join(machine.home, "log"), "a+")
    machine.child = subprocess.Popen(machine.command("up", "--name", machine.name), env=machine.env, cwd=machine.home,
                                     stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=machine.log)


def discovery():
    times, own = [], []
    for _ in range(a.runs or 10):
        with network(2, joined=False) as (first, later):
            spawn(first)
            until("n0 is up", lambda: alive(first) == 1, 30)
            token = first.told("key", "cluster", "show")
            later.told("join", "--token-file", "-", stdin=token + "\n")
            time.sleep(2)  # the first node's early beacons are over
            began = time.monotonic()
            spawn(later)
            until("n1 is up", lambda: alive(later) >= 1, 30, 0.002)
            own.append(time.monotonic() - began)
            until("both see both", lambda: alive(first) == 2 and alive(later) == 2, 30, 0.005)
            times.append(time.monotonic() - began)
    told("discovery, until the later node answers at its socket", own, "s")
    bar("discovery on an isolated segment, from the later `up`", times, "s", 1.5, False)
    bar("discovery, the slowest", max(times), "s", 1.5, False)


def below(pid):
    """The processes of a machine without `unshare`."""
    pids, found = [pid], []
    while pids:
        at = pids.pop()
        with contextlib.suppress(OSError):
            with open(f"/proc/{at}/comm") as f:
                if f.read().strip() == "paceline":
                    found.append(at)
            for task in os.listdir(f"/proc/{at}/task"):
                with open(f"/proc/{at}/task/{task}/children") as f:
                    pids += map(int, f.read().split())
    return found


def files(machine):
    """Bytes of all files of a home, by name."""
    found = {}
    for at, _, names in os.walk(machine.home):
        for name in names:
            with contextlib.suppress(OSError):
                found[os.path.join(at, name)] = os.lstat(os.path.join(at, name)).st_size
    return found


def idle():
    with network(3) as nodes:
        time.sleep(20)  # paths are measured
        pids = [below(n.child.pid) for n in nodes]
        if not all(pids):
            sys.exit("no process `paceline` below a machine")
        before, began, sizes = [cpu_seconds(p) for p in pids], time.monotonic(), []
        for _ in range(2):
            sizes.append([files(n) for n in nodes])
            time.sleep(a.seconds / 2)
        took = time.monotonic() - began
        used = [100 * (cpu_seconds(p) - b) / took for p, b in zip(pids, before)]
        sizes.append([files(n) for n in nodes])
        grown = 0  # a file that is written anew may be some bytes longer once; one that grows does so in both halves
        for first, middle, last in zip(*sizes):
            for name, size in last.items():
                halves = middle.get(name, 0) - first.get(name, 0), size - middle.get(name, 0)
                if max(halves) > 0:
                    print(f"  {name}: {halves[0]:+} and {halves[1]:+} bytes in the halves of the time", flush=True)
                grown += min(halves) > 0
        told("idle, of a core", used, "%")
        bar("idle, of a core, the busiest of three", max(used), "%", 1, False)
        bar("idle, resident, the largest of three", max(rss(p) for p in pids), "MB", 80, False)
        bar(f"idle, files that grow in {a.seconds:g} s", grown, "", 0, False)


def decode(name="SmolLM2", model=SMOLLM2, limit=0.88, gen=96):
    """Two clusters of two: one encrypts, one trusts its interface. Whoever is not measured sleeps."""
    runs, how = a.runs or 9, ["--prompt", 16, "--gen", gen]
    with network(2) as sealed, network(2, ["--trusted-interface", "eth0"], name="t") as plain:
        time.sleep(10)  # ways are measured: before that none is trusted
        for pair in (sealed, plain):
            pair[0].told("load", model, "--nodes", "n0,n1", "--split", "tensor", "--threads", 1, "--spare", 0, "--drafts", 0, "--context", 1024)
        measure = lambda pair, *more: json.loads(pair[0].told("bench", "model", model, "--instance", *how, *more, "--json", timeout=300))
        received = sealed[1].received()
        local = measure(sealed, "--against-local", "--nodes", 2, "--split", "tensor", "--transport", "tcp", "--threads", 1, "--runs", runs)
        if sealed[1].received() - received < 100_000:
            sys.exit("less than 100 kB came over the network: it was not used")
        over_plain, over_local, moved = [], local["ratio"]["decode"]["runs"], {id(sealed): 0, id(plain): 0}
        for r in range(runs):
            rates = {}
            for pair in [sealed, plain] if r % 2 else [plain, sealed]:
                received = pair[1].received()
                rates[id(pair)] = measure(pair, "--runs", 3)["paceline"]["decode_tok_s"]["median"]
                moved[id(pair)] += pair[1].received() - received
            over_plain.append(rates[id(sealed)] / rates[id(plain)])
        told(f"{name}, two machines, encrypted", local["paceline"]["decode_tok_s"]["runs"], "tokens/s")
        told(f"{name}, bytes on the wire, encrypted over plain (1: plain was not)", moved[id(sealed)] / moved[id(plain)], "x")
        bar(f"decode {name} tensor, encrypted over plain between machines", over_plain, "x", limit)
        bar(f"decode {name} tensor, machines over processes of one by TCP", over_local, "x", limit)


def decode_15():
    import models32
    decode("1.5B", models32.path("1.5b"), 0.95, 32)


def handshakes():
    cluster = Cluster(1)
    node, r = cluster.nodes[0], random.Random(26)
    sizes, closed = [], 0
    for n in range(a.count):
        start_of = r.choice([b"", b"PLnode2c", b"PLnode2s", b"PLpair1\n"])
        data = start_of + r.randrange(65536).to_bytes(2, "little") + r.randbytes(r.randrange(300))
        try:
            with socket.create_connection(("127.0.0.1", node.control), timeout=5) as s:
                s.sendall(data)
                s.shutdown(socket.SHUT_WR)
                s.settimeout(0.1)  # the node waits some seconds for the rest of less than eight bytes
                while s.recv(4096):
                    pass
                closed += 1
        except ConnectionError:
            closed += 1
        except OSError:
            pass
        if n % max(1, a.count // 10) == 0:
            sizes.append(rss(node.tree()))
    time.sleep(6)
    sizes.append(rss(node.tree()))
    told(f"handshakes that the node closed at once, of {a.count}", closed)
    told("handshakes, resident after each tenth", sizes, "MB")
    bar(f"handshakes, {a.count} malformed: the node runs", int(node.child.poll() is None), "", 1)
    bar("handshakes, resident at the end more than after a tenth", max(0, sizes[-1] - sizes[1]), "MB", 32, False)
    other = Node("other")
    token = node.run("key", "cluster", "show").strip()
    other.run("join", "--token-file", "-", stdin=token + "\n")
    began = time.monotonic()
    other.up(node.control)
    until("a member gets in", lambda: sum(n["state"] == "alive" for n in other.nodes()) == 2, 60)
    bar("handshakes, a member gets in after", time.monotonic() - began, "s", 10, False)
    other.kill()
    cluster.end()


BARS = {"discovery": (discovery, 300), "idle": (idle, 300), "decode": (decode, 900), "decode-1.5b": (decode_15, 1800),
        "handshakes": (handshakes, 300)}
a = chosen.parsed(arguments(__doc__, runs=0, seconds=60.0, count=10000), BARS, ["decode-1.5b"])
chosen.play(a.bars, BARS)
