// The least and the greatest value of a column by a tree: each thread takes 64 values, then halves
// of the workgroup join. Values are compared as unsigned integers that order as they do, -0 before
// 0; NaN is told apart. Follows float.wgsl.

const THREADS = 256u;
const VALUES_PER_THREAD = 64u;

@group(0) @binding(0) var<storage, read> params: array<u32>;
@group(0) @binding(1) var<storage, read_write> done: array<atomic<u32>>;
@group(0) @binding(2) var<storage, read_write> result: array<u32>;
@group(0) @binding(3) var<storage, read> values: array<vec2<u32>>;

var<workgroup> least: array<vec2<u32>, 256>;
var<workgroup> greatest: array<vec2<u32>, 256>;
var<workgroup> seen_nan: atomic<u32>;

@compute @workgroup_size(256)
fn extremes(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    if thread == 0u {
        atomicStore(&seen_nan, 0u);
    }
    workgroupBarrier();
    let rows = params[0];
    let first = group.x * THREADS * VALUES_PER_THREAD;
    var low = vec2<u32>(0xffffffffu, 0xffffffffu);
    var high = vec2<u32>(0u, 0u);
    for (var k = 0u; k < VALUES_PER_THREAD; k += 1u) {
        let i = first + k * THREADS + thread;
        if i < rows {
            let value = values[i];
            if is_nan(value) {
                atomicOr(&seen_nan, 1u);
            } else {
                let negative = (value.y & SIGN) != 0u;
                let key = select(vec2<u32>(value.x, value.y | SIGN), ~value, negative);
                low = select(low, key, less64(key, low));
                high = select(high, key, less64(high, key));
            }
        }
    }
    least[thread] = low;
    greatest[thread] = high;
    workgroupBarrier();
    for (var half = THREADS / 2u; half > 0u; half /= 2u) {
        if thread < half {
            let a = least[thread + half];
            let b = greatest[thread + half];
            least[thread] = select(least[thread], a, less64(a, least[thread]));
            greatest[thread] = select(greatest[thread], b, less64(greatest[thread], b));
        }
        workgroupBarrier();
    }
    if thread == 0u {
        let out = group.x * 5u;
        result[out] = least[0].x;
        result[out + 1u] = least[0].y;
        result[out + 2u] = greatest[0].x;
        result[out + 3u] = greatest[0].y;
        result[out + 4u] = atomicLoad(&seen_nan);
        atomicAdd(&done[0], 1u);
    }
}
