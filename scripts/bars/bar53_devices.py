"""Three machines whose devices lend 8, 16 and 24 parts of memory.

MLX's library is replaced by one that lends less. SmolLM2 in a pipeline of three: its shares follow
the memory, and a context that does not fit is refused before a byte moves, with all figures.

usage: PACELINE_MLXC=LIBMLXC bar53_devices.py PROGRAM MODEL [MEGABYTES OF A PART]
       MODEL is a file of ~/.cache/paceline/test-models
"""

import json
import os
import subprocess
import sys
import tempfile

PROGRAM, MODEL = os.path.abspath(sys.argv[1]), sys.argv[2]
PART = int(float(sys.argv[3]) * 1e6) if len(sys.argv) > 3 else 5_000_000
os.environ.setdefault("PACELINE", PROGRAM)
import common31  # noqa: E402, reads PACELINE

MLX = os.path.dirname(os.path.realpath(os.environ["PACELINE_MLXC"]))
SOURCE = os.path.join(os.path.dirname(__file__), "../../crates/mlx/tests/fake/memory.rs")
SIZES = [8 * PART, 16 * PART, 24 * PART]
PATH = os.path.expanduser("~/.cache/paceline/test-models/") + MODEL


def device(folder, size):
    """A library that lends `size` bytes."""
    os.makedirs(folder)
    library = os.path.join(folder, "libmlxc.so")
    command = ["rustc", "--edition", "2024", "--crate-type", "cdylib", "--cap-lints", "allow"]
    command += [f"-Lnative={MLX}", f"-Clink-arg=-Wl,-rpath,{MLX}", "-o", library, SOURCE]
    environment = {**os.environ, "PACELINE_FAKE_BYTES": str(size)}
    subprocess.run(command, env=environment, check=True)
    return library


def told(size):
    return f"{size / 1e6:.0f} MB"


def lent(node):
    own = [it for it in node.get("devices", []) if it["engine"] == "mlx"]
    return own[0].get("memory_bytes") if own else None


def placed(machine):
    """Bytes that the records place on the machine's device, as its metrics tell them."""
    url = "http://127.0.0.1:52415/metrics"
    command = ["ip", "netns", "exec", machine.ns, "curl", "-s", "-m", "60", url]
    text = subprocess.run(command, capture_output=True, text=True, timeout=90).stdout
    own = [it for it in text.splitlines() if "device_placed_bytes{" in it and "mlx" in it]
    return int(float(own[0].split()[-1]))


net, machines = common31.Net(3), []
try:
    with tempfile.TemporaryDirectory() as folder:
        for n, size in enumerate(SIZES):
            library = device(os.path.join(folder, f"n{n}"), size)
            machines.append(common31.Machine(PROGRAM, net, n, {"PACELINE_MLXC": library}))
        for machine in machines:
            machine.up()
        common31.form(machines)
        first = machines[0]
        first.until("devices", lambda: sorted(filter(None, map(lent, first.nodes()))) == SIZES)
        print("devices:", ", ".join(map(told, SIZES)))
        three = ["--nodes", "n0,n1,n2", "--split", "pipeline", "--engine", "mlx", "--threads", 1]
        first.told("load", PATH, *three, "--context", 1024, "--parallel", 1, "--spare", 0)
        parts = [placed(machine) for machine in machines]
        share = [part / sum(parts) for part in parts]
        print("placed:", ", ".join(map(told, parts)), "shares", [f"{it:.2f}" for it in share])
        assert all(part <= size for part, size in zip(parts, SIZES)), parts
        answer = json.loads(first.told("run", PATH, "hi", "--json", "--max-tokens", 8))
        print("answers:", len(answer["tokens"]), "tokens")
        first.told("unload", PATH)
        before = [machine.received() for machine in machines[1:]]
        big = ["--context", 65536, "--parallel", 4]
        refused = first.run("load", PATH, *three, *big, check=False)
        after = [machine.received() for machine in machines[1:]]
        moved = max(b - a for a, b in zip(before, after))
        print("refused:", refused.stderr.strip(), f"(received meanwhile: {moved} B)")
        assert refused.returncode and all(f"n{n} " in refused.stderr for n in range(3))
finally:
    for machine in machines:
        machine.end()
    net.end()
