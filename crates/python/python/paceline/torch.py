"""The backend `paceline` of `torch.distributed`, for tensors on the CPU.

Importing this module registers it::

    import torch.distributed as dist
    import paceline.torch

    dist.init_process_group("paceline")          # ranks and store as for gloo, such as by torchrun

DistributedDataParallel, FSDP and the collectives of `torch.distributed` then run over shared memory
where all ranks are on one machine, else over TCP. Tensors of other devices are copied to the CPU
and back. Collectives are done when they return; messages go on beside the program. An error names
the rank (`paceline.errors`) and ends the group.

Ranks on several machines need a key, the same 64 hexadecimal digits in `PACELINE_GROUP_KEY` of all.
"""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as c10d
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

from . import distributed as dist
from ._arrays import borrow

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

__all__ = ["ProcessGroup"]

#: Number of each reduction, by torch's name. AVG is a sum, divided.
_OPS = {"SUM": 0, "AVG": 0, "MAX": 1, "MIN": 2, "PRODUCT": 3}

#: Tags from here on are for `gather`, `scatter` and messages of other collectives.
_OWN_TAGS = 1 << 31


def _done(value: Any) -> Any:
    """A work that is over."""
    future: Future[Any] = Future()
    future.set_result(value)
    return _create_work_from_future(future)


def _started(future: Any, value: Any) -> Any:
    """A work that ends as a future of a thread does."""
    ours: Future[Any] = Future()

    def end(done: Any) -> None:
        error = done.exception()
        ours.set_exception(error) if error else ours.set_result(value)

    future.add_done_callback(end)
    return _create_work_from_future(ours)


class _Staged:
    """A tensor as contiguous CPU memory; `keep` puts changes back where that is a copy."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()
        self.here = self.tensor.cpu().contiguous()
        self.array, self.kind = borrow(self.here)

    def keep(self) -> None:
        if self.here.data_ptr() != self.tensor.data_ptr():
            self.tensor.copy_(self.here)


class ProcessGroup(c10d.ProcessGroup):
    """A process group of torch over one of `paceline.distributed`."""

    def __init__(self, group: dist.Group, timeout: timedelta) -> None:
        super().__init__(group.rank(), group.size())
        self._group = group
        self._native = group._native
        self._seconds = timeout.total_seconds()
        # A thread for each direction and peer: messages of a pair stay in order, and a receive
        # that waits holds up nothing else.
        self._threads: dict[tuple[str, int], ThreadPoolExecutor] = {}

    def getBackendName(self) -> str:  # noqa: N802, torch's name
        return "paceline"

    def _limit(self, opts: Any) -> float:
        seconds = getattr(getattr(opts, "timeout", None), "total_seconds", lambda: -1.0)()
        return seconds if seconds > 0 else self._seconds

    # Reductions.

    def _sum(self, tensor: torch.Tensor, op: Any, seconds: float) -> None:
        name = str(op).rpartition(".")[2]
        if name not in _OPS:
            raise NotImplementedError(f"paceline has no reduction {name}; use one of {list(_OPS)}")
        staged = _Staged(tensor)
        self._native.all_reduce(staged.array, staged.array, (staged.kind, _OPS[name]), seconds)
        if name == "AVG":
            staged.here.div_(self.size())
        staged.keep()

    def allreduce(self, tensors: Any, opts: Any = c10d.AllreduceOptions()) -> Any:
        for tensor in tensors:
            self._sum(tensor, opts.reduceOp, self._limit(opts))
        return _done(tensors)

    def allreduce_coalesced(self, tensors: Any, opts: Any = c10d.AllreduceOptions()) -> Any:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Any, opts: Any = c10d.ReduceOptions()) -> Any:
        for tensor in tensors:
            result = tensor if self.rank() == opts.rootRank else tensor.clone()
            self._sum(result, opts.reduceOp, self._limit(opts))
        return _done(tensors)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor,
                              opts: Any = c10d.ReduceScatterOptions()) -> Any:
        name = str(opts.reduceOp).rpartition(".")[2]
        if name not in _OPS:
            raise NotImplementedError(f"paceline has no reduction {name}; use one of {list(_OPS)}")
        into, values = _Staged(output), _Staged(input)
        kind = (into.kind, _OPS[name])
        self._native.reduce_scatter(values.array, into.array, kind, self._limit(opts))
        if name == "AVG":
            into.here.div_(self.size())
        into.keep()
        return _done(output)

    def reduce_scatter(self, outputs: Any, inputs: Any,
                       opts: Any = c10d.ReduceScatterOptions()) -> Any:
        for output, parts in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, _joined(parts, output), opts)
        return _done(outputs)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any,
                                        opts: Any = c10d.ReduceScatterOptions()) -> Any:
        for output, input in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, input, opts)
        return _done(outputs)

    # Movements.

    def broadcast(self, tensors: Any, opts: Any = c10d.BroadcastOptions()) -> Any:
        for tensor in tensors:
            staged = _Staged(tensor)
            self._native.broadcast(staged.array, opts.rootRank, staged.kind, self._limit(opts))
            staged.keep()
        return _done(tensors)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor,
                          opts: Any = c10d.AllgatherOptions()) -> Any:
        into, values = _Staged(output), _Staged(input)
        self._native.all_gather(values.array, into.array, values.kind, self._limit(opts))
        into.keep()
        return _done(output)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = c10d.AllgatherOptions()) -> Any:
        for parts, input in zip(outputs, inputs, strict=True):
            whole = input.new_empty((self.size(), input.numel()))
            self.all_gather_single(whole, input, opts)
            for part, row in zip(parts, whole, strict=True):
                part.detach().copy_(row.view(part.shape))
        return _done(outputs)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any,
                                    opts: Any = c10d.AllgatherOptions()) -> Any:
        for output, input in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, input, opts)
        return _done(outputs)

    def all_to_all_single(self, output: torch.Tensor, input: torch.Tensor,
                          output_splits: Sequence[int] | None = None,
                          input_splits: Sequence[int] | None = None,
                          opts: Any = c10d.AllToAllOptions()) -> Any:
        into, values = _Staged(output), _Staged(input)
        splits = None
        if output_splits or input_splits:
            splits = (self._counts(input, input_splits), self._counts(output, output_splits))
        self._native.all_to_all(values.array, into.array, values.kind, self._limit(opts), splits)
        into.keep()
        return _done(output)

    def _counts(self, tensor: torch.Tensor, splits: Sequence[int] | None) -> list[int]:
        """Elements for each rank, of rows for each rank."""
        rows = tensor.shape[0] if tensor.dim() else 1
        row = tensor.numel() // rows if rows else 0
        return [count * row for count in splits or [rows // self.size()] * self.size()]

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = c10d.AllToAllOptions()) -> Any:
        whole = torch.cat([input.detach().reshape(-1) for input in inputs])
        sizes = [output.numel() for output in outputs]
        into = whole.new_empty(sum(sizes))
        self.all_to_all_single(into, whole, sizes, [input.numel() for input in inputs], opts)
        for output, part in zip(outputs, into.split(sizes), strict=True):
            output.detach().copy_(part.view(output.shape))
        return _done(outputs)

    def gather(self, outputs: Any, inputs: Any, opts: Any = c10d.GatherOptions()) -> Any:
        root = opts.rootRank
        for input in inputs:
            if self.rank() != root:
                self._send(input, root, _OWN_TAGS, self._limit(opts))
                continue
            for rank, part in enumerate(outputs[0]):
                if rank == root:
                    part.detach().copy_(input)
                else:
                    self._recv(part, rank, _OWN_TAGS, self._limit(opts))
        return _done(outputs)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = c10d.ScatterOptions()) -> Any:
        root = opts.rootRank
        for output in outputs:
            if self.rank() != root:
                self._recv(output, root, _OWN_TAGS + 1, self._limit(opts))
                continue
            for rank, part in enumerate(inputs[0]):
                if rank == root:
                    output.detach().copy_(part)
                else:
                    self._send(part, rank, _OWN_TAGS + 1, self._limit(opts))
        return _done(outputs)

    def barrier(self, opts: Any = c10d.BarrierOptions()) -> Any:
        self._native.barrier(self._limit(opts))
        return _done(None)

    # Messages.

    def _send(self, tensor: torch.Tensor, rank: int, tag: int, seconds: float) -> None:
        staged = _Staged(tensor)
        self._native.send(staged.array, (rank, tag), staged.kind, seconds)

    def _recv(self, tensor: torch.Tensor, rank: int, tag: int, seconds: float) -> None:
        staged = _Staged(tensor)
        self._native.recv(staged.array, (rank, tag), staged.kind, seconds)
        staged.keep()

    def _beside(self, way: str, peer: int, work: Callable[..., None], *arguments: Any) -> Any:
        pool = self._threads.get((way, peer))
        if pool is None:
            pool = ThreadPoolExecutor(1, f"paceline-{way}-{peer}")
            self._threads[way, peer] = pool
        return pool.submit(work, *arguments)

    def send(self, tensors: Any, rank: int, tag: int) -> Any:
        started = self._beside("send", rank, self._send, tensors[0], rank, tag, self._seconds)
        return _started(started, tensors)

    def recv(self, tensors: Any, rank: int, tag: int) -> Any:
        started = self._beside("recv", rank, self._recv, tensors[0], rank, tag, self._seconds)
        return _started(started, tensors)

    # Names that torch before 2.15 calls.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def __repr__(self) -> str:
        return f"paceline.torch.ProcessGroup(rank={self.rank()}, size={self.size()})"


def _joined(parts: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    return torch.cat([part.detach().reshape(-1) for part in parts]).to(like.dtype)


def _own_host() -> str:
    """The address of this machine that leads to rank 0's."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((master, 9))  # sends nothing: the system only looks for a route
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]


def _exchange(store: Any, name: str, rank: int, size: int, own: str) -> list[str]:
    """What every rank says, by rank."""
    store.set(f"paceline/{name}/{rank}", own)
    return [store.get(f"paceline/{name}/{one}").decode() for one in range(size)]


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> ProcessGroup:
    """What `init_process_group` and `new_group` call on each rank."""
    host, key = _own_host(), dist._key()
    if len(set(_exchange(store, "host", rank, size, host))) == 1 and not key:
        host = "127.0.0.1"
    listener = dist.Listener([f"{host}:0"])
    hosts = _exchange(store, "at", rank, size, listener.addrs[0])
    ids = _exchange(store, "id", rank, size, os.urandom(16).hex())
    group = dist.join(listener, rank, [[one] for one in hosts], id=bytes.fromhex(ids[0]),
                      deadline=timeout.total_seconds(), key=key)
    return ProcessGroup(group, timeout)


c10d.Backend.register_backend("paceline", _create, devices=["cpu"])
