//! The kernels against class `cpu`, whose outcomes `tensor` records.

use paceline_base::SplitMix64;
use paceline_base::testing::{from_package, long};

use super::*;
use crate::tests::device;
use cases::digest;

/// An operation of three numbers.
type Operation<'a> = &'a dyn Fn(f32, f32, f32) -> f32;

fn record() -> Record {
    let path = from_package(env!("CARGO_MANIFEST_DIR"), cases::RECORD);
    let text = std::fs::read_to_string(path).unwrap();
    let lines = text.lines().filter_map(|line| line.split_once('\t'));
    lines
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .collect()
}

fn assert_recorded<'a>(record: &Record, key: &str, values: impl IntoIterator<Item = &'a f32>) {
    assert_eq!(format!("{:016x}", digest(values)), record[key], "{key}");
}

/// Random bits, special numbers, denormals, and numbers of one magnitude.
fn numbers(n: usize, seed: u64) -> Vec<f32> {
    const SPECIAL: [u32; 10] = [
        0,
        1,
        0x007f_ffff,
        0x0080_0000,
        0x7f7f_ffff,
        0x7f80_0000,
        0x7fc0_0000,
        0x3f80_0000,
        0x3380_0000,
        0x4b80_0000,
    ];
    let mut random = SplitMix64::new(seed);
    let number = |_| {
        let bits = random.next() as u32;
        let sign = bits & 1 << 31;
        f32::from_bits(match random.below(5) {
            0 => bits,
            1 => SPECIAL[random.below(SPECIAL.len())] | sign,
            2 => bits & 0x7f_ffff | sign,
            3 => 0x3f80_0000 | bits & 7 | sign,
            _ => (0x3f00_0000 + (bits & 0xff_ffff)) | sign,
        })
    };
    (0..n).map(number).collect()
}

#[test]
fn single_operations_have_the_bits_of_the_cpu() {
    let Some(gpu) = device("single_operations_have_the_bits_of_the_cpu") else {
        return;
    };
    const N: usize = 1 << 16;
    let [a, b, mut c] = [1, 2, 3].map(|seed| numbers(N, seed));
    // Sums that cancel but for the product's last bits.
    for i in (0..N).step_by(4) {
        c[i] = -(a[i] * b[i]);
    }
    let cases: [(&str, Operation<'_>); 5] = [
        ("s_fma(x, y, z)", &|x, y, z| x.mul_add(y, z)),
        ("s_add(x, y)", &|x, y, _| x + y),
        ("s_mul(x, y)", &|x, y, _| x * y),
        ("s_div(x, y)", &|x, y, _| x / y),
        ("s_sqrt(x)", &|x, _, _| x.sqrt()),
    ];
    for (operation, expected) in cases {
        let entry = format!(
            "@compute @workgroup_size(64)
            fn operation(
                @builtin(global_invocation_id) id: vec3<u32>,
                @builtin(local_invocation_index) thread: u32,
            ) {{
                let x = a[id.x];
                let y = b[id.x];
                let z = c[id.x];
                result[id.x] = {operation} | ((x | y | z) & 0u);
                sign_off(thread);
            }}"
        );
        let mut on = Session::new(&gpu, Form::Dot4);
        let inputs = [&a, &b, &c].map(|values| on.filled(values));
        let out = on.room(N);
        let text = [&head(Kind::Eight, Form::Dot4), FLOAT, SINGLE, LAYER, &entry];
        let pipeline = gpu
            .pipeline(Kernel {
                entry: "operation",
                text: &text,
            })
            .unwrap();
        let [x, y, z] = inputs;
        let buffers = vec![(2, out.clone()), (3, x), (4, y), (5, z)];
        on.steps.push(Step {
            pipeline,
            buffers,
            groups: N / BLOCK,
        });
        for (i, got) in on.read(&out).into_iter().enumerate() {
            let (x, y, z) = (a[i], b[i], c[i]);
            let expected = expected(x, y, z);
            let same = got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan();
            assert!(
                same,
                "{operation} of {x:e}, {y:e}, {z:e}: {got:e}, expected {expected:e}"
            );
        }
    }
}

#[test]
fn products_have_the_bits_of_class_cpu_in_every_form() {
    let Some(gpu) = device("products_have_the_bits_of_class_cpu_in_every_form") else {
        return;
    };
    let record = record();
    let mut on = Session::new(&gpu, Form::Dot4);
    let exponents = cases::exponents();
    let (x, out) = (on.filled(&exponents), on.room(exponents.len()));
    let (n, buffers) = (exponents.len(), [(2, &out), (3, &x)]);
    on.add(
        ("exponentials", Kind::Eight),
        &[n],
        &buffers,
        n.div_ceil(BLOCK),
    );
    assert_recorded(&record, "exp", &on.read(&out));

    for (kind, leaf) in Kind::ALL
        .into_iter()
        .flat_map(|k| [(k, 0), (k, cases::FFN_LEAF)])
    {
        let stored = cases::product_matrix(kind, leaf);
        let linear = Linear::new(&gpu, stored, &record);
        for rows in cases::PRODUCT_ROWS {
            let all = (0..rows as u64).flat_map(|row| cases::activations(row, stored.cols));
            let x = on.filled(&all.collect::<Vec<f32>>());
            for form in Form::ALL {
                on.form = form;
                let quantised = on.quantise(&x, rows, (stored.cols, leaf));
                let out = on.product(&linear, &quantised, rows, None);
                let key = format!("product {} {leaf} {rows}", kind.name());
                assert_recorded(&record, &key, &on.read(&out));
            }
        }
    }
}

#[test]
fn layers_have_the_bits_of_class_cpu() {
    let Some(gpu) = device("layers_have_the_bits_of_class_cpu") else {
        return;
    };
    let record = record();
    let layer = Layer::new(&gpu, &record);
    let count = |[most, some]: [usize; 2]| if long() { most } else { some };
    for i in 0..count(cases::DECODES) {
        let got = layer.step(&gpu, &LayerCase::decode(i));
        assert_recorded(&record, &format!("decode {i}"), got.iter().flatten());
    }
    for i in 0..count(cases::PROMPTS) {
        let got = layer.step(&gpu, &LayerCase::prompt(i));
        assert_recorded(&record, &format!("prompt {i}"), got.iter().flatten());
    }
}
