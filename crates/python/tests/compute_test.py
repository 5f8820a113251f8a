"""Tests of `paceline.connect`: array jobs and a short training, beside what NumPy and math say.

    python compute_test.py [MODEL]  prints `ok NAME` or `FAILED NAME: why` for each case
"""

from __future__ import annotations

import math
import operator
import os
import pathlib
import signal
import sys
import tempfile
import threading
import warnings

import numpy as np

from ranks import Report

import paceline

VALUES = np.random.default_rng(5).normal(size=40_000) * 10.0 ** np.arange(-8, 8).repeat(2500)


def sums() -> None:
    expected = math.fsum(VALUES)
    for nodes in (1, 2):
        machines = paceline.connect(nodes, threads=1)
        assert machines.sum(VALUES) == expected
        assert machines.sum(VALUES[::-1]) == expected
    machines = paceline.connect()
    assert machines.sum([0.1] * 10) == 1.0
    assert machines.sum(np.array([2**63, 5], np.uint64)) == 2**63 + 5
    assert machines.sum(np.array([math.inf, 1])) == math.inf
    assert machines.dot(np.arange(4.0), np.arange(4.0)) == 14
    assert machines.mean(memoryview(np.arange(5.0))) == 2
    assert machines.reduce("sum", np.arange(4.0), np.ones(4), map="x + 2*y") == 14
    assert machines.reduce("count", VALUES) == len(VALUES)


def orders() -> None:
    machines = paceline.connect(2, threads=1)
    assert np.array_equal(machines.sort(VALUES), np.sort(VALUES))
    values, rows = machines.topk(VALUES, k=3)
    assert np.array_equal(values, np.sort(VALUES)[:-4:-1]) and np.array_equal(VALUES[rows], values)
    assert machines.topk(VALUES, k=2, smallest=True)[0][0] == VALUES.min()
    counts, edges = machines.hist(VALUES, bins=10, range=(-5, 5))
    expected, borders = np.histogram(VALUES, 10, (-5, 5))
    assert np.allclose(edges, borders) and abs(counts - expected).sum() <= 2, counts
    for work in (lambda x: machines.topk(x, k=2), lambda x: machines.hist(x, range=(0, 1))):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            work(np.array([0.5, math.nan, 0.25]))
        assert [str(warning.message) for warning in told] == ["1 NaN left out"], told


def groups() -> None:
    machines = paceline.connect(2, threads=1)
    keys = np.arange(len(VALUES)) % 7
    found, totals = machines.groupby("sum", keys, VALUES)
    assert found.tolist() == list(range(7))
    assert totals.tolist() == [math.fsum(VALUES[keys == key]) for key in range(7)]
    left, right = (np.array([5, 7, 5]), [1.0, 2.0, 3.0]), ([5, 6, 5], [10.0, 20.0, 30.0])
    found, totals = machines.join_by_key("sum", left, right)
    assert (found.tolist(), totals.tolist()) == ([5], [160.0])
    found, counts = machines.join_by_key("count", left, right, map="x")
    assert (found.tolist(), counts.tolist()) == ([5], [4])
    rows = np.concatenate([np.zeros((30, 2)), np.full((10, 2), 9.0)])
    clusters = machines.kmeans(rows, 2)
    assert sorted(clusters.counts) == [10, 30] and clusters.inertia == 0, clusters
    assert clusters.centroids.shape == (2, 2)


def expressions() -> None:
    machines = paceline.connect(2, threads=1)
    assert np.array_equal(machines.map("2*x + i", np.ones(5)), np.arange(5) + 2.0)
    a, b = VALUES[:600].reshape(20, 30), VALUES[600:1800].reshape(30, 40)
    product = machines.matmul(a, b)
    assert np.array_equal(product, paceline.connect().matmul(a, b))
    assert np.allclose(product, a @ b, rtol=1e-12), product
    one, two = (paceline.connect(nodes, threads=1).montecarlo("x*x", samples=20_000)
                for nodes in (1, 2))
    assert one == two and abs(one[0] - 1 / 3) < 5 * one[1], one


def files() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, out = pathlib.Path(folder, "-x.npy"), pathlib.Path(folder, "out.npy")
        np.save(path, VALUES)
        machines = paceline.connect()
        assert machines.sum(path) == math.fsum(VALUES)
        assert machines.sort(path, out=out, memory="64M") == out
        assert np.array_equal(np.load(out), np.sort(VALUES))


def functions() -> None:
    """Own functions in one and in two hosts; the second time one of them is killed in the middle."""
    words = ["b a c", "a b"] * 60
    reference = None
    for nodes in (1, 2):
        machines = paceline.connect(nodes, threads=1)

        def kill(done: int, of: int) -> None:
            if nodes == 2 and done == 5 and machines._team.hosts[1].alive:
                os.kill(machines._team.hosts[1].process.pid, signal.SIGKILL)

        found = [
            machines.map(lambda x: x * x, range(3000)),
            machines.filter(lambda x: x % 7 == 0, range(100)),
            # Rounds: its order is one.
            machines.map_reduce(lambda x: 0.1 * x, operator.add, range(5003)),
            list(machines.group_by(lambda w: (w, None), operator.add, words, each=str.split,
                                   value=lambda w: 0.1, progress=kill).items()),
            machines.join(range(9), range(4, 13), on=lambda x: x % 4, combine=lambda a, b: (a, b)),
            machines.join(range(9), range(4, 13), on=lambda x: x % 4, combine=operator.mul,
                          by=lambda a, b: a % 2, reduce=operator.add),
        ]
        reference = reference or found
        assert found == reference, (found, reference)
        assert found[0] == [x * x for x in range(3000)] and found[1] == list(range(0, 100, 7))
        assert [key for key, _ in found[3]] == [("b", None), ("a", None), ("c", None)], found[3]
        assert found[4] == [(a, b) for a in range(9) for b in range(4, 13) if a % 4 == b % 4]
        assert found[5] == {k: sum(a * b for a, b in found[4] if a % 2 == k) for k in (0, 1)}
        try:
            machines.map(lambda x: 1 / (x - 5), range(9))
        except paceline.errors.FunctionError as error:
            assert error.item == 5 and isinstance(error.__cause__, ZeroDivisionError), error
            assert "in <lambda>" in error.traceback
        else:
            raise AssertionError("an exception is lost")
        machines.close()


def exchanges() -> None:
    """What two hosts sort moves between them, and not through this process."""
    with tempfile.TemporaryDirectory() as folder:
        path, out = os.path.join(folder, "x.npy"), os.path.join(folder, "out")
        values = np.concatenate([VALUES, [0.0, -0.0, math.inf, -math.inf, math.nan]])
        np.save(path, values)
        machines = paceline.connect(2, threads=1)
        ranges = machines.sort_files([path], out, rows=3000)
        found = np.concatenate([np.load(file) for file, _ in ranges])
        assert np.array_equal(found, np.sort(values), equal_nan=True)
        assert np.signbit(found[found == 0]).tolist() == [True, False]
        moved, through = machines.figures.exchanged_bytes, machines.figures.starter_bytes
        # All of it moves where one host happens to compute a whole stage.
        assert moved < 1.1 * values.nbytes and through < 0.2 * values.nbytes, (moved, through)
        counts = machines.shuffle(lambda x: [x, None, x * x], lambda bucket, got: (bucket, got), range(5))
        assert counts[:3] == [(0, [0, 1, 2, 3, 4]), (1, []), (2, [0, 1, 4, 9, 16])], counts
        machines.close()


def limits() -> None:
    from paceline.compute import Limits

    with tempfile.TemporaryDirectory() as folder:
        for expected, limit, work in [
            ("MemoryError", Limits(memory=400 << 20), lambda x: bytearray(1 << 30)),
            ("took over 0.3 s", Limits(seconds=0.3), lambda x: threading.Event().wait(60)),
            ("over the limit of 100", Limits(output=100), lambda x: b"x" * 500),
            ("was tried 3 times", Limits(), lambda x: os.kill(os.getpid(), signal.SIGKILL)),
        ]:
            machines = paceline.connect(threads=1, limits=limit)
            try:
                machines.map(work, [1])
            except paceline.errors.JobError as error:
                assert expected in str(error), error
            else:
                raise AssertionError(f"{expected} is not raised")
        path = pathlib.Path(folder, "lines")
        path.write_text("".join(f"{i}\n" for i in range(1000)))
        parts = paceline.compute.text_parts(path, 100)
        assert [line for part in parts for line in part] == [str(i) for i in range(1000)]


def refusals() -> None:
    machines = paceline.connect()
    for expected, work in {
        "max of no values": lambda: machines.reduce("max", np.zeros(0)),
        "row 1 has NaN": lambda: machines.kmeans(np.array([[1.0], [math.nan], [2.0]]), 2),
        "median": lambda: machines.reduce("median", np.zeros(2)),
        "nowhere.npy": lambda: machines.sum("/nowhere.npy"),
        "10 rows, expected 3": lambda: machines.matmul(np.ones((2, 3)), np.ones((10, 2))),
        "complex128": lambda: machines.sum(np.zeros(2, complex)),
        "<c8": lambda: machines.sum(np.zeros(2, np.complex64)),
        "0.001 s": lambda: paceline.connect(deadline=0.001).montecarlo("x", samples=10**9),
    }.items():
        try:
            work()
        except (paceline.errors.JobError, TypeError) as error:
            assert expected in str(error), f"{error!r} lacks {expected}"
        else:
            raise AssertionError(f"{expected} passes")


def trainings(model: str) -> None:
    data = [{"prompt": "Say hello.", "completion": "Ahoy!"}]
    with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(folder, "adapter")
        done = paceline.connect(2, threads=1).train(model, data, output, steps=1, rank=2,
                                                    targets="attention")
        assert done["steps"] == 1, done
        assert (output / "adapter_model.safetensors").stat().st_size > 1000


def main() -> int:
    report = Report()
    report.check("array jobs: exact sums", sums)
    report.check("array jobs: sorts, extremes and histograms are NumPy's", orders)
    report.check("array jobs: groups and clusters", groups)
    report.check("array jobs: expressions", expressions)
    report.check("array jobs: files", files)
    report.check("array jobs: what is wrong is named", refusals)
    report.check("own functions: any number of hosts, one killed", functions)
    report.check("own functions: machines exchange directly", exchanges)
    report.check("own functions: limits", limits)
    if len(sys.argv) > 1:
        report.check("a training over two nodes", trainings, sys.argv[1])
    return report.failed


if __name__ == "__main__":
    sys.exit(main())
