"""Puts a paceline rank in the place of `mx.distributed`.

The calls of this process go over a loopback connection to a Rust process, which is the rank and
whose group is paceline's. Everything is eager: results are host buffers. Derivatives are MLX's:
reductions hand the cotangent through, a gather takes this rank's part.
"""

import atexit
import os
import socket
import subprocess

import mlx.core as mx
import numpy as np

# Of a ring's tests, or of mpirun.
RANK, SIZE = (
    int(os.environ.get(ours) or os.environ.get(theirs) or 0)
    for ours, theirs in [
        ("MLX_RANK", "OMPI_COMM_WORLD_RANK"),
        ("COMM_TEST_SIZE", "OMPI_COMM_WORLD_SIZE"),
    ]
)

NAMES = {
    mx.bool_: "bool",
    mx.int8: "i8",
    mx.int16: "i16",
    mx.int32: "i32",
    mx.int64: "i64",
    mx.uint8: "u8",
    mx.uint16: "u16",
    mx.uint32: "u32",
    mx.uint64: "u64",
    mx.float16: "f16",
    mx.bfloat16: "bf16",
    mx.float32: "f32",
    mx.float64: "f64",
    mx.complex64: "complex64",
}


def to_bytes(array):
    array = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return np.ascontiguousarray(np.array(array)).tobytes()


def to_array(data, shape, dtype):
    host = {mx.bfloat16: "uint16", mx.bool_: "bool"}.get(dtype) or str(dtype).split(".")[-1]
    array = mx.array(np.frombuffer(data, host)).reshape(shape)
    return array.view(mx.bfloat16) if dtype == mx.bfloat16 else array


class Group:
    """This process's rank."""

    def __init__(self):
        listener = socket.create_server(("127.0.0.1", 0))
        env = dict(os.environ, COMM_TEST_CONTROL="%s:%d" % listener.getsockname())
        command = [env["COMM_TEST_BINARY"], "mlx_ring::cases::serve", "--exact", "--nocapture"]
        self.process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
        listener.settimeout(60)
        connection, _ = listener.accept()
        self.stream = connection.makefile("rwb")
        connection.close()
        atexit.register(self.end)

    def end(self):
        """Lets the rank leave: a rank of MPI has to, before this process ends."""
        self.stream.close()
        self.process.wait()

    def call(self, name, dtype, payload=b"", answer=0, peer=0):
        """One call: a line and bytes out, a line and bytes back."""
        line = f"{name} {NAMES[dtype]} {len(payload)} {answer} {peer}\n"
        self.stream.write(line.encode() + payload)
        self.stream.flush()
        word, _, rest = self.stream.readline().decode().strip().partition(" ")
        if word != "ok":
            raise RuntimeError(rest)
        return self.stream.read(int(rest))

    def rank(self):
        return RANK

    def size(self):
        return SIZE

    def split(self, color, key=-1):
        self.call("split", mx.uint8)

    def reduce(self, name, x):
        x = mx.array(x)
        data = to_bytes(x)
        return to_array(self.call(name, x.dtype, data, len(data)), x.shape, x.dtype)

    def gather(self, x):
        data = to_bytes(x)
        shape = (x.shape[0] * self.size(), *x.shape[1:]) if x.ndim else (self.size(),)
        data = self.call("gather", x.dtype, data, len(data) * self.size())
        return to_array(data, shape, x.dtype)


def passing(function):
    """`function` of one array, whose derivative is the identity."""
    function = mx.custom_function(function)
    function.vjp(lambda primals, cotangents, outputs: cotangents)
    return function


def install():
    """Replaces the calls of `mx.distributed`, and returns the group."""
    group = Group()
    distributed = mx.distributed

    def init(strict=False, backend="any", **options):
        return group if not options else original(strict, backend, **options)

    def all_gather(x, **_):
        def own_part(primal, cotangent, _):
            if primal.ndim == 0:
                return cotangent[group.rank()]
            start = group.rank() * primal.shape[0]
            return cotangent[start : start + primal.shape[0]]

        function = mx.custom_function(group.gather)
        function.vjp(own_part)
        return function(x)

    def send(x, to, **_):
        group.call("send", x.dtype, to_bytes(x), 0, to)
        return x

    def recv_like(x, source, **_):
        data = group.call("recv", x.dtype, b"", x.nbytes, source)
        return to_array(data, x.shape, x.dtype)

    original = distributed.init
    distributed.init = init
    for name in ("sum", "max", "min"):
        reduce = lambda x, name=name, **_: passing(lambda x: group.reduce(name, x))(x)
        setattr(distributed, f"all_{name}", reduce)
    distributed.all_gather = all_gather
    distributed.send = send
    distributed.recv_like = recv_like
    return group
