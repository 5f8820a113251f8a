"""Operations of a token of Llama 3 8B in Q4_K by `crates/gpu/src/wgsl/layer.wgsl`, and the share of
a card's memory rate that they allow. No measurement: it assumes that a vector instruction takes a
32-bit integer lane once, and that loads overlap.

Instructions are those of AMD's RDNA 2 (Navi 21), as Mesa 22.3.6's RADV compiles the kernels by
RADV_FORCE_FAMILY=navi21 RADV_DEBUG=shaders: vector ALU only, both sides of branches counted.

    python3 scripts/bench/gpu_layer.py
"""

# One emulated operation.
FMA, MUL, ADD, EXP, DIV, TO_INT, JOINED = 256, 174, 228, 2650, 159, 28, 88
# A chunk of 32 columns and one activation row, of one row and of eight.
CHUNK = {"dot4": (40, 30), "i32": (103, None), "f32": (129, None)}

LAYERS, WIDTH, HEADS, KV, HEAD, FFN, VOCAB = 32, 4096, 32, 8, 128, 14336, 128256
SPAN, SPAN_BYTES = 256, 144

# GB/s, and 10^12 integer lanes a second: units times lanes times clock, as the makers state them.
CARDS = {
    "RTX 4090": (1008, 128 * 64 * 2.52e-3, "dot4"),
    "RX 7900 XTX": (960, 96 * 64 * 2.5e-3, "dot4"),
    "H100 SXM": (3350, 132 * 64 * 1.98e-3, "dot4"),
    "M2 Ultra": (800, 76 * 128 * 1.4e-3, "f32"),  # no product of four bytes
}


def span(form: str, rows: int) -> int:
    """Instructions of 256 columns of a weight row and one of `rows` activation rows."""
    chunk = CHUNK[form][rows > 1] or CHUNK[form][0]
    return SPAN // 32 * chunk + JOINED + MUL + FMA


def token() -> tuple[int, int, int]:
    """Spans of weights, instructions of a cached position, and of all else."""
    kv = KV * HEAD
    weights = LAYERS * (2 * WIDTH * WIDTH + 2 * WIDTH * kv + 3 * WIDTH * FFN) + WIDTH * VOCAB
    position = LAYERS * HEADS * (2 * HEAD * FMA + ADD + EXP)
    quantised = (3 * WIDTH + FFN) * (MUL + TO_INT)
    norms = 2 * WIDTH * (FMA + 2 * MUL)
    gates = FFN * (EXP + DIV + 2 * ADD + MUL)
    turns = (HEADS + KV) * HEAD * (2 * MUL + ADD)
    return weights // SPAN, position, LAYERS * (quantised + norms + gates + turns)


def main() -> None:
    spans, position, rest = token()
    print(f"a token: {spans * SPAN_BYTES / 1e9:.2f} GB, {spans * span('dot4', 1) / 1e9:.1f}e9 "
          f"instructions of products, {rest / 1e9:.2f}e9 of the rest, "
          f"{position / 1e6:.1f}e6 for each cached position")
    for name, (rate, lanes, form) in CARDS.items():
        memory = spans * SPAN_BYTES / rate / 1e9
        shares = []
        for rows in (1, 8):
            allowed = lanes * 1e12 / (span(form, rows) * rows) * SPAN_BYTES / (rate * 1e9)
            shares.append(f"{min(allowed, 1):.2f}")
        # Where a token takes twice as long as its weights.
        budget = 2 * memory * lanes * 1e12 - spans * span(form, 1) - rest
        prompt = lanes * 1e12 / (spans * span(form, 8) + rest + 256 * position)
        print(f"{name}: share of one row {shares[0]}, of eight {shares[1]}; half the rate up to "
              f"{max(budget, 0) / position:.0f} positions; prompt of 512 rows {prompt:.0f} rows/s")


main()
