#!/usr/bin/env python3
"""Issue 27, mixtures of experts: shapes of Qwen3-30B-A3B, Q4_K_M, --layers of its 48. PACELINE names the binary.

    bar27.py [BAR..]        without names speed and split, some 8 min
    speed  [--runs 5]  6 min  one thread: decode beside plain reads of the bytes that a token touches, and beside llama.cpp;
                              prompts of 512 beside llama.cpp on one and two threads
    split  [--runs 7]  2 min  two nodes of a thread by shared memory: experts over tensor, and each beside its prediction
    delay  [--runs 5]  5 min  the same between two namespaces with 2 ms one way (root, TAP: delay_net.py; --ms for another)

The model is made once, in a minute: /tmp/bars, 2.7 GB for 6 layers, by the Python of cargo xtask's mlx-lm (gguf, numpy).
LLAMA_DIR names a folder with llama.cpp, whose bars are skipped without it:
    npm install --ignore-scripts --prefix $LLAMA_DIR --no-save node-llama-cpp@3.22.1

Bytes of a token: all matrices but the embedding's, of experts 8 of 128, and keys and values of the positions before it.
Our tensor split deals whole experts and shares the attention, so the bar's first split is the tensor split itself. Measured is
`--split experts`, whose nodes have all of the attention: more work for each, so the bar of 0.8 is harder.
"""
import types
import chosen, common31
from common32 import *

LAYERS, D, HEADS, KV, HEAD, EXPERTS, USED, FF, VOCAB = 48, 2048, 32, 4, 128, 128, 8, 768, 151936


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
        subprocess.run([MLX_PYTHON, os.path.abspath(__file__), "--layers", str(a.layers), "--make", out], check=True, timeout=600)
    return out


def touched(path, positions):
    """Bytes of a token of decode."""
    sizes, _ = common31.tensors(path)
    part = lambda name: 0 if name == "token_embd.weight" else USED / EXPERTS if "_exps." in name else 1
    return sum(part(name) * size for name, size in sizes.items()) + positions * a.layers * 2 * KV * HEAD * 2


def speed():
    path, place = model(), os.environ.get("LLAMA_DIR")
    if not place:
        skipped("speed, beside llama.cpp", "LLAMA_DIR names no folder with node-llama-cpp")
    against = ["--against", os.path.abspath(place)] if place else []
    for threads in [1, 2]:
        if threads == 2 and not place:
            break
        found = bench("model", path, "--threads", threads, "--prompt", 512, "--gen", 64, "--runs", a.runs or 5, *against,
                      env={"PACELINE_HOME": folder()}, timeout=900)
        ours, ratio = found["paceline"], found["ratio"]
        bytes_of = touched(path, 512 + 32)
        told(f"speed, {threads} threads, prompts of 512", ours["prefill_tok_s"]["runs"], "tokens/s")
        told(f"speed, {threads} threads, decode of {bytes_of / 1e6:.0f} MB a token", ours["decode_tok_s"]["runs"], "tokens/s")
        shares = [100 * bytes_of * rate / (1e9 * reads) for rate, reads in zip(ours["decode_tok_s"]["runs"], ours["read_limit_gb_s"]["runs"])]
        if threads == 1:
            bar("speed, decode of plain reads", shares, "%", 70)
            if ratio:
                bar("speed, decode over llama.cpp", ratio["decode"]["runs"], "x", 1.5)
        else:
            told("speed, decode of plain reads, two threads", shares, "%")
        if ratio:
            bar(f"speed, prompts of 512 over llama.cpp, {threads} threads", ratio["prefill"]["runs"], "x", 1.3)


def predicted(server):
    """Tokens a second of an answer alone, as told at the start; None where there is no prediction."""
    c = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    c.request("GET", "/metrics")
    found = re.findall(r"^paceline_decode_tok_s_predicted(?:\{[^}]*\})? (\S+)", c.getresponse().read().decode(), re.M)
    c.close()
    return float(found[0]) if found else None


def off(name, said, measured):
    if said is None:
        sys.exit(f"{name}: there is no prediction")
    told(f"{name}, predicted", said, "tokens/s")
    bar(f"{name}, prediction off by", 100 * abs(said / statistics.median(measured) - 1), "%", 15, False)


def split():
    path, rates = model(), {"experts": [], "tensor": []}
    with contextlib.ExitStack() as all_of:
        servers = {}
        for name in rates:
            servers[name] = Up(path, "--nodes", 2, "--split", name, "--threads", 1, "--transport", "shm", "--context", 1024, "--parallel", 1,
                               "--drafts", 0, "--prefix-cache", "off")
            all_of.callback(servers[name].end)
        for r in range((a.runs or 7) + 1):
            for name in sorted(rates, reverse=bool(r % 2)):
                found = servers[name].ask(ids(96, r, VOCAB), 64, ignore_eos=True)["rate"]
                rates[name] += [found] if r else []  # the first warms up
        for name, found in rates.items():
            told(f"split {name}, shared memory", found, "tokens/s")
        bar("split, experts over tensor, shared memory", [e / t for e, t in zip(rates["experts"], rates["tensor"])], "x", 0.8)
        for name, found in rates.items():
            off(f"split {name}, shared memory", predicted(servers[name]), found)


def delay():
    from delay_net import DelayNet
    if os.geteuid():
        sys.exit("namespaces want root")
    path, here = model(), folder()
    # A name of its own for each: the same model again would be a replica.
    files = {name: f"{here}/{name}.gguf" for name in ["experts", "tensor"]}
    net, machines = DelayNet(2, a.ms), []
    try:
        machines = [common31.Machine(BINARY, net, n) for n in range(2)]
        first = machines[0]
        [m.up() for m in machines]
        common31.form(machines)
        time.sleep(10)  # ways are measured
        how, said, rates = ["--nodes", "n0,n1", "--threads", 1, "--context", 1024], {}, {}
        for name, file in files.items():
            another_name(path, file)
            placed = json.loads(first.told("load", file, *how, "--split", name, "--preview", "--json", timeout=120))["placements"]
            said[name], rates[name] = next((p["decode_tok_s"] for p in placed if p["split"] == name), None), []
            print(f"  {name}, the way: {'; '.join(placed[0]['paths']) if placed else 'none'}", flush=True)
        for name, file in files.items():
            first.told("load", file, *how, "--split", name, "--parallel", 1, "--spare", 0, "--drafts", 0, "--weights", "shard", timeout=300)
        for r in range((a.runs or 5) + 1):
            for name in sorted(rates, reverse=bool(r % 2)):
                found = json.loads(first.told("bench", "model", files[name], "--instance", "--prompt", 96, "--gen", 24, "--runs", 1, "--json",
                                              timeout=120))
                if found["split"] != name or found["nodes"] != 2:
                    sys.exit(f"the split is {found['split']} over {found['nodes']} nodes, not {name} over 2")
                rates[name] += [found["paceline"]["decode_tok_s"]["median"]] if r else []
        for name, found in rates.items():
            told(f"delay {name}, {a.ms:g} ms one way", found, "tokens/s")
        bar(f"delay, experts over tensor, {a.ms:g} ms one way", [e / t for e, t in zip(rates["experts"], rates["tensor"])], "x", 1.4)
        for name, found in rates.items():
            off(f"delay {name}", said[name], found)
    finally:
        for machine in machines:
            machine.end()
        net.end()


BARS = {"speed": (speed, 1500), "split": (split, 600), "delay": (delay, 1200)}
parser = arguments(__doc__, runs=0, layers=6, ms=2.0)
parser.add_argument("--make", help=argparse.SUPPRESS)
a = chosen.parsed(parser, BARS, ["delay"])
if a.make:
    make(a.make)
    sys.exit()
chosen.play(a.bars, BARS)
