#!/usr/bin/env python3
"""Issue 58 on a card: the shape of Llama 3.1 8B in 4 bits beside mlx-lm. PACELINE names the binary.

    bar58_card.py FOLDER    2 min; FOLDER as scripts/models/synth_mlx.py makes it (4.5 GB, 20 s)

PACELINE_MLXC names libmlxc; python3 has mlx-lm of the same version of MLX. On a machine without network unpack the
wheels of mlx and mlx-lm (`pip download --no-deps --python-version 3.12 --platform manylinux_2_35_x86_64 ...`, 1.3 MB)
over the MLX of `cargo xtask gpu pack`, and put that folder into PYTHONPATH: both then use one libmlx.
"""
from common32 import *

BYTES_A_TOKEN = 4.5e9  # all weights but the embedding's other rows
BANDWIDTH = {"H100": 3.35e12, "H200": 4.8e12}  # bytes/s, the vendor's data sheets


def streams(path):
    """Tokens a second of eight answers together, by mlx-lm."""
    told = subprocess.run(["python3", "-m", "mlx_lm", "benchmark", "--model", path, "-p", "16", "-g", "256", "-b", "8", "-n", "1"],
                          capture_output=True, text=True, timeout=120)
    found = re.search(r"Averages:.*generation_tps=([\d.]+)", told.stdout)
    return float(found[1]) if found else sys.exit(f"mlx-lm: {told.stdout[-500:]}{told.stderr[-500:]}")


def card():
    named = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True).stdout
    return next((name for name in BANDWIDTH if name in named), None)


a = arguments(__doc__)
a.add_argument("folder")
path = a.parse_args().folder
mlx = ["--engine", "mlx"]
found = bench("model", path, *mlx, "--against", "mlx-lm", "--prompt", 512, "--gen", 128, "--runs", 3,
              env={"PACELINE_MLX_PYTHON": shutil.which("python3")})
decode = found["paceline"]["decode_tok_s"]["runs"]
told("decode", decode, "tokens/s")
bar("decode over mlx-lm's", found["ratio"]["decode"]["runs"], "x", 0.95)
bar("prefill over mlx-lm's", found["ratio"]["prefill"]["runs"], "x", 1.0)
if name := card():
    bar("weights read over the memory's rate", [rate * BYTES_A_TOKEN / BANDWIDTH[name] for rate in decode], "x", 0.5)
server = Up(path, *mlx, "--context", 2048, "--parallel", 8, "--prefix-cache", "off")
ours = [total_rate([server], 8, tokens=256, vocab=120000, seed=i) for i in range(2)]
told("8 streams", ours, "tokens/s")
bar("8 streams over mlx-lm's", [rate / streams(path) for rate in ours], "x", 1.0)
end()
