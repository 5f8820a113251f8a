"""Runs the tutorials in docs/tutorials as somebody who follows them; a line for each.

    python scripts/docs/tutorials.py --binary PACELINE --model SMOLLM2 [--python PYTHON] [--long] [NAME...]

Every block of `sh` or `python` in a page runs, in order, in one empty folder. A comment before a block,
which readers do not see, changes that:

    <!-- run: no, REASON -->            does not run
    <!-- run: long -->                  runs with --long only
    <!-- run: beside, until REGEX -->   goes on beside the following ones; waits for REGEX in its output
    <!-- file: NAME -->                 is written to NAME
    <!-- on: two -->                    runs on the machine `two`; all others on `one`
    <!-- expect: REGEX -->              its output has to match

Machines are homes of this one: `paceline` is a script that gives each node ports of its own, and an
address of the first in place of multicast. SmolLM2 is in their store. PYTHON is one that has the wheel;
without it, pages that use Python are skipped by name.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

PAGES = Path(__file__).resolve().parents[2] / "docs/tutorials"

#: Seconds for a block, which may train for some steps.
LIMIT = 240

#: The port that pages name, and the server's.
PORT = "52415"

MACHINES = ("one", "two", "three")

WRAPPER = """#!/bin/sh
# paceline as the machine $MACHINE runs it.
case $1 in
    up) exec {binary} "$@" $UP ;;
    join) exec {binary} "$@" $JOIN ;;
    agent) shift; exec {binary} agent --url "$URL" "$@" ;;
esac
exec {binary} "$@"
"""


@dataclass
class Block:
    """A block of a page, and what the comment before it says."""

    line: int
    language: str
    text: str
    notes: dict[str, str] = field(default_factory=dict)


def blocks(page: str) -> list[Block]:
    """The blocks of a page that are sh or python.

    Raises:
        ValueError: a comment of an unknown kind, or no block follows one.
    """
    found: list[Block] = []
    notes: dict[str, str] = {}
    lines = page.splitlines()
    at = 0
    while at < len(lines):
        note = re.fullmatch(r"<!-- (\w+): (.*) -->", lines[at])
        fence = re.fullmatch(r"```(\w*)", lines[at])
        if note:
            if note[1] not in ("run", "file", "on", "expect"):
                raise ValueError(f"line {at + 1}: no block is told {note[1]!r}")
            notes[note[1]] = note[2]
        elif fence:
            end = lines.index("```", at + 1)
            if fence[1] in ("sh", "python") or "file" in notes:
                found.append(Block(at + 1, fence[1], "\n".join(lines[at + 1:end]) + "\n", notes))
            elif notes:
                raise ValueError(f"line {at + 1}: a block of {fence[1] or 'text'} is told {notes}")
            notes, at = {}, end
        elif lines[at].strip() and notes:
            raise ValueError(f"line {at + 1}: text between {notes} and its block")
        at += 1
    if notes:
        raise ValueError(f"no block follows {notes}")
    return found


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class Beside:
    """A block that goes on in the background."""

    def __init__(self, command: list[str], **options) -> None:
        self.child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                      text=True, errors="replace", start_new_session=True, **options)
        self.said: list[str] = []
        self.changed = threading.Condition()
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self) -> None:
        for line in self.child.stdout:
            with self.changed:
                self.said.append(line)
                self.changed.notify()
        with self.changed:
            self.child.wait()
            self.changed.notify()

    def wait(self, regex: str) -> None:
        until = time.monotonic() + LIMIT
        with self.changed:
            while not re.search(regex, "".join(self.said)):
                left = until - time.monotonic()
                assert left > 0 and self.child.returncode is None, (
                    f"it never said {regex!r}, but: {''.join(self.said)[-600:]}")
                self.changed.wait(left)

    def end(self) -> None:
        if self.child.poll() is None:
            os.killpg(self.child.pid, signal.SIGINT)
            try:
                self.child.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self.child.pid, signal.SIGKILL)
                self.child.wait()


class World:
    """The folder, machines and programs of one page."""

    def __init__(self, folder: Path, binary: Path, model: Path, python: Path | None) -> None:
        self.work, self.python = folder / "work", python
        self.beside: list[Beside] = []
        ports = free_ports(2 * len(MACHINES))
        self.port = str(ports[0])
        self.environments = {}
        programs = folder / "bin"
        for each in (self.work, programs):
            each.mkdir()
        self.script(programs / "paceline", WRAPPER.format(binary=binary))
        if python:
            self.script(programs / "python3", f'#!/bin/sh\nexec {python} "$@"\n')
        for at, name in enumerate(MACHINES):
            home = folder / name
            stock(home, model)
            own = f"--port {ports[2 * at]} --control-port {ports[2 * at + 1]} --discovery none"
            peer = f"--peer 127.0.0.1:{ports[1]}" if at else ""
            kept = {key: value for key, value in os.environ.items() if not key.startswith("PACELINE_")}
            self.environments[name] = {
                **kept, "PACELINE_HOME": str(home), "MACHINE": name, "JOIN": peer,
                "URL": f"http://127.0.0.1:{ports[2 * at]}",
                "UP": f"{own} --name {name} {peer}", "PACELINE_BINARY": str(binary),
                "PATH": f"{programs}:{os.environ['PATH']}"}

    @staticmethod
    def script(path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    def run(self, block: Block, is_long: bool) -> None:
        """Does what a block says.

        Raises:
            AssertionError: it fails, hangs or says something else.
        """
        how, text = block.notes.get("run", ""), block.text.replace(PORT, self.port)
        if how.startswith("no, ") or (how == "long" and not is_long):
            return
        if "file" in block.notes:
            (self.work / block.notes["file"]).write_text(text)
            return
        options = {"cwd": self.work, "stdin": subprocess.DEVNULL,
                   "env": self.environments[block.notes.get("on", "one")]}
        command = ["bash", "-euo", "pipefail", "-c", text]
        if block.language == "python":
            command = [str(self.python), "-c", text]
        if how.startswith("beside, until "):
            self.beside.append(Beside(command, **options))
            self.beside[-1].wait(how.removeprefix("beside, until "))
            return
        assert how in ("", "long"), f"no block runs {how!r}"
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              errors="replace", timeout=LIMIT, **options)
        assert done.returncode == 0, f"exit status {done.returncode}: {done.stdout[-800:]}"
        expected = block.notes.get("expect", "")
        assert re.search(expected, done.stdout), f"no {expected!r} in {done.stdout[-800:]}"

    def end(self) -> None:
        for each in reversed(self.beside):
            each.end()


def stock(home: Path, model: Path) -> None:
    """A home whose store has SmolLM2, as `paceline pull smollm2` leaves it."""
    folder = home / "models/smollm2"
    folder.mkdir(parents=True)
    os.link(model, folder / model.name) if same_disk(model, folder) else shutil.copy(model, folder)
    hash_ = hashlib.sha256(model.read_bytes()).hexdigest()
    file = {"path": model.name, "bytes": model.stat().st_size, "sha256": hash_}
    record = {"version": 1, "name": "smollm2", "kind": "gguf", "source": "tutorials.py",
              "files": [file], "pulled_at": 5, "last_used": None}
    (folder / "paceline.json").write_text(json.dumps(record))


def same_disk(one: Path, two: Path) -> bool:
    return one.stat().st_dev == two.stat().st_dev


def walk(page: Path, arguments: argparse.Namespace) -> str | None:
    """Follows a page; gives why it was skipped."""
    steps = blocks(page.read_text())
    runs = [step for step in steps if not step.notes.get("run", "").startswith("no, ")]
    assert runs, "nothing in it runs"
    if arguments.python is None and any(step.language == "python" for step in runs):
        return "no Python with the wheel"
    with tempfile.TemporaryDirectory(prefix="tutorial-") as folder:
        world = World(Path(folder), arguments.binary.resolve(), arguments.model.resolve(),
                      arguments.python)
        try:
            for step in steps:
                try:
                    world.run(step, arguments.long)
                except (AssertionError, subprocess.TimeoutExpired) as error:
                    raise AssertionError(f"line {step.line}: {error}") from None
        finally:
            world.end()
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--binary", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--python", type=Path)
    parser.add_argument("--long", action="store_true")
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    failed = False
    for page in sorted(PAGES.glob("*.md")):
        if page.stem == "README" or (arguments.names and page.stem not in arguments.names):
            continue
        began, title = time.monotonic(), f"tutorial {page.stem}"
        try:
            skipped = walk(page, arguments)
        except Exception as error:  # noqa: BLE001
            failed = True
            print(f"FAILED {title}: {error}".replace("\n", " "), flush=True)
        else:
            seconds = time.monotonic() - began
            print(f"SKIPPED {title}: {skipped}" if skipped else f"ok {title} ({seconds:.1f} s)",
                  flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
