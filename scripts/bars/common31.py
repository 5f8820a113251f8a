"""Shared by bar31_*.py: machines that are network namespaces on one bridge (root and `ip`), a hub that counts, GGUF tables."""
import hashlib, http.server, json, os, re, shutil, socket, struct, subprocess, sys, tempfile, threading, time


def ip(*args, check=True):
    return subprocess.run(["ip", *map(str, args)], check=check, capture_output=True, text=True, timeout=30)


class Net:
    """count machines 10.77.0.1 and on; the bridge's namespace is 10.77.0.254."""

    def __init__(self, count, name=""):
        self.base = f"b31x{os.getpid()}{name}"
        self.bridge = self.base + "b"
        self.hosts = [f"{self.base}{n}" for n in range(count)]
        try:
            self.make()
        except BaseException:
            self.end()
            raise

    def make(self):
        for ns in [self.bridge, *self.hosts]:
            ip("netns", "add", ns)
            ip("-n", ns, "link", "set", "lo", "up")
        ip("-n", self.bridge, "link", "add", "br0", "type", "bridge")
        ip("-n", self.bridge, "link", "set", "br0", "up")
        ip("-n", self.bridge, "addr", "add", "10.77.0.254/24", "dev", "br0")
        for n, ns in enumerate(self.hosts):
            ip("-n", self.bridge, "link", "add", f"p{n}", "type", "veth", "peer", "name", "eth0", "netns", ns)
            ip("-n", self.bridge, "link", "set", f"p{n}", "master", "br0", "up")
            ip("-n", ns, "addr", "add", f"10.77.0.{n + 1}/24", "dev", "eth0")
            ip("-n", ns, "link", "set", "eth0", "up")

    def end(self):
        for ns in [*self.hosts, self.bridge]:
            ip("netns", "del", ns, check=False)


class Machine:
    def __init__(self, binary, net, number, env=None):
        self.binary, self.ns, self.name = binary, net.hosts[number], f"n{number}"
        self.address = f"10.77.0.{number + 1}"
        self.home = tempfile.mkdtemp(prefix="b31-home-")
        self.env = {"PACELINE_HOME": self.home, "PATH": os.environ["PATH"], **(env or {})}
        self.child = None

    def command(self, *args):
        own = ["unshare", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]
        return ["ip", "netns", "exec", self.ns, *own, self.binary, *map(str, args)]

    def up(self, *args, preload=None):
        self.log = open(os.path.join(self.home, "log"), "a+")
        env = {**self.env, **({"LD_PRELOAD": preload} if preload else {})}
        self.child = subprocess.Popen(self.command("up", "--name", self.name, *args), env=env, cwd=self.home,
                                      stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self.log)
        self.until("is up", lambda: self.nodes())

    def run(self, *args, check=True, stdin=None, timeout=900):
        done = subprocess.run(self.command(*args), env=self.env, cwd=self.home, input=stdin, text=True, capture_output=True,
                              timeout=timeout, **({} if stdin is not None else {}))
        if check and done.returncode != 0:
            sys.exit(f"{self.name}: {args}: {done.stderr}")
        return done

    def told(self, *args, **more):
        return self.run(*args, **more).stdout.strip()

    def nodes(self):
        done = self.run("nodes", "--json", check=False)
        try:
            return json.loads(done.stdout)
        except ValueError:
            return []

    def until(self, what, done, seconds=120):
        end = time.time() + seconds
        while not done():
            if time.time() > end:
                sys.exit(f"{self.name} {what}: not within {seconds} s\n" + self.said())
            time.sleep(0.1)

    def said(self):
        return open(os.path.join(self.home, "log")).read()

    def received(self):
        told = json.loads(ip("-n", self.ns, "-s", "-j", "link", "show", "eth0").stdout)[0]
        return told["stats64"]["rx"]["bytes"]

    def get(self, path, port=52415):
        done = subprocess.run(["ip", "netns", "exec", self.ns, "curl", "-s", "-m", "60", f"http://127.0.0.1:{port}{path}"],
                              capture_output=True, text=True, timeout=90)
        return json.loads(done.stdout)

    def end(self):
        if self.child:
            self.child.kill()
            self.child.wait()
        shutil.rmtree(self.home, ignore_errors=True)


def form(machines):
    token = machines[0].told("key", "cluster", "show")
    for machine in machines[1:]:
        machine.told("join", "--token-file", "-", stdin=token + "\n")
    machines[0].until("sees all", lambda: sum(n["state"] == "alive" for n in machines[0].nodes()) == len(machines))


HUB = r'''
import hashlib, http.server, json, os, re, sys
path, out = sys.argv[1], sys.argv[2]
size = os.path.getsize(path)
sha = hashlib.sha256()
with open(path, "rb") as f:
    for block in iter(lambda: f.read(1 << 20), b""):
        sha.update(block)
sha, sent = sha.hexdigest(), 0
class Hub(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_): pass
    def do_GET(self):
        global sent
        if self.path.startswith("/api/models/"):
            body = json.dumps({"sha": "0" * 40, "siblings": [{"rfilename": "model.gguf", "size": size, "lfs": {"sha256": sha}}]})
            self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
            self.wfile.write(body.encode()); return
        start = 0
        found = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if found:
            start = int(found[1])
        self.send_response(206 if found else 200)
        self.send_header("ETag", f'"{sha}"'); self.send_header("Content-Length", str(size - start))
        if found:
            self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
        self.end_headers()
        with open(path, "rb") as f:
            f.seek(start)
            for block in iter(lambda: f.read(1 << 20), b""):
                self.wfile.write(block)
                sent += len(block)
                open(out, "w").write(str(sent))
http.server.ThreadingHTTPServer(("10.77.0.254", 8000), Hub).serve_forever()
'''


class Hub:
    """Serves one file as hub id bars/model from the bridge's namespace; counts the bytes of files that it sent."""

    def __init__(self, net, path):
        self.out = tempfile.mktemp(prefix="b31-hub-")
        self.child = subprocess.Popen(["ip", "netns", "exec", net.bridge, sys.executable, "-c", HUB, path, self.out])
        self.env = {"HF_ENDPOINT": "http://10.77.0.254:8000"}
        for _ in range(600):
            probe = subprocess.run(["ip", "netns", "exec", net.bridge, "curl", "-s", "http://10.77.0.254:8000/api/models/bars/model"],
                                   capture_output=True)
            if probe.returncode == 0:
                return
            time.sleep(0.1)
        sys.exit("the hub does not listen")

    def sent(self):
        return int(open(self.out).read()) if os.path.exists(self.out) else 0

    def end(self):
        self.child.kill()
        self.child.wait()


def tensors(path):
    """name -> bytes, by offsets: the rest up to the next tensor counts."""
    f = open(path, "rb")
    u32 = lambda: struct.unpack("<I", f.read(4))[0]
    u64 = lambda: struct.unpack("<Q", f.read(8))[0]
    text = lambda: f.read(u64()).decode("utf-8", "replace")
    fixed = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
    meta = {}

    def value(kind):
        if kind == 8:
            return text()
        if kind == 9:
            inner, count = u32(), u64()
            if inner == 8:
                for _ in range(count):
                    f.seek(u64(), 1)
            else:
                f.seek(fixed[inner] * count, 1)
            return None
        return int.from_bytes(f.read(fixed[kind]), "little")
    assert f.read(4) == b"GGUF" and u32() in (2, 3)
    count, entries = u64(), u64()
    for _ in range(entries):
        key = text()
        meta[key] = value(u32())
    table = []
    for _ in range(count):
        name = text()
        dims = u32()
        f.seek(8 * dims, 1)
        u32()
        table.append((u64(), name))
    align = meta.get("general.alignment") or 32
    begin = -(-f.tell() // align) * align
    table.sort()
    ends = [offset for offset, _ in table[1:]] + [os.path.getsize(path) - begin]
    return {name: end - offset for (offset, name), end in zip(table, ends)}, begin


def layers(sizes, first, end):
    return sum(b for name, b in sizes.items() if (m := re.match(r"blk\.(\d+)\.", name)) and first <= int(m[1]) < end)


def verdict(name, value, bar, at_least=True):
    met = value >= bar if at_least else value <= bar
    print(f"BAR {name}: {value:.4g} (bar {'>=' if at_least else '<='} {bar}) {'MET' if met else 'MISSED'}", flush=True)
