"""A folder of a llama of random f32 weights, for the bars of issue 58."""
import array, json, math, random, shutil, struct
from common32 import REPO, folder

WORDS = f"{REPO}/tests-data/golden/hf/llama-tied"
WIDTH, HEADS, VOCAB = 256, 4, 300


def made(layers=6, ffn=704):
    """The folder of a llama with so many layers and columns of a feed-forward."""
    out = folder()
    with open(f"{WORDS}/config.json") as f:
        config = json.load(f)
    config |= {"hidden_size": WIDTH, "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": HEADS,
               "max_position_embeddings": 2048, "eos_token_id": VOCAB - 1}
    with open(f"{out}/config.json", "w") as f:
        json.dump(config, f)
    for name in ["tokenizer.json", "tokenizer_config.json"]:
        shutil.copy(f"{WORDS}/{name}", out)
    shapes = {"model.embed_tokens.weight": (VOCAB, WIDTH), "model.norm.weight": (WIDTH,)}
    for i in range(layers):
        at = f"model.layers.{i}."
        shapes |= {f"{at}{name}_layernorm.weight": (WIDTH,) for name in ["input", "post_attention"]}
        shapes |= {f"{at}self_attn.{name}_proj.weight": (rows, WIDTH) for name, rows in
                   {"q": WIDTH, "k": WIDTH // 2, "v": WIDTH // 2, "o": WIDTH}.items()}
        shapes |= {f"{at}mlp.{name}_proj.weight": shape for name, shape in
                   {"gate": (ffn, WIDTH), "up": (ffn, WIDTH), "down": (WIDTH, ffn)}.items()}
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
