"""The worker of own functions: what runs on each machine, and what it shares with the starter.

    starter == frames ==> host, one a machine == pipes ==> children, one a thread
    host == frames, by sockets or connections of the cluster ==> other hosts

The starter sends this file to the machine's Python, so that only cloudpickle must be installed there.
It uses the standard library alone. A frame is its length as 8 bytes, little endian, and a pickle.

A host keeps what its children have mapped in files, cut into buckets by key. Hosts fetch buckets from
each other; nothing of that passes the starter. Files of a host are gone with it: its parts are
computed again.
"""

from __future__ import annotations

import os
import pickle
import queue
import select
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Buckets of a shuffle, whatever the number of machines: results never depend on that.
BUCKETS = 64

#: Bits for the number of a record within its item; its item's number is above them.
RECORD_BITS = 40

#: Longest frame: a part's result is limited far below (`Limits.output`).
FRAME_BYTES_MAX = 8 << 30

#: Seconds between signs of life of a host.
BEAT_S = 2.0

#: Seconds for another host to accept a connection.
CONNECT_S = 15.0

#: Bytes that are copied at a time.
COPY_BYTES = 1 << 20

#: Starts the source that it reads from standard input as the module `_paceline_worker`.
BOOTSTRAP = """
import sys, types
read = sys.stdin.buffer
module = types.ModuleType("_paceline_worker")
sys.modules[module.__name__] = module
source = read.read(int(read.readline())).decode()
exec(compile(source, "<paceline worker>", "exec"), module.__dict__)
module.source = source
module.main(sys.argv[1])
"""


class Lost(Exception):
    """The other end of a stream is gone."""


def send(to: BinaryIO, message: Any) -> int:
    """Writes a frame; the number of its bytes."""
    data = pickle.dumps(message, protocol=5)
    try:
        to.write(struct.pack("<Q", len(data)))
        to.write(data)
        to.flush()
    except (OSError, ValueError) as error:
        raise Lost(str(error)) from None
    return 8 + len(data)


def receive(source: BinaryIO) -> Any:
    """Reads a frame.

    Raises:
        Lost: the stream ended, or the length is no frame's.
    """
    return pickle.loads(_bytes(source))


def _bytes(source: BinaryIO) -> bytes:
    (length,) = struct.unpack("<Q", _exactly(source, 8))
    if length > FRAME_BYTES_MAX:
        raise Lost(f"a frame of {length} bytes")
    return _exactly(source, length)


def _exactly(source: BinaryIO, count: int) -> bytes:
    try:
        data = source.read(count)
    except (OSError, ValueError) as error:
        raise Lost(str(error)) from None
    if data is None or len(data) != count:
        raise Lost("the stream ended")
    return data


class Tree:
    """Reduces values by their numbers, in one order for any cut: the binary tree of the numbers' bits.

    Values are added with ascending numbers. Those of an aligned range of 2^k numbers are a subtree,
    so a part reduces its own range alone, and its result is added with the first number of it.
    """

    __slots__ = ("reduce", "stack")

    def __init__(self, reduce: Callable[[Any, Any], Any]) -> None:
        self.reduce = reduce
        self.stack: list[tuple[int, Any]] = []

    def add(self, number: int, value: Any) -> None:
        stack = self.stack
        while len(stack) > 1:
            last = stack[-1][0]
            if (stack[-2][0] ^ last).bit_length() >= (last ^ number).bit_length():
                break
            self._merge()
        stack.append((number, value))

    def _merge(self) -> None:
        right = self.stack.pop()[1]
        first, left = self.stack[-1]
        self.stack[-1] = (first, self.reduce(left, right))

    def result(self) -> tuple[int, Any]:
        """The first number and the value of all. At least one was added."""
        while len(self.stack) > 1:
            self._merge()
        return self.stack[0]


def _hash(key: Any) -> int:
    """A hash that is equal in all workers. Before Python 3.12 that of None is its address."""
    if isinstance(key, tuple):
        return hash(tuple(map(_hash, key)))
    return 1 if key is None else hash(key)


def bucket_of(key: Any) -> int:
    """The bucket of a key; equal for equal keys in all workers, whose seed of hashes is one."""
    return (_hash(key) * 0x9E3779B97F4A7C15 & (1 << 64) - 1) >> 58


class TextPart:
    """Whole lines of a text file: those that begin in a range of its bytes. Iterates as `str`.

    Attributes:
        path: the file, at the same path on all machines.
        start: first byte of the range.
        end: the byte behind it.
    """

    def __init__(self, path: str, start: int, end: int) -> None:
        self.path, self.start, self.end = path, start, end

    def __iter__(self) -> Iterator[str]:
        with open(self.path, "rb") as file:
            if self.start:
                file.seek(self.start - 1)
                file.readline()  # the line before, which the part before has
            while file.tell() < self.end and (line := file.readline()):
                yield line.decode("utf-8", "replace").rstrip("\r\n")

    def __repr__(self) -> str:
        return f"TextPart({self.path!r}, {self.start}, {self.end})"


TextPart.__module__ = "_paceline_worker"


# ---- What a child computes: pure but for the user's functions. -------------------------------------


class Failure(Exception):
    """A function of the user failed at an item."""

    def __init__(self, item: int, error: BaseException) -> None:
        super().__init__(item)
        self.item, self.error = item, error


def mapped(functions: dict[str, Any], start: int, items: Any) -> list[Any]:
    """`map` and `filter`: results in order."""
    function, keeps = functions["map"], functions.get("filter")
    results = []
    for item, value in enumerate(items, start):
        try:
            result = function(value)
        except Exception as error:
            raise Failure(item, error) from error
        if not keeps:
            results.append(result)
        elif result:
            results.append(value)
    return results


def reduced(functions: dict[str, Any], start: int, items: Any) -> tuple[int, Any]:
    """`map_reduce`: the value of an aligned range of items."""
    function, tree = functions["map"], Tree(functions["reduce"])
    for item, value in enumerate(items, start):
        try:
            tree.add(item, function(value))
        except Exception as error:
            raise Failure(item, error) from error
    return tree.result()


def _records(functions: dict[str, Any], start: int, items: Any) -> Iterator[tuple[int, Any, Any]]:
    """Number, key and value of each record of the items."""
    each, key, value = functions.get("each"), functions["key"], functions.get("value")
    for item, whole in enumerate(items, start):
        try:
            for at, record in enumerate(each(whole) if each else (whole,)):
                found = value(record) if value else record
                yield item << RECORD_BITS | at, key(record), found
        except Exception as error:
            raise Failure(item, error) from error


def grouped(functions: dict[str, Any], start: int, items: Any) -> list[list[Any]]:
    """The first half of `group_by`: for each bucket `(first number, key, value)` of its keys."""
    trees: dict[Any, Tree] = {}
    reduce, item = functions["reduce"], start
    try:
        for number, key, value in _records(functions, start, items):
            item = number >> RECORD_BITS
            tree = trees.get(key)
            if tree is None:
                tree = trees[key] = Tree(reduce)
            tree.add(number, value)
        buckets: list[list[Any]] = [[] for _ in range(BUCKETS)]
        for key, tree in trees.items():
            first, value = tree.result()
            buckets[bucket_of(key)].append((first, key, value))
    except Failure:
        raise
    except Exception as error:
        raise Failure(item, error) from error
    return buckets


def scattered(functions: dict[str, Any], start: int, items: Any) -> list[list[Any]]:
    """The first half of `join`: each record in the bucket of its key."""
    buckets: list[list[Any]] = [[] for _ in range(BUCKETS)]
    for record in _records(functions, start, items):
        buckets[bucket_of(record[1])].append(record)
    return buckets


def gathered(functions: dict[str, Any], pieces: Iterator[tuple[int, list[Any]]],
             bucket: int) -> list[Any]:
    """The second half of `group_by`: `(first number, key, value)` of each key of a bucket."""
    trees: dict[Any, Tree] = {}
    for _, piece in pieces:
        for first, key, value in piece:
            tree = trees.get(key)
            if tree is None:
                tree = trees[key] = Tree(functions["reduce"])
            tree.add(first, value)
    results = []
    for key, tree in trees.items():
        first, value = tree.result()
        results.append((first, key, value))
    return results


def joined(functions: dict[str, Any], pieces: Iterator[tuple[int, list[Any]]],
           bucket: int) -> list[Any]:
    """The second half of `join`: `(number, key, value)` of pairs, or of groups where they are reduced.

    Pieces are in order, all of the left side first.
    """
    left: dict[Any, list[tuple[int, Any]]] = {}
    combine, by, reduce = functions["combine"], functions["by"], functions["reduce"]
    pairs = []
    for side, piece in pieces:
        for number, key, value in piece:
            if side == 0:
                left.setdefault(key, []).append((number, value))
                continue
            for first, other in left.get(key, ()):
                group = by(other, value) if by else key
                pairs.append(((first, number), group, combine(other, value)))
    pairs.sort(key=lambda pair: pair[0])
    if reduce is None:
        return pairs
    # Numbers within the group, so that other groups of the bucket do not change its tree.
    trees: dict[Any, tuple[Any, Tree, list[int]]] = {}
    for number, key, value in pairs:
        first, tree, count = trees.setdefault(key, (number, Tree(reduce), [0]))
        tree.add(count[0], value)
        count[0] += 1
    return [(first, key, tree.result()[1]) for key, (first, tree, _) in trees.items()]


def split(functions: dict[str, Any], start: int, items: Any) -> list[list[Any]]:
    """The first half of `shuffle`: `(item, piece)` for each bucket."""
    buckets: list[list[Any]] = [[] for _ in range(BUCKETS)]
    for item, value in enumerate(items, start):
        try:
            pieces = list(functions["split"](value))
            if len(pieces) > BUCKETS:
                raise ValueError(f"{len(pieces)} pieces, of at most {BUCKETS}")
        except Exception as error:
            raise Failure(item, error) from error
        for bucket, piece in zip(buckets, pieces):
            if piece is not None:
                bucket.append((item, piece))
    return buckets


def merged(functions: dict[str, Any], pieces: Iterator[tuple[int, list[Any]]], bucket: int) -> Any:
    """The second half of `shuffle`: what the function makes of a bucket."""
    return functions["merge"](bucket, [value for _, piece in pieces for _, value in piece])


STAGES = {"map": mapped, "reduce": reduced, "group": grouped, "scatter": scattered, "split": split,
          "gather": gathered, "join": joined, "merge": merged}


# ---- The child: computes one task at a time. -------------------------------------------------------


def _own_streams() -> tuple[BinaryIO, BinaryIO]:
    """Standard input and output as streams; what functions print goes to standard error."""
    source = sys.stdin.buffer
    to = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.stdin = open(os.devnull)
    return source, to


def _limit_memory(count: int | None) -> None:
    if count is None:
        return
    import resource

    # Private writable memory; where the system has no such limit, none is set.
    limit = getattr(resource, "RLIMIT_DATA", None)
    if limit is not None:
        resource.setrlimit(limit, (count, count))


def child() -> None:
    """Computes tasks until standard input ends; then removes the host's folder, if it was killed."""
    source, to = _own_streams()
    folder = None
    functions: dict[int, dict[str, Any]] = {}
    limits: dict[str, Any] = {}
    try:
        while True:
            what, *rest = receive(source)
            if what == "begin":
                folder, limits = rest
                _limit_memory(limits["memory"])
            elif what == "functions":
                functions.clear()  # a host has one job at a time
                functions[rest[0]] = pickle.loads(rest[1])
            else:
                send(to, _attempt(what, functions, folder, limits, rest))
    except Lost:
        pass
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def _attempt(what: str, functions: Any, folder: str, limits: dict[str, Any],
             rest: list[Any]) -> tuple[Any, ...]:
    item = None
    try:
        compute = _compute_part if what == "part" else _compute_bucket
        data, offsets = compute(functions, folder, *rest)
        if len(data) > limits["output"]:
            raise MemoryError(f"a result of {len(data)} bytes, over the limit of {limits['output']}")
        return ("done", data, offsets)
    except Failure as failure:
        item, error = failure.item, failure.error
    except Exception as failure:  # of reading the functions or items, or writing the result
        error = failure
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        original = pickle.dumps(error)
        pickle.loads(original)
    except Exception:
        original = None  # the text has it
    return ("failed", item, text, original)


def _compute_part(functions: Any, folder: str, job: int, part: int, stage: str, side: int,
                  start: int, items: bytes) -> tuple[bytes, Any]:
    own = functions[job]
    own = own["sides"][side] if "sides" in own else own
    result = STAGES[stage](own, start, pickle.loads(items))
    if stage not in ("group", "scatter", "split"):
        return _dumped(result), None
    offsets = [0]
    with open(os.path.join(folder, f"{job}-{part}"), "wb") as file:
        for bucket in result:
            if bucket:
                file.write(_dumped(bucket))
            offsets.append(file.tell())
    return b"", offsets


def _dumped(value: Any) -> bytes:
    """By cloudpickle, since results may hold functions and classes of the user."""
    import cloudpickle

    return cloudpickle.dumps(value, protocol=5)


def _compute_bucket(functions: Any, folder: str, job: int, bucket: int, stage: str,
                    pieces: list[tuple[int, str, int, int]]) -> tuple[bytes, Any]:
    def read() -> Iterator[tuple[int, list[Any]]]:
        for side, path, start, end in pieces:
            with open(path, "rb") as file:
                file.seek(start)
                yield side, pickle.loads(_exactly(file, end - start))

    return _dumped(STAGES[stage](functions[job], read(), bucket)), None


# ---- The host: one a machine. ----------------------------------------------------------------------


def facts() -> dict[str, Any]:
    """What must be equal in all Pythons of a job."""
    found: dict[str, Any] = {"python": "{}.{}".format(*sys.version_info)}
    for name in ("cloudpickle", "numpy"):
        try:
            found[name] = __import__(name).__version__
        except ImportError:
            found[name] = None
    return found


class Host:
    """Runs children, keeps their buckets, and fetches those of other hosts."""

    def __init__(self) -> None:
        self.source, self.to = _own_streams()
        self.lock = threading.Lock()
        self.folder = tempfile.mkdtemp(prefix="paceline-")
        self.offsets: dict[tuple[int, int], list[int]] = {}
        self.tasks: queue.Queue[Any] = queue.Queue()
        self.functions: tuple[int, bytes] | None = None
        self.hosts: list[dict[str, Any]] = []
        self.own = 0
        self.sources: list[tuple[int, int, int]] = []
        self.limits: dict[str, Any] = {}
        self.fetched = 0
        self.hands: list[Hand] = []

    def tell(self, *message: Any) -> None:
        with self.lock:
            send(self.to, message)

    def run(self) -> None:
        try:
            path = os.path.join(self.folder, "socket")
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(path)
            listener.listen(64)
            threading.Thread(target=self.serve, args=(listener,), daemon=True).start()
            self.tell("hello", facts(), path, os.cpu_count() or 1)
            threading.Thread(target=self.beat, daemon=True).start()
            while True:
                self.obey(receive(self.source))
        except Lost:
            pass
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
            os._exit(0)  # children end with their pipes

    def beat(self) -> None:
        while True:
            time.sleep(BEAT_S)
            try:
                self.tell("alive")
            except Lost:
                return

    def obey(self, message: tuple[Any, ...]) -> None:
        what, *rest = message
        if what == "begin":
            self.hosts, self.own, threads, self.limits = rest
            self.hands = [Hand(self) for _ in range(threads)]
            for hand in self.hands:
                threading.Thread(target=hand.run, daemon=True).start()
        elif what == "hosts":
            (self.hosts,) = rest
        elif what == "functions":
            self.forget()
            self.functions = (rest[0], rest[1])
        elif what == "sources":
            self.sources = [(side, part, host) for part, (side, host) in enumerate(rest[1])]
        elif what == "forget":
            self.forget()
        elif what == "lost":
            for hand in self.hands:
                if stream := hand.streams.get(rest[0]):
                    stream.abort()
        else:
            self.tasks.put(message)

    def forget(self) -> None:
        """Drops tasks that wait and files of the last job."""
        while True:
            try:
                self.tasks.get_nowait()
            except queue.Empty:
                break
        for job, part in list(self.offsets):
            self.offsets.pop((job, part), None)
            try:
                os.remove(os.path.join(self.folder, f"{job}-{part}"))
            except OSError:
                pass  # it is removed with the folder

    def serve(self, listener: socket.socket) -> None:
        while True:
            connection = listener.accept()[0]
            threading.Thread(target=self.lend, args=(connection,), daemon=True).start()

    def lend(self, connection: socket.socket) -> None:
        """Answers another host: for each part the bytes of a bucket."""
        with connection, connection.makefile("rwb") as stream:
            try:
                while True:
                    job, bucket, parts = receive(stream)
                    for part in parts:
                        self.lend_piece(stream, job, part, bucket)
                    stream.flush()
            except (Lost, OSError, ValueError, TypeError, KeyError):
                return  # the other host asks again, or its parts are computed again

    def lend_piece(self, stream: BinaryIO, job: int, part: int, bucket: int) -> None:
        offsets = self.offsets[(job, part)]
        start, end = offsets[bucket], offsets[bucket + 1]
        stream.write(struct.pack("<Q", end - start))
        with open(os.path.join(self.folder, f"{job}-{part}"), "rb") as file:
            file.seek(start)
            left = end - start
            while left:
                data = _exactly(file, min(left, COPY_BYTES))
                stream.write(data)
                left -= len(data)


class Stream:
    """A connection to another host: by its socket on this machine, or through the cluster."""

    def __init__(self, host: dict[str, Any]) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        if host["node"] is None:
            self.connection = socket.socket(socket.AF_UNIX)
            self.connection.settimeout(CONNECT_S)
            self.connection.connect(host["socket"])
            self.connection.settimeout(None)
            self.source = self.to = self.connection.makefile("rwb")
            return
        program = os.environ.get("PACELINE_BINARY", "paceline")
        command = [program, "programs", "--node", host["node"], "--socket", host["socket"]]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.DEVNULL)
        self.source, self.to = self.process.stdout, self.process.stdin

    def abort(self) -> None:
        """Ends a read that waits in another thread: the other host is lost."""
        if self.process is not None:
            self.process.kill()
            return
        try:
            self.connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is closed already

    def close(self) -> None:
        self.abort()
        for stream in (self.to, self.source):
            try:
                stream.close()
            except OSError:
                pass
        if self.process is None:
            self.connection.close()
        else:
            self.process.wait()


class Hand:
    """A thread of the host with a child, which it starts again when it has ended."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.child: subprocess.Popen[bytes] | None = None
        self.job = -1
        self.streams: dict[int, Stream] = {}

    def run(self) -> None:
        try:
            while True:
                self.work(self.host.tasks.get())
        except Lost:
            os._exit(1)  # the starter is gone

    def work(self, task: tuple[Any, ...]) -> None:
        what, job, number = task[:3]
        if self.host.functions is None or self.host.functions[0] != job:
            return  # of a job that has ended
        try:
            told = task[1:]
            if what == "bucket":
                told = (job, number, task[3], self.fetch(job, number, self.host.sources))
        except Unfetched as error:
            self.host.tell("unfetched", job, number, error.host)
            return
        reply = self.ask((what, *told))
        if what == "bucket":
            self.drop_fetched(number)
        if reply[0] == "done" and reply[2] is not None:
            self.host.offsets[(job, number)] = reply[2]
        self.host.tell(reply[0], what, job, number, *reply[1:2 if reply[0] == "done" else None],
                       self.host.fetched)

    def ask(self, message: tuple[Any, ...]) -> tuple[Any, ...]:
        """A child's answer; `("gone", why)` if it ended, `("late", seconds)` if it takes too long."""
        try:
            process = self.ready()
            send(process.stdin, message)
            limit = self.host.limits["seconds"]
            if not select.select([process.stdout], [], [], limit)[0]:
                self.end()
                return ("late", limit)
            return receive(process.stdout)
        except Lost:
            return ("gone", self.end())

    def ready(self) -> subprocess.Popen[bytes]:
        """The child, started if need be, with the functions of the job."""
        if self.child is None:
            command = [sys.executable, "-c", BOOTSTRAP, "child"]
            self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            text = source.encode()  # noqa: F821 (set by the bootstrap)
            self.child.stdin.write(b"%d\n" % len(text) + text)
            send(self.child.stdin, ("begin", self.host.folder, self.host.limits))
            self.job = -1
        if self.host.functions and self.job != self.host.functions[0]:
            send(self.child.stdin, ("functions", *self.host.functions))
            self.job = self.host.functions[0]
        return self.child

    def end(self) -> str:
        """Ends the child; how it ended, as text."""
        process, self.child = self.child, None
        if process is None:
            return "was not started"
        try:
            code = process.wait(0.2)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        return f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"

    def fetch(self, job: int, bucket: int, sources: list[tuple[int, int, int]]) -> list[Any]:
        """Where the pieces of a bucket are, in the order of `sources`: `(side, part, host)`."""
        wanted: dict[int, list[int]] = {}
        for _, part, host in sources:
            if host != self.host.own:
                wanted.setdefault(host, []).append(part)
        places: dict[int, tuple[str, int, int]] = {}
        for host, parts in wanted.items():
            path = os.path.join(self.host.folder, f"fetched-{bucket}-{host}")
            at = 0
            try:
                with open(path, "wb") as file:
                    for part, length in self.copied(host, job, bucket, parts, file):
                        places[part] = (path, at, at + length)
                        at += length
            except (Lost, OSError):
                if host in self.streams:
                    self.streams.pop(host).close()
                raise Unfetched(host) from None
            self.host.fetched += at
        for _, part, host in sources:
            if host == self.host.own:
                offsets = self.host.offsets[(job, part)]
                path = os.path.join(self.host.folder, f"{job}-{part}")
                places[part] = (path, offsets[bucket], offsets[bucket + 1])
        pieces = [(side, *places[part]) for side, part, _ in sources]
        return [piece for piece in pieces if piece[2] < piece[3]]

    def copied(self, host: int, job: int, bucket: int, parts: list[int],
               file: BinaryIO) -> Iterator[tuple[int, int]]:
        if host not in self.streams:
            self.streams[host] = Stream(self.host.hosts[host])
        stream = self.streams[host]
        send(stream.to, (job, bucket, parts))
        for part in parts:
            (length,) = struct.unpack("<Q", _exactly(stream.source, 8))
            left = length
            while left:
                data = _exactly(stream.source, min(left, COPY_BYTES))
                file.write(data)
                left -= len(data)
            yield part, length

    def drop_fetched(self, bucket: int) -> None:
        for host in range(len(self.host.hosts)):
            try:
                os.remove(os.path.join(self.host.folder, f"fetched-{bucket}-{host}"))
            except OSError:
                pass  # nothing was fetched from it


class Unfetched(Exception):
    """A host did not lend its pieces."""

    def __init__(self, host: int) -> None:
        super().__init__(host)
        self.host = host


def main(role: str) -> None:
    """Runs a host or a child, by the word behind the bootstrap."""
    Host().run() if role == "host" else child()
