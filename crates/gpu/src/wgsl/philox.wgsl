// Random numbers by counter, Philox 4x32-10: numbers from 0 to just below 1, multiples of 2^-53.
// Source: Salmon, Moraes, Dror and Shaw, SC 2011. Follows float.wgsl.

fn uniform_of(seed: vec2<u32>, sample: vec2<u32>, dimension: u32) -> vec2<u32> {
    var block = vec4<u32>(sample.x, sample.y, dimension >> 1u, 0u);
    var key = seed;
    for (var round = 0u; round < 10u; round += 1u) {
        let a = mul32(0xD2511F53u, block.x);
        let b = mul32(0xCD9E8D57u, block.z);
        block = vec4<u32>(b.y ^ block.y ^ key.x, b.x, a.y ^ block.w ^ key.y, a.x);
        key += vec2<u32>(0x9E3779B9u, 0xBB67AE85u);
    }
    let word = shr64(select(block.xy, block.zw, (dimension & 1u) == 1u), 11u);
    if is_zero64(word) {
        return ZERO;
    }
    return normalised(0u, 1032, word);
}
