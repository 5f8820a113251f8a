#!/usr/bin/env python3
"""Issue 32, many requests at once. PACELINE names the binary.

    bar32.py [BAR..]             without names pace, prefix, ngram and kills, some 8 min
    pace        [--runs 5]       4 to 12 min  SmolLM2, a thread: a 4,000-token prompt beside 4 streams, p99 of gaps; TTFT without a pace
    prefix      [--runs 5]       1 min  2,000 shared tokens: TTFT over cold, and after a restart, from disk
    ngram       [--runs 9]       2 min  guesses over none, repetitive and any text, tokens identical
    kills       [--kills 20]     1 min  kill -9 while pages are written, then the same prompts; the bar's 300 are some 15 min
    mixed       [--requests 1000]  8 to 30 min  cancels, over-long prompts, slow readers, vanishing clients; pages and memory
    batch-0.5b  [--runs 3]       4 min  8, 16, 32 streams over R (shapes of models32.py, made once: gguf and numpy)
    batch-1.5b  [--runs 3]       9 min  the same
    stages-0.5b [--runs 3]       6 min  two micro-batches of 8 and a prompt of 4,000 over two stages of a thread
    stages-1.5b [--runs 2]      10 min  the same
    llama-0.5b  [--runs 5]       4 min  8 sequences beside llama.cpp's own batch API. LLAMA_DIR: a folder with the npm package
    llama-1.5b  [--runs 5]       6 min  node-llama-cpp; LLAMA_BENCH: its driver, else scripts/peers/llama_bench.py

--threads T (default 2) is for batch and llama. The bars are of an idle machine with 2 cores. `llama` is without AMX: on a machine
that has it set PACELINE_CPU=avx512-vnni and give LLAMA_DIR a copy of the package without its AMX library.
"""
import asyncio, random
import chosen, models32
from common32 import *

runs = lambda default: a.runs or default
PLAIN = ["--drafts", 0, "--prefix-cache", "off"]
VOCAB = models32.VOCAB


def p99(values):
    values = sorted(values)
    return values[min(len(values) - 1, int(0.99 * len(values)))]


def gaps(streams, since, to):
    return [b - t for s in streams for t, b in zip(s["times"], s["times"][1:]) if since <= b <= to]


def story(server, n, tokens, on_event=None):
    return server.ask(f"Story {n}. Once upon a time in a town by a river there lived a bicycle that", tokens,
                      ignore_eos=True, temperature=1, top_k=20, seed=n, on_event=on_event)


def beside(server, key, prompt=4000):
    """(p99 of the gaps of 4 streams before a prompt, the same while it is read, its TTFT, its TTFT alone)"""
    server.quiet()  # cancelled streams end
    alone = server.ttft(ids(prompt, 2 * key))
    begun, over = threading.Semaphore(0), threading.Event()

    def one(n):
        def event(count):
            if count == 20:
                begun.release()
            return over.is_set()
        return story(server, 10 * key + n, 7000, event)

    def arrives():
        for _ in range(4):
            if not begun.acquire(timeout=120):
                raise RuntimeError("streams did not begin")
        since = time.perf_counter()
        time.sleep(4)
        asked = time.perf_counter()
        ttft = server.ttft(ids(prompt, 2 * key + 1))
        over.set()
        return since, asked, asked + ttft, ttft

    def guarded():
        try:
            return arrives()
        finally:
            over.set()
    *streams, (since, asked, answered, ttft) = together(*[lambda n=n: one(n) for n in range(4)], guarded)
    return p99(gaps(streams, since, asked)), p99(gaps(streams, asked, answered)), ttft, alone


def pace():
    for name in ["auto", "off"]:
        server = Up(SMOLLM2, "--threads", 1, "--context", 8192, "--parallel", 6, "--pace", name, *PLAIN, cores="0")
        try:
            with client_on(1):
                found = [beside(server, 100 + n) for n in range(runs(5))]
        finally:
            server.end()
        told(f"pace {name}: p99 gap without the prompt", [1e3 * f[0] for f in found], "ms")
        told(f"pace {name}: p99 gap with it", [1e3 * f[1] for f in found], "ms")
        told(f"pace {name}: TTFT beside the streams", [f[2] for f in found], "s")
        if name == "auto":
            bar("pace, p99 inter-token of 4 streams with a prompt of 4,000 over without", [f[1] / f[0] for f in found], "x", 3, False)
        else:
            bar("pace off, TTFT beside 4 streams over alone", [f[2] / f[3] for f in found], "x", 1.3, False)


def prefix():
    home, cold, warm, disk = folder(), [], [], []
    with_home = lambda: Up(SMOLLM2, "--threads", 1, "--context", 4096, "--drafts", 0, home=home, cores="0")
    shared = lambda n: ids(2000, 7000 + n)
    ends = lambda n: ids(16, n)
    server = with_home()
    try:
        server.ttft(ids(64, 1))  # warm
        for n in range(runs(5)):
            cold.append(server.ttft(shared(n) + ends(n)))
            warm.append(server.ask(shared(n) + ends(n + 1000)))
        time.sleep(3)  # what is not on disk yet
    finally:
        server.end()
    again = with_home()
    try:
        again.ttft(ids(64, 2))
        for n in range(runs(5)):
            disk.append(again.ask(shared(n) + ends(n + 2000)))
    finally:
        again.end()
    told("prefix, TTFT cold", [1e3 * t for t in cold], "ms")
    told("prefix, cached tokens", [f["cached"] for f in warm])
    told("prefix, cached tokens after the restart", [f["cached"] for f in disk])
    bar("prefix of 2,000, TTFT over cold", [100 * w["ttft"] / c for w, c in zip(warm, cold)], "%", 10, False)
    bar("prefix of 2,000 after a restart, TTFT over cold", [100 * d["ttft"] / c for d, c in zip(disk, cold)], "%", 25, False)


def kills():
    """The worker and its parent are killed while a thread may write pages; no answer after it differs from one without them."""
    home, r, known, wrong = folder(), random.Random(5), 0, 0
    options = ["--threads", 1, "--context", 2048, "--drafts", 0]
    base = ids(1200, 9000)
    prompts = [base[: 150 * i] + ids(300, 9001 + i) for i in range(8)]
    plain = Up(SMOLLM2, *options, "--prefix-cache", "off")
    expected = [plain.ask(prompt, 6)["text"] for prompt in prompts]
    plain.end()
    for _ in range(a.kills):
        server = Up(SMOLLM2, *options, home=home)
        for which in r.choices(range(8), k=r.randint(1, 3)):
            found = server.ask(prompts[which], 6)
            known += found["cached"]
            wrong += found["text"] != expected[which]
        time.sleep(r.random() * 0.03)
        for pid in reversed(server.tree()):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        server.child.wait(10)
        if r.random() < 0.3:
            shutil.rmtree(f"{home}/prefixes", ignore_errors=True)  # much to write again
    told("kills, tokens of prompts that were known", known)
    if not known:
        sys.exit("no page was ever known: nothing was written")
    bar(f"kills, wrong answers after {a.kills} kills -9 during writes", wrong, "", 0, False)


def ngram():
    """A text that repeats itself: greedy answers that come to copy their prompt. Any text: sampled answers."""
    options = ["--threads", 1, "--context", 4096, "--prefix-cache", "off"]
    with contextlib.ExitStack() as both:
        servers = []
        for drafts in [8, 0]:
            servers.append(Up(SMOLLM2, *options, "--drafts", drafts, cores="0"))
            both.callback(servers[-1].end)
        lines = lambda n: "".join(f"{i}: the {n}th list of names has the name number {i % 5}.\n" for i in range(60))
        cases = {
            "repetitive": (lambda n: lines(n) + "The same list once more:\n0: the", dict(temperature=0), 400, 1.5),
            "any": (lambda n: f"Essay {n}. On the habits of sea birds in winter,", dict(temperature=1, seed=11), 400, 0.97),
        }
        for name, (prompt, how, tokens, limit) in cases.items():
            ratios, equal = [], True
            for n in range(runs(9) + 1):
                turn = servers if n % 2 else servers[::-1]
                with client_on(1):
                    told_by = {id(s): s.ask(prompt(n), a.tokens or tokens, ignore_eos=True, **how) for s in turn}
                guessed, plain = (told_by[id(s)] for s in servers)
                equal &= guessed["text"] == plain["text"]
                if n:
                    ratios.append(guessed["rate"] / plain["rate"])
            bar(f"n-gram, {name} text, guesses over none", ratios, "x", limit)
            bar(f"n-gram, {name} text, same answers", int(equal), "", 1)


def batch(kind):
    bars = {8: 0.65, 16: 0.80, 32: 0.90}
    server = Up(models32.path(kind), "--threads", a.threads, "--context", 1024, "--parallel", 32, "--pace", "off", *PLAIN)
    try:
        share = models32.share_of_layers(kind)
        server.ttft(ids(512, 1, VOCAB))
        found = {n: [] for n in bars}
        reads = []
        for r in range(runs(3)):
            for n in bars:
                read = statistics.median(512 / server.ttft(ids(512, 100 * r + 10 * n + k, VOCAB)) for k in range(3))
                reads.append(read)
                rate = total_rate([server], n, a.tokens or 512, vocab=VOCAB, seed=1000 * r + n)
                found[n].append(rate / (read * share))
        told(f"batch {kind}, prompts of 512", reads, "tokens/s")
        told(f"batch {kind}, R", [share * r for r in reads], "tokens/s")
        for n, limit in bars.items():
            bar(f"batch {kind}, {n} streams over R", found[n], "x", limit)
    finally:
        server.end()


def stages(kind, default):
    """Two stages of a thread beside one and two processes of a thread; whoever is not asked sleeps."""
    model, common = models32.path(kind), ["--threads", 1, "--context", 4352, "--pace", "off", *PLAIN]
    with contextlib.ExitStack() as all_of:
        def up(*args, cores=None):
            server = Up(model, *common, *args, cores=cores)
            all_of.callback(server.end)
            return server
        two = up("--nodes", 2, "--split", "pipeline", "--parallel", 16)
        ones = [up("--parallel", 8, cores=str(core)) for core in range(2)]
        for server in [two, *ones]:
            server.ttft(ids(64, 1, VOCAB))
        ratios, prompts = [], []
        for r in range(runs(default)):
            alone = ones[0].ttft(ids(4000, 2 * r + 2, VOCAB))
            prompts.append(alone / two.ttft(ids(4000, 2 * r + 3, VOCAB)))
            apart = total_rate(ones, 8, a.tokens or 512, vocab=VOCAB, seed=50 + r)
            ratios.append(total_rate([two], 16, a.tokens or 512, vocab=VOCAB, seed=80 + r) / apart)
        bar(f"stages {kind}, two micro-batches of 8 over two processes of batch 8", ratios, "x", 0.85)
        bar(f"stages {kind}, a prompt of 4,000 over two stages, over one", prompts, "x", 1.5)


async def one_request(server, r, outcomes):
    """A request of a random kind; what it ended with."""
    kind, streams = r.choices(["whole", "cancel", "over-long", "slow", "vanish"], [50, 15, 10, 15, 10])[0], r.random() < 0.5
    streams |= kind != "whole"
    length = 20000 if kind == "over-long" else r.choice([8, 60, 300, 900])
    most = 400 if kind == "slow" else r.choice([1, 16, 64, 200])  # more than the system takes in for a client
    body = json.dumps({"model": server.model, "prompt": ids(length, r.randrange(1 << 20)), "max_tokens": most,
                       "temperature": r.choice([0, 1]), "n": r.choice([1, 1, 1, 2]), "stream": streams}).encode()
    while True:
        to = socket.socket()
        to.setblocking(False)
        if kind == "slow":
            to.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await asyncio.get_running_loop().sock_connect(to, ("127.0.0.1", server.port))
        reader, writer = await asyncio.open_connection(sock=to, limit=65536 if kind != "slow" else 4096)
        try:
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
                         b"Content-Length: %d\r\n\r\n" % len(body))
            if kind == "vanish" and r.random() < 0.5:
                writer.write(body[: len(body) // 2])
                return outcomes.append((kind, "gone"))
            writer.write(body)
            await writer.drain()
            if kind == "vanish":
                await asyncio.sleep(r.random() * 0.5)
                writer.transport.abort()
                return outcomes.append((kind, "gone"))
            status = 100  # which only says that the server still computes
            while status == 100:
                head = await reader.readuntil(b"\r\n\r\n")
                status = int(head.split(b" ")[1])
            if status in (429, 503):  # told to come again
                after = re.search(rb"(?i)retry-after: (\d+)", head)
                await asyncio.sleep(float(after[1]) if after else 0.2)
                continue
            data, n = b"", 0
            while part := await reader.read(1024 if kind == "slow" else 65536):
                data += part
                n += 1
                if kind == "cancel" and n > 3:
                    writer.transport.abort()
                    return outcomes.append((kind, "gone"))
                if kind == "slow":
                    await asyncio.sleep(0.05)
            if status == 200:
                fine = (b"[DONE]" if streams else b'"finish_reason"') in data
                return outcomes.append((kind, "answer" if fine else f"cut: {data[-120:]!r}"))
            named = status == 400 and b'"message"' in data
            return outcomes.append((kind, "named error" if named else f"{status}: {data[:120]!r}"))
        finally:
            writer.close()


def all_at_once(server, places):
    """How many answers are computed at a time where the first of them fills the context. Together they need every page that there
    is: one that finds none gives its place up. The server counts an answer from its first token on."""
    ended, seen = threading.Event(), []

    def look():
        while not ended.is_set():
            seen.append(server.health()["running"])
            time.sleep(0.02)

    def answer(n):
        try:
            server.ask(ids(16, 5000 + n), 2030, ignore_eos=True, on_event=lambda _: ended.is_set())
        finally:
            ended.set()
    # The id that `ids` begins with differs, so none shares a page with another.
    together(look, *[lambda n=n: answer(n) for n in range(places)])
    return statistics.median(seen[-20:])  # some 0.4 s; the last of them may be behind the end


def mixed():
    server = Up(SMOLLM2, "--threads", 2, "--context", 2048, "--parallel", 8, "--prefix-cache", "off")
    r, outcomes, sizes = random.Random(32), [], []

    async def worker(count):
        for _ in range(count):
            try:
                await asyncio.wait_for(one_request(server, r, outcomes), 300)
            except asyncio.TimeoutError:
                outcomes.append(("?", "no end within 300 s"))
            except (OSError, EOFError, asyncio.LimitOverrunError) as error:
                outcomes.append(("?", f"broken: {error!r}"))

    async def all_of(count):
        await asyncio.gather(*[worker((count + n) // 20) for n in range(20)])

    try:
        parts = 5
        for part in range(parts):
            asyncio.run(all_of((a.requests + part) // parts))
            server.quiet(120)
            sizes.append(server.pss())
        bad = [o for o in outcomes if o[1] not in ("answer", "named error", "gone")]
        kinds = sorted({o for o in outcomes if o not in bad})
        print("  mixed:", ", ".join(f"{kind} {end} {outcomes.count((kind, end))}" for kind, end in kinds), flush=True)
        for what in bad[:5]:
            print("  BAD", what)
        missing = a.requests - len(outcomes) + len(bad)
        bar(f"mixed, of {a.requests} requests without an answer or a clear error", missing, "", 0, False)
        told("mixed, memory after each fifth", sizes, "MiB")
        # The first two fifths fill the cache of prompts, which has a bound.
        bar("mixed, memory at the end over after two fifths", sizes[-1] / sizes[1], "x", 1.05, False)
        bar("mixed, answers that fill the context at once after it, of 8 (no page is missing)", all_at_once(server, 8), "", 8)
    finally:
        server.end()


def llama(kind, limit):
    """Steps of 8 rows, one of each sequence, behind prompts of 16; the driver's library and session, with 8 sequences."""
    place = os.environ.get("LLAMA_DIR")
    if not place:
        return skipped(f"llama {kind}, 8 sequences", "LLAMA_DIR names no folder with node-llama-cpp: npm install --prefix DIR "
                       "--no-save --ignore-scripts node-llama-cpp@3.22.1")
    driver = os.environ.get("LLAMA_BENCH", f"{REPO}/scripts/peers/llama_bench.py")
    program = r"""
import importlib.util, json, sys, time
spec = importlib.util.spec_from_file_location("driver", sys.argv[1]); d = importlib.util.module_from_spec(spec); spec.loader.exec_module(d)
seqs, steps, threads = 8, int(sys.argv[5]), int(sys.argv[4])
s = d.Session(d.library(sys.argv[2]), sys.argv[3])
p = s.llama.llama_context_default_params()
if list(p.words[:4]) != [512, 2048, 512, 1]: sys.exit(f"unknown llama_context_params layout: {list(p.words[:8])}")
p.words[0], p.words[3] = seqs * (steps + 64), seqs  # n_ctx, n_seq_max
s.context = s.llama.llama_init_from_model(s.model, p)
if not s.context: sys.exit("llama.cpp makes no context of 8 sequences")
s.llama.llama_set_n_threads(s.context, threads, threads)
def call(rows):
    b = s.batch; b.n_tokens = len(rows)
    for i, (token, pos, seq, logits) in enumerate(rows):
        b.token[i], b.pos[i], b.n_seq_id[i], b.logits[i] = token, pos, 1, logits
        b.seq_id[i][0] = seq
    if s.llama.llama_decode(s.context, b): sys.exit("llama_decode failed")
    s.llama.llama_synchronize(s.context)
token = lambda seq, pos: ((pos * 7919 + seq * 104729) % (s.n_vocab - 300)) + 150
def once():
    m = s.llama.llama_get_memory(s.context)
    for q in range(seqs): s.llama.llama_memory_seq_rm(m, q, 0, -1)
    for q in range(seqs): call([(token(q, i), i, q, int(i == 15)) for i in range(16)])
    t = time.perf_counter()
    for i in range(16, 16 + steps): call([(token(q, i), i, q, 1) for q in range(seqs)])
    return seqs * steps / (time.perf_counter() - t)
once()
for _ in sys.stdin: print(json.dumps(once()), flush=True)
"""
    model = models32.path(kind)
    server = Up(model, "--threads", a.threads, "--context", 1024, "--parallel", 8, "--pace", "off", *PLAIN)
    peer = start([sys.executable, "-c", program, driver, place, model, a.threads, a.tokens or 96], text=True,
                 stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        ours, theirs = [], []
        for n in range(runs(5) + 1):
            print("", file=peer.stdin, flush=True)
            line = peer.stdout.readline()
            if not line:
                sys.exit("llama.cpp's driver ended, its message is above")
            rate = total_rate([server], 8, a.tokens or 512, vocab=VOCAB, seed=n)
            if n:
                theirs.append(json.loads(line))
                ours.append(rate)
        told(f"llama {kind}, ours", ours, "tokens/s")
        told(f"llama {kind}, llama.cpp", theirs, "tokens/s")
        bar(f"llama {kind}, 8 sequences over llama.cpp", [o / t for o, t in zip(ours, theirs)], "x", limit)
    finally:
        kill(peer)
        server.end()


# A bar's most seconds are twice what it takes on an idle machine, or more.
BARS = {"pace": (pace, 1200), "prefix": (prefix, 240), "ngram": (ngram, 420), "kills": (kills, 240), "mixed": (mixed, 2400),
        "batch-0.5b": (lambda: batch("0.5b"), 600), "batch-1.5b": (lambda: batch("1.5b"), 1200),
        "stages-0.5b": (lambda: stages("0.5b", 3), 900), "stages-1.5b": (lambda: stages("1.5b", 2), 1500),
        "llama-0.5b": (lambda: llama("0.5b", 2.2), 600), "llama-1.5b": (lambda: llama("1.5b", 1.6), 900)}
a = chosen.parsed(arguments(__doc__, runs=0, requests=1000, threads=2, tokens=0, kills=20), BARS, list(BARS)[4:])
BARS["kills"] = (kills, 200 + 8 * a.kills)
chosen.play(a.bars, BARS)
