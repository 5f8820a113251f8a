"""Own functions over machines: leases parts to hosts (`_worker.py`), and collects results in order.

A part is an aligned range of items whose size depends on the number of items alone. So what a part
gives, and the order in which parts are reduced, are the same for any number of machines, and after a
lost one. `Stage` decides which host computes what; `Team` has the hosts and their streams.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib.util
import itertools
import json
import os
import pathlib
import pickle
import queue
import subprocess
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from ._server import binary
from .errors import FunctionError, JobError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: Most parts of a job: some for each thread of a hundred machines.
PARTS_MAX = 1024

#: Parts that a host has for each of its threads: one under way and one that waits.
PARTS_AHEAD = 2

#: Times that a part may end its worker before the job fails.
LOSSES_MAX = 3

#: Seconds to start a worker: ten for the connection, and a Python on a cold disk.
START_S = 40.0

#: Seconds without a sign of life after which a host is lost; it gives one every two seconds.
SILENCE_S = 15.0

#: Seconds in which one host cannot read from another before the job fails.
UNFETCHED_S = 60.0

#: Seconds between looks at limits and cancellation.
LOOK_S = 0.25

#: Seconds before a bucket that could not be fetched is tried again.
RETRY_S = 0.5


def _load_worker() -> Any:
    """The worker's module by the name that it has in workers, so that its classes are the same."""
    name = "_paceline_worker"
    if name not in sys.modules:
        path = pathlib.Path(__file__).with_name("_worker.py")
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        module.source = path.read_text(encoding="utf-8")
    return sys.modules[name]


worker = _load_worker()


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of a part of own functions.

    Attributes:
        memory: private bytes of a worker's thread, on Linux; none by default.
        seconds: seconds of a part; none by default.
        output: bytes of a part's result.
    """

    memory: int | None = None
    seconds: float | None = None
    output: int = 1 << 30


@dataclasses.dataclass
class Figures:
    """What a job of own functions moved.

    Attributes:
        starter_bytes: bytes between this process and the hosts, both ways.
        exchanged_bytes: bytes that hosts read from each other.
        lost: machines that were lost, with the reason.
    """

    starter_bytes: int = 0
    exchanged_bytes: int = 0
    lost: list[str] = dataclasses.field(default_factory=list)


class HostProcess:
    """A host's process, and the thread that reads what it says."""

    def __init__(self, number: int, name: str, node: str | None, python: Sequence[str],
                 events: queue.Queue[Any]) -> None:
        self.number, self.name, self.node = number, name, node
        self.alive, self.ready = True, False
        self.heard = time.monotonic()
        self.sent = self.received = self.fetched = 0
        self.facts: dict[str, Any] = {}
        self.socket, self.cores = "", 1
        self.knows = -1
        command = [*python, "-c", worker.BOOTSTRAP, "host"]
        environment = {**os.environ, "PACELINE_BINARY": binary(), "PYTHONHASHSEED": "0"}
        if node is not None:
            command = [binary(), "programs", "--node", node, "--",
                       "/usr/bin/env", "PYTHONHASHSEED=0", *command]
        try:
            self.process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE,
                                            stdout=subprocess.PIPE, start_new_session=True)
        except OSError as error:
            raise JobError(f"cannot run {command[0]}: {error}") from None
        # Bounded by the leases of a host. A stopped host fills its pipe, which must block no other.
        self.outbox: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self.write, daemon=True).start()
        threading.Thread(target=self.listen, args=(events,), daemon=True).start()

    def write(self) -> None:
        """Sends what is told, until the host is closed or gone, which its reader notices."""
        try:
            text = worker.source.encode()
            self.process.stdin.write(b"%d\n" % len(text) + text)
            self.process.stdin.flush()
            while (message := self.outbox.get()) is not None:
                self.sent += worker.send(self.process.stdin, message)
            self.process.stdin.close()
        except (worker.Lost, OSError, ValueError):
            pass

    def listen(self, events: queue.Queue[Any]) -> None:
        try:
            while True:
                data = worker._bytes(self.process.stdout)
                self.received += 8 + len(data)
                self.heard = time.monotonic()
                events.put((self.number, pickle.loads(data)))
        except (worker.Lost, OSError, ValueError) as error:
            events.put((self.number, ("lost", str(error))))

    def tell(self, *message: Any) -> None:
        """Sends a message, by the thread of the outbox."""
        self.outbox.put(message)

    def close(self) -> None:
        self.alive = False
        self.outbox.put(None)
        try:
            self.process.wait(0.5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _end(hosts: list[HostProcess]) -> None:
    for host in hosts:
        host.close()


class Team:
    """The hosts of a `Machines`: started once, used by one job after the other."""

    def __init__(self, machines: Sequence[dict[str, Any]], python: Sequence[str],
                 threads: int | None, limits: Limits) -> None:
        self.events: queue.Queue[Any] = queue.Queue()
        self.hosts: list[HostProcess] = []
        self.jobs = itertools.count()
        self._finish = weakref.finalize(self, _end, self.hosts)
        try:
            for number, machine in enumerate(machines):
                self.hosts.append(HostProcess(number, machine["name"], machine["node"], python,
                                              self.events))
            self._greet()
            self.threads = [threads or max(1, host.cores // self._share(host))
                            for host in self.hosts]
            places = self.places()
            for host, count in zip(self.hosts, self.threads):
                host.tell("begin", self._seen_by(host, places), host.number, count,
                          dataclasses.asdict(limits))
        except BaseException:
            self.close()
            raise

    def _share(self, host: HostProcess) -> int:
        """Hosts on the same machine."""
        return sum(other.node == host.node for other in self.hosts)

    def places(self) -> list[dict[str, Any]]:
        return [{"node": host.node, "socket": host.socket} for host in self.hosts]

    @staticmethod
    def _seen_by(host: HostProcess, places: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Hosts of the same machine are reached by their sockets, without its node."""
        return [{**place, "node": None if place["node"] == host.node else place["node"]}
                for place in places]

    def introduce(self, own: str | None) -> None:
        """Tells hosts of other machines the id of this machine's node, to fetch from here."""
        places = [{**place, "node": place["node"] or own} for place in self.places()]
        for host in self.hosts:
            seen = [{**place, "node": None if place["node"] == (host.node or own)
                     else place["node"]} for place in places]
            host.tell("hosts", seen)

    def _greet(self) -> None:
        """Waits for all hosts, and compares their Pythons with this one."""
        end, own = time.monotonic() + START_S, worker.facts()
        while not all(host.ready for host in self.hosts):
            try:
                number, message = self.events.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                late = ", ".join(host.name for host in self.hosts if not host.ready)
                raise JobError(f"no worker on {late} within {START_S:.0f} s") from None
            host = self.hosts[number]
            if message[0] == "lost":
                code = host.process.wait()
                raise JobError(f"the worker on {host.name} ended with code {code} before it began: "
                               f"is its Python named by `python=`? its message is above")
            if message[0] == "hello":
                _, host.facts, host.socket, host.cores = message
                host.ready = True
                _compare(own, host)

    def close(self) -> None:
        """Ends all hosts; the second time does nothing."""
        self._finish()

    def alive(self) -> bool:
        """Whether a further job can use it: lost machines are left out."""
        return any(host.alive for host in self.hosts)


def _compare(own: dict[str, Any], host: HostProcess) -> None:
    for name, version in own.items():
        theirs = host.facts.get(name)
        if name == "numpy" and version is None:
            continue
        if version is None:
            raise JobError(f"own functions need {name}: pip install 'paceline[functions]'")
        if theirs is None:
            raise JobError(f"the Python on {host.name} lacks {name}: pip install {name}=={version}")
        if theirs != version:
            raise JobError(f"{name} is {version} here and {theirs} on {host.name}: "
                           "results would differ")


@dataclasses.dataclass
class Part:
    """A range of items of one side."""

    side: int
    start: int
    items: Any


def cut(items: Any, side: int = 0) -> list[Part]:
    """Parts of equal size, a power of two that depends on the number of items alone."""
    if not hasattr(items, "__getitem__") or not hasattr(items, "__len__") or isinstance(items, dict):
        items = list(items)
    size = 1
    while len(items) > size * PARTS_MAX:
        size *= 2
    return [Part(side, start, items[start:start + size]) for start in range(0, len(items), size)]


class Stage:
    """A job on a team: parts first, then buckets if there is a shuffle."""

    def __init__(self, team: Team, functions: dict[str, Any], stages: tuple[str, str | None],
                 parts: list[Part], deadline: float | None,
                 progress: Callable[[int, int], Any] | None) -> None:
        self.team, self.parts, self.progress = team, parts, progress
        self.first, self.second = stages
        self.end = None if deadline is None else time.monotonic() + deadline
        self.limit = deadline
        self.job = next(team.jobs)
        self.blob = _pickled(functions)
        self.figures = Figures()
        buckets = worker.BUCKETS if self.second else 0
        self.waiting = {"part": collections.deque(range(len(parts))),
                        "bucket": collections.deque(range(buckets))}
        self.count = len(parts) + buckets
        self.holders: dict[int, int] = {}
        self.introduced: set[int] = set()
        self.results: dict[tuple[str, int], bytes] = {}
        self.leases: dict[int, set[tuple[str, int]]] = {host.number: set() for host in team.hosts}
        self.losses: collections.Counter[tuple[str, int]] = collections.Counter()
        self.unfetched: dict[int, float] = {}
        self.not_before = 0.0
        self.before = [(host.sent + host.received, host.fetched) for host in team.hosts]

    def run(self) -> list[bytes]:
        """The results of the parts, or of the buckets, in order, as pickles."""
        self.told, self.looked = -1, time.monotonic()
        while not self.is_done():
            self.lease()
            self.look()
            try:
                number, message = self.team.events.get(timeout=LOOK_S)
            except queue.Empty:
                continue
            self.take(self.team.hosts[number], message)
        for host, (starter, fetched) in zip(self.team.hosts, self.before):
            host.tell("forget")
            self.figures.starter_bytes += host.sent + host.received - starter
            self.figures.exchanged_bytes += host.fetched - fetched
        self.report()
        what = "bucket" if self.second else "part"
        return [self.results[what, number]
                for number in range(worker.BUCKETS if self.second else len(self.parts))]

    def is_done(self) -> bool:
        if self.second:
            return sum(what == "bucket" for what, _ in self.results) == worker.BUCKETS
        return len(self.results) == len(self.parts)

    def lease(self) -> None:
        """Gives each living host work ahead; buckets only when all parts are done."""
        hosts = [host for host in self.team.hosts if host.alive]
        if not hosts:
            raise JobError("all machines were lost: " + "; ".join(self.figures.lost))
        for _ in range(PARTS_AHEAD):
            for host in hosts:
                for _ in range(self.team.threads[host.number]):
                    if not self.lease_one(host):
                        return

    def lease_one(self, host: HostProcess) -> bool:
        """Leases a task to a host that has room; false if there is none to lease."""
        leases = self.leases[host.number]
        if len(leases) >= PARTS_AHEAD * self.team.threads[host.number]:
            return True
        if self.waiting["part"]:
            what, number = "part", self.waiting["part"].popleft()
        elif self.second and len(self.holders) == len(self.parts) and self.waiting["bucket"] and (
                time.monotonic() >= self.not_before):
            what, number = "bucket", self.waiting["bucket"].popleft()
        else:
            return False
        leases.add((what, number))
        if host.knows != self.job:
            host.tell("functions", self.job, self.blob)
            host.knows = self.job
        if what == "part":
            part = self.parts[number]
            host.tell("part", self.job, number, self.first, part.side, part.start,
                      _pickled(part.items))
        else:
            if host.number not in self.introduced:
                sources = [(part.side, self.holders[at]) for at, part in enumerate(self.parts)]
                host.tell("sources", self.job, sources)
                self.introduced.add(host.number)
            host.tell("bucket", self.job, number, self.second)
        return True

    def look(self) -> None:
        """Notices silent hosts and the deadline, and reports progress."""
        now = time.monotonic()
        if now - self.looked > SILENCE_S / 3:
            # This process was suspended itself: what hosts said meanwhile is still to be read.
            for host in self.team.hosts:
                host.heard = now
        self.looked = now
        if self.end is not None and now > self.end:
            raise JobError(f"no end after {self.limit} s")
        for host in self.team.hosts:
            if host.alive and now - host.heard > SILENCE_S:
                self.lose(host, f"no sign of life for {SILENCE_S:.0f} s")
        self.report()

    def report(self) -> None:
        done = len(self.holders) + len(self.results)
        if self.progress and done != self.told:
            self.told = done
            self.progress(done, self.count)

    def take(self, host: HostProcess, message: tuple[Any, ...]) -> None:
        """An event of a host."""
        what, *rest = message
        if what == "lost":
            if host.alive:
                self.lose(host, f"its worker ended ({rest[0]})")
            return
        if what in ("alive", "hello") or not host.alive:
            return
        if what == "unfetched":
            job, number, source = rest
            if job == self.job:
                self.wait_for(host, number, source)
            return
        kind, job, number, *values, fetched = rest
        host.fetched = max(host.fetched, fetched)
        if job != self.job or (kind, number) not in self.leases[host.number]:
            return
        self.leases[host.number].remove((kind, number))
        if what == "done":
            self.unfetched.clear()
            if kind == "part" and self.second:
                self.holders[number] = host.number
                self.introduced.clear()
            else:
                self.results[kind, number] = values[0]
        elif what == "failed":
            raise self.failure(host, kind, number, *values)
        elif what == "late":
            raise JobError(f"{self.name(kind, number)} took over {values[0]} s on {host.name}")
        else:
            self.count_loss(kind, number, f"its process on {host.name} {values[0]}")

    def failure(self, host: HostProcess, kind: str, number: int, item: int | None, text: str,
                original: bytes | None) -> FunctionError:
        where = f"item {item}" if item is not None else self.name(kind, number)
        error = FunctionError(f"{where} failed on {host.name}:\n{text.rstrip()}")
        error.part, error.item, error.machine = number, item, host.name
        error.traceback = text
        try:
            error.__cause__ = pickle.loads(original) if original else None
        except Exception:
            pass  # its class is unknown here; the text has it
        return error

    @staticmethod
    def name(kind: str, number: int) -> str:
        return f"{kind} {number}"

    def count_loss(self, kind: str, number: int, why: str) -> None:
        """Leases a task again, unless it has ended its worker too often."""
        self.losses[kind, number] += 1
        if self.losses[kind, number] >= LOSSES_MAX:
            raise JobError(f"{self.name(kind, number)} was tried {LOSSES_MAX} times: {why}")
        self.waiting[kind].appendleft(number)

    def wait_for(self, host: HostProcess, bucket: int, source: int) -> None:
        """A host could not read from another: soon that one is lost, or it is tried again."""
        if ("bucket", bucket) not in self.leases[host.number]:
            return
        self.leases[host.number].remove(("bucket", bucket))
        self.waiting["bucket"].append(bucket)
        now = time.monotonic()
        self.not_before = now + RETRY_S
        if self.team.hosts[source].alive and (
                now - self.unfetched.setdefault(source, now) > UNFETCHED_S):
            raise JobError(f"{host.name} cannot read from {self.team.hosts[source].name}")

    def lose(self, host: HostProcess, why: str) -> None:
        """Takes the host's leases and parts back."""
        host.close()
        for other in self.team.hosts:
            if other.alive:
                other.tell("lost", host.number)
        self.figures.lost.append(f"{host.name}: {why}")
        for kind, number in sorted(self.leases[host.number], reverse=True):
            self.count_loss(kind, number, f"{host.name} was lost: {why}")
        self.leases[host.number].clear()
        gone = [part for part, holder in self.holders.items() if holder == host.number]
        for part in sorted(gone, reverse=True):
            del self.holders[part]
            self.waiting["part"].appendleft(part)


def _pickled(value: Any) -> bytes:
    try:
        import cloudpickle
    except ImportError:
        raise JobError("own functions need cloudpickle: pip install 'paceline[functions]'") from None
    try:
        return cloudpickle.dumps(value, protocol=5)
    except Exception as error:
        raise JobError(f"cannot be sent to workers: {error}") from error


def cluster_machines(count: int) -> tuple[list[dict[str, Any]], str | None, bool]:
    """Where workers start: machines of the cluster if this machine's node runs, else `count` here.

    Returns:
        Machines, this one first; the id of this machine's node; whether others may read from it.

    Raises:
        JobError: fewer machines run programs than `count`.
    """
    here = [{"name": "this machine", "node": None}] * count
    if count == 1:
        return here, None, True
    try:
        done = subprocess.run([binary(), "programs"], capture_output=True, text=True,
                              stdin=subprocess.DEVNULL, timeout=START_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JobError(f"cannot ask this machine's node: {error}") from None
    if done.returncode:
        raise JobError(done.stderr.strip())
    found = json.loads(done.stdout)
    machines = found["machines"]
    if not machines or (len(machines) == 1 and not found["refusing"]):
        return here, None, True
    if len(machines) < count:
        refusing = ", ".join(found["refusing"])
        raise JobError(f"{len(machines)} machines run programs, {count} are wanted"
                       + (f"; `paceline up --allow-programs` is not on {refusing}" if refusing
                          else ""))
    chosen = [{"name": machine["name"], "node": None if machine["is_own"] else machine["id"]}
              for machine in machines[:count]]
    return chosen, machines[0]["id"], machines[0]["programs"]


#: Values of each part by which the ranges of a sort are chosen: of 10^7 values, 64 ranges differ by a fifth.
SAMPLES = 2048


def sort_files(machines: Any, paths: list[str], out: str, rows: int,
               progress: Callable[[int, int], Any] | None) -> list[tuple[str, int]]:
    """`Machines.sort_files`: a sample sort, by `map` and `shuffle`."""
    import numpy as np

    parts, kinds = [], set()
    for path in paths:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        kinds.add(array.dtype)
        parts += [(path, start, min(start + rows, array.size)) for start in range(0, array.size, rows)]
    if len(kinds) != 1 or not kinds <= {np.dtype("<f8"), np.dtype("<i8")}:
        raise JobError(f"files of {sorted(map(str, kinds))}: expected float64 or int64, one of them")
    (kind,) = kinds

    def turned(bits: Any) -> Any:
        """Integers in the order of the floats of these bits, and back: its own inverse."""
        return bits if kind.kind == "i" else bits ^ (bits >> 63 & 0x7FFF_FFFF_FFFF_FFFF)

    def keys(part: tuple[str, int, int]) -> Any:
        array = np.load(part[0], mmap_mode="r", allow_pickle=False).reshape(-1)
        return turned(array[part[1]:part[2]].view(np.int64))

    def sample(part: tuple[str, int, int]) -> Any:
        path, start, end = part
        array = np.load(path, mmap_mode="r", allow_pickle=False).reshape(-1)
        at = np.linspace(start, end - 1, min(SAMPLES, end - start)).astype(np.int64)
        return turned(array[at].view(np.int64))

    samples = machines.map(sample, parts)
    samples = np.sort(np.concatenate(samples)) if samples else np.zeros(1, np.int64)
    borders = samples[np.arange(1, worker.BUCKETS) * len(samples) // worker.BUCKETS]

    def split(part: tuple[str, int, int]) -> list[Any]:
        ordered = np.sort(keys(part))
        return np.split(ordered, np.searchsorted(ordered, borders, "right"))

    def merge(bucket: int, pieces: list[Any]) -> tuple[str, int]:
        values = np.concatenate(pieces) if pieces else np.zeros(0, np.int64)
        pieces.clear()
        values.sort(kind="stable")  # ascending runs
        os.makedirs(out, exist_ok=True)
        path = os.path.join(out, f"{bucket:02}.npy")
        np.save(path + ".part.npy", turned(values).view(kind))
        os.replace(path + ".part.npy", path)
        return path, len(values)

    return machines.shuffle(split, merge, parts, progress=progress)
