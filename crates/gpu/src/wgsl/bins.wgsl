// The exact sum of a column: each value's mantissa, cut at absolute places into slices of 16 bits,
// is added to integers. Slice s has the unit 2^(16 s - 1074). Follows float.wgsl.
//
// A workgroup adds 16384 values at most: a bin stays below 16384 * 65535 < 2^31.

const SLICES = 136u;
const COPIES = 8u;
const THREADS = 256u;
const VALUES_PER_THREAD = 64u;

// Bits of the last word of a workgroup's result.
const SEEN_NAN = 1u;
const SEEN_INFINITY = 2u;
const SEEN_NEG_INFINITY = 4u;
const SEEN_NEG_ZERO = 8u;
const SEEN_OTHER = 16u;

@group(0) @binding(0) var<storage, read> params: array<u32>;
@group(0) @binding(1) var<storage, read_write> done: array<atomic<u32>>;
@group(0) @binding(2) var<storage, read_write> result: array<u32>;
@group(0) @binding(3) var<storage, read> values: array<vec2<u32>>;

// Neighbours use different copies, so that equal exponents do not wait for each other.
var<workgroup> bins: array<atomic<i32>, 1088>;
var<workgroup> seen: atomic<u32>;

fn add_slice(at: u32, piece: u32, sign: i32) {
    if piece != 0u {
        atomicAdd(&bins[at], sign * i32(piece));
    }
}

fn add_value(copy: u32, a: vec2<u32>) {
    let exponent = exponent_of(a);
    let negative = (a.y & SIGN) != 0u;
    if exponent == 0x7ffu {
        let infinity = select(SEEN_INFINITY, SEEN_NEG_INFINITY, negative);
        atomicOr(&seen, select(infinity, SEEN_NAN, is_nan(a)));
        return;
    }
    if is_zero(a) {
        atomicOr(&seen, select(SEEN_OTHER, SEEN_NEG_ZERO, negative));
        return;
    }
    let hidden = select(0u, 0x100000u, exponent > 0u);
    let mantissa = vec2<u32>(a.x, (a.y & 0xfffffu) | hidden);
    let place = max(exponent, 1u) - 1u;
    let shift = place & 15u;
    let low = shl64(mantissa, shift);
    let high = select(0u, shr64(mantissa, min(64u - shift, 63u)).x, shift > 0u);
    let at = copy * SLICES + (place >> 4u);
    let sign = select(1, -1, negative);
    add_slice(at, low.x & 0xffffu, sign);
    add_slice(at + 1u, low.x >> 16u, sign);
    add_slice(at + 2u, low.y & 0xffffu, sign);
    add_slice(at + 3u, low.y >> 16u, sign);
    add_slice(at + 4u, high, sign);
    atomicOr(&seen, SEEN_OTHER);
}

@compute @workgroup_size(256)
fn sum(
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
            add_value(thread % COPIES, values[i]);
        }
    }
    workgroupBarrier();
    let out = group.x * (SLICES + 1u);
    if thread < SLICES {
        var total = 0;
        for (var copy = 0u; copy < COPIES; copy += 1u) {
            total += atomicLoad(&bins[copy * SLICES + thread]);
        }
        result[out + thread] = bitcast<u32>(total);
    }
    if thread == 0u {
        result[out + SLICES] = atomicLoad(&seen);
        atomicAdd(&done[0], 1u);
    }
}
