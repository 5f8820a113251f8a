"""Python MLX programs, unchanged, started by `paceline launch`.

    ranks.py --python PROGRAM --mlx PROGRAM --paceline PROGRAM

A line `ok NAME`, `FAILED NAME: why` or `SKIPPED NAME: why` for each case. `--mlx` is MLX's topology
tool, for the case that goes from cables to sums: namespaces of Linux as hosts.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
PROGRAM = os.path.join(HERE, "program.py")
FAKE_SSH = os.path.join(HERE, "../../tests-data/topology/ssh")


def free_ports(count):
    """The first of so many ports that nobody uses."""
    for first in range(41000, 60000, count):
        sockets = []
        try:
            for port in range(first, first + count):
                sockets.append(socket.create_server(("127.0.0.1", port)))
            return first
        except OSError:
            continue
        finally:
            for one in sockets:
                one.close()
    raise OSError("no free ports")


class World:
    def __init__(self, args):
        self.args = args
        self.folder = tempfile.mkdtemp(prefix="ranks-")
        for name in ["bin", "tmp", "hosts/a", "hosts/b"]:
            os.makedirs(self.path(name))
        os.symlink(FAKE_SSH, self.path("bin/ssh"))
        self.mlx_launch = os.path.join(os.path.dirname(args.mlx), "mlx.launch")
        self.failed = 0

    def path(self, name):
        return os.path.join(self.folder, name)

    def env(self):
        env = dict(os.environ, TMPDIR=self.path("tmp"), FAKE_SSH_HOSTS=self.path("hosts"))
        env["PATH"] = self.path("bin") + ":" + env["PATH"]
        # mpirun refuses root otherwise.
        return env | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

    def tool(self, *words, **env):
        return subprocess.run(
            words, env=self.env() | env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100
        )

    def launch(self, *flags, program):
        return self.tool(self.args.paceline, "launch", *flags, "--", self.args.python, PROGRAM, *program)

    def note(self, name, problem):
        if problem:
            self.failed += 1
        print(f"FAILED {name}: {problem}" if problem else f"ok {name}", flush=True)

    def sums(self, name, size, *flags, backend):
        ended = self.launch(*flags, program=[backend])
        expected = [f"[{rank}] {rank} of {size}: {size * (size + 1) // 2}" for rank in range(size)]
        lines = sorted(ended.stdout.splitlines())
        left = os.listdir(self.path("tmp"))
        good = ended.returncode == 0 and lines == expected and not left
        self.note(f"ranks: {name}", "" if good else f"{ended}, left {left}")

    def fails(self, name, *flags, backend):
        start = time.monotonic()
        ended = self.launch(*flags, program=[backend, "fail"])
        took = time.monotonic() - start
        good = ended.returncode == 3 and took < 30
        self.note(f"ranks: {name}", "" if good else f"{ended} after {took:.1f} s")


def rust_ranks_of_mlxs_launcher(world):
    """MLX's launcher tells of nothing by its exit code, so what rank 0 prints has to do."""
    program = [world.args.paceline, "bench", "comm", "--transport", "mlx-ring", "--plaintext"]
    ended = world.tool(
        world.mlx_launch, "-n", "2", "-p", str(free_ports(8)), "--", *program, "--max-bytes", "64", "--json"
    )
    good = '"ranks":2' in ended.stdout and '"op":"all_reduce"' in ended.stdout
    world.note("ranks: Rust ranks that mlx.launch starts", "" if good else str(ended))


def ip(*words):
    subprocess.run(["ip", *words], capture_output=True, text=True, check=True)


def namespaces(world, names):
    """Hosts n0 to n2 with addresses 10.78.0.1 and on, and a bridge between them."""
    bridge = names[3]
    ip("netns", "add", bridge)
    ip("-n", bridge, "link", "add", "br0", "type", "bridge")
    ip("-n", bridge, "link", "set", "br0", "up")
    for number, host in enumerate(names[:3]):
        ip("netns", "add", host)
        ip("-n", bridge, "link", "add", f"p{number}", "type", "veth", "peer", "name", "eth0", "netns", host)
        ip("-n", bridge, "link", "set", f"p{number}", "master", "br0", "up")
        ip("-n", host, "addr", "add", f"10.78.0.{number + 1}/24", "dev", "eth0")
        ip("-n", host, "link", "set", "eth0", "up")
        ip("-n", host, "link", "set", "lo", "up")
        os.makedirs(world.path(f"hosts/n{number}/bin"))
        with open(world.path(f"hosts/n{number}/netns"), "w") as file:
            file.write(host)


def through_namespaces(world):
    name = "ranks: topology --over ethernet and a ring between namespaces"
    if not shutil.which("ip"):
        print(f"SKIPPED {name}: there is no ip", flush=True)
        return
    names = [f"pr{os.getpid()}x{number}" for number in range(4)]
    try:
        try:
            namespaces(world, names)
        except (OSError, subprocess.CalledProcessError) as error:
            why = getattr(error, "stderr", None) or str(error)
            print(f"SKIPPED {name}: no network namespaces: {why.strip()}", flush=True)
            return
        hosts = "n0,n1,n2"
        own, theirs = world.path("own.json"), world.path("theirs.json")
        found = world.tool(world.args.paceline, "topology", "--over", "ethernet", "--hosts", hosts, "--output", own)
        world.note(f"{name}: addresses", "" if found.returncode == 0 else str(found))
        world.sums("a ring between namespaces", 3, "--hostfile", own, backend="ring")
        by_mlx = [world.mlx_launch, "--hostfile", own, "--backend", "ring", "--"]
        # What MLX has a host run is for bash.
        ended = world.tool(*by_mlx, world.args.python, PROGRAM, "ring", FAKE_SSH_SHELL="/bin/bash")
        # Beside that MLX prints the name of a temporary file of its own.
        good = {f"{rank} of 3: 6" for rank in range(3)} <= set(ended.stdout.splitlines())
        world.note("ranks: mlx.launch with the hostfile of paceline topology", "" if good else str(ended))
        # MLX asks a Mac's ipconfig, which here asks the kernel.
        for number in range(3):
            script = world.path(f"hosts/n{number}/bin/ipconfig")
            with open(script, "w") as file:
                file.write("#!/bin/sh\n[ $2 = en0 ] && ip -4 -o addr show eth0 | sed 's/.*inet //; s,/.*,,'\n")
            os.chmod(script, 0o755)
        world.tool(world.args.mlx, "--over", "ethernet", "--hosts", hosts, "--output", theirs)
        same = open(own).read() == open(theirs).read()
        world.note("topology: --over ethernet, live, as MLX", "" if same else f"{open(own).read()} {open(theirs).read()}")
    finally:
        for one in names:
            subprocess.run(["ip", "netns", "del", one], capture_output=True)


def main():
    parser = argparse.ArgumentParser()
    for flag in ["--python", "--mlx", "--paceline"]:
        parser.add_argument(flag, required=True)
    world = World(parser.parse_args())
    port = lambda: str(free_ports(8))
    world.sums("a ring of 2", 2, "-n", "2", "-p", port(), backend="ring")
    world.sums("a ring of 3, 2 connections", 3, "-n", "3", "--connections-per-ip", "2", "-p", port(), backend="ring")
    world.fails("a ring, one rank of which fails", "-n", "3", "-p", port(), backend="ring")
    hostfile = world.path("hosts.json")
    with open(hostfile, "w") as file:
        json.dump([{"ssh": host, "ips": ["127.0.0.1"]} for host in "ab"], file)
    world.sums("a ring by ssh", 2, "--hostfile", hostfile, "-p", port(), backend="ring")
    if shutil.which("mpirun"):
        mpi = ["--backend", "mpi", "--mpi-arg", "--oversubscribe"]
        world.sums("mpi, 2 ranks", 2, "-n", "2", *mpi, backend="mpi")
        world.sums("mpi, 3 ranks", 3, "-n", "3", *mpi, backend="mpi")
        world.fails("mpi, one rank of which fails", "-n", "2", *mpi, backend="mpi")
    else:
        print("SKIPPED ranks: mpi: there is no mpirun", flush=True)
    through_namespaces(world)
    rust_ranks_of_mlxs_launcher(world)  # last: MLX's launcher leaves temporary files
    shutil.rmtree(world.folder)
    sys.exit(1 if world.failed else 0)


if __name__ == "__main__":
    main()
