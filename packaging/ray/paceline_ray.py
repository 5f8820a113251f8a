"""A cluster of paceline on the machines of a Ray cluster: an actor a machine, each with a node.

    python paceline_ray.py qwen3:8b --nodes 3

Needs `pip install ray paceline` on all machines. Actors that die are made again by Ray; the
cluster goes on meanwhile.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time

import ray

PORT = 52415


@ray.remote(num_cpus=1, max_restarts=-1)
class Node:
    """One machine's node, as long as the actor lives."""

    def __init__(self, token: str, peers: list[str]):
        self.home = tempfile.mkdtemp(prefix="paceline-")
        self.run("join", "--token-file", "-", text=token)
        options = [word for peer in peers for word in ("--peer", peer)]
        self.node = subprocess.Popen(["paceline", "up", *options], env=self.env())

    def env(self) -> dict[str, str]:
        return {**os.environ, "PACELINE_HOME": self.home}

    def run(self, *words: str, text: str | None = None) -> str:
        done = subprocess.run(["paceline", *words], env=self.env(), input=text, text=True,
                              check=True, stdout=subprocess.PIPE)
        return done.stdout

    def address(self) -> str:
        return ray.util.get_node_ip_address()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--nodes", type=int, default=2)
    arguments = parser.parse_args()
    ray.init()
    token = subprocess.run(["paceline", "key", "cluster", "show"], check=True, text=True,
                           stdout=subprocess.PIPE).stdout
    spread = Node.options(scheduling_strategy="SPREAD")
    first = spread.remote(token, [])
    peers = [ray.get(first.address.remote())]
    others = [spread.remote(token, peers) for _ in range(arguments.nodes - 1)]
    ray.get([node.address.remote() for node in others])
    print(ray.get(first.run.remote("load", arguments.model, "--nodes", str(arguments.nodes))))
    print(f"ready: http://{peers[0]}:{PORT}/v1 on that machine's loopback; Ctrl-C ends the cluster")
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main()
