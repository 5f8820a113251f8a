"""Array jobs, own functions and training: `connect` gives a `Machines` whose methods compute on them.

>>> machines = connect(nodes=2)                                      # doctest: +SKIP
>>> machines.sum([0.1] * 10)                                         # doctest: +SKIP
1.0

Array jobs run in worker processes of the `paceline` program of this wheel. Sums are exact and rounded
once. Own functions are Python: they run in Pythons of the machines of the cluster, where the owners
started `paceline up --allow-programs`, or in `nodes` processes here if no node runs. No result depends
on the number of nodes or threads, or on a worker that is lost.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import pickle
import shlex
import subprocess
import sys
import tempfile
import warnings
from typing import TYPE_CHECKING, Any

from ._server import binary
from .errors import JobError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ._functions import Figures, Limits

__all__ = ["Clusters", "Limits", "Machines", "Wgsl", "connect", "text_parts"]

Progress = Any  # a function of two ints, or None

#: Characters of a program's last words that an error keeps.
_WORDS_MAX = 2000


@dataclasses.dataclass(frozen=True)
class Clusters:
    """Rows by their nearest centroid.

    Attributes:
        centroids: `(k, ...)` float64, the mean of each cluster's rows.
        counts: rows of each cluster.
        inertia: sum of the squared distances of all rows to their centroids.
        iterations: passes over the rows.
    """

    centroids: Any
    counts: list[int]
    inertia: float
    iterations: int


@dataclasses.dataclass(frozen=True)
class Wgsl:
    """A function in WGSL, which graphics processors compute in place of an expression.

    Without `halo` it takes the values of a row: `fn f(x: f32, y: f32) -> f32`. With `halo` it reads
    rows nearby, as `paceline mapreduce map --help` says under `--halo`: the first axis are the rows,
    and results are `(rows, columns)`. Its floats differ between devices.

    Attributes:
        text: the function, and functions and constants that it uses.
        halo: rows to each side that it reads, or `"all"`.
        steps: times that it is computed, each time of its last result.
    """

    text: str
    halo: int | str | None = None
    steps: int = 1


def __getattr__(name: str) -> Any:
    if name == "Limits":
        from ._functions import Limits

        return Limits
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def connect(nodes: int = 1, *, threads: int | None = None, deadline: float | None = None,
            python: str | Sequence[str] | None = None, limits: Limits | None = None) -> Machines:
    """Machines or processes, `nodes` of them, for array jobs, own functions and training.

    Args:
        nodes: machines, or worker processes of this one where no node runs; from 1.
        threads: threads of each, or the cores shared by the nodes.
        deadline: seconds for a job, or none.
        python: the Python of own functions on every machine, as a path or a command such as
            `uv run python`; this one by default. Its version, cloudpickle's and NumPy's must be those
            of this process.
        limits: of own functions: memory, seconds and output of a part.
    """
    return Machines(nodes, threads=threads, deadline=deadline, python=python, limits=limits)


def text_parts(path: str | os.PathLike[str], size: int = 16 << 20) -> list[Any]:
    """Cuts a text file into parts of about `size` bytes, as items: each iterates over whole lines."""
    from ._functions import worker

    path = os.path.abspath(path)
    length = os.path.getsize(path)
    return [worker.TextPart(path, start, min(start + size, length))
            for start in range(0, length, size)]


class Machines:
    """Jobs on arrays. Each call is one job and returns when it is done; threads may share it.

    Inputs are arrays of NumPy or anything with DLPack or the buffer protocol, of real numbers of 1 to
    8 bytes, or paths of `.npy` files, which may be larger than memory. Arrays are written to a
    temporary file. An expression computes on the rows `x`, `y`, `z` and `w` of up to four inputs and
    on their number `i`, such as `"x^2 + y^2"`.

    Own functions (`map`, `filter`, `map_reduce`, `group_by`, `join`) may be any that cloudpickle can
    send. Items are a sequence; those that are paths or parts of files (`text_parts`) are read where
    they are computed. Workers stay until `close`, or until this object is gone.

    Every method raises `JobError` when a job fails; its text is what the program said. An own function
    that raises is a `FunctionError`, with the item's number and the traceback.

    Attributes:
        figures: bytes that the last job of own functions moved, and machines that it lost.
    """

    figures: Figures | None = None

    def __init__(self, nodes: int = 1, *, threads: int | None = None, deadline: float | None = None,
                 python: str | Sequence[str] | None = None, limits: Limits | None = None) -> None:
        self.nodes = nodes
        self.threads = threads
        self.deadline = deadline
        self.python = python or [sys.executable]
        self.limits = limits
        self._team: Any = None

    def reduce(self, op: str, *inputs: Any, map: str | Wgsl | None = None) -> Any:
        """One number of all values.

        Args:
            op: `sum`, `mean`, `min`, `max`, `var`, `std`, `dot` (of two inputs) or `count`.
            inputs: `(n, ...)`, up to four of one length.
            map: an expression or a WGSL function that is computed of each row first.

        Returns:
            An int for sums and extremes of integers and for counts, else a float.
        """
        value = self._job(["reduce", op], inputs, [], map)["value"]
        return float(value) if isinstance(value, str) else value

    def sum(self, x: Any) -> Any:
        """The exact sum of all values of `x`, rounded once: what `math.fsum` gives."""
        return self.reduce("sum", x)

    def mean(self, x: Any) -> float:
        """The exact mean of all values of `x`, rounded once."""
        return self.reduce("mean", x)

    def dot(self, x: Any, y: Any) -> float:
        """The exact sum of the products of `x` and `y`, rounded once."""
        return self.reduce("dot", x, y)

    def hist(self, *inputs: Any, bins: int = 256, range: tuple[float, float] | None = None,
             map: str | Wgsl | None = None) -> tuple[Any, Any]:
        """How many values lie in each of `bins` intervals of equal width.

        Returns:
            Counts `(bins,)` and edges `(bins + 1,)`, as of `numpy.histogram`. NaN lies in no bin;
            a `RuntimeWarning` counts it.
        """
        options = ["--bins", str(bins)]
        if range:
            options += ["--range", repr(float(range[0])), repr(float(range[1]))]
        done = self._job(["hist"], inputs, options, map)
        _warn_of_nan(done)
        np = _numpy()
        return np.array(done["counts"], np.int64), np.array(done["edges"], np.float64)

    def topk(self, *inputs: Any, k: int = 10, smallest: bool = False,
             map: str | Wgsl | None = None) -> tuple[Any, Any]:
        """The `k` largest values, or the smallest, in order.

        NaN is left out; a `RuntimeWarning` counts it.

        Returns:
            Values `(k,)` and their row numbers `(k,)`; fewer where there are fewer.
        """
        options = ["-k", str(k), *(["--smallest"] if smallest else [])]
        done = self._job(["topk"], inputs, options, map)
        _warn_of_nan(done)
        np = _numpy()
        return np.array([_number(value) for value in done["values"]]), np.array(
            done["indices"], np.int64)

    def groupby(self, op: str, keys: Any, values: Any) -> tuple[Any, Any]:
        """A reduction (`sum`, `mean`, `min`, `max`, `count`) of the values of each key.

        Args:
            op: the reduction.
            keys: `(n,)` integers.
            values: `(n,)` numbers.

        Returns:
            The different keys `(m,)`, ascending, and a value for each `(m,)`.
        """
        done = self._job(["groupby", op], (keys, values), [])
        np = _numpy()
        return np.array(done["keys"]), np.array([_number(value) for value in done["values"]])

    def join_by_key(self, op: str, left: tuple[Any, Any], right: tuple[Any, Any], *,
                    map: str = "x * y") -> tuple[Any, Any]:
        """A reduction, for each key, of all pairs of a left and a right row with that key.

        Args:
            op: the reduction, as of `groupby`.
            left: integer keys `(n,)` and values `(n,)`.
            right: integer keys `(k,)` and values `(k,)`, in the memory of each node.
            map: what a pair gives: an expression of the left value `x` and the right value `y`.

        Returns:
            The keys that both sides have `(m,)`, ascending, and a value for each `(m,)`.
        """
        done = self._job(["join", op], (*left, *right), ["--map", map])
        np = _numpy()
        return np.array(done["keys"]), np.array([_number(value) for value in done["values"]])

    def matmul(self, a: Any, b: Any, *, out: str | os.PathLike[str] | None = None,
               device: str = "cpu") -> Any:
        """The product of `a`, `(m, k)`, and `b`, `(k, n)`, which may be files larger than memory.

        Args:
            a: the first matrix, or the path of its `.npy` file.
            b: the second matrix, or the path of its `.npy` file.
            out: the `.npy` file to write.
            device: `cpu` computes in float64, the same bits for any number of nodes; `gpu` in float32.

        Returns:
            A new array `(m, n)` of float64, or `out` where it is given.
        """
        return self._written(["matmul"], (a, b), ["--device", device], out)

    def sort(self, x: Any, *, out: str | os.PathLike[str] | None = None,
             memory: str | None = None) -> Any:
        """The values of `x` in ascending order.

        Args:
            x: `(n,)`, or the path of a `.npy` file.
            out: the `.npy` file to write.
            memory: bytes for all nodes together, as `500M` or `2G`; half of what is free by default.

        Returns:
            A new array `(n,)` of the type of `x`, or `out` where it is given.
        """
        return self._written(["sort"], (x,), ["--memory", memory] if memory else [], out)

    def map(self, expression: str | Wgsl | Callable[[Any], Any], *inputs: Any,
            out: str | os.PathLike[str] | None = None, progress: Progress = None) -> Any:
        """An expression of each row of arrays, or an own function of each item.

        Args:
            expression: text such as `"2*x"`, a WGSL function, or a function of one item.
            inputs: arrays, or for a function the items.
            out: the `.npy` file to write, for an expression.
            progress: is called with the parts that are done and their number; may raise to cancel.

        Returns:
            A new array `(n,)` of float64, of `Wgsl` with a halo `(n, columns)`, or `out`; for a
            function the list of its results.
        """
        if not callable(expression):
            if isinstance(expression, Wgsl) and expression.halo == "all" and expression.steps > 1:
                # A step reads all rows of the last one, so it is a job of its own.
                once = dataclasses.replace(expression, steps=1)
                first, *others = inputs
                for _ in range(expression.steps - 1):
                    first = self._written(["map"], (first, *others), [], None, once)
                return self._written(["map"], (first, *others), [], out, once)
            return self._written(["map"], inputs, [], out, expression)
        (items,) = inputs
        return self._lists({"map": expression}, items, progress)

    def filter(self, keeps: Callable[[Any], Any], items: Iterable[Any], *,
               progress: Progress = None) -> list[Any]:
        """The items for which `keeps` gives a true value, in order."""
        return self._lists({"map": keeps, "filter": True}, items, progress)

    def map_reduce(self, map: Callable[[Any], Any], reduce: Callable[[Any, Any], Any],
                   items: Iterable[Any], *, progress: Progress = None) -> Any:
        """`reduce` of `map(item)` over all items, in the order of a fixed binary tree.

        So the result has the same bits for any number of machines, also where `reduce` rounds.

        Raises:
            JobError: there are no items.
        """
        from ._functions import worker

        tree = worker.Tree(reduce)
        for data in self._stage({"map": map, "reduce": reduce}, ("reduce", None), [items], progress):
            tree.add(*pickle.loads(data))
        if not tree.stack:
            raise JobError("map_reduce of no items")
        return tree.result()[1]

    def group_by(self, key: Callable[[Any], Any], reduce: Callable[[Any, Any], Any],
                 items: Iterable[Any], *, each: Callable[[Any], Iterable[Any]] | None = None,
                 value: Callable[[Any], Any] | None = None, progress: Progress = None
                 ) -> dict[Any, Any]:
        """Reduces the values of each key; machines exchange them directly.

        Args:
            key: the key of a record: hashable, with a hash of its value, such as a str, a number or a
                tuple of them.
            reduce: two values to one, in the order of a fixed binary tree.
            items: the items.
            each: the records of an item, such as the lines of a file; by default the item itself.
            value: the value of a record; by default the record.
            progress: as of `map`.

        Returns:
            Values by key, in the order in which the keys first appear.
        """
        functions = {"key": key, "reduce": reduce, "each": each, "value": value}
        found = self._stage(functions, ("group", "gather"), [items], progress)
        return _by_key(found)

    def join(self, left: Iterable[Any], right: Iterable[Any], *, on: Callable[[Any], Any],
             combine: Callable[[Any, Any], Any], right_on: Callable[[Any], Any] | None = None,
             reduce: Callable[[Any, Any], Any] | None = None,
             by: Callable[[Any, Any], Any] | None = None,
             each: Callable[[Any], Iterable[Any]] | None = None, progress: Progress = None) -> Any:
        """`combine` of each pair of records with equal keys; machines exchange records directly.

        Args:
            left: items of one side.
            right: items of the other side.
            on: the key of a record, of both sides or of the left one.
            combine: the result of a left and a right record.
            right_on: the key of a right record, where it is another.
            reduce: reduces the results of each group, in a fixed order.
            by: the group of a left and a right record; by default their key.
            each: the records of an item, of both sides; by default the item itself.
            progress: as of `map`.

        Returns:
            Results ordered by left, then by right record; with `reduce` a dict of values by group. A
            bucket, a 64th of both sides, must fit the memory of a worker.
        """
        sides = [{"key": on, "each": each}, {"key": right_on or on, "each": each}]
        functions = {"sides": sides, "combine": combine, "reduce": reduce, "by": by}
        found = self._stage(functions, ("scatter", "join"), [left, right], progress)
        if reduce is not None:
            return _by_key(found, reduce if by else None)
        pairs = [pair for data in found for pair in pickle.loads(data)]
        return [value for _, _, value in sorted(pairs, key=lambda pair: pair[0])]

    def shuffle(self, split: Callable[[Any], Iterable[Any]], merge: Callable[[int, list[Any]], Any],
                items: Iterable[Any], *, progress: Progress = None) -> list[Any]:
        """Cuts items into 64 buckets, which machines exchange directly, and computes each.

        Args:
            split: the pieces of an item by bucket, at most 64; None for no piece.
            merge: the result of a bucket's number and its pieces, in the order of the items.
            items: the items.
            progress: as of `map`.

        Returns:
            The 64 results.
        """
        functions = {"split": split, "merge": merge}
        return [pickle.loads(data)
                for data in self._stage(functions, ("split", "merge"), [items], progress)]

    def sort_files(self, paths: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str], *,
                   rows: int = 1 << 21, progress: Progress = None) -> list[tuple[str, int]]:
        """Sorts arrays of files over machines that exchange their values directly.

        Values are compared as by `sort`: -NaN, numbers with -0 before 0, NaN.

        Args:
            paths: `.npy` files of float64 or int64, flat, at the same paths on all machines.
            out: a folder on each machine, which is made; it gets `.npy` files of ascending ranges.
            rows: values that a worker sorts at a time.
            progress: as of `map`.

        Returns:
            For each of 64 ranges, in order, its file, on the machine that sorted it, and its rows.
        """
        from . import _functions

        return _functions.sort_files(self, [os.path.abspath(path) for path in paths],
                                     os.path.abspath(out), rows, progress)

    def close(self) -> None:
        """Ends the workers of own functions; the next call starts new ones."""
        team, self._team = self._team, None
        if team is not None:
            team.close()

    def _lists(self, functions: dict[str, Any], items: Iterable[Any], progress: Progress) -> list[Any]:
        results: list[Any] = []
        for data in self._stage(functions, ("map", None), [items], progress):
            results += pickle.loads(data)
        return results

    def _stage(self, functions: dict[str, Any], stages: tuple[str, str | None],
               sides: list[Iterable[Any]], progress: Progress) -> list[bytes]:
        from . import _functions

        parts = [part for side, items in enumerate(sides) for part in _functions.cut(items, side)]
        is_shuffle = stages[1] is not None
        if self._team is None or not self._team.alive() or (is_shuffle and not self._team.shuffles):
            self.close()
            self._team = self._new_team(is_shuffle)
        stage = _functions.Stage(self._team, functions, stages, parts, self.deadline, progress)
        self.figures = stage.figures
        try:
            return stage.run()
        except BaseException:
            self.close()  # what still computes is not wanted
            raise

    def _new_team(self, is_shuffle: bool) -> Any:
        from . import _functions

        machines, own, is_open = _functions.cluster_machines(self.nodes)
        if is_shuffle and not is_open and len(machines) > 1:
            warnings.warn("this machine takes no part, since others cannot read from it without "
                          "`paceline up --allow-programs`", RuntimeWarning, stacklevel=5)
            machines = machines[1:]
        python = shlex.split(self.python) if isinstance(self.python, str) else list(self.python)
        limits = self.limits or _functions.Limits()
        team = _functions.Team(machines, python, self.threads, limits)
        team.introduce(own)
        team.shuffles = is_shuffle or is_open
        return team

    def kmeans(self, rows: Any, k: int, *, iterations: int = 20, seed: int = 0) -> Clusters:
        """Clusters of `rows`, `(n, ...)`, of finite numbers; `seed` chooses the first centroids."""
        done = self._job(["kmeans"], (rows,), ["-k", str(k), "--iterations", str(iterations),
                                               "--seed", str(seed)])
        centroids = _numpy().array(done["centroids"], _numpy().float64)
        return Clusters(centroids, done["counts"], _number(done["inertia"]), done["iterations"])

    def montecarlo(self, expression: str, *, samples: int = 10_000_000,
                   seed: int = 0) -> tuple[float, float]:
        """The mean of `expression` over random `x`, `y`, `z` and `w` in [0, 1), and its error."""
        done = self._job(["montecarlo", expression], (), ["--samples", str(samples),
                                                          "--seed", str(seed)])
        return _number(done["value"]), _number(done["std_error"])

    def train(self, model: str, data: Any, output: str | os.PathLike[str],
              **options: Any) -> dict[str, Any]:
        """Trains `model`, or an adapter of it, with the same bytes for any number of nodes.

        Args:
            model: an alias, a GGUF file, a folder of safetensors or a hub id.
            data: a file of lines of JSON, or a list of examples such as
                `{"prompt": "Hi", "completion": "Ahoy!"}`.
            output: the folder for the adapter, checkpoints and metrics.
            options: those of `paceline train`, with `_` for `-`: `method`, `rank`, `steps`, `batch`,
                `lr`, `seed`, `resume=True`, ...

        Returns:
            The object that `paceline train --json` prints.
        """
        with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
            words = ["train", str(model), "--data", _examples(data, folder),
                     "--output", os.fspath(output)]
            for name, value in options.items():
                words += _flag(name, value)
            return self._run(words)

    def _written(self, job: list[str], inputs: Sequence[Any], options: list[str],
                 out: str | os.PathLike[str] | None, map: str | Wgsl | None = None) -> Any:
        with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
            path = os.path.join(folder, "out.npy") if out is None else os.fspath(out)
            self._job(job, inputs, [*options, "-o", path], map)
            return _numpy().load(path, allow_pickle=False) if out is None else out

    def _job(self, job: list[str], inputs: Sequence[Any], options: list[str],
             map: str | Wgsl | None = None) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
            options = options + _mapped(map, folder)
            paths = [_file(x, folder, at) for at, x in enumerate(inputs)]
            # Behind `--`, so that no path and no negative number is taken for an option.
            return self._run(["mapreduce", job[0], *options, *self._own(), "--", *job[1:], *paths])

    def _own(self) -> list[str]:
        threads = [] if self.threads is None else ["--threads", str(self.threads)]
        return ["--nodes", str(self.nodes), *threads, "--json"]

    def _run(self, words: list[str]) -> dict[str, Any]:
        command = [binary(), *words, *([] if "--json" in words else self._own())]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace",
                                  stdin=subprocess.DEVNULL, timeout=self.deadline)
        except OSError as error:
            raise JobError(f"cannot run {command[0]}: {error}") from None
        except subprocess.TimeoutExpired:
            name = " ".join(words[:2])
            raise JobError(f"{name}: no end after {self.deadline} s") from None
        if done.returncode:
            raise JobError(done.stderr.strip()[-_WORDS_MAX:])
        return json.loads(done.stdout)

    def __repr__(self) -> str:
        return f"Machines(nodes={self.nodes})"


def _by_key(found: list[bytes], reduce: Callable[[Any, Any], Any] | None = None) -> dict[Any, Any]:
    """Values by key, in the order of their first numbers.

    With `reduce`, a key may be in several buckets, whose values are reduced in their order.
    """
    firsts: dict[Any, Any] = {}
    values: dict[Any, Any] = {}
    for data in found:
        for first, key, value in pickle.loads(data):
            if key not in values:
                firsts[key], values[key] = first, value
            elif reduce is not None:
                firsts[key] = min(firsts[key], first)
                values[key] = reduce(values[key], value)
            else:
                raise JobError(f"{key!r} has other hashes in other workers: keys need a hash of their "
                               "value")
    return {key: values[key] for key in sorted(values, key=firsts.__getitem__)}


def _mapped(map: str | Wgsl | None, folder: str) -> list[str]:
    """Options of what is computed of each row first; a function is written to a file."""
    if not isinstance(map, Wgsl):
        return ["--map", map] if map else []
    path = pathlib.Path(folder, "function.wgsl")
    path.write_text(map.text, encoding="utf-8")
    halo = [] if map.halo is None else ["--halo", str(map.halo), "--steps", str(map.steps)]
    return ["--wgsl", str(path), "--device", "gpu", *halo]


def _numpy() -> Any:
    import numpy

    return numpy


def _warn_of_nan(done: dict[str, Any]) -> None:
    """Warns the caller of the method that calls this."""
    if count := done.get("nan"):
        warnings.warn(f"{count} NaN left out", RuntimeWarning, stacklevel=3)


def _number(value: Any) -> Any:
    """JSON has no words for infinities and NaN; the program writes them as text."""
    return float(value) if isinstance(value, str) else value


def _file(x: Any, folder: str, at: int) -> str:
    """The path of a `.npy` file with `x`."""
    if isinstance(x, (str, os.PathLike)):
        return os.fspath(x)
    np = _numpy()
    path = os.path.join(folder, f"{at}.npy")
    np.save(path, np.asarray(x) if isinstance(x, (list, tuple)) else _borrowed(x),
            allow_pickle=False)
    return path


def _borrowed(x: Any) -> Any:
    from ._arrays import BF16, borrow

    array, kind = borrow(x)
    if kind == BF16:  # its bits are the upper half of a float32
        array = (array.astype(_numpy().uint32) << 16).view(_numpy().float32)
    return array


def _examples(data: Any, folder: str) -> str:
    if isinstance(data, (str, os.PathLike)):
        return os.fspath(data)
    path = pathlib.Path(folder, "train.jsonl")
    path.write_text("".join(json.dumps(one) + "\n" for one in data), encoding="utf-8")
    return str(path)


def _flag(name: str, value: Any) -> list[str]:
    word = "--" + name.replace("_", "-")
    if value is True:
        return [word]
    return [] if value is None or value is False else [word, str(value)]
