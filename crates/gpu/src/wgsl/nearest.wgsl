// The nearest centroid of each row and its squared distance: squares of differences are added
// column by column, each operation rounded; ties go to the lowest. A row without a finite distance
// gets centroid 0 and infinity. params: rows, columns, centroids. Follows float.wgsl.

@group(0) @binding(0) var<storage, read> params: array<u32>;
@group(0) @binding(1) var<storage, read_write> done: array<atomic<u32>>;
@group(0) @binding(2) var<storage, read_write> result: array<u32>;
@group(0) @binding(3) var<storage, read> values: array<vec2<u32>>;
@group(0) @binding(4) var<storage, read> centroids: array<vec2<u32>>;

fn distance_to(row: u32, centroid: u32, columns: u32) -> vec2<u32> {
    var sum = ZERO;
    for (var c = 0u; c < columns; c += 1u) {
        let difference = f_sub(values[row * columns + c], centroids[centroid * columns + c]);
        sum = f_add(sum, f_mul(difference, difference));
    }
    return sum;
}

@compute @workgroup_size(64)
fn nearest(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let row = id.x;
    if row < params[0] {
        var best = vec2<u32>(0u, 0x7ff00000u);
        var which = 0u;
        for (var centroid = 0u; centroid < params[2]; centroid += 1u) {
            let distance = distance_to(row, centroid, params[1]);
            if less(distance, best) {
                best = distance;
                which = centroid;
            }
        }
        result[row * 3u] = which;
        result[row * 3u + 1u] = best.x;
        result[row * 3u + 2u] = best.y;
    }
    if thread == 0u {
        atomicAdd(&done[0], 1u);
    }
}
