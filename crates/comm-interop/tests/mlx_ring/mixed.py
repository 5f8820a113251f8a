"""One real MLX rank of a mixed ring: makes the calls of a plan and checks what they give.

    mixed.py PLAN        a JSON list of [call, dtype, elements]; MLX_RANK and MLX_HOSTFILE are set

The Rust ranks of tests/mlx_ring.rs make the same calls with the same inputs. Prints `done` at the
end; whatever is wrong ends the process.
"""

import json
import sys

import mlx.core as mx

DTYPES = {
    "bool": mx.bool_,
    "i8": mx.int8,
    "i16": mx.int16,
    "i32": mx.int32,
    "i64": mx.int64,
    "u8": mx.uint8,
    "u16": mx.uint16,
    "u32": mx.uint32,
    "u64": mx.uint64,
    "f16": mx.float16,
    "bf16": mx.bfloat16,
    "f32": mx.float32,
    "f64": mx.float64,
    "complex64": mx.complex64,
}


def whole(rank, length, dtype):
    """Whole numbers below 11: sums of a few are exact in every type."""
    return ((mx.arange(length) * 3 + rank * 7) % 11).astype(dtype)


def expect(holds, *what):
    if not holds:
        sys.exit(f"rank {RANK}: wrong result: {what}")


def reduction(call, merge, dtype, length):
    got = getattr(mx.distributed, call)(whole(RANK, length, dtype))
    parts = [whole(rank, length, dtype) for rank in range(SIZE)]
    expected = parts[0]
    for part in parts[1:]:
        expected = merge(expected, part)
    expect(got.shape == expected.shape and bool(mx.all(got == expected)), call, dtype, length)


def gather(dtype, length):
    got = mx.distributed.all_gather(whole(RANK, length, dtype))
    expected = mx.concatenate([whole(rank, length, dtype) for rank in range(SIZE)])
    expect(got.shape == expected.shape and bool(mx.all(got == expected)), "gather", dtype, length)


def message(dtype, length):
    """To the right, then to the left; rank 0 receives first, so that nobody gets stuck."""
    own = whole(RANK, length, dtype)
    for step in (1, SIZE - 1):
        to, source = (RANK + step) % SIZE, (RANK - step) % SIZE
        if RANK != 0:
            mx.eval(mx.distributed.send(own, to))
        got = mx.distributed.recv_like(own, source)
        mx.eval(got)
        if RANK == 0:
            mx.eval(mx.distributed.send(own, to))
        expect(bool(mx.all(got == whole(source, length, dtype))), "message", dtype, length)


def rough(dtype, length):
    """A sum that rounds: all ranks must hold the same bits."""
    own = (mx.sin(mx.arange(length) * 0.37 + RANK) * 1000).astype(dtype)
    total = mx.distributed.all_sum(own)
    mx.eval(total)
    every = mx.distributed.all_gather(total).reshape(SIZE, length)
    bits = every.view(mx.uint8)
    expect(bool(mx.all(bits == bits[0])), "bits of a rough sum", dtype, length)


def strided(dtype, length):
    """A sum of every other element of an array."""
    own = whole(RANK, length, dtype)
    own = mx.stack([own, mx.zeros_like(own)], axis=1)[:, 0]
    expected = sum(whole(rank, length, dtype) for rank in range(SIZE))
    expect(bool(mx.all(mx.distributed.all_sum(own) == expected)), "strided", dtype, length)


CALLS = {
    "barrier": lambda dtype, length: mx.eval(mx.distributed.all_sum(mx.array(1.0))),
    "sum": lambda dtype, length: reduction(
        "all_sum", mx.logical_or if dtype == mx.bool_ else mx.add, dtype, length
    ),
    "max": lambda dtype, length: reduction("all_max", mx.maximum, dtype, length),
    "min": lambda dtype, length: reduction("all_min", mx.minimum, dtype, length),
    "gather": gather,
    "message": message,
    "rough": rough,
    "strided": strided,
}

if __name__ == "__main__":
    mx.set_default_device(mx.cpu)
    group = mx.distributed.init(strict=True, backend="ring")
    RANK, SIZE = group.rank(), group.size()
    for call, dtype, length in json.load(open(sys.argv[1])):
        CALLS[call](DTYPES[dtype], length)
    print("done", flush=True)
