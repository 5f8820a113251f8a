// A step of heat that spreads over a plate, for `--halo 1`. The edges keep their neighbours' warmth.
fn f(row: i32, column: i32) -> f32 {
    let here = x(row, column);
    let around = x(row - 1, column) + x(row + 1, column) + x(row, column - 1) + x(row, column + 1);
    return here + 0.2 * (around - 4.0 * here);
}
