"""Data-parallel training as MLX's users write it. `mlx_test.py` changes one import of it."""

import json

import mlx.core as mx
from mlx.core import distributed

world = distributed.init(strict=True, backend="ring")
rank, size = world.rank(), world.size()

mx.random.seed(3)
data = mx.random.normal((8, 5))
target = data @ mx.arange(5.0)
weights = mx.zeros((5,))


def loss(weights, data, target):
    return mx.mean((data @ weights - target) ** 2)


losses = []
for step in range(10):
    own = slice(rank * 8 // size, (rank + 1) * 8 // size)
    value, gradient = mx.value_and_grad(loss)(weights, data[own], target[own])
    gradient = distributed.all_sum(gradient) / size
    weights = weights - 0.1 * gradient
    mx.eval(weights)
    losses.append(distributed.all_sum(value).item())

half = distributed.all_sum(mx.full((3,), 1.5 + rank, mx.bfloat16))
assert half.dtype == mx.bfloat16
mx.eval(half)
everyone = distributed.all_gather(mx.array([[rank, 2 * rank]]))
mx.eval(everyone)
most = distributed.all_max(mx.array(rank))
mx.eval(most)
least = distributed.all_min(mx.array(rank), stream=mx.cpu)
mx.eval(least)
if rank == 0:
    mx.eval(distributed.send(weights, 1))
    passed = distributed.recv((2,), mx.int16, 1)
    mx.eval(passed)
else:
    got = distributed.recv_like(weights, 0)
    mx.eval(got)
    assert mx.array_equal(got, weights).item()
    passed = mx.array([4, -5], mx.int16)
    mx.eval(distributed.send(passed, 0))
result = [losses, weights.tolist(), half.tolist(), everyone.tolist(), most.item(), least.item(),
          passed.tolist(), str(everyone.dtype), distributed.all_sum(1).item(),
          distributed.all_sum(0.1 + rank).item()]
print(json.dumps(result), flush=True)
