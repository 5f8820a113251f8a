#!/usr/bin/env python3
"""Issue 52, models of many files: memory of nodes while a folder travels, bytes received by shards, a folder over three machines.

    bar52_folder.py BINARY [--transfer GB] [--load GB]      root; twice the size of the larger one on the disk in /tmp

n0 has a folder of safetensors with Llama's shapes (width 4096) in shards of two layers. --transfer (20): its weights are holes;
`pull --to n1` copies it, and the anonymous memory of both nodes is sampled (page cache is none). --load (6): random weights, over
three machines as a pipeline and, over two, as a tensor split; bytes are those of eth0 until ready.
"""
import argparse, random, sys
sys.path.insert(0, __import__("os").path.dirname(__import__("os").path.abspath(__file__)))
from common31 import *

GOLDEN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../tests-data/golden/hf/llama-untied-bf16")
WIDTH, FFN, KV, VOCAB = 4096, 14336, 1024, 300
LAYER = {"input_layernorm": [WIDTH], "post_attention_layernorm": [WIDTH], "self_attn.q_proj": [WIDTH, WIDTH],
         "self_attn.k_proj": [KV, WIDTH], "self_attn.v_proj": [KV, WIDTH], "self_attn.o_proj": [WIDTH, WIDTH],
         "mlp.gate_proj": [FFN, WIDTH], "mlp.up_proj": [FFN, WIDTH], "mlp.down_proj": [WIDTH, FFN]}
size_of = lambda shape: 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
LAYER_BYTES = sum(map(size_of, LAYER.values()))
# What a rank of two reads in a tensor split: all of a matrix that is cut by columns, for the groups hold parts of both.
BY_COLUMNS = sum(size_of(LAYER[name]) for name in ["self_attn.o_proj", "mlp.down_proj"])


def random_bf16(count, rng):
    """Values of 0.008 to 0.016 with any sign."""
    out = bytearray(2 * count)
    out[0::2] = rng.randbytes(count)
    out[1::2] = rng.randbytes(count).translate(bytes([0x3C if i % 2 else 0xBC for i in range(256)]))
    return bytes(out)


def make(folder, gigabytes, holes):
    layers = max(2, round(gigabytes * 1e9 / LAYER_BYTES))
    os.makedirs(folder)
    for name in ["tokenizer.json", "tokenizer_config.json"]:
        shutil.copy(f"{GOLDEN}/{name}", folder)
    config = json.load(open(f"{GOLDEN}/config.json"))
    config.update(hidden_size=WIDTH, intermediate_size=FFN, num_hidden_layers=layers, num_attention_heads=WIDTH // 128,
                  num_key_value_heads=KV // 128, head_dim=128)
    json.dump(config, open(f"{folder}/config.json", "w"))
    files = [[(f"model.layers.{i}.{name}.weight", shape) for i in range(at, min(at + 2, layers)) for name, shape in LAYER.items()]
             for at in range(0, layers, 2)]
    files[0].insert(0, ("model.embed_tokens.weight", [VOCAB, WIDTH]))
    files[-1] += [("model.norm.weight", [WIDTH]), ("lm_head.weight", [VOCAB, WIDTH])]
    rng, index = random.Random(52), {}
    pool = None if holes else random_bf16(1 << 24, rng)
    for no, tensors in enumerate(files):
        name, header, at = f"model-{no + 1:05}-of-{len(files):05}.safetensors", {}, 0
        for tensor, shape in tensors:
            header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size_of(shape)]}
            at += size_of(shape)
            index[tensor] = name
        head = json.dumps(header).encode()
        head += b" " * (-len(head) % 8)
        with open(f"{folder}/{name}", "wb") as f:
            f.write(struct.pack("<Q", len(head)) + head)
            for tensor, shape in [] if holes else tensors:
                left = size_of(shape)
                if len(shape) == 1:
                    f.write(b"\x80\x3f" * (left // 2))
                    continue
                while left:  # from anywhere in the pool, so that no two files are alike
                    start = 2 * rng.randrange(1 << 20)
                    left -= f.write(pool[start:start + min(left, 1 << 24)])
            f.truncate(8 + len(head) + at)
    json.dump({"weight_map": index}, open(f"{folder}/model.safetensors.index.json", "w"))
    return layers, sum(os.path.getsize(f"{folder}/{f}") for f in os.listdir(folder))


class Memory(threading.Thread):
    """Anonymous memory of a node without its workers, in MB, every 20 ms."""

    def __init__(self, machine):
        super().__init__(daemon=True)
        pid = machine.child.pid
        while not os.path.samefile(f"/proc/{pid}/exe", machine.binary):
            pid = int(open(f"/proc/{pid}/task/{pid}/children").read().split()[0])
        self.pid, self.name, self.over = pid, machine.name, False
        self.first = self.most = self.now()
        self.start()

    def now(self):
        told = dict(line.split(":", 1) for line in open(f"/proc/{self.pid}/status"))
        return sum(int(told[key].split()[0]) for key in ["RssAnon", "RssShmem"]) / 1e3

    def run(self):
        while not self.over:
            self.most = max(self.most, self.now())
            time.sleep(0.02)

    def end(self, what):
        self.over = True
        self.join()
        hwm = next(line for line in open(f"/proc/{self.pid}/status") if line.startswith("VmHWM"))
        print(f"{self.name}: {self.first:.0f} MB before, {self.most:.0f} MB at most; {' '.join(hwm.split())} with mapped files")
        verdict(f"{what}: memory of {self.name} grows, MB", self.most - self.first, 100, at_least=False)


def machines_of(net, count):
    made = [Machine(a.binary, net, n) for n in range(count)]
    for machine in made:
        machine.up()
    form(made)
    return made


def transfer(net):
    n0, n1 = made = machines_of(net, 2)
    try:
        layers, size = make(f"{n0.home}/m", a.transfer, holes=True)
        watched = [Memory(n0), Memory(n1)]
        began = time.time()
        n0.run("pull", "m", "--to", "n1", timeout=3000)
        took = time.time() - began
        print(f"{size / 1e9:.1f} GB, {layers} layers: {took:.0f} s, hashing included; {load_average()}", flush=True)
        for one in watched:
            one.end("transfer")
    finally:
        for machine in made:
            machine.end()


def load_average():
    return "load average " + " ".join(open("/proc/loadavg").read().split()[:3])


def answer(machine, *more):
    done = machine.run("run", "m", "once", "--json", "--temperature", "0", "--max-tokens", "8", *more)
    return json.loads(done.stdout)["tokens"]


def load(net):
    made = machines_of(net, 3)
    n0 = made[0]
    try:
        layers, size = make(f"{n0.home}/m", a.load, holes=False)
        header = 200e3  # headers, manifest, hashes: a thousandth
        ends = 2 * VOCAB * WIDTH
        alone = answer(n0, "--local")
        for split, count in [("pipeline", 3), ("tensor", 2)]:
            watched = [Memory(machine) for machine in made[:count]]
            before = [machine.received() for machine in made]
            began = time.time()
            n0.run("load", "m", "--nodes", ",".join(m.name for m in made[:count]), "--split", split, "--weights", "shard",
                   "--threads", "1", timeout=1200)
            took = time.time() - began
            got = [m.received() - b for m, b in zip(made, before)]
            print(f"{size / 1e9:.1f} GB {split} over {count}: ready after {took:.0f} s; {load_average()}; received MB: "
                  + ", ".join(f"{g / 1e6:.0f}" for g in got), flush=True)
            print("same tokens as n0 alone:", answer(made[2]) == alone)
            if split == "pipeline":
                parts = n0.get("/v1/paceline/status")["instances"][0]["portrait"]["shards"]
                for machine, got, part in list(zip(made, got, parts))[1:]:
                    own = (part["end_layer"] - part["first_layer"]) * LAYER_BYTES + (ends if part["end_layer"] == layers else 0)
                    verdict(f"pipeline: received by {machine.name} over its shard", got / (own + header), 1.05, at_least=False)
            else:
                own = layers * (LAYER_BYTES / 2 + BY_COLUMNS / 2) + ends
                verdict("tensor: received by n1 over what it reads", got[1] / (own + header), 1.05, at_least=False)
                print(f"that is {got[1] / (layers * LAYER_BYTES / 2 + ends):.2f} of half the weights")
            for one in watched:
                one.end(split)
            n0.run("unload", "m")
            n0.until("unloads", lambda: n0.told("ps", "--json") == "[]")
            n0.run("rm", "m", "--node", "n1,n2", check=False)
    finally:
        for machine in made:
            machine.end()


ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
ap.add_argument("binary")
ap.add_argument("--transfer", type=float, default=20)
ap.add_argument("--load", type=float, default=6)
a = ap.parse_args()
net = Net(3)
try:
    if a.transfer:
        transfer(net)
    if a.load:
        load(net)
finally:
    net.end()
