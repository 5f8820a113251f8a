#!/usr/bin/env python3
"""Issue 26, a cluster without a master, in network namespaces (root, `ip`). PACELINE names the binary.

    bar26.py discovery [--runs 10]   1 min   from the later `up` until both nodes list both alive, fresh homes, an isolated segment
    bar26.py idle      [--seconds 60] 2 min  three joined nodes without an instance: processor, resident memory, growth of files
    bar26.py decode    [--runs 9]    8 min   two machines, tensor split: encrypted over plain, and over processes of this machine by TCP;
                                             SmolLM2 and the 1.5B shapes (models32.py: gguf and numpy)
    bar26.py handshakes [--count 10000] 1 min  malformed handshakes on the control port: no crash, bounded memory, members get in
"""
import random
import common31
from common32 import *

parser = arguments(__doc__, runs=0, seconds=60.0, count=10000)
parser.add_argument("what", choices=["discovery", "idle", "decode", "handshakes", "all"])
a = parser.parse_args()


def machines(net, more=()):
    """Machines of a network, joined into a cluster and up."""
    found = [common31.Machine(BINARY, net, n) for n in range(len(net.hosts))]
    for machine in found:
        machine.up("--discovery", "all", *more)
    common31.form(found)
    return found


@contextlib.contextmanager
def network(count, more=(), joined=True, name=""):
    """The machines, ended with their namespaces."""
    net, found = common31.Net(count, name), []
    try:
        found = machines(net, more) if joined else [common31.Machine(BINARY, net, n) for n in range(count)]
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
    """Bytes of all files of a home."""
    return {os.path.join(at, name): os.lstat(os.path.join(at, name)).st_size for at, _, names in os.walk(machine.home)
            for name in names if os.path.exists(os.path.join(at, name))}


def idle():
    with network(3) as nodes:
        time.sleep(20)  # paths are measured
        pids = [below(n.child.pid) for n in nodes]
        if not all(pids):
            sys.exit("no process `paceline` below a machine")
        sizes, before, began = [files(n) for n in nodes], [cpu_seconds(p) for p in pids], time.monotonic()
        time.sleep(a.seconds)
        took = time.monotonic() - began
        used = [100 * (cpu_seconds(p) - b) / took for p, b in zip(pids, before)]
        grown = [sum(max(0, size - was.get(name, 0)) for name, size in files(n).items()) for n, was in zip(nodes, sizes)]
        told("idle, of a core", used, "%")
        bar("idle, of a core, the busiest of three", max(used), "%", 1, False)
        bar("idle, resident, the largest of three", max(rss(p) for p in pids), "MB", 80, False)
        bar(f"idle, bytes that files grew by in {a.seconds:g} s", max(grown), "", 0, False)


def decode():
    """Two clusters of two: one encrypts, one trusts its interface. Whoever is not measured sleeps."""
    import models32
    runs = a.runs or 9
    for name, model, split, limit, gen in [("SmolLM2", SMOLLM2, "tensor", 0.88, 96), ("1.5B", models32.path("1.5b"), "tensor", 0.95, 32)]:
        how = ["--prompt", 16, "--gen", gen]
        with network(2) as sealed, network(2, ["--trusted-interface", "eth0"], name="t") as plain:
            for pair in (sealed, plain):
                pair[0].told("load", model, "--nodes", "n0,n1", "--split", split, "--threads", 1, "--spare", 0, "--drafts", 0, "--context", 1024)
            called = ask_node(sealed[0].home, "ps")[0]["model"]
            measure = lambda pair, *more: json.loads(pair[0].told("bench", "model", called, "--instance", *how, *more, "--json"))
            received = sealed[1].received()
            local = measure(sealed, "--against-local", "--nodes", 2, "--split", split, "--transport", "tcp", "--threads", 1, "--runs", runs)
            moved = sealed[1].received() - received
            if moved < 100_000:
                sys.exit(f"only {moved} bytes came over the network: it was not used")
            over_plain, over_local = [], local["ratio"]["decode"]["runs"]
            for r in range(runs):
                turn = [sealed, plain] if r % 2 else [plain, sealed]
                rates = {id(pair): measure(pair, "--runs", 3)["paceline"]["decode_tok_s"]["median"] for pair in turn}
                over_plain.append(rates[id(sealed)] / rates[id(plain)])
            told(f"decode {name}, two machines, encrypted", local["paceline"]["decode_tok_s"]["runs"], "tokens/s")
            bar(f"decode {name} {split}, encrypted over plain between machines", over_plain, "x", limit)
            bar(f"decode {name} {split}, machines over processes of one by TCP", over_local, "x", limit)


def handshakes():
    cluster = Cluster(1)
    node, r = cluster.nodes[0], random.Random(26)
    sizes = []
    for n in range(a.count):
        start_of = r.choice([b"", b"PLnode1c", b"PLnode1s", b"PLpair1\n"])
        data = start_of + r.randrange(65536).to_bytes(2, "little") + r.randbytes(r.randrange(300))
        with contextlib.suppress(OSError):
            with socket.create_connection(("127.0.0.1", node.control), timeout=5) as s:
                s.sendall(data)
                if n % 100 == 0:  # some wait for what is said
                    s.settimeout(0.2)
                    s.recv(64)
        if n % (a.count // 10) == 0:
            sizes.append(rss(node.tree()))
    time.sleep(2)
    sizes.append(rss(node.tree()))
    told("handshakes, resident after each tenth", sizes, "MB")
    bar(f"handshakes, {a.count} malformed: the node runs", int(node.child.poll() is None), "", 1)
    bar("handshakes, resident at the end over after a tenth", sizes[-1] - sizes[1], "MB", 32, False)
    other = Node("other")
    token = node.run("key", "cluster", "show").strip()
    other.run("join", "--token-file", "-", stdin=token + "\n")
    began = time.monotonic()
    other.up(node.control)
    until("a member gets in", lambda: sum(n["state"] == "alive" for n in node.nodes()) == 2, 60)
    bar("handshakes, a member gets in after", time.monotonic() - began, "s", 10, False)
    other.kill()
    cluster.end()


print(load(), BINARY, flush=True)
if os.geteuid() and a.what != "handshakes":
    sys.exit("namespaces want root")
for what in ["discovery", "idle", "decode", "handshakes"] if a.what == "all" else [a.what]:
    globals()[what]()
end()
