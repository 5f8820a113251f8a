"""Shared by the scripts here: a server of its own home, streams with times, medians."""
import http.client, json, os, re, shutil, statistics, subprocess, sys, tempfile, threading, time

MODELS = os.environ.get("PACELINE_TEST_MODELS", os.path.expanduser("~/.cache/paceline/test-models"))
SMOLLM2 = f"{MODELS}/SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA = f"{MODELS}/gemma-3-270m-q4_k_m.gguf"
MLX_PYTHON = os.path.expanduser("~/.cache/paceline/test-clients/mlx-lm/bin/python")  # has gguf and numpy
ALONE = ["--discovery", "none", "--control-port", "0"]


class Server:
    def __init__(self, binary, *args, home=None):
        self.keeps, self.home = home is not None, home or tempfile.mkdtemp(prefix="bars-home-")
        env = {**os.environ, "PACELINE_HOME": self.home}
        self.log = []
        self.child = subprocess.Popen([binary, "up", "--port", "0", *map(str, args)], env=env,
                                      stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                      stderr=subprocess.PIPE, text=True)
        self.port = None
        ready = threading.Event()

        def read():
            for line in self.child.stderr:
                self.log.append(line)
                found = re.search(r"listening on http://127\.0\.0\.1:(\d+)", line)
                if found and self.port is None:
                    self.port = int(found[1])
                    ready.set()
            ready.set()
        threading.Thread(target=read, daemon=True).start()
        if not ready.wait(120) or self.port is None:
            self.end()
            sys.exit("the server does not listen: " + "".join(self.log))

    @property
    def pid(self):
        return self.child.pid

    def call(self, method, path, body=None, headers=None):
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=580)
        send = json.dumps(body) if body is not None else None
        c.request(method, path, send, {"Content-Type": "application/json", **(headers or {})})
        r = c.getresponse()
        data = r.read()
        c.close()
        if r.status != 200:
            sys.exit(f"{method} {path}: {r.status} {data[:500]!r}")
        return json.loads(data)

    def stream(self, path, body):
        """(seconds to the first event with text, seconds from there to the end, completion tokens, usage)"""
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=580)
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        began = time.perf_counter()
        c.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        r = c.getresponse()
        if r.status != 200:
            sys.exit(f"{path}: {r.status} {r.read()[:500]!r}")
        first = last = usage = None
        for line in r:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            now = time.perf_counter()
            event = json.loads(line[6:])
            if "error" in event:
                sys.exit(f"{path}: {event}")
            usage = event.get("usage") or usage
            for choice in event.get("choices", []):
                said = choice.get("text") or (choice.get("delta") or {}).get("content")
                if said and first is None:
                    first = now
                if said or choice.get("finish_reason"):
                    last = now
        c.close()
        if first is None or usage is None:
            sys.exit(f"{path}: no text or no usage")
        return first - began, last - first, usage["completion_tokens"], usage

    def tree(self):
        pids, found = [self.pid], []
        while pids:
            pid = pids.pop()
            found.append(pid)
            try:
                for task in os.listdir(f"/proc/{pid}/task"):
                    with open(f"/proc/{pid}/task/{task}/children") as f:
                        pids += map(int, f.read().split())
            except OSError:
                pass
        return found

    def pss(self):
        """MiB of all processes."""
        total = 0
        for pid in self.tree():
            try:
                with open(f"/proc/{pid}/smaps_rollup") as f:
                    total += next(int(line.split()[1]) for line in f if line.startswith("Pss:"))
            except (OSError, StopIteration):
                pass
        return total / 1024

    def end(self):
        self.child.terminate()
        try:
            self.child.wait(20)
        except subprocess.TimeoutExpired:
            self.child.kill()
        if not self.keeps:
            shutil.rmtree(self.home, ignore_errors=True)


def spread(values, digits=3):
    values = sorted(values)
    at = lambda q: values[min(len(values) - 1, int(q * (len(values) - 1) + 0.5))]
    return f"{statistics.median(values):.{digits}f} ({at(.1):.{digits}f} .. {at(.9):.{digits}f}), n={len(values)}"


def load():
    return "load average " + " ".join(open("/proc/loadavg").read().split()[:3])


def verdict(name, value, bar, at_least=True):
    met = value >= bar if at_least else value <= bar
    print(f"BAR {name}: {value:.4g} (bar {'>=' if at_least else '<='} {bar}) {'MET' if met else 'MISSED'}", flush=True)
