"""mlx.distributed_config and `paceline topology` side by side on the same hosts.

    topology.py --mlx PROGRAM --paceline PROGRAM     compare; a line `ok NAME` or `FAILED NAME: why`
    topology.py --mlx PROGRAM --write FILE           record what MLX does, for tests without Python

Equal must be: the hostfile, byte for byte; the graph of --dot; the commands that --auto-setup runs
on each host; and whether there is a result at all.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

from hosts import install, macs

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../..")
ABC = ["studio-a", "studio-b", "studio-c", "studio-d", "studio-e"]


def mesh(count, times=1, first=1):
    """A cable, or several, for each pair."""
    free = [first] * count
    cables = []
    for _ in range(times):
        for a in range(count):
            for b in range(a + 1, count):
                cables.append(((a, free[a]), (b, free[b])))
                free[a] += 1
                free[b] += 1
    return cables


def ring(order, times=1):
    free = [1] * len(order)
    cables = []
    for _ in range(times):
        for at, a in enumerate(order):
            b = order[(at + 1) % len(order)]
            cables.append(((a, free[a]), (b, free[b])))
            free[a] += 1
            free[b] += 1
    return cables


ALL = [[], ["--backend", "ring"], ["--backend", "jaccl"], ["--backend", "jaccl-ring"], ["--dot"]]


def cases():
    """Name, hosts, argument lists."""
    two = ABC[:2]
    yield "two hosts, no cable", macs(two, []), [[], ["--dot"], ["--backend", "ring"]]
    yield "two hosts, one cable", macs(two, mesh(2), rdma=False), [[], ["--dot"], ["--env", "A=1", "--env", "B=\u00e9 \"x\""]]
    yield "two hosts, two cables, RDMA", macs(two, mesh(2, 2)), ALL
    yield "three in a mesh, RDMA", macs(ABC[:3], mesh(3)), ALL
    yield "three in a double mesh, RDMA", macs(ABC[:3], mesh(3, 2)), [[], ["--backend", "jaccl-ring"]]
    yield "three in a mesh, no RDMA", macs(ABC[:3], mesh(3), rdma=False), [[], ["--backend", "jaccl"]]
    yield "three in a row", macs(ABC[:3], mesh(3)[::2]), [[], ["--backend", "ring"], ["--dot"]]
    yield "four in a ring, RDMA", macs(ABC[:4], ring([0, 1, 2, 3])), ALL
    yield "four in a double ring, RDMA", macs(ABC[:4], ring([0, 2, 1, 3], 2)), ALL
    yield "four in a ring, no RDMA", macs(ABC[:4], ring([3, 1, 0, 2]), rdma=False), [[], ["--auto-setup"]]
    yield "four in a mesh, RDMA", macs(ABC[:4], mesh(4)), [[], ["--backend", "ring"], ["--auto-setup"]]
    yield "five in a ring, odd order", macs(ABC, ring([0, 3, 1, 4, 2])), [[], ["--backend", "ring"], ["--dot"]]
    odd = macs(ABC[:3], mesh(3), interfaces=lambda port: ["", "en11", "en2", "en9", "en3", "en1", "en4"][port])
    yield "interfaces in another order", odd, [[], ["--backend", "ring"], ["--dot"], ["--auto-setup"]]
    stranger = macs(ABC[:3], mesh(3) + [((0, 4), (7, 1))])
    yield "a cable to a stranger", stranger, [[], ["--dot"]]
    places = [{"en0": "192.0.2.1"}, {"en1": "192.0.2.2"}, {"en0": "192.0.2.3", "en1": "198.51.100.3"}]
    wifi = macs(ABC[:3], mesh(3), addresses=places)
    yield "addresses of en0 and en1", wifi, [[], ["--over", "ethernet"], ["--over", "ethernet", "--env", "A=1"]]
    many = macs([f"m{number}" for number in range(30)], mesh(2), ports=1)
    yield "thirty hosts", many, [["--dot"]]


class World:
    """Hosts in a folder, and what their administrators were asked to do."""

    def __init__(self, hosts):
        self.names = list(hosts)
        self.folder = tempfile.mkdtemp(prefix="topology-")
        os.mkdir(os.path.join(self.folder, "bin"))
        os.symlink(os.path.join(ROOT, "tests-data/topology/ssh"), os.path.join(self.folder, "bin/ssh"))
        install(os.path.join(self.folder, "hosts"), hosts)

    def run(self, command, args, extra=()):
        """What a tool makes of the hosts: code, hostfile, graph, commands by host."""
        output = os.path.join(self.folder, "out.json")
        words = [*command, "--hosts", ",".join(self.names), *args, *extra]
        if "--dot" not in args:
            words += ["--output-hostfile", output]
        env = dict(os.environ)
        env["PATH"] = os.path.join(self.folder, "bin") + ":" + env["PATH"]
        env["FAKE_SSH_HOSTS"] = os.path.join(self.folder, "hosts")
        ended = subprocess.run(
            words, env=env, input="\n" * 99, capture_output=True, text=True, timeout=60
        )
        found = {"code": ended.returncode, "file": take(output)}
        if "--dot" in args:
            found["dot"] = ended.stdout
        if "--auto-setup" in args:
            done = {name: take(os.path.join(self.folder, "hosts", name, "done")) for name in self.names}
            found["done"] = {name: text for name, text in done.items() if text}
        return found, ended.stderr

    def close(self):
        shutil.rmtree(self.folder)


def take(path):
    """The text of a file, which is removed; None without one."""
    if not os.path.exists(path):
        return None
    with open(path) as file:
        text = file.read()
    os.remove(path)
    return text


def compare_case(mlx, paceline, name, hosts, runs):
    """A line for each run."""
    world = World(hosts)
    lines = []
    for args in runs:
        title = f"topology: {name}: {' '.join(args) or 'no flags'}"
        theirs, _ = world.run([mlx], args)
        ours, said = world.run([paceline, "topology"], args, ["--yes"] if "--auto-setup" in args else [])
        theirs["code"], ours["code"] = bool(theirs["code"]), bool(ours["code"])
        if theirs == ours:
            lines.append(f"ok {title}")
        else:
            ours, theirs = json.dumps(ours), json.dumps(theirs)
            lines.append(f"FAILED {title}: {ours}, MLX {theirs}; {said.strip()[-300:]!r}")
    world.close()
    return lines


def compare(mlx, paceline):
    failed = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for lines in pool.map(lambda case: compare_case(mlx, paceline, *case), cases()):
            print("\n".join(lines), flush=True)
            failed += sum(line.startswith("FAILED") for line in lines)
    return failed


def record(mlx, path):
    """Writes hosts and results to a file."""
    recorded = []
    for name, hosts, runs in cases():
        world = World(hosts)
        results = [{"args": args, **world.run([mlx], args)[0]} for args in runs]
        world.close()
        recorded.append({"name": name, "hosts": hosts, "runs": results})
    origin = "scripts/mlx/topology.py --write, with mlx.distributed_config of MLX 0.32.4"
    with open(path, "w") as file:
        json.dump({"origin": origin, "cases": recorded}, file, indent=1)
        file.write("\n")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mlx", required=True)
    parser.add_argument("--paceline")
    parser.add_argument("--write")
    args, _ = parser.parse_known_args()
    if args.write:
        record(args.mlx, args.write)
        return
    sys.exit(1 if compare(args.mlx, args.paceline) else 0)


if __name__ == "__main__":
    main()
