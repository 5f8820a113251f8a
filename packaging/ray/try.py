"""Runs paceline_ray.py without Ray: actors are objects of this process.

    PACELINE=BINARY python try.py MODEL --nodes 2 --ask "Hi"

The module `ray` here does what the script asks of it and no more.
"""

from __future__ import annotations

import runpy
import sys
import types
from pathlib import Path


class Method:
    def __init__(self, call):
        self.call = call

    def remote(self, *arguments, **named):
        return self.call(*arguments, **named)


class Actor:
    def __init__(self, own):
        self.own = own

    def __getattr__(self, name: str) -> Method:
        return Method(getattr(self.own, name))


class Kind:
    """What `ray.remote` makes of a class."""

    def __init__(self, made):
        self.made = made

    def options(self, scheduling_strategy: str) -> Kind:
        assert scheduling_strategy == "SPREAD"
        return self

    def remote(self, *arguments) -> Actor:
        return Actor(self.made(*arguments))


def stand_in() -> types.ModuleType:
    ray = types.ModuleType("ray")
    ray.init = lambda: None
    ray.get = lambda result: result
    ray.remote = lambda num_cpus, max_restarts: Kind
    ray.util = types.SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
    return ray


if __name__ == "__main__":
    sys.modules["ray"] = stand_in()
    runpy.run_path(str(Path(__file__).with_name("paceline_ray.py")), run_name="__main__")
