// A pass of a radix sort by four bits, lowest first. Keys are one or two words (WORDS, which comes
// before this text), the low one first.
//
//   count    keys of each tile with each digit               counts[digit * tiles + tile]
//   scan     how many keys come before, in that order        counts, in place
//   scatter  each key to its place; equal digits keep their order
//
// params: keys, the first bit of the digit, tiles.

const DIGITS = 16u;
const THREADS = 128u;
const KEYS_PER_THREAD = 16u;
const SCAN_THREADS = 256u;

@group(0) @binding(0) var<storage, read> params: array<u32>;
@group(0) @binding(1) var<storage, read_write> done: array<atomic<u32>>;
@group(0) @binding(2) var<storage, read_write> counts: array<u32>;
@group(0) @binding(3) var<storage, read> keys: array<u32>;
@group(0) @binding(4) var<storage, read_write> sorted: array<u32>;

var<workgroup> tile_counts: array<atomic<u32>, 16>;
var<workgroup> sums: array<u32, 256>;
// How many keys with a digit the threads before have.
var<workgroup> before: array<u32, 2048>;

fn digit_of(key: u32) -> u32 {
    let bit = params[1];
    return (keys[key * WORDS + bit / 32u] >> (bit % 32u)) & 15u;
}

@compute @workgroup_size(128)
fn count(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    if thread < DIGITS {
        atomicStore(&tile_counts[thread], 0u);
    }
    workgroupBarrier();
    let first = (group.x * THREADS + thread) * KEYS_PER_THREAD;
    for (var k = 0u; k < KEYS_PER_THREAD; k += 1u) {
        if first + k < params[0] {
            atomicAdd(&tile_counts[digit_of(first + k)], 1u);
        }
    }
    workgroupBarrier();
    if thread < DIGITS {
        counts[thread * params[2] + group.x] = atomicLoad(&tile_counts[thread]);
    }
    if thread == 0u {
        atomicAdd(&done[0], 1u);
    }
}

@compute @workgroup_size(256)
fn scan(@builtin(local_invocation_index) thread: u32) {
    let all = DIGITS * params[2];
    let share = (all + SCAN_THREADS - 1u) / SCAN_THREADS;
    let start = min(thread * share, all);
    let end = min(start + share, all);
    var sum = 0u;
    for (var i = start; i < end; i += 1u) {
        sum += counts[i];
    }
    sums[thread] = sum;
    workgroupBarrier();
    var running = 0u;
    for (var other = 0u; other < thread; other += 1u) {
        running += sums[other];
    }
    for (var i = start; i < end; i += 1u) {
        let here = counts[i];
        counts[i] = running;
        running += here;
    }
    if thread == 0u {
        atomicAdd(&done[0], 1u);
    }
}

@compute @workgroup_size(128)
fn scatter(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let first = (group.x * THREADS + thread) * KEYS_PER_THREAD;
    var own: array<u32, 16>;
    for (var k = 0u; k < KEYS_PER_THREAD; k += 1u) {
        if first + k < params[0] {
            own[digit_of(first + k)] += 1u;
        }
    }
    for (var digit = 0u; digit < DIGITS; digit += 1u) {
        before[digit * THREADS + thread] = own[digit];
    }
    workgroupBarrier();
    if thread < DIGITS {
        var running = counts[thread * params[2] + group.x];
        for (var other = 0u; other < THREADS; other += 1u) {
            let here = before[thread * THREADS + other];
            before[thread * THREADS + other] = running;
            running += here;
        }
    }
    workgroupBarrier();
    for (var digit = 0u; digit < DIGITS; digit += 1u) {
        own[digit] = before[digit * THREADS + thread];
    }
    for (var k = 0u; k < KEYS_PER_THREAD; k += 1u) {
        let key = first + k;
        if key < params[0] {
            let digit = digit_of(key);
            let place = own[digit];
            own[digit] = place + 1u;
            for (var word = 0u; word < WORDS; word += 1u) {
                sorted[place * WORDS + word] = keys[key * WORDS + word];
            }
        }
    }
    if thread == 0u {
        atomicAdd(&done[0], 1u);
    }
}
