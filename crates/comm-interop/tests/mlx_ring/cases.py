"""The cases of MLX's ring suite, by the same names, written anew.

    cases.py mlx|paceline [common]     the last: only those of all of MLX's suites

Ranks of both kinds run this script at once and form one ring: `mlx` calls MLX's own ring,
`paceline` calls a Rust rank through shim.py. MLX is lazy and the shim is not, so results are
computed at once in both, in the order of the program. Prints `ok CASE` for each case, and `done`
with how many there are.
"""

import math
import sys

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import shard_inplace, shard_linear
from mlx.nn.utils import average_gradients, clip_grad_norm_sharded

import shim

COMMON = [
    "test_average_gradients",
    "test_all_reduce",
    "test_donation",
    "test_shard_linear",
    "test_shard_predicate",
    "test_all_gather",
    "test_clip_grad_norm_sharded",
    "test_jaccl_all_gather_factory_validation",
]

ATOL, RTOL = 1e-6, 1e-4
SHAPES = [(7,), (10,), (1024,), (1024, 1024)]


def close(a, b, atol=ATOL, rtol=RTOL):
    assert mx.allclose(a, b, atol=atol, rtol=rtol), mx.abs(a - b).max()


def fails(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def inputs(shape, dtype):
    """The inputs of all ranks, the same everywhere."""
    uniform = mx.random.uniform(shape=(SIZE, *shape), key=mx.random.key(0))
    return (uniform * 10).astype(dtype)


def check_reductions(dtypes):
    for dtype, tolerance in dtypes:
        for shape in SHAPES:
            x = inputs(shape, dtype)
            difference = (mx.distributed.all_sum(x[RANK]) - x.sum(0)).abs()
            difference = difference / x.sum(0).abs() if tolerance else difference
            assert difference.max() <= tolerance, (dtype, shape)
            assert mx.all(mx.distributed.all_max(x[RANK]) == x.max(0)), (dtype, shape)
            assert mx.all(mx.distributed.all_min(x[RANK]) == x.min(0)), (dtype, shape)


def check_gathers(dtypes):
    for dtype in dtypes:
        gathered = mx.distributed.all_gather(mx.ones((2, 2, 4), dtype=dtype))
        assert gathered.shape == (SIZE * 2, 2, 4) and mx.all(gathered == 1)


def test_groups():
    again = mx.distributed.init()
    assert (again.rank(), again.size()) == (RANK, SIZE)
    error = fails(RuntimeError, lambda: again.split(RANK % 2))
    assert "ring" in str(error)


def test_all_reduce():
    exact = [(dtype, 0) for dtype in (mx.int8, mx.uint8, mx.int32, mx.uint32)]
    check_reductions([*exact, (mx.float32, 1e-6), (mx.float16, 5e-3), (mx.bfloat16, 1e-1)])


def test_all_reduce_extra():
    check_reductions([(mx.int16, 0), (mx.uint16, 0), (mx.complex64, 1e-6)])


def test_all_gather():
    narrow = [mx.int8, mx.uint8, mx.int32, mx.uint32]
    check_gathers([*narrow, mx.float32, mx.float16, mx.bfloat16])


def test_all_gather_extra():
    check_gathers([mx.int16, mx.uint16, mx.complex64])


def test_all_gather_vjp():
    first = mx.value_and_grad(lambda x: mx.distributed.all_gather(x)[0])
    value, slope = first(mx.array(1.0))
    mx.eval(value, slope)  # MLX alone would not gather: the slope does not need the value
    assert value.item() == 1.0
    assert slope.item() == (1.0 if RANK == 0 else 0.0)


def test_send_recv():
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    integers = [mx.int8, mx.uint8, mx.int16, mx.uint16, mx.int32, mx.uint32]
    for dtype in [*integers, mx.float32, mx.float16, mx.bfloat16, mx.complex64]:
        for shape in SHAPES:
            x = inputs(shape, dtype)
            if RANK % 2 == 0:
                mx.eval(mx.distributed.send(x[RANK], right))
            got = mx.distributed.recv_like(x[RANK], left)
            mx.eval(got)
            if RANK % 2 == 1:
                mx.eval(mx.distributed.send(x[RANK], right))
            assert mx.all(got == x[left]), (dtype, shape)


def test_average_gradients():
    gradients = [mx.ones(10) for _ in range(10)]
    all_sum = mx.distributed.all_sum
    for options, expected in [({}, 1), ({"all_reduce_size": 200}, 2), ({"all_reduce_size": 0}, 10)]:
        calls = []
        mx.distributed.all_sum = lambda x, **more: calls.append(x.dtype) or all_sum(x, **more)
        try:
            averages = average_gradients(gradients, **options)
            mx.eval(averages)
        finally:
            mx.distributed.all_sum = all_sum
        assert len(averages) == 10 and all(mx.all(average == 1) for average in averages)
        assert calls == [mx.float32] * expected, (options, calls)


def test_donation():
    """Scaling a sum takes no more memory than the sum; of MLX's own calls only."""
    x, scale = mx.random.normal((1024,)), mx.array(2.0)
    mx.eval(x)
    peaks = []
    for after in (lambda y: y, lambda y: y * scale):
        mx.synchronize()
        mx.reset_peak_memory()
        mx.eval(after(LAZY_SUM(x)))
        mx.synchronize()
        peaks.append(mx.get_peak_memory())
    assert KIND != "mlx" or peaks[0] == peaks[1], peaks


def own_part(width):
    return slice(RANK * width // SIZE, (RANK + 1) * width // SIZE)


def check_sharded(linear, x, exact):
    """A linear layer against itself, cut by outputs and by inputs."""
    part = (slice(None), own_part(1024))
    by_outputs = shard_linear(linear, "all-to-sharded")
    by_inputs = shard_linear(linear, "sharded-to-all")
    y = linear(x)
    close(by_inputs(x[part]), y)
    close(by_outputs(x), y[part], *(() if not exact else (1e-8, 1e-5)))
    return by_outputs, by_inputs


def test_shard_linear():
    mx.random.seed(0xF0F0F0F0)
    x = mx.random.normal((4, 1024))
    linear = nn.Linear(1024, 1024, bias=True)
    check_sharded(linear, x, False)
    check_sharded(linear.to_quantized(), x, True)
    quantized = linear.to_quantized(group_size=32, bits=8, mode="mxfp8")
    for shard in check_sharded(quantized, x, True):
        assert shard.mode == "mxfp8" and shard.get("biases") is None
    check_sharded_gradients()


def check_sharded_gradients():
    whole = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)))
    kinds = ["all-to-sharded", "sharded-to-all"] * 2
    sharded = nn.Sequential(*(shard_linear(l, k) for l, k in zip(whole.layers, kinds)))
    x, y = mx.random.normal((4, 128)), mx.random.normal((4, 128))

    def loss(model, x, y):
        return (model(x) * y).sum()

    loss_1, expected = nn.value_and_grad(whole, loss)(whole, x, y)
    loss_2, got = nn.value_and_grad(sharded, loss)(sharded, x, y)
    close(loss_1, loss_2, 1e-8, 1e-4)
    part = own_part(128)
    for layer, (a, b) in enumerate(zip(expected["layers"], got["layers"])):
        rows = layer % 2 == 0
        close(a["weight"][part] if rows else a["weight"][:, part], b["weight"])
        close(a["bias"][part] if rows else a["bias"], b["bias"])


class Convolution(nn.Module):
    def __init__(self, inputs, outputs, sums):
        super().__init__()
        self.sums = sums
        self.conv = nn.Conv2d(inputs, outputs, kernel_size=3)

    def __call__(self, x):
        x = self.conv(x)
        return mx.distributed.all_sum(x) if self.sums else x


def test_shard_predicate():
    mx.random.seed(0xF0F0F0F0)
    widths = [(3, 128), (128, 128), (128, 128), (128, 3)]
    whole = nn.Sequential(*(Convolution(*width, False) for width in widths))
    sharded = nn.Sequential(*(Convolution(*w, i % 2 == 1) for i, w in enumerate(widths)))

    def axis(path, weight):
        _, layer, *_, name = path.split(".")
        if int(layer) % 2 == 0:
            return 0
        return None if name == "bias" else -1

    sharded.update(whole.parameters())
    shard_inplace(sharded, axis)
    x = mx.random.normal((4, 16, 16, 3))
    close(whole(x), sharded(x))


def test_clip_grad_norm_sharded():
    gradients = {"a": mx.full((4, 3), 3.0), "b": mx.full((5,), 3.0)}
    norm = math.sqrt(SIZE * 17) * 3
    for limit, scale in [(1e9, 1.0), (1.0, 1 / (norm + 1e-6))]:
        clipped, got = clip_grad_norm_sharded(gradients, max_norm=limit, group=GROUP)
        mx.eval(clipped, got)
        close(got, mx.array(norm))
        for name, gradient in gradients.items():
            close(clipped[name], gradient * scale)


def test_jaccl_all_gather_factory_validation():
    factory = lambda rank, size: lambda data, n_bytes: b""
    fails(ValueError, lambda: mx.distributed.init(backend="ring", all_gather_factory=factory))
    fails(TypeError, lambda: mx.distributed.init(backend="jaccl", all_gather_factory="none"))


def eager():
    """MLX's own reductions, at once and with their own derivatives."""
    for name in ("all_sum", "all_max", "all_min"):
        lazy = getattr(mx.distributed, name)

        def at_once(x, lazy=lazy):
            y = lazy(x)
            mx.eval(y)
            return y

        passing = shim.passing(at_once)
        setattr(mx.distributed, name, lambda x, passing=passing, **_: passing(mx.array(x)))


if __name__ == "__main__":
    KIND = sys.argv[1]
    mx.set_default_device(mx.cpu)
    LAZY_SUM = mx.distributed.all_sum
    if KIND == "mlx":
        GROUP = mx.distributed.init(strict=True, backend="ring")
        eager()
    else:
        GROUP = shim.install()
        LAZY_SUM = mx.distributed.all_sum
    RANK, SIZE = GROUP.rank(), GROUP.size()
    common = "common" in sys.argv
    cases = COMMON if common else [name for name in list(globals()) if name.startswith("test_")]
    # mpirun weaves what ranks print, not always by whole lines; one that fails says so anyway.
    speaks = RANK == 0 or not common
    for name in cases:
        globals()[name]()
        if speaks:
            print("ok", name, flush=True)
    if speaks:
        print("done", len(cases), flush=True)
