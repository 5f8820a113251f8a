"""Tests of the backend of `torch.distributed` beside gloo. Needs torch.

    python torch_test.py            prints `ok NAME` or `FAILED NAME: why` for each case
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn

from ranks import Report, end

STEPS = 12
TIMED_STEPS = 60


def model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(),
                         nn.Linear(256, 8))


def train(net: nn.Module, parameters, steps: int) -> list[float]:
    """Losses of steps on this rank's data."""
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    losses = []
    for _ in range(steps):
        x = torch.randn(16, 64, generator=generator)
        optimizer.zero_grad()
        loss = (net(x) - x[:, :8]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def ddp() -> dict:
    net = nn.parallel.DistributedDataParallel(model())
    train(net, net.parameters(), STEPS)
    flat = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    began = time.perf_counter()
    train(net, net.parameters(), TIMED_STEPS)
    seconds = time.perf_counter() - began
    return {"hash": hashlib.sha256(flat.numpy().tobytes()).hexdigest(), "seconds": seconds,
            "some": flat[::997].tolist()}


def fsdp() -> dict:
    from torch.distributed.fsdp import fully_shard

    net = model()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(net)
    losses = train(net, net.parameters(), STEPS)
    full = [p.full_tensor().reshape(-1) for p in net.parameters()]
    return {"losses": losses, "some": torch.cat(full)[::997].tolist()}


def calls() -> dict:
    """Every collective, its result as lists."""
    rank, size = dist.get_rank(), dist.get_world_size()
    got: dict = {}
    for dtype in (torch.float32, torch.int64, torch.bfloat16, torch.bool):
        for op in ("SUM", "MAX", "MIN", "PRODUCT") if dtype != torch.bool else ("MAX", "MIN"):
            x = torch.arange(6).add(rank).remainder(3).to(dtype)
            dist.all_reduce(x, op=getattr(dist.ReduceOp, op))
            got[f"{op} {dtype}"] = x.tolist()
    grid = torch.arange(12.0).reshape(3, 4) + rank
    dist.all_reduce(grid.t())
    got["a view"] = grid.tolist()
    parts = [torch.empty(2, 3) for _ in range(size)]
    dist.all_gather(parts, torch.full((2, 3), float(rank)))
    got["all_gather"] = [part.tolist() for part in parts]
    whole = torch.empty(2 * size)
    dist.all_gather_into_tensor(whole, torch.tensor([rank, 9.0]))
    got["all_gather_into_tensor"] = whole.tolist()
    part = torch.empty(2)
    dist.reduce_scatter_tensor(part, torch.arange(2.0 * size) * (rank + 1))
    got["reduce_scatter_tensor"] = part.tolist()
    for root in range(size):
        x = torch.tensor([rank, 3])
        dist.broadcast(x, root)
        got[f"broadcast {root}"] = x.tolist()
        x = torch.tensor([rank + 1])
        dist.reduce(x, root)
        got[f"reduce {root}"] = x.tolist() if rank == root else None
        into = [torch.empty(2) for _ in range(size)] if rank == root else None
        dist.gather(torch.full((2,), float(rank)), into, root)
        got[f"gather {root}"] = [one.tolist() for one in into or []]
        out = torch.empty(1)
        rows = [torch.tensor([10.0 + one]) for one in range(size)] if rank == root else None
        dist.scatter(out, rows, root)
        got[f"scatter {root}"] = out.tolist()
    sends = [one + rank for one in range(size)]
    receives = [rank + one for one in range(size)]
    out = torch.empty(sum(receives), 2)
    dist.all_to_all_single(out, torch.arange(2.0 * sum(sends)).reshape(-1, 2) + 100 * rank,
                           receives, sends)
    got["all_to_all_single"] = out.tolist()
    things: list = [None] * size
    dist.all_gather_object(things, {"rank": rank})
    got["objects"] = things
    right, left = (rank + 1) % size, (rank - 1) % size
    out = torch.empty(3)
    works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, out, left),
                                    dist.P2POp(dist.isend, torch.full((3,), rank + 0.5), right)])
    for work in works:
        work.wait()
    got["messages"] = out.tolist()
    half = dist.new_group(list(range(size - 1)))
    if rank < size - 1:
        x = torch.tensor([rank + 1])
        dist.all_reduce(x, group=half)
        got["new_group"] = x.tolist()
    dist.barrier()
    return got


def losses() -> dict:
    """Rank 1 leaves; the others' error names it."""
    if dist.get_rank() == 1:
        os._exit(0)
    try:
        dist.all_reduce(torch.ones(2))
    except RuntimeError as error:
        return {"why": str(error)}
    return {}


def rank_of(case: str, backend: str, file: str, rank: int, size: int) -> None:
    if backend == "paceline":
        import paceline.torch  # noqa: F401, registers the backend
    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=size,
                            timeout=datetime.timedelta(seconds=60))
    print(json.dumps(globals()[case]()), flush=True)
    if case != "losses":
        dist.barrier()
        dist.destroy_process_group()
    os._exit(0)


def run(case: str, backend: str, size: int) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        ranks = [subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), case, backend, f"{folder}/store",
             str(rank), str(size)], text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE) for rank in range(size)]
        return [json.loads(out or "null") for out in end(ranks)]


def same_as_gloo(case: str, size: int) -> None:
    ours, theirs = run(case, "paceline", size), run(case, "gloo", size)
    for name in theirs[0]:
        got, expected = [[rank.get(name) for rank in ranks] for ranks in (ours, theirs)]
        assert got == expected, f"{name}: {got}, expected {expected}"


def close_to_gloo(case: str, size: int) -> None:
    ours, theirs = run(case, "paceline", size), run(case, "gloo", size)
    assert all(rank["some"] == ours[0]["some"] for rank in ours), "ranks differ"
    torch.testing.assert_close(torch.tensor(ours[0]["some"]), torch.tensor(theirs[0]["some"]))


def ddp_bits() -> None:
    ours, theirs = run("ddp", "paceline", 2), run("ddp", "gloo", 2)
    assert len({rank["hash"] for rank in ours + theirs}) == 1, [ours, theirs]


def ddp_speed() -> None:
    pairs = []
    for _ in range(3):
        ours, theirs = (max(rank["seconds"] for rank in run("ddp", backend, 2))
                        for backend in ("paceline", "gloo"))
        pairs.append((ours, theirs))
    ratios = sorted(ours / theirs for ours, theirs in pairs)
    print(f"DDP, 2 ranks, {TIMED_STEPS} steps: seconds of ours and gloo's {pairs}", flush=True)
    assert ratios[1] <= 1.05, f"ours over gloo's: {ratios}"


def lost() -> None:
    ours = run("losses", "paceline", 3)
    for rank in (0, 2):
        assert "rank 1" in ours[rank]["why"], ours


def main() -> int:
    report = Report()
    report.check("torch: collectives are gloo's, 2 ranks", same_as_gloo, "calls", 2)
    report.check("torch: collectives are gloo's, 3 ranks", same_as_gloo, "calls", 3)
    report.check("torch: an error names the rank", lost)
    report.check("torch: DDP of 2 ranks has gloo's bits", ddp_bits)
    for size in (3, 4):
        report.check(f"torch: DDP of {size} ranks is close to gloo", close_to_gloo, "ddp", size)
    report.check("torch: FSDP of 2 ranks is close to gloo", close_to_gloo, "fsdp", 2)
    report.check("torch: DDP is not slower than gloo", ddp_speed)
    return report.failed


if __name__ == "__main__":
    if len(sys.argv) > 2:
        rank_of(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
    sys.exit(main())
