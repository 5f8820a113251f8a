// IEEE 754's f64 by integers, rounding to nearest, ties to even: the bits of any CPU.
//
// A number is a vec2<u32>: x has the low 32 bits, y the high ones. Nothing here is left to a
// shader compiler, which may reorder, contract and flush what is written as floats.

const NAN = vec2<u32>(0u, 0x7ff80000u);
const ONE = vec2<u32>(0u, 0x3ff00000u);
const ZERO = vec2<u32>(0u, 0u);
const SIGN = 0x80000000u;

// Integers of 64 bits.

fn add64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    let low = a.x + b.x;
    return vec2<u32>(low, a.y + b.y + select(0u, 1u, low < a.x));
}

fn sub64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    return vec2<u32>(a.x - b.x, a.y - b.y - select(0u, 1u, a.x < b.x));
}

fn less64(a: vec2<u32>, b: vec2<u32>) -> bool {
    return a.y < b.y || (a.y == b.y && a.x < b.x);
}

fn is_zero64(a: vec2<u32>) -> bool {
    return (a.x | a.y) == 0u;
}

// n from 0 to 63.
fn shl64(a: vec2<u32>, n: u32) -> vec2<u32> {
    if n == 0u {
        return a;
    }
    if n >= 32u {
        return vec2<u32>(0u, a.x << (n - 32u));
    }
    return vec2<u32>(a.x << n, (a.y << n) | (a.x >> (32u - n)));
}

// n from 0 to 63.
fn shr64(a: vec2<u32>, n: u32) -> vec2<u32> {
    if n == 0u {
        return a;
    }
    if n >= 32u {
        return vec2<u32>(a.y >> (n - 32u), 0u);
    }
    return vec2<u32>((a.x >> n) | (a.y << (32u - n)), a.y >> n);
}

// Shifts to the right; bit 0 says besides whether a bit was lost.
fn shr_sticky(a: vec2<u32>, n: u32) -> vec2<u32> {
    if n == 0u {
        return a;
    }
    if n >= 64u {
        return vec2<u32>(select(1u, 0u, is_zero64(a)), 0u);
    }
    let kept = shr64(a, n);
    let lost = !is_zero64(shl64(a, 64u - n));
    return vec2<u32>(kept.x | select(0u, 1u, lost), kept.y);
}

fn leading_zeros64(a: vec2<u32>) -> u32 {
    if a.y != 0u {
        return countLeadingZeros(a.y);
    }
    return 32u + countLeadingZeros(a.x);
}

// The product of two words: 64 bits.
fn mul32(a: u32, b: u32) -> vec2<u32> {
    let al = a & 0xffffu;
    let ah = a >> 16u;
    let bl = b & 0xffffu;
    let bh = b >> 16u;
    let low = al * bl;
    let middle = ah * bl + (low >> 16u);
    let other = al * bh + (middle & 0xffffu);
    let high = ah * bh + (middle >> 16u) + (other >> 16u);
    return vec2<u32>((other << 16u) | (low & 0xffffu), high);
}

// The product of two integers of 64 bits: 128 bits, the lowest word first.
fn mul64(a: vec2<u32>, b: vec2<u32>) -> vec4<u32> {
    let ll = mul32(a.x, b.x);
    let lh = mul32(a.x, b.y);
    let hl = mul32(a.y, b.x);
    let hh = mul32(a.y, b.y);
    // Words 1 and 2 get three addends each at most.
    let one = add64(vec2<u32>(ll.y, 0u), vec2<u32>(lh.x, 0u));
    let second = add64(one, vec2<u32>(hl.x, 0u));
    let two = add64(vec2<u32>(lh.y, 0u), vec2<u32>(hl.y, 0u));
    let third = add64(add64(two, vec2<u32>(hh.x, 0u)), vec2<u32>(second.y, 0u));
    return vec4<u32>(ll.x, second.x, third.x, hh.y + third.y);
}

// Parts of a number.

fn exponent_of(a: vec2<u32>) -> u32 {
    return (a.y >> 20u) & 0x7ffu;
}

fn is_nan(a: vec2<u32>) -> bool {
    let high = a.y & 0x7fffffffu;
    return high > 0x7ff00000u || (high == 0x7ff00000u && a.x != 0u);
}

fn is_infinite(a: vec2<u32>) -> bool {
    return (a.y & 0x7fffffffu) == 0x7ff00000u && a.x == 0u;
}

fn is_zero(a: vec2<u32>) -> bool {
    return (a.x | (a.y & 0x7fffffffu)) == 0u;
}

// Of a finite number that is not zero: its magnitude is mantissa * 2^(exponent - 1085), and the
// mantissa's highest bit is bit 62.
struct Parts {
    exponent: i32,
    mantissa: vec2<u32>,
}

fn parts_of(a: vec2<u32>) -> Parts {
    let exponent = exponent_of(a);
    let fraction = vec2<u32>(a.x, a.y & 0xfffffu);
    if exponent == 0u {
        let shift = leading_zeros64(fraction) - 1u;
        return Parts(11 - i32(shift), shl64(fraction, shift));
    }
    return Parts(i32(exponent), shl64(vec2<u32>(fraction.x, fraction.y | 0x100000u), 10u));
}

// The number with these parts, rounded; bit 0 of the mantissa may stand for bits that were lost.
fn rounded(sign: u32, exponent: i32, mantissa: vec2<u32>) -> vec2<u32> {
    if exponent >= 2047 {
        return vec2<u32>(0u, sign | 0x7ff00000u);
    }
    var kept = mantissa;
    var field = 0u;
    if exponent <= 0 {
        kept = shr_sticky(mantissa, u32(1 - exponent));
    } else {
        // The hidden bit adds one.
        field = u32(exponent - 1);
    }
    let rest = kept.x & 0x3ffu;
    kept = shr64(kept, 10u);
    if rest > 0x200u || (rest == 0x200u && (kept.x & 1u) == 1u) {
        kept = add64(kept, vec2<u32>(1u, 0u));
    }
    // A carry goes into the exponent, up to infinity.
    return vec2<u32>(kept.x, (kept.y + (field << 20u)) | sign);
}

// Any mantissa but zero, wherever its highest bit is.
fn normalised(sign: u32, exponent: i32, mantissa: vec2<u32>) -> vec2<u32> {
    let zeros = leading_zeros64(mantissa);
    if zeros == 0u {
        return rounded(sign, exponent + 1, shr_sticky(mantissa, 1u));
    }
    return rounded(sign, exponent - i32(zeros) + 1, shl64(mantissa, zeros - 1u));
}

// Arithmetic.

fn f_neg(a: vec2<u32>) -> vec2<u32> {
    return vec2<u32>(a.x, a.y ^ SIGN);
}

fn f_abs(a: vec2<u32>) -> vec2<u32> {
    return vec2<u32>(a.x, a.y & 0x7fffffffu);
}

fn f_add(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    if is_nan(a) || is_nan(b) {
        return NAN;
    }
    let opposite = ((a.y ^ b.y) & SIGN) != 0u;
    if is_infinite(a) {
        if is_infinite(b) && opposite {
            return NAN;
        }
        return a;
    }
    if is_infinite(b) {
        return b;
    }
    if is_zero(a) {
        if is_zero(b) {
            return vec2<u32>(0u, a.y & b.y);
        }
        return b;
    }
    if is_zero(b) {
        return a;
    }
    let swap = less64(f_abs(a), f_abs(b));
    let large = select(a, b, swap);
    let small = select(b, a, swap);
    let sign = large.y & SIGN;
    let p = parts_of(large);
    let q = parts_of(small);
    let addend = shr_sticky(q.mantissa, u32(p.exponent - q.exponent));
    if !opposite {
        return normalised(sign, p.exponent, add64(p.mantissa, addend));
    }
    let difference = sub64(p.mantissa, addend);
    if is_zero64(difference) {
        return ZERO;
    }
    return normalised(sign, p.exponent, difference);
}

fn f_sub(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    return f_add(a, f_neg(b));
}

fn f_mul(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    if is_nan(a) || is_nan(b) {
        return NAN;
    }
    let sign = (a.y ^ b.y) & SIGN;
    if is_infinite(a) || is_infinite(b) {
        if is_zero(a) || is_zero(b) {
            return NAN;
        }
        return vec2<u32>(0u, sign | 0x7ff00000u);
    }
    if is_zero(a) || is_zero(b) {
        return vec2<u32>(0u, sign);
    }
    let p = parts_of(a);
    let q = parts_of(b);
    // Bits 62 and 63 lead, so bit 125 or 126 of the product does.
    let product = mul64(p.mantissa, shl64(q.mantissa, 1u));
    let lost = (product.x | product.y) != 0u;
    let high = vec2<u32>(product.z | select(0u, 1u, lost), product.w);
    return normalised(sign, p.exponent + q.exponent - 1022, high);
}

fn f_div(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    if is_nan(a) || is_nan(b) {
        return NAN;
    }
    let sign = (a.y ^ b.y) & SIGN;
    if is_infinite(a) {
        if is_infinite(b) {
            return NAN;
        }
        return vec2<u32>(0u, sign | 0x7ff00000u);
    }
    if is_infinite(b) {
        return vec2<u32>(0u, sign);
    }
    if is_zero(b) {
        if is_zero(a) {
            return NAN;
        }
        return vec2<u32>(0u, sign | 0x7ff00000u);
    }
    if is_zero(a) {
        return vec2<u32>(0u, sign);
    }
    let p = parts_of(a);
    let q = parts_of(b);
    // 56 bits of the quotient, whose highest or second highest is set, and whether more follow.
    var rest = p.mantissa;
    var quotient = ZERO;
    for (var i = 0u; i < 56u; i += 1u) {
        quotient = shl64(quotient, 1u);
        if !less64(rest, q.mantissa) {
            rest = sub64(rest, q.mantissa);
            quotient.x |= 1u;
        }
        rest = shl64(rest, 1u);
    }
    quotient = shl64(quotient, 7u);
    quotient.x |= select(1u, 0u, is_zero64(rest));
    return normalised(sign, p.exponent - q.exponent + 1023, quotient);
}

fn f_sqrt(a: vec2<u32>) -> vec2<u32> {
    if is_nan(a) {
        return NAN;
    }
    if is_zero(a) {
        return a;
    }
    if (a.y & SIGN) != 0u {
        return NAN;
    }
    if is_infinite(a) {
        return a;
    }
    let p = parts_of(a);
    // An even exponent; the mantissa's leading pair of bits is 01, 10 or 11.
    let odd = (p.exponent & 1) == 0;
    var radicand = select(p.mantissa, shl64(p.mantissa, 1u), odd);
    let exponent = (p.exponent - select(0, 1, odd) - 1023) / 2 + 1023;
    var root = ZERO;
    var rest = ZERO;
    for (var i = 0u; i < 55u; i += 1u) {
        rest = shl64(rest, 2u);
        rest.x |= radicand.y >> 30u;
        radicand = shl64(radicand, 2u);
        var trial = shl64(root, 2u);
        trial.x |= 1u;
        root = shl64(root, 1u);
        if !less64(rest, trial) {
            rest = sub64(rest, trial);
            root.x |= 1u;
        }
    }
    root = shl64(root, 8u);
    root.x |= select(1u, 0u, is_zero64(rest));
    return rounded(0u, exponent, root);
}

// Comparisons. Truth values are 0 and 1.

fn truth(value: bool) -> vec2<u32> {
    return select(ZERO, ONE, value);
}

// Orders as the numbers do, the zeros equal; NaN is not asked for.
fn key_of(a: vec2<u32>) -> vec2<u32> {
    if is_zero(a) {
        return vec2<u32>(0u, SIGN);
    }
    if (a.y & SIGN) != 0u {
        return ~a;
    }
    return vec2<u32>(a.x, a.y | SIGN);
}

fn less(a: vec2<u32>, b: vec2<u32>) -> bool {
    return !is_nan(a) && !is_nan(b) && less64(key_of(a), key_of(b));
}

fn equal(a: vec2<u32>, b: vec2<u32>) -> bool {
    let same = all(a == b) || (is_zero(a) && is_zero(b));
    return !is_nan(a) && !is_nan(b) && same;
}

fn f_less(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    return truth(less(a, b));
}

fn f_less_equal(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    return truth(less(a, b) || equal(a, b));
}

fn f_equal(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    return truth(equal(a, b));
}

fn f_not_equal(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    return truth(!equal(a, b));
}

fn f_and(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    return truth(!is_zero(a) && !is_zero(b));
}

fn f_or(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    return truth(!is_zero(a) || !is_zero(b));
}

fn f_not(a: vec2<u32>) -> vec2<u32> {
    return truth(is_zero(a));
}

fn f_select(condition: vec2<u32>, a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    return select(a, b, is_zero(condition));
}

// The smaller, or NaN if one is; -0 before 0.
fn f_min(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    let first = less(a, b) || is_nan(a) || (equal(a, b) && (a.y & SIGN) != 0u);
    return select(b, a, first);
}

fn f_max(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    return f_neg(f_min(f_neg(a), f_neg(b)));
}

// Rounding to integers.

// The lowest bit of a number's integer part, for exponents from 1023 to 1074.
fn unit_of(exponent: u32) -> vec2<u32> {
    return shl64(vec2<u32>(1u, 0u), 1075u - exponent);
}

fn f_trunc(a: vec2<u32>) -> vec2<u32> {
    let exponent = exponent_of(a);
    if exponent >= 1075u {
        return a;
    }
    if exponent < 1023u {
        return vec2<u32>(0u, a.y & SIGN);
    }
    return a & ~sub64(unit_of(exponent), vec2<u32>(1u, 0u));
}

// Away from zero where something was cut off and the sign is this one.
fn away(a: vec2<u32>, sign: u32) -> vec2<u32> {
    let cut = f_trunc(a);
    if is_nan(a) || all(cut == a) || (a.y & SIGN) != sign {
        return cut;
    }
    let exponent = exponent_of(a);
    if exponent < 1023u {
        return vec2<u32>(0u, ONE.y | sign);
    }
    return add64(cut, unit_of(exponent));
}

fn f_floor(a: vec2<u32>) -> vec2<u32> {
    return away(a, SIGN);
}

fn f_ceil(a: vec2<u32>) -> vec2<u32> {
    return away(a, 0u);
}

fn f_round(a: vec2<u32>) -> vec2<u32> {
    let exponent = exponent_of(a);
    if exponent >= 1075u {
        return a;
    }
    let sign = a.y & SIGN;
    if exponent < 1023u {
        // Up to a half goes to zero.
        let half = vec2<u32>(0u, 0x3fe00000u);
        return select(vec2<u32>(0u, sign), vec2<u32>(0u, ONE.y | sign), less64(half, f_abs(a)));
    }
    let unit = unit_of(exponent);
    let mask = sub64(unit, vec2<u32>(1u, 0u));
    let sum = add64(a, shr64(unit, 1u));
    let tie = is_zero64(sum & mask);
    return select(sum & ~mask, sum & ~(mask | unit), tie);
}

// The number nearest to an integer of 64 bits.
fn f_whole(a: vec2<u32>) -> vec2<u32> {
    if is_zero64(a) {
        return ZERO;
    }
    return normalised(0u, 1085, a);
}

// One NaN, whatever it came from.
fn f_plain(a: vec2<u32>) -> vec2<u32> {
    return select(a, NAN, is_nan(a));
}
