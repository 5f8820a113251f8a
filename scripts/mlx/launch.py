"""mlx.launch and `paceline launch` side by side: what each rank is given must be the same.

    launch.py --mlx PROGRAM --paceline PROGRAM     a line `ok NAME` or `FAILED NAME: why` for each case

Compared are the variables that MLX's backends read, the contents of the files that they name, the
variables of hostfile and command line, the arguments and the folder.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../..")

PROGRAM = """#!/bin/sh
{
    env | grep -E '^(MLX|NCCL|CUDA_VISIBLE|JACCL|COLUMNS|LINES|V[0-9])' |
        grep -vE '^(MLX_HOSTFILE|MLX_IBV_DEVICES)=' | sort
    echo "hostfile <$([ -z "$MLX_HOSTFILE" ] || cat "$MLX_HOSTFILE")>"
    echo "devices <$([ -z "$MLX_IBV_DEVICES" ] || cat "$MLX_IBV_DEVICES")>"
    pwd
    printf '<%s>' "$0" "$@"
} >"$OUT/$MLX_RANK" 2>&1
"""

RDMA = {
    "backend": "jaccl",
    "envs": ["V1=of the file", "V2=it's \"quoted\" $HOME"],
    "hosts": [
        {"ssh": "a", "ips": ["10.0.0.1"], "rdma": [None, "rdma_en5", ["rdma_en2", "rdma_en3"]]},
        {"ssh": "b", "ips": [], "rdma": ["rdma_en4", None, "rdma_en5"]},
        {"ssh": "127.0.0.1", "ips": ["10.0.0.3"], "rdma": ["rdma_en4", "rdma_en5", None]},
    ],
}
BARE = [{"ssh": "a", "ips": ["10.0.0.1", "10.0.1.1"]}, {"ssh": "b", "ips": ["10.0.0.2", "10.0.1.2"]}]


def cases(files):
    yield "one rank", []
    yield "four local ranks", ["-n", "4"]
    yield "a ring of addresses", ["--hosts", "10.0.0.1,10.0.0.2", "-n", "2", "-p", "7000"]
    yield "a bare hostfile", ["--hostfile", files["bare"], "--connections-per-ip", "3"]
    yield "a ring of the hostfile of jaccl", ["--hostfile", files["ring"], "--backend", "ring", "--env", "V1=own"]
    yield "jaccl", ["--hostfile", files["rdma"]]
    yield "jaccl-ring", ["--hostfile", files["rdma"], "--backend", "jaccl-ring", "--starting-port", "99"]
    yield "nccl", ["-n", "2", "--backend", "nccl", "--nccl-port", "4242", "--verbose"]
    yield "nccl on hosts", ["--hosts", "10.0.0.1,127.0.0.1", "-n", "2", "--backend", "nccl"]
    yield "verbose ring", ["-n", "2", "--verbose", "--env", "V1=", "--env", "V2=a=b"]
    yield "another folder", ["-n", "2", "--cwd", "/usr"]
    yield "a python", ["-n", "2", "--python", "/bin/sh"]


class World:
    def __init__(self):
        self.folder = tempfile.mkdtemp(prefix="launch-")
        for name in ["bin", *(f"hosts/{host}" for host in ["a", "b", "10.0.0.1", "10.0.0.2"])]:
            os.makedirs(self.path(name))
        os.symlink(os.path.join(ROOT, "tests-data/topology/ssh"), self.path("bin/ssh"))
        self.write("program", PROGRAM, 0o755)
        ring = dict(RDMA, hosts=[host | {"ips": ["10.0.0.9"]} for host in RDMA["hosts"]])
        self.files = {
            name: self.write(f"{name}.json", json.dumps(value))
            for name, value in [("bare", BARE), ("rdma", RDMA), ("ring", ring)]
        }

    def path(self, name):
        return os.path.join(self.folder, name)

    def write(self, name, text, mode=0o644):
        with open(self.path(name), "w") as file:
            file.write(text)
        os.chmod(self.path(name), mode)
        return self.path(name)

    def run(self, tool, args):
        """What each rank was given, by rank."""
        out = self.path("out")
        os.mkdir(out)
        env = {"HOME": self.folder, "PATH": self.path("bin") + ":/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
        env |= {"FAKE_SSH_HOSTS": self.path("hosts"), "FAKE_SSH_SHELL": "/bin/bash", "COLUMNS": "77"}
        words = [*tool, "--env", f"OUT={out}", *args, "--", self.path("program"), "x", "a b", "it's", "$V1", "--env"]
        ended = subprocess.run(
            words, env=env, cwd=self.folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
        )
        given = {}
        for rank in sorted(os.listdir(out)):
            with open(os.path.join(out, rank)) as file:
                given[rank] = file.read()
        shutil.rmtree(out)
        return given, ended.stderr


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mlx", required=True)
    parser.add_argument("--paceline", required=True)
    args, _ = parser.parse_known_args()
    world = World()
    failed = 0
    for name, flags in cases(world.files):
        theirs, _ = world.run([args.mlx], flags)
        ours, said = world.run([args.paceline, "launch"], flags)
        if theirs == ours and theirs:
            print(f"ok launch: {name}", flush=True)
        else:
            failed += 1
            print(f"FAILED launch: {name}: {ours}, MLX {theirs}; {said[-300:]!r}", flush=True)
    shutil.rmtree(world.folder)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
