#!/usr/bin/env python3
"""Issue 58: MLX beside mlx-lm on a tiny f32 folder, by MLX's CPU build. PACELINE names the binary.

    bar58_mlx.py [--pairs 5]    6 min, quiet

PACELINE_MLXC names libmlxc, PACELINE_MLX_PYTHON the Python with mlx-lm of the same version of MLX.
"""
import array, math, random, struct
from common32 import *

WORDS = f"{REPO}/tests-data/golden/hf/llama-tied"
WIDTH, FFN, LAYERS, HEADS, VOCAB = 256, 704, 6, 4, 300
PYTHON = os.environ.get("PACELINE_MLX_PYTHON", MLX_PYTHON)


def made():
    """The folder of a llama of random weights."""
    out = folder()
    with open(f"{WORDS}/config.json") as f:
        config = json.load(f)
    config |= {"hidden_size": WIDTH, "intermediate_size": FFN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
               "max_position_embeddings": 2048, "eos_token_id": VOCAB - 1}
    with open(f"{out}/config.json", "w") as f:
        json.dump(config, f)
    for name in ["tokenizer.json", "tokenizer_config.json"]:
        shutil.copy(f"{WORDS}/{name}", out)
    shapes = {"model.embed_tokens.weight": (VOCAB, WIDTH), "model.norm.weight": (WIDTH,)}
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        shapes |= {f"{at}{name}_layernorm.weight": (WIDTH,) for name in ["input", "post_attention"]}
        shapes |= {f"{at}self_attn.{name}_proj.weight": (rows, WIDTH) for name, rows in
                   {"q": WIDTH, "k": WIDTH // 2, "v": WIDTH // 2, "o": WIDTH}.items()}
        shapes |= {f"{at}mlp.{name}_proj.weight": shape for name, shape in
                   {"gate": (FFN, WIDTH), "up": (FFN, WIDTH), "down": (WIDTH, FFN)}.items()}
    chance, header, data = random.Random(58), {}, b""
    for name, shape in shapes.items():
        n = math.prod(shape)
        values = [1.0] * n if len(shape) == 1 else [chance.uniform(-1, 1) * (3 / shape[1]) ** 0.5 for _ in range(n)]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + 4 * n]}
        data += array.array("f", values).tobytes()
    header = json.dumps(header).encode()
    with open(f"{out}/model.safetensors", "wb") as f:
        f.write(struct.pack("<Q", len(header)) + header + data)
    return out


def streams(path):
    """Tokens a second of eight answers together, by mlx-lm."""
    told = subprocess.run([PYTHON, "-m", "mlx_lm", "benchmark", "--model", path, "-p", "16", "-g", "400", "-b", "8", "-n", "1"],
                          capture_output=True, text=True, timeout=300)
    found = re.search(r"Averages:.*generation_tps=([\d.]+)", told.stdout)
    return float(found[1]) if found else sys.exit(f"mlx-lm: {told.stdout[-500:]}{told.stderr[-500:]}")


a = arguments(__doc__, pairs=5).parse_args()
path = made()
mlx = ["--engine", "mlx", "--threads", 1]
found = bench("model", path, *mlx, "--against", "mlx-lm", "--prompt", 512, "--gen", 128, "--runs", a.pairs,
              env={"PACELINE_MLX_PYTHON": PYTHON})
told("decode", found["paceline"]["decode_tok_s"]["runs"], "tokens/s")
bar("decode over mlx-lm's", found["ratio"]["decode"]["runs"], "x", 0.97)
bar("prefill over mlx-lm's", found["ratio"]["prefill"]["runs"], "x", 0.97)
server = Up(path, *mlx, "--context", 512, "--parallel", 8, "--prefix-cache", "off")
pairs = [(total_rate([server], 8, tokens=400, vocab=420, seed=i), streams(path)) for i in range(a.pairs)]
told("8 streams", [ours for ours, _ in pairs], "tokens/s")
bar("8 streams over mlx-lm's", [ours / theirs for ours, theirs in pairs], "x", 1.0)
end()
