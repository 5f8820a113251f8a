"""Tests of `paceline.distributed` in processes, against what NumPy makes of the same arrays.

    python distributed_test.py      prints `ok NAME` or `FAILED NAME: why` for each case
"""

from __future__ import annotations

import array
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time

import numpy as np

from ranks import Report, be_rank, end, run, start

import paceline.distributed as dist

DTYPES = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
          "float16", "float32", "float64", "complex64"]
SHAPES = [(), (0,), (1,), (5,), (3, 4), (6, 1000)]


def part(rank: int, shape: tuple, dtype: str) -> np.ndarray:
    """What a rank brings: small whole numbers, so that every order of a sum has one result."""
    values = np.random.default_rng(7 + rank).integers(0, 5, shape)
    return np.asarray(values).astype(dtype)


def same(got, expected) -> None:
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.dtype == expected.dtype, f"{got.dtype}, expected {expected.dtype}"
    assert got.shape == expected.shape, f"{got.shape}, expected {expected.shape}"
    assert np.array_equal(got, expected), f"{got!r}, expected {expected!r}"


def reductions(group) -> None:
    for dtype in DTYPES:
        for shape in SHAPES:
            parts = [part(rank, shape, dtype) for rank in range(group.size())]
            own = parts[group.rank()]
            total = np.add.reduce(parts).astype(dtype)
            same(dist.all_sum(own, group), total)
            same(own, parts[group.rank()])
            if dtype != "complex64":
                same(dist.all_max(own, group), np.maximum.reduce(parts))
                same(dist.all_min(own, group), np.minimum.reduce(parts))
            if group.size() > 1:
                out = np.empty_like(own)
                assert dist.all_sum(own, group, out=out) is out
                same(out, total)
                assert dist.all_sum(own, group, out=own) is own
                same(own, total)


def layouts(group) -> None:
    """Arrays that are no plain contiguous NumPy array."""
    size, rank = group.size(), group.rank()
    grid = np.arange(24, dtype=np.float32).reshape(4, 6) + rank
    both = np.arange(24, dtype=np.float32).reshape(4, 6) * size + sum(range(size))
    same(dist.all_sum(grid.T, group), both.T)
    same(dist.all_sum(grid[:, ::2], group), both[:, ::2])
    same(np.asarray(dist.all_sum(grid.astype(">f4"), group)).astype("<f4"), both)
    same(dist.all_sum(memoryview(grid), group), both)
    same(dist.all_sum(array.array("i", [1, rank]), group),
         np.array([size, sum(range(size))], np.int32))
    same(dist.all_sum(bytes([rank, 2]), group), np.array([sum(range(size)), 2 * size], np.uint8))
    assert int(dist.all_sum(1, group)) == size
    odd = np.frombuffer(bytes(1) + grid.tobytes(), np.uint8)[1:].view(np.float32)
    assert not odd.flags.aligned
    same(dist.all_sum(odd, group), both.reshape(-1))


class Exported:
    """An array of another library, as far as DLPack shows it."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __dlpack__(self, **arguments):
        return self.values.__dlpack__(**arguments)

    def __dlpack_device__(self):
        return self.values.__dlpack_device__()


def dlpack(group) -> None:
    values = np.full(3, group.rank() + 1, np.float32)
    total = group.size() * (group.size() + 1) / 2
    same(dist.all_sum(Exported(values), group), np.full(3, total, np.float32))


def movements(group) -> None:
    size, rank = group.size(), group.rank()
    for dtype in ("bool", "int16", "float32", "complex64"):
        for shape in [(size, 3), (2 * size,), (size * 500, 7)]:
            parts = [part(one, shape, dtype) for one in range(size)]
            own, n = parts[rank], shape[0] // size
            mine = slice(rank * n, (rank + 1) * n)
            same(dist.all_gather(own, group), np.concatenate(parts))
            same(dist.sum_scatter(own, group), np.add.reduce(parts).astype(dtype)[mine])
            same(dist.all_to_all(own, group), np.concatenate([one[mine] for one in parts]))
            for root in range(size):
                same(dist.broadcast(own, root, group), parts[root])
    same(dist.all_gather(np.float32(rank), group), np.arange(size, dtype=np.float32))
    taken = np.full(4, rank)
    assert dist.broadcast(taken, size - 1, group, out=taken) is taken
    same(taken, np.full(4, size - 1))
    try:
        dist.sum_scatter(np.zeros(size + 1), group)
    except ValueError as error:
        assert f"({size + 1},)" in str(error), error
    else:
        raise AssertionError("an uneven sum_scatter passes")
    dist.barrier(group)


def messages(group) -> None:
    size, rank = group.size(), group.rank()
    right, left = (rank + 1) % size, (rank - 1) % size
    own = part(rank, (3, 5), "float64")
    assert dist.send(own, right, group) is own
    dist.send(own + 1, right, group, tag=7)
    same(dist.recv((3, 5), np.float64, left, group, tag=7), part(left, (3, 5), "float64") + 1)
    same(dist.recv_like(own, left, group), part(left, (3, 5), "float64"))
    for wrong in (size, -1, rank):
        try:
            dist.send(own, wrong, group)
        except ValueError as error:
            assert str(wrong) in str(error), error
        else:
            raise AssertionError(f"sent to {wrong}")


def splits(group) -> None:
    size, rank = group.size(), group.rank()
    half = group.split(rank % 2, -rank + size)
    members = [one for one in range(size) if one % 2 == rank % 2][::-1]
    assert half.size() == len(members) and members[half.rank()] == rank
    assert int(dist.all_sum(rank, half)) == sum(members)
    assert group.split(0).rank() == rank


def gradients(group) -> None:
    size, rank = group.size(), group.rank()
    tree = {"w": np.full((3, 2), rank, np.float32), "rest": [np.arange(5.0) * rank, None],
            "more": (np.float32(rank),), "half": np.full(2, rank, np.float16)}
    mean = sum(range(size)) / size
    for limit in (0, 1, 40, 1 << 20):
        got = dist.average_gradients(tree, group, all_reduce_size=limit)
        same(got["w"], np.full((3, 2), mean, np.float32))
        same(got["rest"][0], np.arange(5.0) * mean)
        assert got["rest"][1] is None
        same(got["more"][0], np.float32(mean))
        same(got["half"], np.full(2, mean, np.float16))


def deadlines(group) -> None:
    """Rank 0 makes a call that the others do not."""
    if group.rank():
        sys.stdin.read()
        return
    began = time.monotonic()
    try:
        dist.all_sum(np.zeros(3), group, deadline=0.2)
    except dist.DeadlineExceeded as error:
        assert isinstance(error, TimeoutError) and error.rank == 1, error
        assert "rank 1" in str(error), error
    else:
        raise AssertionError("a sum with nobody else succeeds")
    assert time.monotonic() - began < 5


def mismatches(group) -> None:
    try:
        dist.all_sum(np.zeros(3 + (group.rank() == 1), np.float32), group)
    except dist.Mismatch as error:
        assert error.rank == 1 and "rank 1" in str(error), error
    else:
        raise AssertionError("other lengths pass")


def losses(group) -> None:
    if group.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_sum(np.zeros(3), group)
    except dist.PeerLost as error:
        assert error.rank == 1 and "rank 1" in str(error), error
    else:
        raise AssertionError("a sum with a dead rank succeeds")


def unheld(group) -> None:
    """A call that waits lets other threads run."""
    if group.rank():
        time.sleep(0.3)
        dist.barrier(group)
        return
    import threading

    ticks = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks.append(time.monotonic())
            time.sleep(0.01)

    thread = threading.Thread(target=tick)
    thread.start()
    began = time.monotonic()
    dist.barrier(group)
    ended = time.monotonic()
    stop.set()
    thread.join()
    during = [one for one in ticks if began < one < ended]
    assert len(during) > 3, f"{len(during)} ticks in {ended - began:.3f} s"


CASES = {case.__name__: case for case in (
    reductions, layouts, dlpack, movements, messages, splits, gradients, deadlines, mismatches,
    losses, unheld)}


def suite(group) -> None:
    for case in (reductions, layouts, dlpack, movements, messages, splits, gradients):
        case(group)


CASES["suite"] = suite


def failures() -> None:
    for case in ("mismatches", "unheld"):
        end(start(2, case))
    ranks = start(2, "deadlines")
    out, err = ranks[0].communicate(timeout=60)
    assert ranks[0].returncode == 0, err
    end(ranks[1:])
    for backend in ("shm", "tcp"):
        end(start(3, "losses", backend), {1: -signal.SIGKILL})


def alone() -> None:
    group = dist.init()
    assert (group.rank(), group.size()) == (0, 1) and dist.init() is group
    x = np.arange(3)
    for call in (dist.all_sum, dist.all_max, dist.all_gather, dist.sum_scatter, dist.all_to_all):
        assert call(x) is x
    for call in (lambda: dist.send(x, 0), lambda: dist.recv_like(x, 0)):
        try:
            call()
        except ValueError as error:
            assert "singleton" in str(error)
        else:
            raise AssertionError("a message to nobody passes")
    reductions(group)


def refusals() -> None:
    for expected, work in {
        "'zzz'": lambda: dist.init(backend="zzz"),
        "MLX_HOSTFILE": lambda: dist.init(strict=True, backend="tcp"),
        "deadline is -1": lambda: dist.barrier(dist.init(), deadline=-1),
        "expected 32": lambda: dist.join(dist.Listener(["127.0.0.1:0"]), 0, [["127.0.0.1:1"]],
                                         key=b"short"),
        '"nowhere"': lambda: dist.Listener(["nowhere"]),
        "192.0.2.1": lambda: dist.join(dist.Listener(["127.0.0.1:0"]), 0,
                                       [["127.0.0.1:1"], ["192.0.2.1:1"]], deadline=1),
        "datetime64": lambda: dist.all_sum(np.zeros(2, "M8[s]"), dist.init(), out=np.zeros(2)),
        "(3,)": lambda: dist.all_sum(np.zeros(2), dist.init(), out=np.zeros(3)),
        "read-only": lambda: dist.all_sum(np.zeros(2), dist.init(), out=np.frombuffer(bytes(16))),
    }.items():
        try:
            work()
        except (ValueError, TypeError, RuntimeError) as error:
            assert expected in str(error), f"{error!r} lacks {expected}"
        else:
            raise AssertionError(f"nothing is wrong with {expected}")


def launched() -> None:
    """Ranks that a launcher starts, by MLX's variables: our wires, and MLX's ring."""
    program = ("import sys, numpy as np, paceline.distributed as dist\n"
               "world = dist.init(backend=sys.argv[1], strict=True)\n"
               "assert dist.init() is world\n"
               "print(dist.all_sum(np.full(3, world.rank() + 1.0)).tolist())\n")
    with tempfile.TemporaryDirectory() as folder:
        for backend in ("any", "tcp", "ring"):
            sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
            hosts = [[f"127.0.0.1:{one.getsockname()[1]}"] for one in sockets]
            for one in sockets:
                one.close()
            file = pathlib.Path(folder, "hosts.json")
            file.write_text(json.dumps(hosts))
            ranks = [subprocess.Popen(
                [sys.executable, "-c", program, backend], text=True, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, env={**os.environ, "MLX_RANK": str(rank),
                                             "MLX_HOSTFILE": str(file)}) for rank in range(3)]
            for out in end(ranks):
                assert out == "[6.0, 6.0, 6.0]\n", f"{backend}: {out!r}"
        keyed(program, file)


def keyed(program: str, file: pathlib.Path) -> None:
    """Ranks with one key sum; what is no key is named."""
    def ranks(keys: list[str]) -> list:
        return [subprocess.Popen(
            [sys.executable, "-c", program, "tcp"], text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env={**os.environ, "MLX_RANK": str(rank),
                                         "MLX_HOSTFILE": str(file), "PACELINE_GROUP_KEY": key})
            for rank, key in enumerate(keys)]

    for out in end(ranks(["5a" * 32] * 3)):
        assert out == "[6.0, 6.0, 6.0]\n", out
    _, err = ranks(["xyz"])[0].communicate(timeout=60)
    assert "PACELINE_GROUP_KEY is not 64 hexadecimal digits" in err, err


def main() -> int:
    report = Report()
    report.check("a group of one", alone)
    report.check("wrong arguments are named", refusals)
    for size, backend in [(2, "shm"), (3, "tcp")]:
        report.check(f"{size} ranks by {backend}: results are NumPy's", run, size, "suite", backend)
    report.check("failures name the rank, and the GIL is released", failures)
    report.check("ranks of a launcher", launched)
    return report.failed


if __name__ == "__main__":
    sys.exit(0 if be_rank(CASES) else main())
