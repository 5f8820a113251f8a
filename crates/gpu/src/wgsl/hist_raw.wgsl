// How many words have each of some highest bits. params: rows, bits to drop, bins (at most 4096).

const THREADS = 256u;
const VALUES_PER_THREAD = 32u;

@group(0) @binding(0) var<storage, read> params: array<u32>;
@group(0) @binding(1) var<storage, read_write> done: array<atomic<u32>>;
@group(0) @binding(2) var<storage, read_write> result: array<atomic<u32>>;
@group(0) @binding(3) var<storage, read> words: array<u32>;

var<workgroup> own: array<atomic<u32>, 4096>;

@compute @workgroup_size(256)
fn hist_raw(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    for (var i = thread; i < params[2]; i += THREADS) {
        atomicStore(&own[i], 0u);
    }
    workgroupBarrier();
    let rows = params[0];
    let shift = params[1];
    let first = group.x * THREADS * VALUES_PER_THREAD;
    for (var k = 0u; k < VALUES_PER_THREAD; k += 1u) {
        let i = first + k * THREADS + thread;
        if i < rows {
            atomicAdd(&own[words[i] >> shift], 1u);
        }
    }
    workgroupBarrier();
    for (var bin = thread; bin < params[2]; bin += THREADS) {
        let count = atomicLoad(&own[bin]);
        if count > 0u {
            atomicAdd(&result[bin], count);
        }
    }
    if thread == 0u {
        atomicAdd(&done[0], 1u);
    }
}
