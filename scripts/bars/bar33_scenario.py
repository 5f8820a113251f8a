#!/usr/bin/env python3
"""Issue 33: scenarios 3 and 4 together (at nice 19) with 4 normal clients.

    bar33_scenario.py BINARY [--model GGUF] [--seconds 60] [--tokens 48] [--nodes 1]

Server with five API keys. Undisturbed: 4 clients with a key each stream chats one after the other for SECONDS.
Then the attack, a process at nice 19, for as long: 512 keep-alive connections that ask /health without a key, 700 that
send half a head and then a byte every 2 s, 6 that send prompts of 8 MB and 64 that ask for long streams, both with the
key `attacker` (on 429 they wait as told). Bars: the normal clients' requests take at most twice as long (median and
slowest); resident memory of the parent (`up`) grows by at most 150 MB, and is within 30 MB ten seconds after the end.
"""
import argparse, asyncio, resource
from common import *

ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
ap.add_argument("binary")
ap.add_argument("--model", default=SMOLLM2)
ap.add_argument("--seconds", type=float, default=60)
ap.add_argument("--tokens", type=int, default=48)
ap.add_argument("--nodes", type=int, default=1)
ap.add_argument("--attack", nargs=3, metavar=("PORT", "KEY", "MODEL"), help=argparse.SUPPRESS)
a = ap.parse_args()
HEAD = "{} {} HTTP/1.1\r\nHost: localhost\r\n{}"


def post(path, body, key):
    body = json.dumps(body).encode()
    return HEAD.format("POST", path, f"Authorization: Bearer {key}\r\nContent-Type: application/json\r\n"
                       f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n").encode() + body


async def attack(port, key, model):
    told = {"health": 0, "half closed": 0, "long refused": 0, "streams": 0, "429": 0, "other": 0}

    async def again(what):
        while True:
            try:
                await what()
            except (OSError, asyncio.IncompleteReadError, ValueError):
                await asyncio.sleep(0.05)

    async def health():
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            while True:
                writer.write(HEAD.format("GET", "/health", "\r\n").encode())
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(re.search(rb"(?i)content-length: (\d+)", head)[1])
                await reader.readexactly(length)
                told["health"] += 1
                await asyncio.sleep(0.2)
        finally:
            writer.close()

    async def half():
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(HEAD.format("GET", "/health", "X-Slow: ").encode())
            while not reader.at_eof():
                writer.write(b"x")
                await writer.drain()
                try:
                    await asyncio.wait_for(reader.read(1000), 2)
                except asyncio.TimeoutError:
                    pass
            told["half closed"] += 1
        finally:
            writer.close()

    async def ask(body, name):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(post("/v1/chat/completions", body, key))
            head = await reader.readuntil(b"\r\n\r\n")
            status = int(head.split(b" ")[1])
            while await reader.read(65536):
                pass
            told[name if status in (200, 400) else "429" if status == 429 else "other"] += 1
            wait = re.search(rb"(?i)retry-after: (\d+)", head)
            await asyncio.sleep(float(wait[1]) if wait else 0.05)
        finally:
            writer.close()

    text = "All work and no play makes a dull day. "
    long = {"model": model, "messages": [{"role": "user", "content": text * (8_000_000 // len(text) - 20)}]}
    stream = {"model": model, "stream": True, "max_tokens": 2000, "ignore_eos": True,
              "messages": [{"role": "user", "content": text * 8}]}
    tasks = [asyncio.create_task(again(health)) for _ in range(512)]
    tasks += [asyncio.create_task(again(half)) for _ in range(700)]
    tasks += [asyncio.create_task(again(lambda: ask(long, "long refused"))) for _ in range(6)]
    tasks += [asyncio.create_task(again(lambda: ask(stream, "streams"))) for _ in range(64)]
    await asyncio.sleep(a.seconds)
    print("attack:", ", ".join(f"{name} {count}" for name, count in told.items()), flush=True)
    os._exit(0)


if a.attack:
    os.nice(19)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(attack(int(a.attack[0]), a.attack[1], a.attack[2]))


def key(home, name):
    out = subprocess.run([a.binary, "key", "api", "new", name], env={**os.environ, "PACELINE_HOME": home},
                         capture_output=True, text=True, check=True)
    return max(re.findall(r"\S+", out.stdout), key=len)


class Keyed(Server):
    def __init__(self, *args):
        home = tempfile.mkdtemp(prefix="bars-home-")
        self.keys = {name: key(home, name) for name in ("normal0", "normal1", "normal2", "normal3", "attacker")}
        real, tempfile.mkdtemp = tempfile.mkdtemp, lambda **_: home
        try:
            super().__init__(*args)
        finally:
            tempfile.mkdtemp = real


def rss(pid):
    with open(f"/proc/{pid}/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("VmRSS:")) / 1024


PHASES = []  # of each request: seconds to its end, connected, head, first line; client, question


def client(server, number, until, times, errors):
    count = 0
    while time.perf_counter() < until:
        count += 1
        body = {"model": MODEL, "max_tokens": a.tokens, "ignore_eos": True, "temperature": 0, "stream": True,
                "messages": [{"role": "user", "content": f"Client {number}, question {count}: tell a story of a bicycle."}]}
        began = time.perf_counter()
        try:
            c = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
            c.connect()
            phases = [time.perf_counter() - began]
            c.request("POST", "/v1/chat/completions", json.dumps(body),
                      {"Content-Type": "application/json", "Authorization": f"Bearer {server.keys[f'normal{number}']}"})
            r = c.getresponse()
            phases.append(time.perf_counter() - began)
            data = r.readline()
            phases.append(time.perf_counter() - began)
            data += r.read()
            c.close()
            if r.status == 200 and b"[DONE]" in data:
                times.append(time.perf_counter() - began)
                PHASES.append((times[-1], *phases, number, count))
            else:
                errors.append(f"{r.status} {data[-200:]!r}")
                time.sleep(0.2)
        except OSError as error:
            errors.append(repr(error))
            time.sleep(0.2)


def normal(server, seconds):
    times, errors = [], []
    until = time.perf_counter() + seconds
    threads = [threading.Thread(target=client, args=(server, n, until, times, errors)) for n in range(4)]
    [t.start() for t in threads]
    peak = 0
    while any(t.is_alive() for t in threads):
        peak = max(peak, rss(server.pid))
        time.sleep(0.1)
    return times, errors, peak


print(load())
server = Keyed(a.binary, "--no-beacons", "--control-port", "0", "--model", a.model, *(["--nodes", a.nodes] if a.nodes > 1 else []))
try:
    c = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    c.request("GET", "/v1/models", headers={"Authorization": f"Bearer {server.keys['normal0']}"})
    listed = json.loads(c.getresponse().read())
    c.close()
    MODEL = listed["data"][0]["id"]
    normal(server, min(5, a.seconds))  # warm
    before = rss(server.pid)
    quiet, errors, _ = normal(server, a.seconds)
    print(f"undisturbed: {spread(quiet)} s, slowest {max(quiet):.3f}, errors {errors[:3]}; parent {before:.0f} MB")
    attacker = subprocess.Popen([sys.executable, os.path.abspath(__file__), a.binary, "--seconds", str(a.seconds + 10),
                                 "--attack", str(server.port), server.keys["attacker"], MODEL])
    time.sleep(5)
    disturbed, errors, peak = normal(server, a.seconds)
    attacker.wait()
    time.sleep(10)
    after = rss(server.pid)
    for end, connected, head, first, number, count in sorted(PHASES[-len(disturbed):], reverse=True)[:5]:
        print(f"slow: {end:.2f} s; connected {connected:.2f}, head {head:.2f}, first line {first:.2f};"
              f" client {number}, question {count}")
    if not disturbed:
        sys.exit(f"no request of a normal client was answered: {errors[:3]}")
    print(f"disturbed:   {spread(disturbed)} s, slowest {max(disturbed):.3f}, errors {len(errors)} {errors[:3]}")
    print(f"parent: {before:.0f} MB before, {peak:.0f} at most, {after:.0f} ten seconds after")
    verdict("normal requests, median", statistics.median(disturbed) / statistics.median(quiet), 2, at_least=False)
    verdict("normal requests, slowest", max(disturbed) / max(quiet), 2, at_least=False)
    verdict("normal requests refused or broken", len(errors), 0, at_least=False)
    verdict("parent's peak, MB", peak - before, 150, at_least=False)
    verdict("parent ten seconds later, MB", after - before, 30, at_least=False)
finally:
    server.end()
print(load())
