#!/usr/bin/env python3
"""Issue 39: prefill here and decode there, drafts over slow links, shares that follow use. PACELINE names the binary.

    bar39.py [BAR..]        without names prefill and follow, some 9 min
    prefill [--runs 3]    4 min  prompts of 4,000: a node reads, one with half of its cores decodes, over a split of both; prediction
    follow  [--runs 2]    5 min  2 cores: a foreign load on one of two pinned nodes, --follow over the best fixed shares
    drafts  [--runs 3]   10 min  four stages with 25 ms one way (root, TAP: delay_net.py; --ms): n-gram and draft over plain

prefill: two nodes of a cluster, `strong` with all cores (two thirds of three and more) and `weak` with half as many, of a core that
strong has too where there are only two. `load` takes one number of threads for all machines: that of strong. --symmetric is the split
beside it. SmolLM2; --kind 0.5b or 1.5b for Qwen2.5's shapes (models32.py: gguf and numpy; slower). The prediction of the first token is
`prompts.tok_s` of /v1/paceline/status before a prompt came, that of decode is `bench model`'s behind 4,000 tokens: on one machine,
`--prefill-nodes 1`, a thread each, because nodes over machines have no predictions.
drafts: --model and --draft name GGUF files of one vocabulary. Without them: SmolLM2 whose layers are each followed by three that add
nothing (the same function at four times the size), and as a draft SmolLM2 in Q4_0 (gguf and numpy), whose guesses are mostly right.
"""
import types
import chosen, common31
from common32 import *


def ask_status(port):
    c = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    c.request("GET", "/v1/paceline/status")
    told = json.loads(c.getresponse().read())
    c.close()
    return told


def kind():
    """The model's file and the size of its vocabulary."""
    if not a.kind:
        return SMOLLM2, 49152
    import models32
    return models32.path(a.kind), models32.VOCAB


def prefill():
    path, vocab = kind()
    cores = os.cpu_count()
    if cores < 2:
        return skipped("prefill", "it wants two cores")
    half = max(1, cores // 3)
    strong, weak = ("0,1", "1") if cores == 2 else (f"0-{2 * half - 1}", f"{2 * half}-{3 * half - 1}")
    print(f"  strong has cores {strong}, weak {weak}", flush=True)
    cluster, here = Cluster(2, cores=[strong, weak]), folder()
    first, second = cluster.nodes
    common = ["--threads", 2 * half, "--context", 4608, "--parallel", 1, "--drafts", 0, "--spare", 0]
    ways = {"apart": (second, ["--nodes", "n1", "--prefill-nodes", "n0"]), "symmetric": (first, ["--nodes", "n0,n1", *a.symmetric.split()])}
    for name, (_, how) in ways.items():
        another_name(path, f"{here}/{name}.gguf")  # the same name again would be a replica
        first.run("load", f"{here}/{name}.gguf", *how, *common, timeout=300)
    found = {name: [] for name in ways}
    for r in range((a.runs or 3) + 1):
        for name in sorted(ways, reverse=bool(r % 2)):
            body = {"model": f"{here}/{name}.gguf", "prompt": ids(4000, r, vocab), "max_tokens": a.tokens or 64, "temperature": 0, "ignore_eos": True}
            one = until(f"{name} is answered", lambda: answered(ways[name][0].port, body), 60)
            if name == "apart" and one["cached"] < 3900:
                sys.exit(f"the decoding node read {4000 - one['cached']} tokens itself: {second.said()[-600:]}")
            found[name] += [one] if r else []
    for name, all_of in found.items():
        told(f"prefill {name}, TTFT of 4,000", [f["ttft"] for f in all_of], "s")
        told(f"prefill {name}, decode", [f["rate"] for f in all_of], "tokens/s")
    pairs = list(zip(found["apart"], found["symmetric"]))
    bar("prefill apart, TTFT over symmetric", [x["ttft"] / y["ttft"] for x, y in pairs], "x", 0.7, False)
    bar("prefill apart, decode over symmetric", [x["rate"] / y["rate"] for x, y in pairs], "x", 0.95)
    bar("prefill apart, same answers", int(all(x["text"] == y["text"] for x, y in pairs)), "", 1)
    cluster.end()
    predicted(path, vocab)


def answered(port, body):
    """An answer; None while the node does not know the model yet."""
    try:
        return stream(port, body, timeout=180)
    except RuntimeError as error:
        if ": 404 " not in str(error) and ": 503 " not in str(error):
            raise
        time.sleep(0.5)


def predicted(path, vocab):
    """Predictions of one machine beside what it does."""
    apart = ["--threads", 1, "--prefill-nodes", 1]
    server = Up(path, *apart, "--prefill-from", 256, "--context", 4608, "--parallel", 1, "--drafts", 0, "--prefix-cache", "off")
    told_by = ask_status(server.port)["instances"][0]["portrait"]["prompts"].get("tok_s")
    times = [server.ask(ids(4000, 100 + r, vocab), 2, ignore_eos=True) for r in range(3)]
    if min(t["cached"] for t in times) < 3900:
        sys.exit("prompts were not read apart: " + server.said()[-600:])
    server.end()
    found = bench("model", path, *apart, "--prompt", 64, "--depth", 4000, "--gen", 64, "--runs", 3, env={"PACELINE_HOME": folder()}, timeout=300)
    decode = found["paceline"]["decode_tok_s"]["median"]
    for name, said, measured in [("first token", told_by and 4000 / told_by, statistics.median(t["ttft"] for t in times)),
                                 ("a token of decode", found["predicted_decode_tok_s"] and 1 / found["predicted_decode_tok_s"], 1 / decode)]:
        if said is None:
            skipped(f"prefill apart, prediction of {name}", "there is none")
            continue
        told(f"prefill apart, {name}, predicted", 1e3 * said, "ms")
        told(f"prefill apart, {name}, measured", 1e3 * measured, "ms")
        bar(f"prefill apart, prediction of {name} off by", 100 * abs(said / measured - 1), "%", 20, False)


def make(deep, small):
    """SmolLM2 with three layers that add nothing behind each, and SmolLM2 in Q4_0."""
    sys.path.insert(0, f"{REPO}/scripts/models")
    import gguf, numpy as np, synth_gguf
    Q = synth_gguf.Q

    def written(out, times, tensors):
        m = synth_gguf.Synth(types.SimpleNamespace(seed=39, base=SMOLLM2, out=out + ".new", quant="Q8_0", raw_blocks=False, layers=None))
        w = m.writer("llama", os.path.basename(out))
        fields = m.base.fields
        for key, field in fields.items():
            if not key.startswith(("llama.", "tokenizer.", "general.quantization_version", "general.file_type")):
                continue
            kind, value = field.types, field.contents() * times if key == "llama.block_count" else field.contents()
            w.add_key_value(key, value, kind[0], **({"sub_type": kind[-1]} if kind[0] == gguf.GGUFValueType.ARRAY else {}))
        m.finish(w, tensors(m.base))
        os.rename(out + ".new", out)

    def padded(base):
        found = []
        for t in base.tensors:
            block = re.match(r"blk\.(\d+)\.(.*)", t.name)
            if not block:
                found.append((t.name, (np.asarray(t.data), t.tensor_type)))
                continue
            for extra in range(4):
                nothing = extra and block[2] in ("attn_output.weight", "ffn_down.weight")
                data = np.zeros_like(t.data) if nothing else np.asarray(t.data)
                found.append((f"blk.{4 * int(block[1]) + extra}.{block[2]}", (data, t.tensor_type)))
        return found

    def coarser(base):
        found = []
        for t in base.tensors:
            data, kind = np.asarray(t.data), t.tensor_type
            if t.name.startswith("blk.") and kind not in (Q.F32, Q.F16):
                data, kind = gguf.quants.quantize(gguf.quants.dequantize(data, kind), Q.Q4_0), Q.Q4_0
            found.append((t.name, (data, kind)))
        return found
    written(deep, 4, padded)
    written(small, 1, coarser)


def drafts():
    from delay_net import DelayNet
    if os.geteuid():
        sys.exit("namespaces want root")
    deep, small = a.model or f"{MADE}/smollm2-x4.gguf", a.draft or f"{MADE}/smollm2-q4_0.gguf"
    if not (os.path.exists(deep) and os.path.exists(small)):
        os.makedirs(MADE, exist_ok=True)
        subprocess.run([MLX_PYTHON, os.path.abspath(__file__), "--make", deep, small], check=True, timeout=300)
    lines = lambda n: "".join(f"{i}: the {n}th list of names has the name number {i % 5}.\n" for i in range(40))
    texts = {
        "repetitive": (lambda n: lines(n) + "The same list once more:\n0: the", dict(temperature=0)),
        "ordinary": (lambda n: f"Essay {n}. How a bicycle is mended. First", dict(temperature=0)),
        "any": (lambda n: f"Essay {n}. On the habits of sea birds in winter,", dict(temperature=1, seed=11)),
    }
    here = folder()
    ways = {"plain": ["--drafts", 0], "ngram": ["--drafts", 8], "draft": ["--drafts", 8, "--draft", small]}
    net, machines = DelayNet(4, a.ms), []
    try:
        machines = [common31.Machine(BINARY, net, n) for n in range(4)]
        [m.up() for m in machines]
        common31.form(machines)
        time.sleep(10)  # ways are measured
        for name, how in ways.items():
            named = f"{here}/{name}.gguf"  # a name of its own: the same model again would be a replica
            another_name(deep, named)
            machines[0].told("load", named, "--nodes", "n0,n1,n2,n3", "--split", "pipeline", "--threads", 1, "--parallel", 1, "--context", 4096,
                             "--spare", 0, "--weights", "whole", *how)
        listed = [m["id"] for m in machines[0].get("/v1/models")["data"]]
        ids_of = {name: next(i for i in listed if i.endswith(f"/{name}.gguf")) for name in ways}
        program = ("import json, sys\nsys.path.insert(0, sys.argv[1])\nimport common32\n"
                   "f = common32.stream(52415, json.loads(sys.stdin.read()))\nprint(json.dumps([f['rate'], f['text']]))")

        def ask(name, prompt, how, tokens):
            body = {"model": ids_of[name], "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, **how}
            command = ["ip", "netns", "exec", net.hosts[0], sys.executable, "-c", program, os.path.dirname(os.path.abspath(__file__))]
            child = subprocess.run(command, input=json.dumps(body), text=True, capture_output=True, timeout=120)
            if child.returncode:
                sys.exit(f"{name}: {child.stderr[-600:]}")
            return json.loads(child.stdout)
        ratios = {(text, way): [] for text in texts for way in ways if way != "plain"}
        equal = True
        for r in range((a.runs or 3) + 1):
            for text, (prompt, how) in texts.items():
                order = list(ways) if r % 2 else list(ways)[::-1]
                found = {way: ask(way, prompt(r), how, a.tokens or 128) for way in order}
                equal &= len({told_by[1] for told_by in found.values()}) == 1
                if r:
                    for way in ("ngram", "draft"):
                        ratios[text, way].append(found[way][0] / found["plain"][0])
        best = [max(n, d) for n, d in zip(ratios["repetitive", "ngram"], ratios["repetitive", "draft"])]
        for (text, way), values in ratios.items():
            told(f"drafts, {way} on {text} text over plain", values, "x")
        where = f"four stages, {a.ms:g} ms one way"
        bar(f"drafts, {where}, n-gram or draft on repetitive text over plain", best, "x", 3)
        bar(f"drafts, {where}, a draft of a quarter on ordinary text over plain", ratios["ordinary", "draft"], "x", 1.3)
        for way in ("ngram", "draft"):
            bar(f"drafts, {where}, {way} on any text over plain", ratios["any", way], "x", 0.95)
        bar("drafts, same answers", int(equal), "", 1)
    finally:
        for machine in machines:
            machine.end()
        net.end()


class Flow:
    """Answers one after the other; the rate of those that ended within a time."""

    def __init__(self, server):
        self.server, self.over, self.found = server, threading.Event(), []
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        n = 0
        while not self.over.is_set():
            # A failure ends this thread: its rates are 0 from then on.
            one = self.server.ask(f"Story {n % 8}. Once upon a time", 48, ignore_eos=True)
            self.found.append((time.monotonic(), one["rate"], n % 8, one["text"]))
            n += 1

    def between(self, since, to):
        rates = [rate for at, rate, *_ in self.found if since < at <= to]
        return statistics.median(rates) if rates else 0.0

    def end(self):
        self.over.set()
        self.thread.join(60)


def follow():
    """The load: one busy process on core 1, which takes half of that core from the node there."""
    if os.cpu_count() < 2:
        return skipped("follow", "it wants two cores")
    common = ["--nodes", 2, "--threads", 1, "--split", "tensor", "--pin", "--context", 1024, "--parallel", 1, "--drafts", 0, "--prefix-cache", "off"]
    burn = lambda: start(["taskset", "-c", "1", sys.executable, "-c", "while True: pass"])

    def fixed(shares, loaded):
        server, burner = Up(SMOLLM2, *common, "--shares", shares), burn() if loaded else None
        try:
            server.ask("Warm", 32, ignore_eos=True)
            return statistics.median(server.ask(f"Story {n}. Once upon a time", 48, ignore_eos=True)["rate"] for n in range(5))
        finally:
            if burner:
                kill(burner)
            server.end()
    under, after, equal = [], [], True
    for _ in range(a.runs or 2):
        # The second node is the loaded one: --pin puts it on core 1. --follow has 4,3, 4,2 and 4,1.
        best = {shares: fixed(shares, True) for shares in ["1,1", "4,3", "2,1", "3,1", "4,1"]}
        even = fixed("1,1", False)
        print("  fixed shares under the load: " + ", ".join(f"{s} {v:.0f}" for s, v in best.items()) + f" tokens/s; 1,1 without it {even:.0f}", flush=True)
        server = Up(SMOLLM2, *common, "--follow")
        flow = Flow(server)
        time.sleep(15)
        burner = burn()
        time.sleep(16)
        now = time.monotonic()
        under.append(flow.between(now - 6, now) / max(best.values()))  # 10 to 16 s after it began
        kill(burner)
        time.sleep(16)
        now = time.monotonic()
        after.append(flow.between(now - 6, now) / even)
        flow.end()
        print("  changes: " + "; ".join(line.strip() for line in server.said().splitlines() if "split" in line or "share" in line)[-600:], flush=True)
        first = {}
        for _, _, which, text in flow.found:
            equal &= first.setdefault(which, text) == text
        server.end()
    bar("follow, decode 10 s into a foreign load over the best fixed shares", under, "x", 0.9)
    bar("follow, decode 10 s after its end over even shares without it", after, "x", 0.9)
    bar("follow, same answers all the time", int(equal), "", 1)


BARS = {"prefill": (prefill, 900), "follow": (follow, 900), "drafts": (drafts, 1800)}
parser = arguments(__doc__, runs=0, ms=25.0, kind="", model="", draft="", tokens=0, symmetric="--split tensor")
parser.add_argument("--make", nargs=2, help=argparse.SUPPRESS)
a = chosen.parsed(parser, BARS, ["drafts"])
if a.make:
    make(*a.make)
    sys.exit()
chosen.play(a.bars, BARS)
