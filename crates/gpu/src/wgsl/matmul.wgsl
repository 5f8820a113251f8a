// Product of two matrices of f32, a tile of 16 by 16 values for each workgroup.
//
// params: rows m, depth k, columns n, tiles in a row. left (m, k), right (k, n), result (m, n).
// Each value is a sum in the order of k.

const SIDE = 16u;

@group(0) @binding(0) var<storage, read> params: array<u32>;
@group(0) @binding(1) var<storage, read_write> done: array<atomic<u32>>;
@group(0) @binding(2) var<storage, read_write> result: array<f32>;
@group(0) @binding(3) var<storage, read> left: array<f32>;
@group(0) @binding(4) var<storage, read> right: array<f32>;

var<workgroup> left_tile: array<f32, 256>;
var<workgroup> right_tile: array<f32, 256>;

@compute @workgroup_size(16, 16)
fn matmul(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(local_invocation_id) local: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let m = params[0];
    let depth = params[1];
    let n = params[2];
    let row = group.x / params[3] * SIDE + local.y;
    let column = group.x % params[3] * SIDE + local.x;
    var sum = 0.0;
    for (var first = 0u; first < depth; first += SIDE) {
        var a = 0.0;
        if row < m && first + local.x < depth {
            a = left[row * depth + first + local.x];
        }
        var b = 0.0;
        if column < n && first + local.y < depth {
            b = right[(first + local.y) * n + column];
        }
        left_tile[thread] = a;
        right_tile[thread] = b;
        workgroupBarrier();
        for (var i = 0u; i < SIDE; i += 1u) {
            sum += left_tile[local.y * SIDE + i] * right_tile[i * SIDE + local.x];
        }
        workgroupBarrier();
    }
    if row < m && column < n {
        result[row * n + column] = sum;
    }
    if thread == 0u {
        atomicAdd(&done[0], 1u);
    }
}
