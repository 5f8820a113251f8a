#!/usr/bin/env python3
"""Issue 58: ranks on MLX between exchanges. PACELINE names the binary, PACELINE_MLXC libmlxc.

    bar58_ranks.py [--only BAR]   4 min, quiet
    shares    a slow device of 60 ms a step and 5 us a crossing (crates/mlx/tests/fake/share.rs): tensor splits over one.
              The ranks' own work, 1.4 ms a step each by MLX's CPU build, shares the cores here and is apart on machines
    split     the same with 180 us a crossing, 2, 10 and 60 ms a step: the split that `auto` takes over the best one
    wedge     a GPU that fast sync wedges (fake/metal.rs): the answer continues, the machine remembers, selftest qualifies it again
"""
from common32 import *
from folder58 import made

FAKES = f"{REPO}/crates/mlx/tests/fake"
MLXC = os.environ["PACELINE_MLXC"]


def fake(source):
    """A library of the tests that stands for MLX's."""
    out, place = f"{folder()}/libmlxc.so", os.path.dirname(MLXC)
    subprocess.run(["rustc", "--edition", "2024", "--crate-type", "cdylib", "--cap-lints", "allow", f"-Lnative={place}",
                    f"-Clink-arg=-Wl,-rpath,{place}", "-o", out, f"{FAKES}/{source}"], check=True)
    return out


def slow(path, ms, crossing_us, device):
    """Variables of a device that takes `ms` a step for all weights of the model, and so many us a crossing."""
    file, kib = f"{folder()}/slow", os.path.getsize(f"{path}/model.safetensors") / 1024
    with open(file, "w") as f:
        f.write(f"{ms * 1e6 / kib} {crossing_us * 1e3}")
    return {"PACELINE_MLXC": device, "PACELINE_SLOW": file}


def shares():
    # As equal shares as large models have: 704 columns are six blocks, of which four ranks get two, one, two and one.
    path, device = made(layers=2, ffn=2048), fake("share.rs")
    env = {**slow(path, 60, 5, device), "PACELINE_HOME": folder()}

    def decode(n):
        how = ["--nodes", n, "--split", "tensor"] if n > 1 else []
        found = bench("model", path, "--engine", "mlx", "--threads", 1, *how, "--prompt", 4, "--gen", 40, "--runs", 3, env=env)
        return found["paceline"]["decode_tok_s"]["median"]
    one = decode(1)
    told("a step on one machine", 1e3 / one, "ms")
    for n, limit in [(2, 1.7), (4, 3.0)]:
        bar(f"tensor split over {n} over one machine", decode(n) / one, "x", limit)


def split():
    os.environ.setdefault("PACELINE", BINARY)
    import common31
    path, device = made(layers=6), fake("share.rs")
    for ms in [2, 10, 60]:
        net, machines = common31.Net(2), []
        try:
            machines += [common31.Machine(BINARY, net, n, slow(path, ms, 180, device)) for n in range(2)]
            for machine in machines:
                machine.up()
            common31.form(machines)
            first = machines[0]
            rates = lambda node: [it["rates"] for it in node.get("devices", []) if it["engine"] == "mlx" and it.get("rates")]
            first.until("measures its devices", lambda: all(map(rates, first.nodes())))
            steps = {}
            for kind in ["tensor", "pipeline", "auto"]:
                first.told("load", path, "--nodes", 2, "--split", kind, "--engine", "mlx", "--threads", 1, "--context", 256, "--spare", 0)
                found = [json.loads(first.told("run", path, "hi", "--json", "--max-tokens", 60)) for _ in range(3)]
                steps[kind] = min(1e3 / it["decode_tok_s"] for it in found)
                told(f"{ms} ms a step, {kind}", steps[kind], "ms")
                first.told("unload", path)
            best = min(steps["tensor"], steps["pipeline"])
            bar(f"step of auto over the best at {ms} ms", steps["auto"] / best, "x", 1.1, at_least=False)
        finally:
            for machine in machines:
                machine.end()
            net.end()


def wedge():
    path, device, home = made(layers=2), fake("metal.rs"), folder()
    hang, note = f"{home}/hang", f"{home}/fast-sync-hang"
    env = {"PACELINE_MLXC": device, "PACELINE_HANG": hang}
    how = [path, "--engine", "mlx", "--nodes", 2, "--split", "tensor", "--context", 512, "--fast-sync", "--prefix-cache", "off"]
    server = Up(*how, home=home, env=env)
    began = []

    def harm(n):
        if n == 20 and not began:
            began.append(time.monotonic())
            open(hang, "w").close()
    answer = server.ask("go", tokens=200, on_event=harm, ignore_eos=True)
    bar("tokens of an answer over a wedge", answer["tokens"], "", 200)
    gap = max(b - a for a, b in zip(answer["times"], answer["times"][1:]))
    bar("pause of the answer", gap, "s", 30, at_least=False)
    bar("the hang is noted", int(os.path.exists(note)), "", 1)
    server.end()
    server = Up(*how, home=home, env=env)
    bar("the next start says that fast sync stays off", int("fast sync stays off" in server.said()), "", 1)
    bar("tokens of an answer without it", server.ask("go", tokens=50, ignore_eos=True)["tokens"], "", 50)
    server.end()
    os.remove(hang)
    env["PACELINE_HOME"] = home
    report = json.loads(run("selftest", "--engine", "mlx", "--quick", "--fast-sync", "--json", env=env))
    rows = {row["check"]: row for row in report["rows"]}
    for check in ["mlx: one evaluation", "mlx: one evaluation, fast sync"]:
        told(check, rows[check]["figure"]["value"], "us")
    bar("the machine is qualified again", int(not os.path.exists(note)), "", 1)


BARS = [shares, split, wedge]
parser = arguments(__doc__)
parser.add_argument("--only", choices=[each.__name__ for each in BARS])
only = parser.parse_args().only
for each in BARS:
    if only in [None, each.__name__]:
        each()
end()
