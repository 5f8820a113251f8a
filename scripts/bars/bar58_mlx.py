#!/usr/bin/env python3
"""Issue 58: MLX beside mlx-lm on a tiny f32 folder, by MLX's CPU build. PACELINE names the binary.

    bar58_mlx.py [--pairs 5] [--only one|eight]    6 min, quiet; one answer: decode and prefill; eight at once

PACELINE_MLXC names libmlxc, PACELINE_MLX_PYTHON the Python with mlx-lm of the same version of MLX.
"""
from common32 import *
from folder58 import VOCAB, made

PYTHON = os.environ.get("PACELINE_MLX_PYTHON", MLX_PYTHON)


def streams(path):
    """Tokens a second of eight answers together, by mlx-lm."""
    told = subprocess.run([PYTHON, "-m", "mlx_lm", "benchmark", "--model", path, "-p", "16", "-g", "400", "-b", "8", "-n", "1"],
                          capture_output=True, text=True, timeout=300)
    found = re.search(r"Averages:.*generation_tps=([\d.]+)", told.stdout)
    return float(found[1]) if found else sys.exit(f"mlx-lm: {told.stdout[-500:]}{told.stderr[-500:]}")


def one(path):
    found = bench("model", path, *MLX, "--against", "mlx-lm", "--prompt", 512, "--gen", 128, "--runs", a.pairs,
                  env={"PACELINE_MLX_PYTHON": PYTHON})
    told("decode", found["paceline"]["decode_tok_s"]["runs"], "tokens/s")
    bar("decode over mlx-lm's", found["ratio"]["decode"]["runs"], "x", 0.97)
    bar("prefill over mlx-lm's", found["ratio"]["prefill"]["runs"], "x", 0.97)


def eight(path):
    server = Up(path, *MLX, "--context", 512, "--parallel", 8, "--prefix-cache", "off")
    # Attention costs by position, so both measure about 400 tokens behind a prompt of 16: 0.9 of these, from the first on.
    ours = lambda i: total_rate([server], 8, tokens=445, vocab=420, seed=i, settle=0, streamed=False)
    pairs = [(ours(i), streams(path)) for i in range(a.pairs)]
    told("8 streams", [ours for ours, _ in pairs], "tokens/s")
    bar("8 streams over mlx-lm's", [ours / theirs for ours, theirs in pairs], "x", 1.0)


MLX = ["--engine", "mlx", "--threads", 1]
parser = arguments(__doc__, pairs=5)
parser.add_argument("--only", choices=["one", "eight"])
a, path = parser.parse_args(), made()
for each in [one, eight]:
    if a.only in [None, each.__name__]:
        each(path)
end()
