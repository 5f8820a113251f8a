"""paceline: pool machines, run models too large for one of them, and compute together.

- `paceline.LLM`: a model that answers, over a node that this process starts or one that runs.
- `paceline.connect`: array jobs, own functions and training on several machines.
- `paceline.distributed`: collectives between processes, with MLX's names.
- `paceline.errors`: what is raised.

Importing this package imports neither NumPy nor any other array library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._native import VERSION as __version__

if TYPE_CHECKING:
    from . import distributed, errors
    from .compute import Machines, connect
    from .llm import LLM, Answer, AsyncLLM

__all__ = ["LLM", "Answer", "AsyncLLM", "Machines", "__version__", "connect", "distributed",
           "errors"]


def __getattr__(name: str) -> Any:
    import importlib

    if name in ("distributed", "errors"):
        return importlib.import_module(f".{name}", __name__)
    if name in ("LLM", "AsyncLLM", "Answer"):
        return getattr(importlib.import_module(".llm", __name__), name)
    if name in ("Machines", "connect"):
        return getattr(importlib.import_module(".compute", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
