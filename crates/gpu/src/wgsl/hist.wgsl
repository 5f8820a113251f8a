// How many values lie between edges, which are searched by halves. params: rows, bins. The result
// has a count for each bin, then those below, above and NaN. Follows float.wgsl.

const THREADS = 256u;
const VALUES_PER_THREAD = 32u;
const OWN_MAX = 2048u;

@group(0) @binding(0) var<storage, read> params: array<u32>;
@group(0) @binding(1) var<storage, read_write> done: array<atomic<u32>>;
@group(0) @binding(2) var<storage, read_write> result: array<atomic<u32>>;
@group(0) @binding(3) var<storage, read> values: array<vec2<u32>>;
// Keys of the edges, one more than there are bins.
@group(0) @binding(4) var<storage, read> edges: array<vec2<u32>>;

// Counts of this workgroup, if they fit.
var<workgroup> own: array<atomic<u32>, 2048>;

fn bin_of(value: vec2<u32>, bins: u32) -> u32 {
    if is_nan(value) {
        return bins + 2u;
    }
    let key = key_of(value);
    if less64(key, edges[0]) {
        return bins;
    }
    if less64(edges[bins], key) {
        return bins + 1u;
    }
    // The last edge of the first `bins` that is not above the value.
    var low = 0u;
    var high = bins;
    while high - low > 1u {
        let middle = (low + high) / 2u;
        if less64(key, edges[middle]) {
            high = middle;
        } else {
            low = middle;
        }
    }
    return low;
}

@compute @workgroup_size(256)
fn hist(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    for (var i = thread; i < OWN_MAX; i += THREADS) {
        atomicStore(&own[i], 0u);
    }
    workgroupBarrier();
    let rows = params[0];
    let bins = params[1];
    let is_own = bins + 3u <= OWN_MAX;
    let first = group.x * THREADS * VALUES_PER_THREAD;
    for (var k = 0u; k < VALUES_PER_THREAD; k += 1u) {
        let i = first + k * THREADS + thread;
        if i < rows {
            let bin = bin_of(values[i], bins);
            if is_own {
                atomicAdd(&own[bin], 1u);
            } else {
                atomicAdd(&result[bin], 1u);
            }
        }
    }
    workgroupBarrier();
    if is_own {
        for (var bin = thread; bin < bins + 3u; bin += THREADS) {
            let count = atomicLoad(&own[bin]);
            if count > 0u {
                atomicAdd(&result[bin], count);
            }
        }
    }
    if thread == 0u {
        atomicAdd(&done[0], 1u);
    }
}
