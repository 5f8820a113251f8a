"""A distributed MLX program as people write it: nothing in it knows of paceline.

    program.py BACKEND [fail]
"""

import os
import sys
import time

import mlx.core as mx

backend = sys.argv[1]
world = mx.distributed.init(strict=True, backend=backend)
rank, size = world.rank(), world.size()
total = size * (size + 1) / 2

for count in [1, 7, 1000, 100003]:
    summed = mx.distributed.all_sum(mx.full((count,), rank + 1, dtype=mx.float32))
    assert mx.all(summed == total).item(), f"all_sum of {count}"
    gathered = mx.distributed.all_gather(mx.full((count,), rank, dtype=mx.int32))
    expected = mx.repeat(mx.arange(size), count)
    assert mx.all(gathered == expected).item(), f"all_gather of {count}"
if size % 2 == 0:
    other = rank ^ 1
    x = mx.full((100,), rank, dtype=mx.float32)
    if rank < other:
        mx.eval(mx.distributed.send(x, other))
        y = mx.distributed.recv_like(x, other)
    else:
        y = mx.distributed.recv_like(x, other)
        mx.eval(y)
        mx.eval(mx.distributed.send(x, other))
    assert mx.all(y == other).item(), "send and recv"

if "fail" in sys.argv:
    if rank == size - 1:
        os._exit(3)  # an exception would wait in MPI_Finalize for the others
    time.sleep(1000)
print(f"{rank} of {size}: {summed[0].item():g}")
