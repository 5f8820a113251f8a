"""One rank of another library: sums when it is told to, and says how long that took.

Called as `mlx|mpi PORT`. Connects to the port on loopback, says its rank, and then reads lines
`[bytes, calls]`; rank 0 answers each with the median time of a call in microseconds. Between lines
it sleeps, so that whoever else is measured has the machine.
"""

import json
import socket
import sys
import time

which, port = sys.argv[1], int(sys.argv[2])
if which == "mlx":
    import mlx.core as mx

    group = mx.distributed.init(strict=True, backend="ring")
    rank = group.rank()

    def make(length):
        x = mx.ones((length,))
        mx.eval(x)
        return lambda: mx.eval(mx.distributed.all_sum(x, stream=mx.cpu))

else:
    import ctypes

    lib = ctypes.CDLL("libmpi.so.40", mode=ctypes.RTLD_GLOBAL)
    lib.MPI_Init(None, None)

    def symbol(name):
        return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(lib, name)))

    world, f32, add = map(symbol, ("ompi_mpi_comm_world", "ompi_mpi_float", "ompi_mpi_op_sum"))
    number = ctypes.c_int()
    lib.MPI_Comm_rank(world, ctypes.byref(number))
    rank = number.value

    def make(length):
        a, b = (ctypes.c_float * length)(), (ctypes.c_float * length)()
        return lambda: lib.MPI_Allreduce(a, b, length, f32, add, world)


stream = socket.create_connection(("127.0.0.1", port)).makefile("rw")
print(rank, file=stream, flush=True)
for line in stream:
    length, calls = json.loads(line)
    call = make(max(length // 4, 1))
    for _ in range(3):
        call()
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    if rank == 0:
        print(sorted(times)[len(times) // 2], file=stream, flush=True)
if which == "mpi":
    lib.MPI_Finalize()
