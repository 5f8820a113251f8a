"""Array jobs and training: `connect` gives a `Machines` whose methods compute on them.

>>> machines = connect(nodes=2)                                      # doctest: +SKIP
>>> machines.sum([0.1] * 10)                                         # doctest: +SKIP
1.0

Jobs run in worker processes of the `paceline` program of this wheel, on this machine. Sums are exact
and rounded once. No result depends on the number of nodes or threads, or on a worker that is lost.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import tempfile
import warnings
from typing import TYPE_CHECKING, Any

from ._server import binary
from .errors import JobError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Clusters", "Machines", "connect"]

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


def connect(nodes: int = 1, *, threads: int | None = None,
            deadline: float | None = None) -> Machines:
    """What computes on arrays and trains: `nodes` worker processes of this machine.

    Args:
        nodes: worker processes of each job, from 1.
        threads: threads of each, or the cores shared by the nodes.
        deadline: seconds for a job, or none.
    """
    return Machines(nodes, threads=threads, deadline=deadline)


class Machines:
    """Jobs on arrays. Each call is one job and returns when it is done; threads may share it.

    Inputs are arrays of NumPy or anything with DLPack or the buffer protocol, of real numbers of 1 to
    8 bytes, or paths of `.npy` files, which may be larger than memory. Arrays are written to a
    temporary file. An expression computes on the rows `x`, `y`, `z` and `w` of up to four inputs and
    on their number `i`, such as `"x^2 + y^2"`.

    Every method raises `JobError` when a job fails; its text is what the program said.
    """

    def __init__(self, nodes: int = 1, *, threads: int | None = None,
                 deadline: float | None = None) -> None:
        self.nodes = nodes
        self.threads = threads
        self.deadline = deadline

    def reduce(self, op: str, *inputs: Any, map: str | None = None) -> Any:
        """One number of all values.

        Args:
            op: `sum`, `mean`, `min`, `max`, `var`, `std`, `dot` (of two inputs) or `count`.
            inputs: `(n, ...)`, up to four of one length.
            map: an expression that is computed of each row first.

        Returns:
            An int for sums and extremes of integers and for counts, else a float.
        """
        options = ["--map", map] if map else []
        value = self._job(["reduce", op], inputs, options)["value"]
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
             map: str | None = None) -> tuple[Any, Any]:
        """How many values lie in each of `bins` intervals of equal width.

        Returns:
            Counts `(bins,)` and edges `(bins + 1,)`, as of `numpy.histogram`. NaN lies in no bin;
            a `RuntimeWarning` counts it.
        """
        options = ["--bins", str(bins)]
        if range:
            options += ["--range", repr(float(range[0])), repr(float(range[1]))]
        if map:
            options += ["--map", map]
        done = self._job(["hist"], inputs, options)
        _warn_of_nan(done)
        np = _numpy()
        return np.array(done["counts"], np.int64), np.array(done["edges"], np.float64)

    def topk(self, *inputs: Any, k: int = 10, smallest: bool = False,
             map: str | None = None) -> tuple[Any, Any]:
        """The `k` largest values, or the smallest, in order.

        NaN is left out; a `RuntimeWarning` counts it.

        Returns:
            Values `(k,)` and their row numbers `(k,)`; fewer where there are fewer.
        """
        options = ["-k", str(k), *(["--smallest"] if smallest else [])]
        if map:
            options += ["--map", map]
        done = self._job(["topk"], inputs, options)
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

    def map(self, expression: str, *inputs: Any, out: str | os.PathLike[str] | None = None) -> Any:
        """`expression` of each row, as a new array `(n,)` of float64, or into the file `out`."""
        return self._written(["map"], inputs, ["--map", expression], out)

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
                 out: str | os.PathLike[str] | None) -> Any:
        with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
            path = os.path.join(folder, "out.npy") if out is None else os.fspath(out)
            self._job(job, inputs, [*options, "-o", path])
            return _numpy().load(path, allow_pickle=False) if out is None else out

    def _job(self, job: list[str], inputs: Sequence[Any], options: list[str]) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
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
