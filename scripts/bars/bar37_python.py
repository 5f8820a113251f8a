#!/usr/bin/env python3
"""Issue 37's quick bars on Python: import, all_sum of 4 KiB, the wheel in a fresh venv, MLX's example.

    python3 bar37_python.py TREE BINARY [--wheel FILE] [--rounds 9]      2 to 3 minutes

TREE is the checkout; the wheel is TREE/target/wheels/*.whl (cargo xtask wheel) or TREE/target/publish's.
"""
import argparse, glob, os, pathlib, re, shutil, statistics, subprocess, sys, tempfile, time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from common import MODELS, MLX_PYTHON, SMOLLM2, load, spread, verdict


def run(*command, **options):
    done = subprocess.run([str(word) for word in command], text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, **options)
    if done.returncode:
        sys.exit(f"{command}: {done.returncode}: {done.stdout[-800:]} {done.stderr[-800:]}")
    return done.stdout


parser = argparse.ArgumentParser()
parser.add_argument("tree", type=pathlib.Path)
parser.add_argument("binary", type=pathlib.Path)
parser.add_argument("--wheel")
parser.add_argument("--rounds", type=int, default=9)
args = parser.parse_args()
wheel = args.wheel or next(iter(sorted(glob.glob(f"{args.tree}/target/publish/*_x86_64.whl"))
                                + sorted(glob.glob(f"{args.tree}/target/wheels/*.whl"))), None)
if wheel is None:
    sys.exit("no wheel: cargo xtask wheel (or release) makes it")
print(load(), "wheel", os.path.basename(wheel), os.path.getsize(wheel) // 2**20, "MiB", flush=True)

# A fresh venv, no Rust in PATH, the store mounted (the user's, with SmolLM2 in it).
with tempfile.TemporaryDirectory() as folder:
    home = pathlib.Path(folder, "home")
    (home / ".paceline/models").mkdir(parents=True)
    own = pathlib.Path(os.environ.get("PACELINE_HOME", os.path.expanduser("~/.paceline")), "models/smollm2")
    if (own / "paceline.json").is_file():
        shutil.copytree(own, home / ".paceline/models/smollm2", copy_function=os.link
                        if own.stat().st_dev == home.stat().st_dev else shutil.copy)
        asked = "smollm2"
    else:
        asked = SMOLLM2
    began = time.perf_counter()
    run(sys.executable, "-m", "venv", f"{folder}/venv")
    python = f"{folder}/venv/bin/python"
    run(python, "-m", "pip", "install", "--quiet", "--only-binary", ":all:", wheel)
    print(f"venv and install: {time.perf_counter() - began:.1f} s", flush=True)
    bare = {"PATH": f"{folder}/venv/bin:/usr/bin:/bin", "HOME": str(home), "LC_ALL": "C.UTF-8"}
    assert shutil.which("cargo", path=bare["PATH"]) is None, "this PATH has Rust"
    answer = run("paceline", "run", asked, "Name three colours.", "--temperature", "0", "--max-tokens", "24",
                 env=bare, timeout=300)
    print("BAR wheel's paceline run answers:", "MET" if len(answer.strip()) > 5 else "MISSED",
          repr(answer[:80]), flush=True)

    # Import.
    program = ("import time; began = time.perf_counter(); import paceline, paceline.distributed; "
               "print(1000 * (time.perf_counter() - began))")
    times = [float(run(python, "-c", program, env=bare)) for _ in range(31)]
    print("import, ms:", spread(times, 1))
    verdict("import, ms (median)", statistics.median(times), 100, at_least=False)

    # all_sum of 4 KiB beside the Rust figure, in turns.
    said = run(python, args.tree / "scripts/python/latency.py", "--paceline", args.binary, "--rounds",
               args.rounds, timeout=900)
    print(said, flush=True)
    for name, more in re.findall(r"all_sum of 4 KiB, ([\w ]+): .*more by (-?[\d.]+) us", said):
        verdict(f"all_sum of 4 KiB, {name}, us over Rust (median)", float(more), 2, at_least=False)

    # MLX's example with one changed import, by a Python that has MLX.
    mlx = next((p for p in (os.path.expanduser("~/.cache/paceline/test-clients/mlx/bin/python"), MLX_PYTHON)
                if subprocess.run([p, "-c", "import mlx.core"], capture_output=True).returncode == 0), None)
    if mlx is None:
        print("SKIPPED MLX's example: no Python with MLX")
    else:
        site = glob.glob(f"{folder}/venv/lib/python3*/site-packages")[0]
        said = run(mlx, args.tree / "crates/python/tests/mlx_test.py", timeout=300,
                   env={**os.environ, "PYTHONPATH": site, "PYTHONDONTWRITEBYTECODE": "1"})
        print(said.strip())
        print("BAR one changed import gives MLX's results:",
              "MET" if "FAILED" not in said and said.count("ok ") == 3 else "MISSED", flush=True)
