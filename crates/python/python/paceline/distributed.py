"""Collectives between processes, with the names and meanings of `mlx.core.distributed`.

A program for MLX changes one import::

    import paceline.distributed as dist

    world = dist.init()
    total = dist.all_sum(np.ones(3), group=world)

and is started by `paceline launch -n 2 --backend ring --python python3 -- program.py`, by
`mlx.launch` or by anything that sets the same variables.

Arrays are NumPy's, or anything with DLPack or the buffer protocol: PyTorch, MLX and JAX on the CPU
are read without a copy, and the result is an array of the same library. `out=` names a NumPy array
(or another writable buffer) that takes the result in place.

Beyond MLX there are `all_to_all`, `broadcast`, `barrier`, tags, deadlines and errors that name the
rank (`paceline.errors`). Calls are not lazy: they return when they are done, and they release the
GIL. All ranks make the same collective calls in the same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import _native
from .errors import (CommError, DeadlineExceeded, Invalid, JoinError, Mismatch, PeerLost,
                     PeerSilent, Unsupported)

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "CommError", "DeadlineExceeded", "Group", "Invalid", "JoinError", "Listener", "Mismatch",
    "PeerLost", "PeerSilent", "Unsupported", "all_gather", "all_max", "all_min", "all_sum",
    "all_to_all", "average_gradients", "barrier", "broadcast", "init", "is_available", "join",
    "recv", "recv_like", "send", "sum_scatter",
]

#: Seconds that a call waits for other ranks unless `init`, `Group.deadline` or the call says
#: otherwise: as long as MLX gives NCCL.
DEADLINE = 300.0

Listener = _native.Listener

_SUM, _MAX, _MIN = range(3)

#: Backends whose ranks meet at the addresses of a ring's hostfile.
_OURS = ("any", "shm", "tcp")
#: MLX's own wires, by its names and ours.
_WIRES = {"ring": "ring", "mlx-ring": "ring", "jaccl": "jaccl", "rdma": "jaccl", "mpi": "mpi"}

_arrays: Any = None
_groups: dict[str, Group] = {}


def _load() -> Any:
    """The module that knows NumPy, which costs more to import than all of paceline."""
    global _arrays
    if _arrays is None:
        from . import _arrays
    return _arrays


class Group:
    """One rank's handle to a fixed set of ranks.

    Attributes:
        deadline: seconds that a call on this group waits, unless the call says otherwise.
    """

    __slots__ = ("_native", "_rank", "_size", "deadline")

    def __init__(self, native: Any, deadline: float = DEADLINE) -> None:
        self._native = native
        self._rank = native.rank()
        self._size = native.size()
        self.deadline = deadline

    def rank(self) -> int:
        """This rank, from 0."""
        return self._rank

    def size(self) -> int:
        """The number of ranks."""
        return self._size

    def split(self, color: int, key: int = -1, *, deadline: float | None = None) -> Group:
        """The group of the ranks that name the same `color`. Collective.

        They are numbered by `key`, and where keys are equal by their rank here; -1 stands for
        the own rank.
        """
        key = self._rank if key < 0 else key
        seconds = self.deadline if deadline is None else deadline
        return Group(self._native.split(color, key, seconds), self.deadline)

    def traffic(self) -> tuple[int, int]:
        """Bytes sent to and received from other ranks so far."""
        return self._native.traffic()

    def __repr__(self) -> str:
        return f"Group(rank={self._rank}, size={self._size})"


def is_available(backend: str = "any") -> bool:
    """Whether this build has the backend. It need not be configured."""
    return backend in _OURS or backend in ("local", "ring", "mlx-ring", "jaccl", "rdma")


def init(strict: bool = False, backend: str = "any", *, deadline: float = DEADLINE,
         key: bytes | None = None, plaintext: bool = False) -> Group:
    """Joins the group that this process was started as a rank of. Collective.

    Args:
        strict: raise where no launcher has named a group; otherwise this process goes on alone. A
            group that was named and does not come about is an error in both cases.
        backend: `any` (shared memory, else TCP), `shm` or `tcp`, for ranks of paceline;
            `ring`, `jaccl` or `mpi` for groups with MLX ranks in them; `local` for a group of one.
        deadline: seconds to wait for the others here and, by default, in every call.
        key: 32 random bytes, the same on all ranks, or the 64 hexadecimal digits in
            `PACELINE_GROUP_KEY`: encrypts what `tcp` sends. Without it only loopback addresses
            are used.
        plaintext: allow bytes to leave this machine unencrypted, as `PACELINE_PLAINTEXT=1` does;
            MLX's own wires cannot encrypt.

    The rank comes from `MLX_RANK`, the addresses from the file that `MLX_HOSTFILE` names. A second
    call for the same backend returns the same group.

    Raises:
        ValueError: no backend has this name.
        JoinError: `strict`, and the environment names no group or the others did not come.
    """
    if not is_available(backend) and backend != "mpi":
        names = ", ".join((*_OURS, "local", *_WIRES))
        raise ValueError(f"no backend is called {backend!r}; choose one of {names}")
    if backend in _groups:
        return _groups[backend]
    try:
        native = _start(backend, deadline, key or _key(), plaintext or _may_be_plain())
    except JoinError:
        # A group that was named and did not meet is a failure, strict or not.
        if strict or _is_launched():
            raise
        native = _native.alone()
    group = Group(native, deadline)
    _groups[backend] = group
    _groups.setdefault("any", group)
    return group


def _key() -> bytes | None:
    """The key in `PACELINE_GROUP_KEY`."""
    import os

    text = os.environ.get("PACELINE_GROUP_KEY")
    if not text:
        return None
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise JoinError("PACELINE_GROUP_KEY is not 64 hexadecimal digits") from None


def _may_be_plain() -> bool:
    import os

    return os.environ.get("PACELINE_PLAINTEXT") == "1"


def _is_launched() -> bool:
    import os

    return "MLX_RANK" in os.environ


def _start(backend: str, deadline: float, key: bytes | None, plaintext: bool) -> Any:
    import os

    if backend == "local":
        return _native.alone()
    env = os.environ
    if backend in _WIRES:
        hosts, devices = _hosts(env), None
        path = env.get("MLX_IBV_DEVICES") or env.get("JACCL_IBV_DEVICES")
        if _WIRES[backend] == "jaccl" and path:
            devices = _read(path)
        said = {"env": dict(env), "hosts": hosts, "devices": devices, "plaintext": plaintext}
        return _native.join_launched(_WIRES[backend], said, deadline)
    rank, hosts = env.get("MLX_RANK", ""), _hosts(env)
    if not rank or hosts is None:
        raise JoinError(f"{backend}: MLX_RANK is {rank!r} and MLX_HOSTFILE is "
                        f"{env.get('MLX_HOSTFILE', '')!r}; `paceline launch` sets both")
    if len(hosts) < 2:
        return _native.alone()
    number = _rank(rank, len(hosts))
    try:
        listener = Listener(hosts[number])
    except OSError as error:
        raise JoinError(f"{backend}: rank {number}: {error}", number) from None
    return join(listener, number, hosts, backend=backend, deadline=deadline, key=key,
                plaintext=plaintext)._native


def _rank(text: str, size: int) -> int:
    if not text.isdecimal() or int(text) >= size:
        raise JoinError(f"MLX_RANK is {text!r}, expected 0 to {size - 1}: "
                        f"the hostfile has {size} ranks")
    return int(text)


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise JoinError(f"cannot read {path}: {error}") from None


def _hosts(env: Any) -> list[list[str]] | None:
    """The addresses in `MLX_HOSTFILE`, by rank; None where it is not set."""
    path = env.get("MLX_HOSTFILE")
    if not path:
        return None
    text = _read(path)
    if not text.strip():
        return [[]]
    import json

    try:
        hosts = json.loads(text)
    except ValueError as error:
        raise JoinError(f"{path} is no JSON: {error}") from None
    fits = isinstance(hosts, list) and hosts and all(
        isinstance(own, list) and all(isinstance(one, str) for one in own) for own in hosts)
    if not fits:
        raise JoinError(f"{path}: expected a list of lists of addresses, by rank")
    return hosts


def join(listener: Listener, rank: int, hosts: Sequence[Sequence[str]], *, backend: str = "any",
         deadline: float = DEADLINE, id: bytes | None = None, key: bytes | None = None,
         plaintext: bool = False) -> Group:
    """Joins ranks whose addresses the program itself has exchanged. Collective.

    Args:
        listener: what `hosts[rank]` leads to, such as `Listener(["127.0.0.1:0"])`, whose `addrs`
            says which port the system chose.
        rank: this rank.
        hosts: the addresses of every rank, `"host:port"`, by rank; the same on all ranks.
        id: 16 bytes, the same on all ranks of this group and on no others; made from `hosts`
            where it is not given.
        backend, deadline, key, plaintext: as of `init`; `backend` is `any`, `shm` or `tcp`.
    """
    if backend not in _OURS:
        raise ValueError(f"join has no backend {backend!r}; choose one of {', '.join(_OURS)}")
    addrs = [list(own) for own in hosts]
    if id is None:
        import hashlib

        id = hashlib.blake2b(repr(addrs).encode(), digest_size=16).digest()
    if key is not None and len(key) != 32:
        raise ValueError(f"the key has {len(key)} bytes, expected 32")
    terms = {"addrs": addrs, "id": id, "key": key, "plaintext": plaintext}
    return Group(_native.join(backend, listener, rank, terms, deadline), deadline)


def _world() -> Group:
    """The group of calls that name none: the first that was made, as with MLX."""
    group = _groups.get("any")
    return init() if group is None else group


def _reduce(x: Any, op: int, group: Group | None, out: Any, deadline: float | None) -> Any:
    if group is None:
        group = _world()
    arrays = _arrays or _load()
    if group._size == 1 and out is None:
        return x
    array, kind = arrays.borrow(x)
    into = arrays.np.empty_like(array, subok=False) if out is None else _into(out, array)
    seconds = group.deadline if deadline is None else deadline
    group._native.all_reduce(array if out is not x else into, into, (kind, op), seconds)
    return arrays.give_back(into, kind, x) if out is None else out


def _into(out: Any, like: Any) -> Any:
    """`out` as a NumPy array over the same memory, with the shape and type of `like`."""
    array = out if type(out) is _arrays.np.ndarray else _arrays._as_numpy(out)
    if array.shape != like.shape or array.dtype.itemsize != like.dtype.itemsize:
        raise Invalid(f"out is {array.dtype}{array.shape}, expected {like.dtype}{like.shape}")
    if not array.flags.c_contiguous:
        raise Invalid("out is not contiguous in C order")
    return array


def all_sum(x: Any, group: Group | None = None, stream: Any = None, *, out: Any = None,
            deadline: float | None = None) -> Any:
    """The sum of `x` over all ranks, the same bits on all. Collective.

    Args:
        x: `(...)`, of one shape and type on all ranks.
        group: the group, or the first that `init` made.
        stream: taken for MLX's sake and not used.
        out: a writable array of the shape of `x`, `x` itself too, that takes the result.
        deadline: seconds to wait, or `group.deadline`.

    Returns:
        A new array `(...)`, or `out`. Of a group of one: `x` itself.
    """
    return _reduce(x, _SUM, group, out, deadline)


def all_max(x: Any, group: Group | None = None, stream: Any = None, *, out: Any = None,
            deadline: float | None = None) -> Any:
    """The elementwise maximum over all ranks; arguments as of `all_sum`. Collective."""
    return _reduce(x, _MAX, group, out, deadline)


def all_min(x: Any, group: Group | None = None, stream: Any = None, *, out: Any = None,
            deadline: float | None = None) -> Any:
    """The elementwise minimum over all ranks; arguments as of `all_sum`. Collective."""
    return _reduce(x, _MIN, group, out, deadline)


def _moved(x: Any, group: Group | None, shape: Any, call: str, deadline: float | None,
           op: int | None = None) -> Any:
    """Runs a collective from `x` into a new array whose shape is `shape(array, size)`."""
    group = _world() if group is None else group
    arrays = _arrays or _load()
    if group._size == 1:
        return x
    array, kind = arrays.borrow(x)
    into = arrays.np.empty(shape(array, group._size), array.dtype)
    seconds = group.deadline if deadline is None else deadline
    tag = kind if op is None else (kind, op)
    getattr(group._native, call)(array, into, tag, seconds)
    return arrays.give_back(into, kind, x)


def _parts(array: Any, size: int) -> tuple[int, ...]:
    """The shape of one rank's part of `array`."""
    if array.ndim < 1 or array.shape[0] % size:
        raise Invalid(f"the first axis of {array.shape} is not a multiple of {size} ranks")
    return (array.shape[0] // size, *array.shape[1:])


def all_gather(x: Any, group: Group | None = None, stream: Any = None, *,
               deadline: float | None = None) -> Any:
    """The arrays of all ranks, one after the other along the first axis. Collective.

    `x` is `(n, ...)` on all ranks, the result `(size * n, ...)`; of scalars it is `(size,)`.
    """
    def shape(array: Any, size: int) -> tuple[int, ...]:
        return (size * array.shape[0], *array.shape[1:]) if array.ndim else (size,)

    return _moved(x, group, shape, "all_gather", deadline)


def sum_scatter(x: Any, group: Group | None = None, stream: Any = None, *,
                deadline: float | None = None) -> Any:
    """This rank's part of the sum over all ranks. Collective.

    `x` is `(size * n, ...)`, the result `(n, ...)`.
    """
    return _moved(x, group, _parts, "reduce_scatter", deadline, _SUM)


def all_to_all(x: Any, group: Group | None = None, stream: Any = None, *,
               deadline: float | None = None) -> Any:
    """Sends each rank its part of `x` and returns what each sent to this one. Collective.

    `x` and the result are `(size * n, ...)`, parts in rank order.
    """
    def shape(array: Any, size: int) -> tuple[int, ...]:
        _parts(array, size)
        return array.shape

    return _moved(x, group, shape, "all_to_all", deadline)


def broadcast(x: Any, root: int = 0, group: Group | None = None, stream: Any = None, *,
              out: Any = None, deadline: float | None = None) -> Any:
    """The array of rank `root`, on all ranks. Collective.

    `x` is `(...)`, of one shape and type on all ranks; elsewhere than on `root` its values do not
    matter. `out` as of `all_sum`.
    """
    group = _world() if group is None else group
    arrays = _load()
    _peer(root, group, "root")
    if group._size == 1 and out is None:
        return x
    array, kind = arrays.borrow(x)
    into = arrays.np.array(array, subok=False) if out is None else _into(out, array)
    if out is not None and group._rank == root:
        into[...] = array
    seconds = group.deadline if deadline is None else deadline
    group._native.broadcast(into, root, kind, seconds)
    return arrays.give_back(into, kind, x) if out is None else out


def barrier(group: Group | None = None, *, deadline: float | None = None) -> None:
    """Returns when all ranks have called it. Collective."""
    group = _world() if group is None else group
    group._native.barrier(group.deadline if deadline is None else deadline)


def _peer(rank: int, group: Group, name: str) -> None:
    if not 0 <= rank < group._size:
        raise Invalid(f"{name} is {rank}, expected 0 to {group._size - 1} in a group of "
                      f"{group._size}", group._rank)


def _other(rank: int, group: Group, verb: str) -> None:
    if group._size == 1:
        raise Invalid(f"cannot {verb} a singleton group", 0)
    _peer(rank, group, "destination" if verb == "send to" else "source")
    if rank == group._rank:
        raise Invalid(f"rank {rank} cannot {verb} itself", rank)


def send(x: Any, dst: int, group: Group | None = None, stream: Any = None, *, tag: int = 0,
         deadline: float | None = None) -> Any:
    """Sends `x` to rank `dst`, which calls `recv` or `recv_like` with the same `tag`.

    Returns `x` when it has been copied, which need not mean that it was received. Blocks while
    sixteen messages to that rank wait.
    """
    group = _world() if group is None else group
    _other(dst, group, "send to")
    array, kind = _load().borrow(x)
    seconds = group.deadline if deadline is None else deadline
    group._native.send(array, (dst, tag), kind, seconds)
    return x


def recv(shape: Sequence[int], dtype: Any, src: int, group: Group | None = None,
         stream: Any = None, *, tag: int = 0, deadline: float | None = None) -> Any:
    """The oldest message of rank `src` with this `tag`, as an array of `shape` and `dtype`.

    A dtype of PyTorch or MLX gives an array of that library, all others one of NumPy.

    Raises:
        Mismatch: the message has another type or number of elements.
    """
    group = _world() if group is None else group
    _other(src, group, "receive from")
    arrays = _load()
    own, kind, name = arrays.kind_of(dtype)
    into = arrays.np.empty(tuple(shape), own)
    _receive(into, src, group, tag, kind, deadline)
    return arrays.made(into, kind, name)


def recv_like(x: Any, src: int, group: Group | None = None, stream: Any = None, *, tag: int = 0,
              out: Any = None, deadline: float | None = None) -> Any:
    """`recv` of an array with the shape, type and library of `x`, or into `out`."""
    group = _world() if group is None else group
    _other(src, group, "receive from")
    arrays = _load()
    array, kind = arrays.borrow(x)
    into = arrays.np.empty_like(array, subok=False) if out is None else _into(out, array)
    _receive(into, src, group, tag, kind, deadline)
    return arrays.give_back(into, kind, x) if out is None else out


def _receive(into: Any, src: int, group: Group, tag: int, kind: int,
             deadline: float | None) -> None:
    seconds = group.deadline if deadline is None else deadline
    bits = into.view(_arrays.np.uint16) if kind == _arrays.BF16 else into
    group._native.recv(bits, (src, tag), kind, seconds)


def average_gradients(gradients: Any, group: Group | None = None,
                      all_reduce_size: int = 32 * 1024**2,
                      communication_stream: Any = None, *, deadline: float | None = None) -> Any:
    """The mean over all ranks of every array in nested dicts, lists and tuples. Collective.

    Arrays of one type are summed together, `all_reduce_size` bytes at a time or a little more;
    0 or less sums each by itself.
    """
    group = _world() if group is None else group
    if group._size == 1:
        return gradients
    leaves: list[Any] = []
    _each(gradients, leaves.append)
    results = iter(_mean(leaves, group, all_reduce_size, deadline))
    return _each(gradients, lambda _: next(results))


def _each(tree: Any, visit: Any) -> Any:
    """The tree of what `visit` gives for each leaf, in order."""
    if isinstance(tree, dict):
        return {name: _each(value, visit) for name, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        values = [_each(value, visit) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return tree if tree is None else visit(tree)


def _mean(leaves: list[Any], group: Group, limit: int, deadline: float | None) -> list[Any]:
    np = _load().np
    seconds = group.deadline if deadline is None else deadline
    borrowed = [_arrays.borrow(leaf) for leaf in leaves]
    means: list[Any] = []
    while len(means) < len(leaves):
        first, size = len(means), 0
        kind, end = borrowed[first][1], first
        while end < len(leaves) and borrowed[end][1] == kind and (end == first or size < limit):
            size += borrowed[end][0].nbytes
            end += 1
        flat = np.concatenate([array.reshape(-1) for array, _ in borrowed[first:end]])
        group._native.all_reduce(flat, flat, (kind, _SUM), seconds)
        flat = _divide(flat, kind, group._size)
        at = 0
        for (array, _), leaf in zip(borrowed[first:end], leaves[first:end], strict=True):
            part = flat[at:at + array.size].reshape(array.shape)
            at += array.size
            means.append(_arrays.give_back(part, kind, leaf))
    return means


def _divide(flat: Any, kind: int, size: int) -> Any:
    np = _arrays.np
    if kind != _arrays.BF16:
        return (flat / size).astype(flat.dtype, copy=False)
    wide = (flat.astype(np.uint32) << 16).view(np.float32) / np.float32(size)
    bits = wide.view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return np.where(np.isnan(wide), (bits >> 16) | 0x40, rounded >> 16).astype(np.uint16)
