// IEEE 754's f32 by integers, rounding to nearest, ties to even, denormals kept: the bits of any
// CPU. A number is a u32. Follows float.wgsl, whose integers of 64 bits it takes.
//
// Every rounding goes through s_round. A sum and a product are fused multiply-adds with a 1 and a 0.

const S_NAN = 0x7fc00000u;
const S_INF = 0x7f800000u;
const S_ONE = 0x3f800000u;

// Of a finite number: its magnitude is mantissa * 2^(exponent - 150), and the mantissa's highest
// bit is bit 23; 0 has the mantissa 0.
struct Single {
    exponent: i32,
    mantissa: u32,
}

fn s_parts(a: u32) -> Single {
    let exponent = (a >> 23u) & 255u;
    let fraction = a & 0x7fffffu;
    let shift = countLeadingZeros(fraction) - 8u;
    let normal = Single(i32(exponent), fraction | 0x800000u);
    let denormal = Single(1 - i32(shift), fraction << (shift & 31u));
    if exponent == 0u {
        return denormal;
    }
    return normal;
}

fn s_is_zero(a: u32) -> bool {
    return (a << 1u) == 0u;
}

fn s_is_special(a: u32) -> bool {
    return (a & S_INF) == S_INF;
}

fn s_is_nan(a: u32) -> bool {
    return (a & 0x7fffffffu) > S_INF;
}

fn s_neg(a: u32) -> u32 {
    return a ^ SIGN;
}

// The number with these parts, rounded. The mantissa's highest bit is bit 30; bit 0 may stand for
// bits that were lost.
fn s_round(sign: u32, exponent: i32, mantissa: u32) -> u32 {
    if exponent >= 255 {
        return sign | S_INF;
    }
    // The hidden bit adds one to the field of the exponent.
    let shift = u32(clamp(1 - exponent, 0, 31));
    let field = u32(max(exponent - 1, 0));
    let lost = (mantissa & ((1u << shift) - 1u)) != 0u;
    let kept = (mantissa >> shift) | select(0u, 1u, lost);
    let rest = kept & 127u;
    let up = rest > 64u || (rest == 64u && (kept & 128u) != 0u);
    // A carry goes into the exponent, up to infinity.
    return sign | ((kept >> 7u) + select(0u, 1u, up) + (field << 23u));
}

// Any mantissa but zero: the magnitude is mantissa * 2^(exponent - 189).
fn s_normalised(sign: u32, exponent: i32, mantissa: vec2<u32>) -> u32 {
    let zeros = leading_zeros64(mantissa);
    // Bit 63 goes to bit 31.
    let top = shl64(mantissa, zeros);
    let lost = top.x != 0u || (top.y & 1u) != 0u;
    return s_round(sign, exponent - i32(zeros) + 1, (top.y >> 1u) | select(0u, 1u, lost));
}

fn s_fma_special(a: u32, b: u32, c: u32) -> u32 {
    let sign = (a ^ b) & SIGN;
    let is_infinite = s_is_special(a) || s_is_special(b);
    let invalid = is_infinite && (s_is_zero(a) || s_is_zero(b));
    let opposite = is_infinite && s_is_special(c) && sign != (c & SIGN);
    if s_is_nan(a) || s_is_nan(b) || s_is_nan(c) || invalid || opposite {
        return S_NAN;
    }
    return select(c, sign | S_INF, is_infinite);
}

// a b + c, rounded once.
fn s_fma(a: u32, b: u32, c: u32) -> u32 {
    if s_is_special(a) || s_is_special(b) || s_is_special(c) {
        return s_fma_special(a, b, c);
    }
    let sign = (a ^ b) & SIGN;
    if s_is_zero(a) || s_is_zero(b) {
        return select(c, sign & c, s_is_zero(c));
    }
    let p = s_parts(a);
    let q = s_parts(b);
    let r = s_parts(c);
    // Bit 61 or 62 leads the product, and bit 62 the addend.
    let product = shl64(mul32(p.mantissa, q.mantissa), 15u);
    let addend = vec2<u32>(0u, r.mantissa << 7u);
    let exponent = p.exponent + q.exponent - 126;
    let ahead = exponent - r.exponent;
    let left = shr_sticky(product, u32(max(-ahead, 0)));
    let right = shr_sticky(addend, u32(max(ahead, 0)));
    let larger = max(exponent, r.exponent);
    if sign == (c & SIGN) {
        return s_normalised(sign, larger, add64(left, right));
    }
    let swap = less64(left, right);
    let difference = sub64(select(left, right, swap), select(right, left, swap));
    if is_zero64(difference) {
        return 0u;
    }
    return s_normalised(select(sign, c & SIGN, swap), larger, difference);
}

fn s_mul(a: u32, b: u32) -> u32 {
    return s_fma(a, b, (a ^ b) & SIGN);
}

fn s_add(a: u32, b: u32) -> u32 {
    return s_fma(a, S_ONE, b);
}

fn s_sub(a: u32, b: u32) -> u32 {
    return s_add(a, s_neg(b));
}

fn s_div(a: u32, b: u32) -> u32 {
    let sign = (a ^ b) & SIGN;
    let both = s_is_special(a) && s_is_special(b) || s_is_zero(a) && s_is_zero(b);
    if s_is_nan(a) || s_is_nan(b) || both {
        return S_NAN;
    }
    if s_is_special(a) || s_is_zero(b) {
        return sign | S_INF;
    }
    if s_is_special(b) || s_is_zero(a) {
        return sign;
    }
    let p = s_parts(a);
    let q = s_parts(b);
    let less = p.mantissa < q.mantissa;
    // 31 bits of the quotient, whose highest is set, and whether more follow.
    var rest = select(p.mantissa, p.mantissa << 1u, less) - q.mantissa;
    var quotient = 1u;
    for (var i = 0u; i < 5u; i += 1u) {
        rest <<= 6u;
        quotient = (quotient << 6u) | (rest / q.mantissa);
        rest %= q.mantissa;
    }
    quotient |= select(0u, 1u, rest != 0u);
    return s_round(sign, p.exponent - q.exponent + 127 - select(0, 1, less), quotient);
}

fn s_sqrt(a: u32) -> u32 {
    if s_is_nan(a) || ((a & SIGN) != 0u && !s_is_zero(a)) {
        return S_NAN;
    }
    if s_is_zero(a) || s_is_special(a) {
        return a;
    }
    let p = s_parts(a);
    // An even exponent; the mantissa's leading pair of bits is 01, 10 or 11.
    let odd = (p.exponent & 1) == 0;
    var radicand = shl64(vec2<u32>(p.mantissa, 0u), select(39u, 40u, odd));
    let exponent = (p.exponent - select(0, 1, odd) - 127) / 2 + 127;
    var root = 0u;
    var rest = ZERO;
    for (var i = 0u; i < 31u; i += 1u) {
        rest = shl64(rest, 2u);
        rest.x |= radicand.y >> 30u;
        radicand = shl64(radicand, 2u);
        let trial = vec2<u32>((root << 2u) | 1u, root >> 30u);
        root <<= 1u;
        if !less64(rest, trial) {
            rest = sub64(rest, trial);
            root |= 1u;
        }
    }
    return s_round(0u, exponent, root | select(1u, 0u, is_zero64(rest)));
}

// Orders as the numbers do, -0 before 0; NaN is not asked for.
fn s_key(a: u32) -> u32 {
    return select(a | SIGN, ~a, (a & SIGN) != 0u);
}

fn s_less(a: u32, b: u32) -> bool {
    return s_key(a) < s_key(b);
}

// The nearest integer of a number below 2^24, ties to even.
fn s_to_int(a: u32) -> i32 {
    let p = s_parts(a);
    let shift = u32(clamp(150 - p.exponent, 0, 31));
    let rest = p.mantissa & ((1u << shift) - 1u);
    let half = (1u << shift) >> 1u;
    let kept = p.mantissa >> shift;
    let up = rest > half || (rest == half && shift > 0u && (kept & 1u) == 1u);
    let magnitude = i32(kept + select(0u, 1u, up));
    return select(magnitude, -magnitude, (a & SIGN) != 0u);
}

// The f32 of a half.
fn s_from_half(h: u32) -> u32 {
    let sign = (h & 0x8000u) << 16u;
    let exponent = (h >> 10u) & 31u;
    let fraction = h & 0x3ffu;
    if exponent == 31u {
        return sign | S_INF | (fraction << 13u);
    }
    if exponent > 0u {
        return sign | ((exponent + 112u) << 23u) | (fraction << 13u);
    }
    if fraction == 0u {
        return sign;
    }
    let shift = countLeadingZeros(fraction) - 21u;
    return sign | ((113u - shift) << 23u) | (((fraction << shift) & 0x3ffu) << 13u);
}

// The nearest half.
fn s_to_half(a: u32) -> u32 {
    let sign = (a >> 16u) & 0x8000u;
    if s_is_special(a) {
        return sign | select(0x7c00u, 0x7e00u, s_is_nan(a));
    }
    let p = s_parts(a);
    // Of the mantissa 11 bits are kept, of denormal halves fewer.
    let shift = u32(clamp(126 - p.exponent, 13, 31));
    let field = u32(max(p.exponent - 113, 0));
    let rest = p.mantissa & ((1u << shift) - 1u);
    let half = 1u << (shift - 1u);
    let kept = p.mantissa >> shift;
    let up = rest > half || (rest == half && (kept & 1u) == 1u);
    return sign | min(kept + select(0u, 1u, up) + (field << 10u), 0x7c00u);
}

// The exponential of the CPU's kernels, operation by operation (tensor/src/isa/mod.rs).
fn s_exp(x: u32) -> u32 {
    const LOWEST = 0xc2aea8f6u; // -87.33
    const HIGHEST = 0x42b0bd71u; // 88.37
    const SHIFT = 0x4b400000u; // 1.5 * 2^23
    let below = select(HIGHEST, x, s_less(x, HIGHEST));
    let clamped = select(LOWEST, below, s_less(LOWEST, below));
    let shifted = s_fma(clamped, 0x3fb8aa3bu, SHIFT);
    let n = s_sub(shifted, SHIFT);
    let rough = s_fma(n, 0xbf318000u, clamped);
    let r = s_fma(n, 0x395e8083u, rough);
    var p = s_fma(0x39506968u, r, 0x3ab743ceu);
    p = s_fma(p, r, 0x3c088908u);
    p = s_fma(p, r, 0x3d2aa9c1u);
    p = s_fma(p, r, 0x3e2aaaaau);
    p = s_fma(p, r, 0x3f000000u);
    p = s_fma(p, s_mul(r, r), r);
    p = s_add(p, S_ONE) + (shifted << 23u);
    return select(p, 0u, s_less(x, LOWEST));
}
