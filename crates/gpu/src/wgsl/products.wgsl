// The exact sum of the products of two columns, as bins.wgsl: slice s has the unit
// 2^(16 s - 2148). Follows float.wgsl.

const SLICES = 264u;
const COPIES = 4u;
const THREADS = 256u;
const VALUES_PER_THREAD = 64u;

const SEEN_NAN = 1u;
const SEEN_INFINITY = 2u;
const SEEN_NEG_INFINITY = 4u;
const SEEN_OTHER = 16u;

@group(0) @binding(0) var<storage, read> params: array<u32>;
@group(0) @binding(1) var<storage, read_write> done: array<atomic<u32>>;
@group(0) @binding(2) var<storage, read_write> result: array<u32>;
@group(0) @binding(3) var<storage, read> left: array<vec2<u32>>;
@group(0) @binding(4) var<storage, read> right: array<vec2<u32>>;

var<workgroup> bins: array<atomic<i32>, 1056>;
var<workgroup> seen: atomic<u32>;

fn add_slices(at: u32, word: u32, sign: i32) {
    if (word & 0xffffu) != 0u {
        atomicAdd(&bins[at], sign * i32(word & 0xffffu));
    }
    if (word >> 16u) != 0u {
        atomicAdd(&bins[at + 1u], sign * i32(word >> 16u));
    }
}

fn whole_mantissa(a: vec2<u32>) -> vec2<u32> {
    return vec2<u32>(a.x, (a.y & 0xfffffu) | select(0u, 0x100000u, exponent_of(a) > 0u));
}

fn add_product(copy: u32, a: vec2<u32>, b: vec2<u32>) {
    let negative = ((a.y ^ b.y) & SIGN) != 0u;
    if exponent_of(a) == 0x7ffu || exponent_of(b) == 0x7ffu {
        let none = is_nan(a) || is_nan(b) || is_zero(a) || is_zero(b);
        let infinity = select(SEEN_INFINITY, SEEN_NEG_INFINITY, negative);
        atomicOr(&seen, select(infinity, SEEN_NAN, none));
        return;
    }
    atomicOr(&seen, SEEN_OTHER);
    if is_zero(a) || is_zero(b) {
        return;
    }
    let product = mul64(whole_mantissa(a), whole_mantissa(b));
    let place = max(exponent_of(a), 1u) + max(exponent_of(b), 1u) - 2u;
    let shift = place & 15u;
    let at = copy * SLICES + (place >> 4u);
    let sign = select(1, -1, negative);
    // 106 bits and 15 more fit 128.
    let low = shl64(product.xy, shift);
    let carry = select(0u, product.y >> min(32u - shift, 31u), shift > 0u);
    var high = shl64(product.zw, shift);
    high.x |= carry;
    add_slices(at, low.x, sign);
    add_slices(at + 2u, low.y, sign);
    add_slices(at + 4u, high.x, sign);
    add_slices(at + 6u, high.y, sign);
}

@compute @workgroup_size(256)
fn dot(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    for (var i = thread; i < SLICES * COPIES; i += THREADS) {
        atomicStore(&bins[i], 0);
    }
    if thread == 0u {
        atomicStore(&seen, 0u);
    }
    workgroupBarrier();
    let rows = params[0];
    let first = group.x * THREADS * VALUES_PER_THREAD;
    for (var k = 0u; k < VALUES_PER_THREAD; k += 1u) {
        let i = first + k * THREADS + thread;
        if i < rows {
            add_product(thread % COPIES, left[i], right[i]);
        }
    }
    workgroupBarrier();
    let out = group.x * (SLICES + 1u);
    for (var slice = thread; slice < SLICES; slice += THREADS) {
        var total = 0;
        for (var copy = 0u; copy < COPIES; copy += 1u) {
            total += atomicLoad(&bins[copy * SLICES + slice]);
        }
        result[out + slice] = bitcast<u32>(total);
    }
    if thread == 0u {
        result[out + SLICES] = atomicLoad(&seen);
        atomicAdd(&done[0], 1u);
    }
}
