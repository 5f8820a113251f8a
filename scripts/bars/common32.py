"""Shared by bar22, bar26 to bar29, bar32, bar34, bar38 and bar39: a binary, servers, streams with times, bars.

The binary is that of PACELINE, else target/release/paceline. Each server has a home of its own in a temporary folder;
models are named by their files (common.MODELS, and those that are made in /tmp/bars). All processes that `start` has
started end with the script, with all of their session, also at SIGTERM and at an error.
"""
import argparse, atexit, contextlib, http.client, json, os, re, shutil, signal, socket, statistics, subprocess, sys, tempfile, threading, time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from common import ALONE, GEMMA, MLX_PYTHON, MODELS, SMOLLM2, Server, load

REPO = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BINARY = os.path.abspath(os.environ.get("PACELINE", f"{REPO}/target/release/paceline"))
MADE = "/tmp/bars"  # models and data that are made once
_children, _folders, _missed = [], [], []


def start(command, **more):
    """A process in a session of its own, which ends with this script."""
    try:
        child = subprocess.Popen([str(word) for word in command], start_new_session=True, **{"stdin": subprocess.DEVNULL, **more})
    except FileNotFoundError:
        sys.exit(f"no program {command[0]}; PACELINE names the binary")
    _children.append(child)
    return child


def kill(child):
    """SIGKILL to all of its session, if it runs; workers without their parent end by themselves."""
    if child.poll() is not None:
        return
    with contextlib.suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(10)


def folder(prefix="bars-"):
    """A folder that goes with this script."""
    _folders.append(tempfile.mkdtemp(prefix=prefix))
    return _folders[-1]


@atexit.register
def _end():
    for child in _children:
        kill(child)
    for path in _folders:
        shutil.rmtree(path, ignore_errors=True)


for _number in [signal.SIGTERM, signal.SIGHUP]:
    signal.signal(_number, lambda *_: sys.exit("ended by SIGTERM"))


def arguments(doc, **numbers):
    """A parser with the script's docstring; `runs=9` becomes --runs with that default."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    return parser


def run(*args, env=None, timeout=900, check=True, cores=None, stdin=None, binary=None):
    """Output of a command of the binary; ends the script where it fails."""
    pinned = ["taskset", "-c", cores] if cores else []
    child = start([*pinned, binary or BINARY, *args], env={**os.environ, **(env or {})}, text=True,
                  stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        out, err = child.communicate(stdin, timeout=timeout)
    except subprocess.TimeoutExpired:
        sys.exit(f"{args}: not within {timeout} s")
    finally:
        kill(child)
        _children.remove(child)
    if check and child.returncode:
        sys.exit(f"{' '.join(map(str, args))}: exit {child.returncode}: {err[-800:]}")
    return out if check else (child.returncode, out, err)


def bench(*args, **more):
    """The object of `bench .. --json`."""
    return json.loads(run("bench", *args, "--json", **more))


def shown(value):
    return f"{value:.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def bar(name, values, unit, limit, at_least=True):
    """Prints a bar's line: the value, or the median of the pairs' with the least, the most and their number."""
    values = sorted(values) if isinstance(values, (list, tuple)) else [values]
    if not values:
        return skipped(name, "nothing was measured")
    value = statistics.median(values)
    met = value >= limit if at_least else value <= limit
    many = f" ({shown(values[0])} .. {shown(values[-1])}, n={len(values)})" if len(values) > 1 else ""
    wanted = ">=" if at_least else "<="
    print(f"bar {name}: {shown(value)}{' ' + unit if unit else ''}{many} (bar {wanted} {shown(limit)}) {'ok' if met else 'missed'}", flush=True)
    if not met:
        _missed.append(name)
    return met


def told(name, values, unit=""):
    """Prints a figure that has no bar."""
    values = sorted(values) if isinstance(values, (list, tuple)) else [values]
    if values:
        many = f" ({shown(values[0])} .. {shown(values[-1])}, n={len(values)})" if len(values) > 1 else ""
        print(f"  {name}: {shown(statistics.median(values))} {unit}{many}", flush=True)


def skipped(name, why):
    print(f"SKIPPED {name}: {why}", flush=True)


def end():
    """The last line of a script; exit code 1 where a bar was missed."""
    print(load(), "| missed: " + ", ".join(_missed) if _missed else "| no bar missed", flush=True)
    sys.exit(1 if _missed else 0)


def until(what, done, seconds=60, every=0.05):
    """Waits for a true value of done() and returns it."""
    stop = time.monotonic() + seconds
    while not (value := done()):
        if time.monotonic() > stop:
            sys.exit(f"{what}: not within {seconds} s")
        time.sleep(every)
    return value


class Up(Server):
    """`paceline up ARGS` alone on a free port; `cores` as taskset's list. A home that is given is kept."""

    def __init__(self, *args, cores=None, home=None, env=None, binary=None, seconds=300):
        self.own = home is None
        self.home = home or tempfile.mkdtemp(prefix="bars-home-")
        if self.own:
            _folders.append(self.home)
        self.said_at = os.path.join(self.home, f"bars-{time.monotonic_ns()}.log")
        with open(self.said_at, "w") as log:
            self.child = start([*(["taskset", "-c", cores] if cores else []), binary or BINARY, "up", "--port", "0", *ALONE, *args],
                               env={**os.environ, "PACELINE_HOME": self.home, **(env or {})}, stdout=subprocess.DEVNULL, stderr=log)

        def listens():
            if self.child.poll() is not None:
                sys.exit("the server ended: " + self.said())
            return re.search(r"listening on http://127\.0\.0\.1:(\d+)", self.said())
        self.port = int(until("the server listens", listens, seconds)[1])
        until("the server is ready", lambda: self.health().get("status") == "ready", seconds)
        self.model = self.call("GET", "/v1/models")["data"][0]["id"]

    def said(self):
        with open(self.said_at, errors="replace") as log:
            return log.read()

    def health(self):
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        c.request("GET", "/health")
        told = json.loads(c.getresponse().read())
        c.close()
        if told.get("status") == "failed":
            sys.exit(f"the model failed: {told}")
        return told

    def generated(self):
        """Tokens that were generated so far, of all answers."""
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        c.request("GET", "/metrics")
        text = c.getresponse().read().decode()
        c.close()
        found = re.findall(r'^paceline_tokens_total\{[^}]*kind="generated"[^}]*\} (\S+)', text, re.M)
        return sum(map(float, found))

    def ask(self, prompt, tokens=1, path="/v1/completions", on_event=None, **more):
        """Streams an answer: see `stream`."""
        body = {"model": self.model, "temperature": 0, "max_tokens": tokens, **more}
        body |= {"messages": prompt} if "chat" in path else {"prompt": prompt}
        return stream(self.port, body, path, on_event)

    def quiet(self, seconds=60):
        """Waits until no request is in work."""
        until("requests end", lambda: (h := self.health())["running"] + h["waiting"] == 0, seconds)

    def ttft(self, prompt, **more):
        return self.ask(prompt, **more)["ttft"]

    def end(self):
        self.child.terminate()
        try:
            self.child.wait(20)
        except subprocess.TimeoutExpired:
            pass
        kill(self.child)
        if self.own:
            shutil.rmtree(self.home, ignore_errors=True)


def stream(port, body, path="/v1/completions", on_event=None, timeout=580):
    """Times of the events with text, ttft, text, usage. `on_event(n)` after each; a true value ends the connection.
    A first event counts as ttft where the text itself is withheld (half of a character)."""
    c = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    sent = {**body, "stream": True, "stream_options": {"include_usage": True}}
    began = time.perf_counter()
    told = {"times": [], "text": "", "usage": None, "began": began, "tokens": None}
    try:
        c.request("POST", path, json.dumps(sent), {"Content-Type": "application/json"})
        r = c.getresponse()
        if r.status != 200:
            raise RuntimeError(f"{path}: {r.status} {r.read()[:300]!r}")
        ended = None
        for line in r:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            now = time.perf_counter()
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(f"{path}: {event}")
            told["usage"] = event.get("usage") or told["usage"]
            for choice in event.get("choices", []):
                said = choice.get("text") or (choice.get("delta") or {}).get("content")
                if said:
                    told["times"].append(now)
                    told["text"] += said
                elif choice.get("finish_reason"):
                    ended = now
            if on_event and on_event(len(told["times"])):
                break
    finally:
        c.close()
    told["ended"] = time.perf_counter()
    first = told["times"][0] if told["times"] else ended or told["ended"]
    told["ttft"] = first - began
    if told["usage"]:
        told["tokens"] = told["usage"]["completion_tokens"]
        last = max(filter(None, [told["times"][-1] if told["times"] else None, ended]), default=told["ended"])
        told["rate"] = (told["tokens"] - 1) / max(last - first, 1e-9)
        told["cached"] = (told["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return told


def together(*calls):
    """Calls each in a thread of its own; their results. The first failure is raised."""
    results, errors = [None] * len(calls), []

    def one(i):
        try:
            results[i] = calls[i]()
        except BaseException as error:  # SystemExit too
            errors.append(error)
    threads = [threading.Thread(target=one, args=(i,), daemon=True) for i in range(len(calls))]
    [t.start() for t in threads]
    [t.join() for t in threads]
    if errors:
        raise errors[0]
    return results


def ids(count, seed, vocab=49152):
    """Token ids spread over a vocabulary, others for each seed."""
    return [(i * 7919 + seed * 104729) % (vocab - 300) + 150 for i in range(count)]


def total_rate(servers, streams, tokens=512, prompt=16, vocab=49152, seed=0, settle=1.0, most=12.0, streamed=True):
    """Tokens a second of all servers while `streams` answers of each are decoded together, by the servers' own counters.
    Both ends of the time are just behind a step of the first server, as few steps may fit in it. The answers are cancelled
    after that. Where they are not `streamed`, but for the first, they come whole: reading events takes cores."""
    asks, over, stepped = [], threading.Event(), threading.Event()
    for n, server in enumerate(servers):
        for s in range(streams):
            def heard(_, is_first=not n and not s):
                if is_first:
                    stepped.set()
                return over.is_set()
            key = seed * 10007 + n * 101 + s
            if streamed or not n and not s:
                asks.append(lambda server=server, key=key, heard=heard: server.ask(
                    ids(prompt, key, vocab), tokens, ignore_eos=True, on_event=heard))
            else:
                body = {"temperature": 0, "max_tokens": tokens, "prompt": ids(prompt, key, vocab), "ignore_eos": True}
                asks.append(lambda server=server, body=body: server.call("POST", "/v1/completions", {"model": server.model, **body}))
    counts = lambda: (time.perf_counter(), sum(server.generated() for server in servers))
    begun, all_tokens = counts()[1], streams * len(servers)

    def behind_step():
        stepped.clear()
        stepped.wait(5)
        return counts()

    def watch():
        rate = None
        try:
            stop = time.monotonic() + 120
            while counts()[1] < begun + 2 * all_tokens and time.monotonic() < stop:
                time.sleep(0.02)  # until all prompts are read
            time.sleep(settle)
            (t0, n0), stop = behind_step(), time.monotonic() + most
            while time.monotonic() < stop:
                time.sleep(0.25)
                t, n = behind_step()
                if n - begun > 0.9 * tokens * all_tokens:
                    break
                rate = (n - n0) / (t - t0)
        finally:
            over.set()
        return rate
    rate, *_ = together(watch, *asks)
    until("cancelled answers end", lambda: all(server.health()["running"] == 0 for server in servers), 60)
    if not rate:
        sys.exit("answers ended before their rate was measured: more --tokens")
    return rate


@contextlib.contextmanager
def client_on(core):
    """Keeps this program off the cores of the servers that it measures. What it starts meanwhile is to name its own cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core} & before or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def cpu_seconds(pids):
    """Processor seconds of processes so far."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/stat") as f:
                fields = f.read().rsplit(")", 1)[1].split()
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def rss(pids):
    """Resident MB of processes."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, StopIteration):
            with open(f"/proc/{pid}/status") as f:
                total += next(int(line.split()[1]) for line in f if line.startswith("VmRSS:"))
    return total / 1024


def another_name(path, link):
    """The same file by another name, a copy where it cannot be linked."""
    try:
        os.link(path, link)
    except OSError:
        shutil.copy(path, link)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def ask_node(home, command, arguments=None, seconds=30):
    """What the node of a home answers at its socket; None where none runs. Reports of progress are passed over."""
    with socket.socket(socket.AF_UNIX) as s:
        s.settimeout(seconds)
        try:
            s.connect(f"{home}/node/socket")
            s.sendall(json.dumps({"command": command, "arguments": arguments or {}}).encode() + b"\n")
            for line in s.makefile():
                answer = json.loads(line)
                if "error" in answer:
                    raise RuntimeError(f"{command}: {answer['error']}")
                if "ok" in answer:
                    return answer["ok"]
        except (OSError, ValueError):
            pass
    return None


class Node:
    """A machine of a `Cluster`: a process of this machine with a home and fixed ports."""

    def __init__(self, name, cores=None, group=None):
        self.name, self.cores, self.group = name, cores, group
        self.home, self.control, self.port = folder("bars-node-"), free_port(), free_port()
        self.env = {**os.environ, "PACELINE_HOME": self.home}
        self.child = None

    def up(self, peer=None, *more):
        """Starts its process, in its control group where it has one."""
        pinned = ["taskset", "-c", self.cores] if self.cores else []
        into = ["sh", "-c", 'echo $$ > "$0/cgroup.procs"; exec "$@"', self.group] if self.group else []
        command = [*into, *pinned, BINARY, "up", "--name", self.name, "--port", self.port, "--control-port", self.control,
                   "--discovery", "none", "--events", f"{self.home}/events", *(["--peer", f"127.0.0.1:{peer}"] if peer else []), *more]
        with open(f"{self.home}/log", "a") as log:
            self.child = start(command, env=self.env, stdout=subprocess.DEVNULL, stderr=log)
        until(f"{self.name} is up", self.answers)

    def answers(self):
        if self.child.poll() is not None:
            sys.exit(f"{self.name} ended: " + self.said()[-800:])
        return ask_node(self.home, "nodes") is not None

    def said(self):
        with open(f"{self.home}/log", errors="replace") as log:
            return log.read()

    def run(self, *args, **more):
        return run(*args, env=self.env, **more)

    def nodes(self):
        return (ask_node(self.home, "nodes") or {"nodes": []})["nodes"]

    def ps(self):
        return ask_node(self.home, "ps") or []

    def events(self, *kinds):
        """Its events of these kinds so far."""
        with contextlib.suppress(FileNotFoundError), open(f"{self.home}/events") as f:
            found = [json.loads(line) for line in f if line.endswith("\n")]
            return [e for e in found if e.get("kind") in kinds or not kinds]
        return []

    def model(self):
        """The name that it serves, once it does."""
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
            c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
            c.request("GET", "/v1/models")
            listed = json.loads(c.getresponse().read())["data"]
            c.close()
            return listed[0]["id"] if listed else None

    def tree(self):
        """Its processes, itself first."""
        pids, found = [self.child.pid], []
        while pids:
            found.append(pids.pop(0))
            with contextlib.suppress(OSError):
                for task in os.listdir(f"/proc/{found[-1]}/task"):
                    with open(f"/proc/{found[-1]}/task/{task}/children") as f:
                        pids += map(int, f.read().split())
        return found

    def workers(self):
        """Processes that it started, but for those of chat templates."""
        def computes(pid):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as f:
                return not f.read().endswith(b"\0template\0")
        return [pid for pid in self.tree()[1:] if computes(pid)]

    def kill(self):
        kill(self.child)


class Cluster:
    """Nodes of this machine, joined by a token; `cores` gives each its own core, in turn; `groups` their control groups."""

    def __init__(self, count, cores=None, groups=None, more=()):
        self.more = more
        self.nodes = [Node(f"n{n}", cores[n % len(cores)] if cores else None, groups[n] if groups else None) for n in range(count)]
        self.nodes[0].up(None, *more)
        token = self.nodes[0].run("key", "cluster", "show").strip()
        for node in self.nodes[1:]:
            node.run("join", "--token-file", "-", stdin=token + "\n")
            self.up(node)
        until("the nodes see each other", lambda: all(
            sum(n["state"] == "alive" for n in node.nodes()) == count for node in self.nodes))

    def up(self, node):
        """Starts a node, again or at first, beside one that runs."""
        other = next(n for n in self.nodes if n is not node and n.child and n.child.poll() is None)
        node.up(other.control, *self.more)

    def load(self, model, *args):
        """Loads a model from the first node, and waits until all nodes answer with it; its name."""
        self.nodes[0].run("load", model, *args)
        until("all nodes have the model", lambda: all(node.model() for node in self.nodes), 120)
        return self.nodes[0].model()

    def ready(self, seconds=120):
        """Waits until one instance is ready at all nodes that run."""
        running = [n for n in self.nodes if n.child.poll() is None]
        until("the model is ready", lambda: all(
            (found := n.ps()) and found[0]["state"] == "ready" and n.model() for n in running), seconds, 0.2)

    def end(self):
        for node in self.nodes:
            if node.child:
                node.kill()
