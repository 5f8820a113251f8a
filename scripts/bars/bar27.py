#!/usr/bin/env python3
"""Issue 27, mixtures of experts: shapes of Qwen3-30B-A3B, Q4_K_M, --layers of its 48 (made once: gguf and numpy, 2.7 GB for 6).

    bar27.py speed  [--runs 9]  5 min   one thread: decode beside plain reads of the bytes that a token touches, and beside llama.cpp
                                        (LLAMA_DIR: a folder with the npm package node-llama-cpp); prompts of 512 on one and two threads
    bar27.py split  [--runs 9]  5 min   two nodes of a thread by shared memory: experts over tensor, and each beside the prediction
    bar27.py delay  [--runs 5]  8 min   the same between two namespaces with 2 ms one way (root, TAP: delay_net.py; --ms for another)

--experts NAME is the split that shares experts (default `experts`: attention whole on each node). Bytes of a token: all matrices but the
embedding's, of experts 8 of 128, and keys and values of the positions before it.
"""
import types
import common31
from common32 import *

LAYERS, D, HEADS, KV, HEAD, EXPERTS, USED, FF, VOCAB = 48, 2048, 32, 4, 128, 128, 8, 768, 151936
parser = arguments(__doc__, runs=0, layers=6, experts="experts", ms=2.0)
parser.add_argument("--make", help=argparse.SUPPRESS)
parser.add_argument("what", nargs="?", choices=["speed", "split", "delay", "all"], default="all")
a = parser.parse_args()


def make(out):
    sys.path.insert(0, f"{REPO}/scripts/models")
    import gguf, synth_gguf
    m = synth_gguf.Synth(types.SimpleNamespace(seed=27, base=SMOLLM2, out=out + ".new", quant="Q4_K", raw_blocks=True, layers=None))
    Q = synth_gguf.Q
    q4 = lambda *shape: m.blocks(Q.Q4_K, shape, [(0, 0.0001), (2, 0.00075)])
    q6 = lambda *shape: m.blocks(Q.Q6_K, shape, [(208, 0.000015)])
    tensors = [("token_embd.weight", q4(VOCAB, D)), ("output_norm.weight", m.ones(D)), ("output.weight", q6(VOCAB, D))]
    for i in range(a.layers):
        p, high = f"blk.{i}.", q6 if i % 2 == 0 else q4
        tensors += [(p + "attn_norm.weight", m.ones(D)), (p + "attn_q.weight", q4(HEADS * HEAD, D)), (p + "attn_k.weight", q4(KV * HEAD, D)),
                    (p + "attn_v.weight", high(KV * HEAD, D)), (p + "attn_output.weight", q4(D, HEADS * HEAD)),
                    (p + "attn_q_norm.weight", m.ones(HEAD)), (p + "attn_k_norm.weight", m.ones(HEAD)), (p + "ffn_norm.weight", m.ones(D)),
                    (p + "ffn_gate_inp.weight", (m.normal(EXPERTS, D, scale=0.5), Q.F32)), (p + "ffn_gate_exps.weight", q4(EXPERTS, FF, D)),
                    (p + "ffn_up_exps.weight", q4(EXPERTS, FF, D)), (p + "ffn_down_exps.weight", high(EXPERTS, D, FF))]
    w = m.writer("qwen3moe", "synthetic qwen3-30b-a3b shapes")
    w.add_quantization_version(2); w.add_file_type(int(gguf.LlamaFileType.MOSTLY_Q4_K_M))
    w.add_block_count(a.layers); w.add_context_length(32768); w.add_embedding_length(D); w.add_feed_forward_length(6144)
    w.add_head_count(HEADS); w.add_head_count_kv(KV); w.add_key_length(HEAD); w.add_value_length(HEAD)
    w.add_layer_norm_rms_eps(1e-6); w.add_rope_freq_base(1e6); w.add_vocab_size(VOCAB)
    w.add_expert_count(EXPERTS); w.add_expert_used_count(USED); w.add_expert_feed_forward_length(FF)
    names, kinds = m.value("tokenizer.ggml.tokens"), m.value("tokenizer.ggml.token_type")
    for key in ["ggml.model", "ggml.pre", "ggml.merges", "ggml.bos_token_id", "ggml.eos_token_id", "ggml.add_bos_token", "chat_template"]:
        if f"tokenizer.{key}" in m.base.fields:
            m.copy(w, f"tokenizer.{key}")
    more = VOCAB - len(names)
    w.add_token_list(names + [f"xq{i}" for i in range(more)])
    w.add_token_types(list(kinds) + [1] * more)
    m.finish(w, tensors)
    os.rename(out + ".new", out)


def model():
    out = f"{MADE}/qwen3-30b-a3b-{a.layers}.gguf"
    if not os.path.exists(out):
        os.makedirs(MADE, exist_ok=True)
        subprocess.run([MLX_PYTHON, os.path.abspath(__file__), "--layers", str(a.layers), "--make", out], check=True)
    return out


def touched(path, positions):
    """Bytes of a token of decode."""
    sizes, _ = common31.tensors(path)
    part = lambda name: 0 if name == "token_embd.weight" else USED / EXPERTS if "_exps." in name else 1
    return sum(part(name) * size for name, size in sizes.items()) + positions * a.layers * 2 * KV * HEAD * 2


def speed():
    path, place = model(), os.environ.get("LLAMA_DIR")
    against = ["--against", place] if place else []
    if not place:
        skipped("speed, beside llama.cpp", "LLAMA_DIR names no folder with node-llama-cpp")
    for threads in [1, 2]:
        found = bench("model", path, "--threads", threads, "--prompt", 512, "--gen", 64, "--runs", a.runs or 9, *against, timeout=3000)
        ours = found["paceline"]
        bytes_of = touched(path, 512 + 32)
        told(f"speed, {threads} threads, prompts of 512", ours["prefill_tok_s"]["runs"], "tokens/s")
        told(f"speed, {threads} threads, decode of {bytes_of / 1e6:.0f} MB a token", ours["decode_tok_s"]["runs"], "tokens/s")
        shares = [100 * bytes_of * rate / (1e9 * reads) for rate, reads in zip(ours["decode_tok_s"]["runs"], ours["read_limit_gb_s"]["runs"])]
        ratio = found.get("ratio")
        if threads == 1:
            bar("speed, decode of plain reads", shares, "%", 70)
            if ratio:
                bar("speed, decode over llama.cpp", ratio["decode"]["runs"], "x", 1.5)
        else:
            told("speed, decode of plain reads, two threads", shares, "%")
        if ratio:
            bar(f"speed, prompts of 512 over llama.cpp, {threads} threads", ratio["prefill"]["runs"], "x", 1.3)


def predicted(server):
    c = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    c.request("GET", "/metrics")
    found = re.findall(r"^paceline_decode_tok_s_predicted(?:\{[^}]*\})? (\S+)", c.getresponse().read().decode(), re.M)
    c.close()
    return float(found[0]) if found else None


def off(name, said, measured):
    if said is None:
        return skipped(f"{name}, prediction", "none was made")
    told(f"{name}, predicted", said, "tokens/s")
    bar(f"{name}, prediction off by", [100 * abs(said / statistics.median(measured) - 1)], "%", 15, False)


def split():
    path, rates = model(), {a.experts: [], "tensor": []}
    with contextlib.ExitStack() as all_of:
        servers = {}
        for name in rates:
            servers[name] = Up(path, "--nodes", 2, "--split", name, "--threads", 1, "--transport", "shm", "--context", 1024, "--parallel", 1,
                               "--drafts", 0, "--prefix-cache", "off")
            all_of.callback(servers[name].end)
        for r in range((a.runs or 9) + 1):
            for name in sorted(rates, reverse=bool(r % 2)):
                found = servers[name].ask(ids(16, r, VOCAB), 64, ignore_eos=True)["rate"]
                rates[name] += [found] if r else []
        for name, found in rates.items():
            told(f"split {name}, shared memory", found, "tokens/s")
        bar("split, experts over tensor, shared memory", [e / t for e, t in zip(rates[a.experts], rates["tensor"])], "x", 0.8)
        for name, found in rates.items():
            off(f"split {name}, shared memory", predicted(servers[name]), found)


def delay():
    from delay_net import DelayNet
    path, names = model(), {a.experts: None, "tensor": None}
    net, machines = DelayNet(2, a.ms), []
    try:
        machines = [common31.Machine(BINARY, net, n) for n in range(2)]
        [m.up() for m in machines]
        common31.form(machines)
        time.sleep(10)  # ways are measured
        said, rates = {}, {name: [] for name in names}
        here = folder()
        for name in names:
            names[name] = f"{here}/{name}.gguf"  # a name of its own: the same model again would be a replica
            another_name(path, names[name])
            how = ["--nodes", "n0,n1", "--split", name, "--threads", 1, "--context", 1024]
            options = json.loads(machines[0].told("load", names[name], *how, "--preview", "--json"))["placements"]
            fit = [p for p in options if p["split"] == name and len(p["nodes"]) == 2]
            said[name] = fit[0]["decode_tok_s"] if fit else None
            machines[0].told("load", names[name], *how, "--parallel", 1, "--spare", 0, "--drafts", 0, "--weights", "shard")
        called = {name: next(i["id"] for i in ask_node(machines[0].home, "ps") if i["split"] == name) for name in names}
        for r in range(a.runs or 5):
            for name in sorted(names, reverse=bool(r % 2)):
                found = json.loads(machines[0].told("bench", "model", called[name], "--instance", "--prompt", 16, "--gen", 24, "--runs", 1, "--json"))
                rates[name].append(found["paceline"]["decode_tok_s"]["median"])
        for name, found in rates.items():
            told(f"delay {name}, {a.ms:g} ms one way", found, "tokens/s")
        bar(f"delay, experts over tensor, {a.ms:g} ms one way", [e / t for e, t in zip(rates[a.experts], rates["tensor"])], "x", 1.4)
        for name, found in rates.items():
            off(f"delay {name}", said[name], found)
    finally:
        for machine in machines:
            machine.end()
        net.end()


if a.make:
    make(a.make)
    sys.exit()
print(load(), BINARY, flush=True)
for what in ["speed", "split", "delay"] if a.what == "all" else [a.what]:
    globals()[what]()
end()
