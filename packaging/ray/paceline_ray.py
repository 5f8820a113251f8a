"""A cluster of paceline on the machines of a Ray cluster: an actor a machine, each with a node.

    python paceline_ray.py qwen3:8b --nodes 3
    python paceline_ray.py smollm2 --nodes 2 --ask "Hi"

Needs `pip install ray paceline` on all machines. Actors that die are made again by Ray; the
cluster goes on meanwhile. The models lie in the store of each machine's user.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import time

import ray

#: Ports of the API and of the cluster; where another program has one, the system chooses both.
PORTS = ((52415, 52416), (0, 0))

#: Seconds until all nodes have met.
MEETING = 120

PROGRAM = os.environ.get("PACELINE", "paceline")


@ray.remote(num_cpus=1, max_restarts=-1)
class Node:
    """One machine's node, as long as the actor lives."""

    def __init__(self, token: str, peers: list[str]):
        self.home = tempfile.mkdtemp(prefix="paceline-")
        store = pathlib.Path(os.environ.get("PACELINE_HOME", pathlib.Path.home() / ".paceline"), "models")
        store.mkdir(parents=True, exist_ok=True)
        os.symlink(store.absolute(), f"{self.home}/models")
        self.run("join", "--token-file", "-", text=token)
        options = [word for peer in peers for word in ("--peer", peer)]
        if not any(self.start([*options, "--port", str(api), "--control-port", str(control)])
                   for api, control in PORTS):
            raise RuntimeError("no node: what it printed says why")

    def start(self, options: list[str]) -> bool:
        """Whether the node is up; it says then at which ports."""
        self.node = subprocess.Popen([PROGRAM, "up", *options], env=self.env(), text=True,
                                     stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
        for line in self.node.stderr:
            sys.stderr.write(line)
            if found := re.match(r"listening on \S+:(\d+)$", line):
                self.port = int(found[1])
            if found := re.match(r"node .* on port (\d+)$", line):
                self.control = int(found[1])
                threading.Thread(target=self.forward, daemon=True).start()
                return True
        self.node.wait()
        return False

    def forward(self) -> None:
        for line in self.node.stderr:
            sys.stderr.write(line)

    def env(self) -> dict[str, str]:
        return {**os.environ, "PACELINE_HOME": self.home}

    def run(self, *words: str, text: str | None = None) -> str:
        done = subprocess.run([PROGRAM, *words], env=self.env(), input=text or "", text=True,
                              stdout=subprocess.PIPE, check=True)
        return done.stdout

    def address(self) -> str:
        """Where other nodes reach this one."""
        return f"{ray.util.get_node_ip_address()}:{self.control}"

    def api(self) -> str:
        """Where this machine's clients reach it."""
        return f"http://127.0.0.1:{self.port}/v1"

    def alive(self) -> int:
        """Nodes that this one sees alive, itself too; 0 before it is up."""
        done = subprocess.run([PROGRAM, "nodes", "--json"], env=self.env(), text=True,
                              capture_output=True, check=False, stdin=subprocess.DEVNULL)
        nodes = json.loads(done.stdout) if done.returncode == 0 else []
        return sum(node["state"] == "alive" for node in nodes)

    def end(self) -> None:
        self.node.terminate()
        self.node.wait()


def meet(first, count: int) -> None:
    until = time.monotonic() + MEETING
    while ray.get(first.alive.remote()) < count:
        if time.monotonic() > until:
            raise SystemExit(f"after {MEETING} s the {count} nodes have not met")
        time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ask", metavar="PROMPT", help="answer this and end")
    arguments = parser.parse_args()
    ray.init()
    token = subprocess.run([PROGRAM, "key", "cluster", "show"], check=True, text=True,
                           stdout=subprocess.PIPE).stdout
    spread = Node.options(scheduling_strategy="SPREAD")
    first = spread.remote(token, [])
    others: list = []
    try:
        peers = [ray.get(first.address.remote())]
        others += [spread.remote(token, peers) for _ in range(arguments.nodes - 1)]
        meet(first, arguments.nodes)
        print(ray.get(first.run.remote("load", arguments.model, "--nodes", str(arguments.nodes))), end="")
        if arguments.ask is not None:
            print(ray.get(first.run.remote("run", arguments.model, arguments.ask)))
            return
        print(f"ready: {ray.get(first.api.remote())} on {peers[0]}; Ctrl-C ends the cluster")
        while True:
            time.sleep(60)
    finally:
        ray.get([node.end.remote() for node in [*others, first]])


if __name__ == "__main__":
    main()
