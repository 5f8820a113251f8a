"""Arrays of other libraries as NumPy arrays over the same memory, and back.

`borrow` returns a C-contiguous NumPy array and the number of its element type. bfloat16, which
NumPy lacks, travels as uint16 with the number of bf16. `give_back` turns a NumPy result into the
kind of array that the caller passed. NumPy is imported with the first array, not with paceline.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from . import _native

#: Number of each element type, by paceline's name for it.
NUMBERS = {name: number for number, name in enumerate(_native.DTYPES)}

BF16 = NUMBERS["bf16"]

#: Number of each NumPy dtype that can travel.
KINDS = {
    np.dtype(dtype): NUMBERS[name]
    for name, dtype in {
        "bool": "bool", "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64",
        "u8": "uint8", "u16": "uint16", "u32": "uint32", "u64": "uint64",
        "f16": "float16", "f32": "float32", "f64": "float64", "complex64": "complex64",
    }.items()
}


def library(x: Any) -> str:
    """The top package that the type of `x` comes from, such as `torch`."""
    return type(x).__module__.partition(".")[0]


def borrow(x: Any) -> tuple[np.ndarray, int]:
    """`x` as a C-contiguous array, without a copy where its memory allows, and its kind.

    Python's numbers become int32, float32 and complex64, as with MLX; lists become arrays as by
    `numpy.asarray`, `bytes` an array of uint8.

    Raises:
        TypeError: the element type cannot travel.
    """
    if type(x) is not np.ndarray:
        x = _as_numpy(x)
    kind = BF16 if type(x) is _Bits else KINDS.get(x.dtype)
    if kind is None and not x.dtype.isnative:
        x = x.astype(x.dtype.newbyteorder("="))
        kind = KINDS.get(x.dtype)
    if kind is None:
        if x.dtype.name != "bfloat16":
            raise TypeError(f"arrays of {x.dtype} cannot be sent; send one of {_names()}")
        x, kind = x.view(np.uint16), BF16
    if not x.flags.c_contiguous:
        x = np.ascontiguousarray(x)
    return x, kind


def _names() -> str:
    return ", ".join([str(dtype) for dtype in KINDS] + ["bfloat16"])


#: What MLX makes of Python's numbers.
_SCALARS = {bool: np.bool_, int: np.int32, float: np.float32, complex: np.complex64}


def _as_numpy(x: Any) -> np.ndarray:
    if type(x) in _SCALARS:
        return np.asarray(x, _SCALARS[type(x)])
    name = library(x)
    if name == "torch":
        return _of_torch(x)
    if name == "mlx":
        return _of_mlx(x)
    if isinstance(x, (bytes, bytearray)):
        return np.frombuffer(x, np.uint8)
    if isinstance(x, np.ndarray) or not hasattr(x, "__dlpack__"):
        return np.asarray(x)
    try:
        return np.from_dlpack(x)
    except (BufferError, RuntimeError):  # another device, or a type that DLPack or NumPy lacks
        return np.asarray(x)


def _of_torch(x: Any) -> np.ndarray:
    import torch

    x = x.detach()
    if x.dtype == torch.bfloat16:
        return _marked(x.contiguous().view(torch.int16).cpu().numpy())
    return x.cpu().numpy()


def _of_mlx(x: Any) -> np.ndarray:
    import mlx.core as mx

    if x.dtype == mx.bfloat16:
        return _marked(np.asarray(x.view(mx.uint16)))
    return np.asarray(x)


class _Bits(np.ndarray):
    """bfloat16 in the memory of 16-bit integers."""


def _marked(bits: np.ndarray) -> np.ndarray:
    return bits.view(np.uint16).view(_Bits)


def give_back(result: np.ndarray, kind: int, like: Any) -> Any:
    """`result` as the kind of array that `like` is, on its device."""
    name = library(like)
    if name == "torch":
        import torch

        tensor = torch.from_numpy(result.view(np.int16) if kind == BF16 else result)
        return (tensor.view(torch.bfloat16) if kind == BF16 else tensor).to(like.device)
    if name == "mlx":
        import mlx.core as mx

        array = mx.array(result)
        return array.view(mx.bfloat16) if kind == BF16 else array
    if kind == BF16:
        result = result.view(np.dtype(sys.modules["ml_dtypes"].bfloat16))
    if type(like) is np.ndarray:
        return result
    space = getattr(like, "__array_namespace__", None)
    return space().asarray(result) if space and name != "numpy" else result


def kind_of(dtype: Any) -> tuple[np.dtype, int, str]:
    """NumPy's dtype, the number, and the library of a dtype as `recv` is given one."""
    name = library(dtype)
    text = str(dtype).rpartition(".")[2]
    if name in ("torch", "mlx"):
        if text == "bfloat16":
            return np.dtype(np.uint16), BF16, name
        own = np.dtype({"float": "float32", "double": "float64", "long": "int64",
                        "int": "int32", "half": "float16", "bool_": "bool"}.get(text, text))
    else:
        own = np.dtype(dtype)
    kind = BF16 if own.name == "bfloat16" else KINDS.get(own)
    if kind is None:
        raise TypeError(f"arrays of {dtype} cannot be received; receive one of {_names()}")
    return own, kind, name


def made(result: np.ndarray, kind: int, name: str) -> Any:
    """`result` as an array of the library called `name`."""
    if name == "torch":
        import torch

        return give_back(result, kind, torch.empty(0))
    if name == "mlx":
        import mlx.core as mx

        return give_back(result, kind, mx.zeros(0))
    return result
