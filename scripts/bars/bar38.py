#!/usr/bin/env python3
"""Issue 38, the new families on MLX, whose CPU build is a test bed. PACELINE names the binary, PACELINE_MLXC its libmlxc
(else that of `paceline engines install mlx`, for which PACELINE_HOME is set).

    bar38.py agreement [--tokens 40]  5 min  the tiny folders of tests-data/golden/hf: log-probabilities of a text by mlx-f32, and by a
                                             pipeline of cpu and mlx, beside cpu-f32
    bar38.py steps     [--runs 5]     3 min  time of a token by mlx beside cpu on the same folders
    bar38.py ci                       the wall time of MLX's tests as CI runs them: cargo test of crates/model's `mlx` (it builds first)

Bounds of agreement: mlx-f32 1e-3 at the most, and through `cpu,mlx` (class mlx, bf16 or f16 files) 0.06 of the spread of the
log-probabilities in the root mean square, after docs/numerics.md's 5.6 % of the logits' size.
"""
import glob
from common32 import *

parser = arguments(__doc__, tokens=40, runs=5, folders="")
parser.add_argument("what", nargs="?", choices=["agreement", "steps", "ci", "all"], default="all")
a = parser.parse_args()
FOLDERS = a.folders.split(",") if a.folders else sorted(
    path for path in glob.glob(f"{REPO}/tests-data/golden/hf/*/") if os.path.exists(path + "config.json"))
ALL = {**os.environ, "PACELINE_HOME": os.environ.get("PACELINE_HOME", folder())}


def has_mlx():
    """Whether MLX can be opened; its library goes to all servers by PACELINE_MLXC."""
    code, out, _ = run("engines", "--json", check=False, env=ALL)
    engine = next((e for e in json.loads(out)["engines"] if e["name"] == "mlx"), {}) if code == 0 else {}
    if engine.get("ready") and engine.get("library"):
        ALL["PACELINE_MLXC"] = engine["library"]
    return bool(engine.get("ready"))


def family(path):
    with open(path + "config.json") as f:
        return f"{os.path.basename(path.rstrip('/'))} ({json.load(f)['model_type']})"


class Small:
    """A server of a tiny folder, or why there is none."""

    def __init__(self, path, *how):
        self.home, self.why, self.child = folder(), None, None
        self.at = f"{self.home}/log"
        env = {**ALL, "PACELINE_HOME": self.home}
        with open(self.at, "w") as log:
            self.child = start([BINARY, "up", path, "--port", 0, *ALONE, "--threads", 1, "--context", 128, "--parallel", 1, "--drafts", 0,
                                "--prefix-cache", "off", *how], env=env, stdout=subprocess.DEVNULL, stderr=log)
        stop = time.monotonic() + 300
        while time.monotonic() < stop and not self.why:
            with open(self.at, errors="replace") as log:
                said = log.read()
            if self.child.poll() is not None:
                self.why = said.strip().splitlines()[-1] if said.strip() else "it ended"
            elif found := re.search(r"listening on http://127\.0\.0\.1:(\d+)", said):
                self.port = int(found[1])
                try:
                    if self.get("/health")["status"] == "ready":
                        self.model = self.get("/v1/models")["data"][0]["id"]
                        return
                except OSError:
                    pass
            time.sleep(0.05)
        self.why = self.why or "not ready within 300 s"

    def get(self, path, body=None):
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        c.request("POST" if body else "GET", path, json.dumps(body) if body else None, {"Content-Type": "application/json"})
        told_by = json.loads(c.getresponse().read())
        c.close()
        return told_by

    def logprobs(self, tokens):
        """Log-probabilities of a prompt's tokens."""
        answer = self.get("/v1/completions", {"model": self.model, "prompt": tokens, "max_tokens": 1, "echo": True, "logprobs": 0, "temperature": 0})
        if "choices" not in answer:
            raise RuntimeError(str(answer)[:300])
        return [p for p in answer["choices"][0]["logprobs"]["token_logprobs"][: len(tokens)] if p is not None]

    def rate(self, tokens, count):
        return stream(self.port, {"model": self.model, "prompt": tokens, "max_tokens": count, "temperature": 0, "ignore_eos": True}, timeout=300)["rate"]

    def end(self):
        kill(self.child)


def tokens_of(path, count):
    with open(path + "config.json") as f:
        config = json.load(f)
    vocab = (config.get("text_config") or config)["vocab_size"]
    return [(7 + 31 * i + i * i) % (vocab - 20) + 10 for i in range(count)]


def agreement():
    ways = {"mlx-f32": (["--class", "mlx-f32"], 1e-3, False),
            "cpu,mlx in stages": (["--engine", "cpu,mlx", "--nodes", 2, "--split", "pipeline"], 0.06, True)}
    for path in FOLDERS:
        name, tokens = family(path), tokens_of(path, a.tokens)
        right = Small(path, "--class", "cpu-f32")
        if right.why:
            skipped(f"agreement {name}", right.why)
            continue
        expected = right.logprobs(tokens)
        right.end()
        spread = statistics.pstdev(expected) or 1.0
        for way, (how, limit, relative) in ways.items():
            server = Small(path, *how)
            if server.why:
                skipped(f"agreement {name}, {way}", server.why)
                continue
            try:
                found = server.logprobs(tokens)
                apart = [abs(x - y) for x, y in zip(found, expected)]
                told(f"agreement {name}, {way}, log-probabilities of {len(expected)} tokens, the most apart", max(apart))
                if relative:
                    apart = statistics.fmean(x * x for x in apart) ** 0.5 / spread
                    bar(f"agreement {name}, {way}, root mean square apart over their spread", apart, "", limit, False)
                else:
                    bar(f"agreement {name}, {way}, the most apart", max(apart), "", limit, False)
            except (RuntimeError, OSError) as error:
                skipped(f"agreement {name}, {way}", str(error))
            finally:
                server.end()


def steps():
    for path in FOLDERS:
        name, tokens, ms = family(path), tokens_of(path, 16), {}
        for way, how in [("mlx", ["--engine", "mlx"]), ("cpu", ["--engine", "cpu"])]:
            server = Small(path, *how)
            if server.why:
                skipped(f"steps {name}, {way}", server.why)
                continue
            try:
                server.rate(tokens, 4)
                ms[way] = [1e3 / server.rate(tokens, 24) for _ in range(a.runs)]
            finally:
                server.end()
        for way, values in ms.items():
            told(f"steps {name}, {way}, a token", values, "ms")


def ci():
    if "PACELINE_MLXC" not in os.environ or not shutil.which("cargo"):
        return skipped("ci, MLX's tests", "PACELINE_MLXC names no libmlxc (cargo xtask mlx), or there is no cargo")
    test = ["cargo", "test", "--release", "-p", "paceline-model", "--test", "mlx"]
    if subprocess.run([*test, "--no-run"], cwd=REPO).returncode:
        sys.exit("the tests do not build")
    began = time.monotonic()
    passed = subprocess.run(test, cwd=REPO, timeout=1800).returncode == 0
    bar("ci, MLX's tests passed", int(passed), "", 1)
    bar("ci, MLX's tests, wall time", time.monotonic() - began, "s", 120, False)


print(load(), BINARY, flush=True)
if a.what != "ci" and not has_mlx():
    skipped("all", "no MLX here: paceline engines install mlx, or PACELINE_MLXC")
    sys.exit()
for what in ["agreement", "steps", "ci"] if a.what == "all" else [a.what]:
    globals()[what]()
end()
