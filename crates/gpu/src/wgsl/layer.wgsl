// One layer of a llama by class `cpu`'s definitions (docs/numerics.md), operation by operation.
// Follows float.wgsl, single.wgsl and two constants:
//
//   FOUR   weights are Q4_K's, else Q8_0's
//   FORM   how integers are multiplied: 0 dot4I8Packed, 1 i32, 2 f32
//
// Letters: C columns, R output rows, S spans of a row, T activation rows. A float is a u32.
//
//   norm      a (T, C), b (C)                       -> out (T, C)
//   quantise  a (T, C)                              -> out (T, quantised row)
//   dots      a weights, b factors, c (T, quantised row)  -> out (T, S, R)
//   combine   a (T, S, R), c (T, quantised row)     -> out (T, R)
//   rotate    b (T, HEAD / 2, 2)                    -> out (T, heads, HEAD), in place
//   store     a (words, 2)                          -> out (words): pairs of halves
//   attend    a (T, heads, HEAD), b keys, c values  -> out (T, heads, HEAD)
//   gated     a gates, b                            -> out
//
// A quantised row of q = 128 high + low has C / 4 words of high bytes, as many of low ones, C words
// of q, C / 32 sums of chunks and S scales.
//
// Weights of 64 rows are interleaved: a thread is a row, as a lane is on the CPU. A chunk of 32
// columns has 8 words (Q8_0), or 4 with columns 4 j.. in the low nibbles of word j and 16 + 4 j..
// in the high ones. Its factor is a scale and, in the high half, a min. Steps follow, one for each
// row and 256 columns.

const HEAD = 64u;
const PAGE = 64u;
const TILE = 8u;
const WORDS = select(8u, 4u, FOUR);
// Bits at which sums are cut.
const CUT = select(14u, 7u, FOUR);

@group(0) @binding(0) var<storage, read> params: array<u32>;
@group(0) @binding(1) var<storage, read_write> done: array<atomic<u32>>;
@group(0) @binding(2) var<storage, read_write> result: array<u32>;
@group(0) @binding(3) var<storage, read> a: array<u32>;
@group(0) @binding(4) var<storage, read> b: array<u32>;
@group(0) @binding(5) var<storage, read> c: array<u32>;

var<workgroup> shared_words: array<u32, 64>;

fn sign_off(thread: u32) {
    if thread == 0u {
        atomicAdd(&done[0], 1u);
    }
}

// Adds lane i + width to lane i for halving widths: the order of the CPU's registers.
fn lanes_sum(thread: u32) -> u32 {
    for (var width = 8u; width > 0u; width /= 2u) {
        workgroupBarrier();
        if thread < width {
            shared_words[thread] = s_add(shared_words[thread], shared_words[thread + width]);
        }
    }
    workgroupBarrier();
    return shared_words[0];
}

// params: C, C as a float, epsilon. A workgroup is a row.
@compute @workgroup_size(16)
fn norm(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let columns = params[0];
    let first = group.x * columns;
    var squares = 0u;
    for (var k = thread; k < columns; k += 16u) {
        squares = s_fma(a[first + k], a[first + k], squares);
    }
    shared_words[thread] = squares;
    let mean = s_div(lanes_sum(thread), params[1]);
    let scale = s_div(S_ONE, s_sqrt(s_add(mean, params[2])));
    for (var k = thread; k < columns; k += 16u) {
        result[first + k] = s_mul(s_mul(a[first + k], scale), b[k]);
    }
    sign_off(thread);
}

fn spans_of(columns: u32, span: u32) -> u32 {
    return (columns + span - 1u) / span;
}

fn quantised_words(columns: u32, spans: u32) -> u32 {
    return columns / 2u + columns + columns / 32u + spans;
}

// params: C, columns of a span, T. A thread is a span.
@compute @workgroup_size(64)
fn quantise(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    const STEPS = 0x467e0000u; // 16256
    const SMALLEST = 0x0704ec3du; // 1e-34
    let columns = params[0];
    let spans = spans_of(columns, params[1]);
    let row = id.x / spans;
    if row < params[2] {
        let span = id.x % spans;
        let first = span * params[1];
        let end = min(columns, first + params[1]);
        var largest = 0u;
        for (var k = first; k < end; k += 1u) {
            largest = max(largest, a[row * columns + k] & 0x7fffffffu);
        }
        let is_used = largest > SMALLEST && largest < S_INF;
        let inverse = s_div(STEPS, largest);
        let to = row * quantised_words(columns, spans);
        let whole = to + columns / 2u;
        for (var chunk = first; chunk < end; chunk += 32u) {
            var sum = 0;
            for (var k = chunk; k < chunk + 32u; k += 4u) {
                var high = 0u;
                var low = 0u;
                for (var j = 0u; j < 4u; j += 1u) {
                    let scaled = s_mul(a[row * columns + k + j], inverse);
                    let q = select(0, s_to_int(scaled), is_used);
                    sum += q;
                    high |= (bitcast<u32>(q >> 7u) & 255u) << (8u * j);
                    low |= bitcast<u32>(q & 127) << (8u * j);
                    result[whole + k + j] = bitcast<u32>(q);
                }
                result[to + k / 4u] = high;
                result[to + (columns + k) / 4u] = low;
            }
            result[whole + columns + chunk / 32u] = bitcast<u32>(sum);
        }
        let scale = select(0u, s_div(largest, STEPS), is_used);
        result[whole + columns + columns / 32u + span] = scale;
    }
    sign_off(thread);
}

// Four columns j of a chunk as signed bytes.
fn bytes_of(weights: array<u32, WORDS>, j: u32) -> u32 {
    var words = weights;
    if FOUR {
        return (words[j % 4u] >> (4u * (j / 4u))) & 0x0f0f0f0fu;
    }
    return words[j];
}

// The sum of the products of a chunk with 32 integers, which fits 27 bits. `at` is the row, `k` the
// first column.
fn chunk_dot(weights: array<u32, WORDS>, at: u32, k: u32, columns: u32) -> i32 {
    var sum = 0;
    if FORM == 0u {
        var high = 0;
        for (var j = 0u; j < 8u; j += 1u) {
            let bytes = bytes_of(weights, j);
            high += dot4I8Packed(bytes, c[at + k / 4u + j]);
            sum += dot4I8Packed(bytes, c[at + (columns + k) / 4u + j]);
        }
        return 128 * high + sum;
    }
    for (var j = 0u; j < 8u; j += 2u) {
        // Eight products have 24 bits: exact as floats, in any order.
        var exact = 0.0;
        for (var i = 0u; i < 8u; i += 1u) {
            let bytes = bitcast<i32>(bytes_of(weights, j + i / 4u));
            let w = extractBits(bytes, 8u * (i % 4u), 8u);
            let q = bitcast<i32>(c[at + columns / 2u + k + 4u * j + i]);
            if FORM == 1u {
                sum += w * q;
            } else {
                exact = fma(f32(w), f32(q), exact);
            }
        }
        sum += i32(exact);
    }
    return sum;
}

// fma(f32(h), 2^CUT, f32(l)), where h 2^CUT + l is the sum with these parts and 0 <= l < 2^CUT.
fn joined(high: i32, low: i32) -> u32 {
    let h = high + (low >> CUT);
    let l = bitcast<u32>(low) & ((1u << CUT) - 1u);
    // 24 bits of h, rounded.
    let magnitude = bitcast<u32>(abs(h));
    let shift = 8u - min(countLeadingZeros(magnitude), 8u);
    let odd = (magnitude >> shift) & 1u;
    let rounded_up = magnitude + ((1u << shift) >> 1u) - select(0u, 1u - odd, shift > 0u);
    let kept = rounded_up >> shift << shift;
    let scaled = vec2<u32>(kept << CUT, kept >> (32u - CUT));
    let rest = vec2<u32>(l, 0u);
    let is_negative = h < 0;
    let total = select(add64(scaled, rest), sub64(scaled, rest), is_negative);
    if is_zero64(total) {
        return 0u;
    }
    return s_normalised(select(0u, SIGN, is_negative), 189, total);
}

// params: R, C, columns of a span, T. A thread is a row of the weights, a workgroup a span of 64
// rows and of TILE activation rows.
@compute @workgroup_size(64)
fn dots(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let columns = params[1];
    let spans = spans_of(columns, params[2]);
    let tiles = (params[3] + TILE - 1u) / TILE;
    let first = group.x % tiles * TILE;
    let last = min(first + TILE, params[3]);
    let span = group.x / tiles % spans;
    let block = group.x / tiles / spans;
    let chunks = columns / 32u;
    let stride = quantised_words(columns, spans);
    var high: array<i32, TILE>;
    var low: array<i32, TILE>;
    for (var k = span * params[2]; k < min(columns, (span + 1u) * params[2]); k += 32u) {
        let place = block * chunks + k / 32u;
        let factor = bitcast<i32>(b[place * 64u + thread]);
        let scale = extractBits(factor, 0u, 16u);
        var weights: array<u32, WORDS>;
        for (var j = 0u; j < WORDS; j += 1u) {
            weights[j] = a[(place * WORDS + j) * 64u + thread];
        }
        for (var t = first; t < last; t += 1u) {
            let dot = chunk_dot(weights, t * stride, k, columns);
            high[t - first] += scale * (dot >> CUT);
            low[t - first] += scale * (dot & ((1 << CUT) - 1));
            if FOUR {
                let sums = t * stride + columns / 2u + columns;
                let sum = bitcast<i32>(c[sums + k / 32u]);
                high[t - first] += (factor >> 16u) * (sum >> CUT);
                low[t - first] += (factor >> 16u) * (sum & ((1 << CUT) - 1));
            }
        }
    }
    let rows = params[0];
    let blocks = (rows + 63u) / 64u;
    let units = (columns + 255u) / 256u;
    let unit = block * units + span * params[2] / 256u;
    let step = b[(blocks * chunks + unit) * 64u + thread];
    let row = block * 64u + thread;
    for (var t = first; t < last && row < rows; t += 1u) {
        let inner = joined(high[t - first], low[t - first]);
        result[(t * spans + span) * rows + row] = s_mul(inner, step);
    }
    sign_off(thread);
}

// params: R, C, columns of a span, T, spans of a leaf, whether to add to the output. A thread is an
// output.
@compute @workgroup_size(64)
fn combine(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let rows = params[0];
    let columns = params[1];
    let spans = spans_of(columns, params[2]);
    if id.x < rows * params[3] {
        let t = id.x / rows;
        let words = quantised_words(columns, spans);
        let scales = t * words + words - spans;
        // Complete subtrees of the leaves so far, as the ones of their count in binary.
        var stack: array<u32, 17>;
        var depth = 0u;
        for (var leaf = 0u; leaf * params[4] < spans; leaf += 1u) {
            var sum = 0u;
            for (var s = leaf * params[4]; s < min(spans, (leaf + 1u) * params[4]); s += 1u) {
                sum = s_fma(a[(t * spans + s) * rows + id.x % rows], c[scales + s], sum);
            }
            for (var rest = leaf; (rest & 1u) == 1u; rest >>= 1u) {
                depth -= 1u;
                sum = s_add(stack[depth], sum);
            }
            stack[depth] = sum;
            depth += 1u;
        }
        var sum = stack[depth - 1u];
        for (; depth > 1u; depth -= 1u) {
            sum = s_add(stack[depth - 2u], sum);
        }
        if params[5] != 0u {
            sum = s_add(result[id.x], sum);
        }
        result[id.x] = sum;
    }
    sign_off(thread);
}

// params: pairs, heads of a row, factor behind the rotation. A thread is a pair.
@compute @workgroup_size(64)
fn rotate(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    if id.x < params[0] {
        let pairs = HEAD / 2u;
        let angle = id.x / (pairs * params[1]) * pairs + id.x % pairs;
        let cosine = b[2u * angle];
        let sine = b[2u * angle + 1u];
        let x = result[2u * id.x];
        let y = result[2u * id.x + 1u];
        let turned_x = s_sub(s_mul(x, cosine), s_mul(y, sine));
        let turned_y = s_add(s_mul(x, sine), s_mul(y, cosine));
        result[2u * id.x] = s_mul(turned_x, params[2]);
        result[2u * id.x + 1u] = s_mul(turned_y, params[2]);
    }
    sign_off(thread);
}

// params: words, the first one's place in the output. A thread is a word.
@compute @workgroup_size(64)
fn store(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    if id.x < params[0] {
        let low = s_to_half(a[2u * id.x]);
        result[params[1] + id.x] = low | (s_to_half(a[2u * id.x + 1u]) << 16u);
    }
    sign_off(thread);
}

fn half_at(word: u32, index: u32) -> u32 {
    return s_from_half((word >> (16u * (index & 1u))) & 0xffffu);
}

// The largest score of a page.
fn largest(thread: u32, score: u32) -> u32 {
    workgroupBarrier();
    shared_words[thread] = score;
    for (var width = 32u; width > 0u; width /= 2u) {
        workgroupBarrier();
        if thread < width && s_less(shared_words[thread], shared_words[thread + width]) {
            shared_words[thread] = shared_words[thread + width];
        }
    }
    workgroupBarrier();
    return shared_words[0];
}

var<workgroup> weights_of_page: array<u32, 64>;

// params: first row's position, heads, KV heads. A workgroup is a head of a row; a thread a
// position of a page, then an element of the output.
@compute @workgroup_size(64)
fn attend(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let heads = params[1];
    let head = group.x % heads / (heads / params[2]);
    let seen = params[0] + group.x / heads + 1u;
    let row_words = params[2] * HEAD / 2u;
    var most = S_INF | SIGN;
    var sum = 0u;
    var output = 0u;
    for (var page = 0u; page * PAGE < seen; page += 1u) {
        let position = page * PAGE + thread;
        let at = position * row_words + head * HEAD / 2u;
        var score = S_INF | SIGN;
        if position < seen {
            score = 0u;
            for (var d = 0u; d < HEAD; d += 1u) {
                score = s_fma(a[group.x * HEAD + d], half_at(b[at + d / 2u], d), score);
            }
        }
        let page_most = largest(thread, score);
        weights_of_page[thread] = select(0u, s_exp(s_sub(score, page_most)), position < seen);
        workgroupBarrier();
        if thread < 16u {
            let first = s_add(weights_of_page[thread], weights_of_page[thread + 16u]);
            let second = s_add(weights_of_page[thread + 32u], weights_of_page[thread + 48u]);
            shared_words[thread] = s_add(first, second);
        }
        let page_sum = lanes_sum(thread);
        var page_output = 0u;
        for (var i = 0u; i < min(PAGE, seen - page * PAGE); i += 1u) {
            let word = (page * PAGE + i) * row_words + (head * HEAD + thread) / 2u;
            page_output = s_fma(weights_of_page[i], half_at(c[word], thread), page_output);
        }
        if page == 0u {
            most = page_most;
            sum = page_sum;
            output = page_output;
        } else {
            let larger = select(most, page_most, s_less(most, page_most));
            let before = s_exp(s_sub(most, larger));
            let next = s_exp(s_sub(page_most, larger));
            sum = s_fma(sum, before, s_mul(page_sum, next));
            output = s_fma(output, before, s_mul(page_output, next));
            most = larger;
        }
    }
    result[group.x * HEAD + thread] = s_div(output, sum);
    sign_off(thread);
}

// params: elements. A thread is an element.
@compute @workgroup_size(64)
fn gated(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    if id.x < params[0] {
        let gate = a[id.x];
        let divisor = s_add(S_ONE, s_exp(s_sub(0u, gate)));
        result[id.x] = s_mul(s_div(gate, divisor), b[id.x]);
    }
    sign_off(thread);
}

// params: elements.
@compute @workgroup_size(64)
fn exponentials(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    if id.x < params[0] {
        result[id.x] = s_exp(a[id.x]);
    }
    sign_off(thread);
}
