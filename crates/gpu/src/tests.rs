//! Kernels against their definitions, on any adapter; lavapipe in CI. Without an adapter the tests
//! are skipped by name.

use paceline_base::SplitMix64;

use crate::{Column, Error, Gpu, KeyWidth, RowRange, Scalar, ScalarFunction, Software};

/// The device of this machine, printed with its label; prints a skipped test if there is none.
pub(crate) fn device(test: &str) -> Option<Gpu> {
    match Gpu::open(Software::Allowed) {
        Ok(gpu) => {
            eprintln!("{test} runs on {}", gpu.label());
            Some(gpu)
        }
        Err(error) => {
            eprintln!("SKIPPED {test}: {error}");
            None
        }
    }
}

/// Random bits, many of them special or subnormal; numbers of one magnitude; small halves.
fn numbers(n: usize, seed: u64) -> Vec<f64> {
    const SPECIAL: [u64; 12] = [
        0,
        1,
        0x000f_ffff_ffff_ffff,
        0x0010_0000_0000_0000,
        0x7fef_ffff_ffff_ffff,
        0x7ff0_0000_0000_0000,
        0x7ff8_0000_0000_0000,
        0x3ff0_0000_0000_0000,
        0x3fe0_0000_0000_0000,
        0x3ff8_0000_0000_0000,
        0x4330_0000_0000_0000,
        0x432f_ffff_ffff_ffff,
    ];
    let mut random = SplitMix64::new(seed);
    let number = |_| {
        let sign = random.next() << 63;
        f64::from_bits(match random.below(5) {
            0 => random.next(),
            1 => SPECIAL[random.below(SPECIAL.len())] | sign,
            2 => random.next() >> 10 | sign,
            3 => ((random.below(17) as f64 - 8.0) / 2.0).to_bits(),
            _ => (0x3f80_0000_0000_0000 + (random.next() >> 8)) | sign,
        })
    };
    (0..n).map(number).collect()
}

fn rows<'a>(columns: &'a [Column<'a>], count: usize, map: Option<&'a str>) -> RowRange<'a> {
    RowRange {
        count: count as u64,
        first: 5,
        columns,
        map,
    }
}

/// NaN has no promised bits.
fn assert_same(got: &[f64], expected: impl Iterator<Item = f64>, what: &str) {
    let mut seen = 0;
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let same = got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan();
        assert!(same, "{what}, row {i}: {got:e}, expected {expected:e}");
        seen += 1;
    }
    assert_eq!(seen, got.len(), "{what}");
}

/// An operation of two numbers.
type BinaryOp<'a> = &'a dyn Fn(f64, f64) -> f64;

#[test]
fn operations_have_the_bits_of_the_cpu() {
    let Some(gpu) = device("operations_have_the_bits_of_the_cpu") else {
        return;
    };
    let n = 40_000;
    let (a, b) = (numbers(n, 1), numbers(n, 2));
    let truth = |value: bool| f64::from(u8::from(value));
    let cases: [(&str, BinaryOp<'_>); 16] = [
        ("f_add(x, y)", &|x, y| x + y),
        ("f_sub(x, y)", &|x, y| x - y),
        ("f_mul(x, y)", &|x, y| x * y),
        ("f_div(x, y)", &|x, y| x / y),
        ("f_sqrt(x)", &|x, _| x.sqrt()),
        ("f_floor(x)", &|x, _| x.floor()),
        ("f_ceil(x)", &|x, _| x.ceil()),
        ("f_trunc(x)", &|x, _| x.trunc()),
        ("f_round(x)", &|x, _| x.round_ties_even()),
        ("f_abs(x)", &|x, _| x.abs()),
        ("f_neg(x)", &|x, _| -x),
        ("f_less(x, y)", &|x, y| truth(x < y)),
        ("f_less_equal(x, y)", &|x, y| truth(x <= y)),
        ("f_equal(x, y)", &|x, y| truth(x == y)),
        ("f_not_equal(x, y)", &|x, y| truth(x != y)),
        ("f_select(f_less(x, y), x, y)", &|x, y| {
            if x < y { x } else { y }
        }),
    ];
    let columns = [Column::Values(&a), Column::Values(&b)];
    for (text, expected) in cases {
        let body = format!("let value = {text};");
        let got = gpu.values(&rows(&columns, n, Some(&body))).unwrap();
        let expected = a.iter().zip(&b).map(|(x, y)| expected(*x, *y));
        assert_same(&got, expected, text);
    }
    let got = gpu.values(&rows(&columns, n, Some("let value = f_add(i, ONE);")));
    assert_same(&got.unwrap(), (0..n).map(|i| (i + 6) as f64), "row numbers");
}

#[test]
fn a_lost_device_gives_no_answer() {
    let Some(gpu) = device("a_lost_device_gives_no_answer") else {
        return;
    };
    let values = vec![1.0; 1000];
    let columns = [Column::Values(&values)];
    let all = rows(&columns, 1000, None);
    assert!(gpu.sum(&all).is_ok());
    gpu.lose();
    for _ in 0..2 {
        let refused = gpu.sum(&all).unwrap_err();
        assert!(matches!(refused, Error::Lost { .. }), "{refused}");
    }
    assert!(gpu.sort(&mut [0; 8], KeyWidth::Two).is_err());
}

#[test]
fn more_than_the_adapter_takes_is_refused() {
    let Some(gpu) = device("more_than_the_adapter_takes_is_refused") else {
        return;
    };
    let bytes = gpu.bytes_max() as usize + 8;
    assert!(!gpu.sorts(bytes as u64) && gpu.sorts(gpu.bytes_max()));
    let refused = gpu.sort(&mut vec![0; bytes], KeyWidth::Two).unwrap_err();
    assert!(matches!(refused, Error::Bytes { .. }), "{refused}");
    assert!(gpu.lost().is_none(), "{:?}", gpu.lost());
}

#[test]
fn functions_of_users_are_computed() {
    let text = "fn g(a: u32, b: i32) -> i32 {
        var s = i32(a % 7u); let v = vec2<i32>(b, 3);
        if s > 3 { s = -s; } switch b { case 1: { s += 10; } default: { s += v.y; } }
        return s * v.x; }";
    let function = ScalarFunction::parse(text).unwrap();
    assert_eq!(function.arguments(), [Scalar::U32, Scalar::I32]);
    assert_eq!(function.result(), Scalar::I32);
    let Some(gpu) = device("functions_of_users_are_computed") else {
        return;
    };
    let a: Vec<u32> = (0..1000).collect();
    let b: Vec<u32> = (0..1000).map(|i| i % 3).collect();
    let got = gpu.function(&function, &[a.clone(), b.clone()]).unwrap();
    let expected = a.iter().zip(&b).map(|(a, b)| {
        let s = (a % 7) as i32;
        let s = if s > 3 { -s } else { s };
        (s + if *b == 1 { 10 } else { 3 }) * *b as i32
    });
    assert!(got.iter().map(|word| *word as i32).eq(expected));
    let floats = ScalarFunction::parse("fn f(x: f32) -> f32 { return x * 0.5 + 1.0; }").unwrap();
    let x: Vec<u32> = (0..100).map(|i| (i as f32).to_bits()).collect();
    let got = gpu.function(&floats, &[x]).unwrap();
    let expected = (0..100).map(|i| (i as f32).mul_add(0.5, 1.0).to_bits());
    assert!(got.into_iter().eq(expected), "exact in any order");
}

#[expect(clippy::too_many_lines, reason = "a case for each way to be refused")]
#[test]
fn hostile_functions_are_refused_by_name() {
    let long = format!("fn f(x: f32) -> f32 {{ return x{}; }}", " + x".repeat(2000));
    let deep = format!(
        "fn f(x: f32) -> f32 {{ return {}x{}; }}",
        "(".repeat(1200),
        ")".repeat(1200)
    );
    let blocks = format!("fn f(x: f32) -> f32 {{ {} return x; }}", "{".repeat(5000));
    let huge = format!(
        "fn f(x: f32) -> f32 {{ return x; }} // {}",
        "y".repeat(20_000)
    );
    for (text, said) in [
        ("", "0 functions, expected exactly one"),
        ("x; } fn evil() -> f32 { return 1.0", "expected"),
        (
            "fn f(x: f32) -> f32 { return x; } fn g(x: f32) -> f32 { return x; }",
            "2 functions",
        ),
        (
            "var<private> p: f32; fn f(x: f32) -> f32 { return x; }",
            "1 variables",
        ),
        (
            "override o: f32 = 1.0; fn f(x: f32) -> f32 { return x * o; }",
            "1 overrides",
        ),
        ("@compute @workgroup_size(1) fn f() {}", "1 entry points"),
        (
            "fn f(x: f32) -> f32 { loop {} return x; }",
            "loops are not allowed",
        ),
        (
            "fn f(x: f32) -> f32 { while true {} return x; }",
            "loops are not allowed",
        ),
        (
            "fn f(x: f32) -> f32 { for (;;) {} return x; }",
            "loops are not allowed",
        ),
        ("fn f(x: f32) -> f32 { return f(x); }", ""),
        ("fn f(x: f32) -> f32 { return result[0]; }", "result"),
        ("fn f(x: f32) { }", "it gives no result"),
        ("fn f() -> f32 { return 1.0; }", "0 arguments"),
        (
            "fn f(x: vec2<f32>) -> f32 { return x.x; }",
            "the types f32, i32 or u32",
        ),
        (
            "fn f(x: f32) -> bool { return true; }",
            "the types f32, i32 or u32",
        ),
        (
            "fn f(x: f32) -> f32 { var a: array<f32, 1000000>; return a[0]; }",
            "arrays",
        ),
        ("fn f(x: f64) -> f64 { return x; }", ""),
        (
            "enable f16; fn f(x: f32) -> f32 { return f32(f16(x)); }",
            "",
        ),
        ("fn f(x: f32) -> f32 { workgroupBarrier(); return x; }", ""),
        ("fn f(x: f32) -> f32 { return dpdx(x); }", "derivatives"),
        ("fn f(x: f32) -> f32 { return y; }", "y"),
        (&long, "operations, expected at most 1000"),
        (&deep, "brackets nested 1201 deep"),
        (&blocks, "brackets nested 5001 deep"),
        (&huge, "bytes, expected at most 16384"),
    ] {
        let start: String = text.chars().take(60).collect();
        match ScalarFunction::parse(text) {
            Err(Error::Function { reason }) => {
                assert!(reason.contains(said), "{start}: {reason}");
            }
            other => panic!("{start}: {other:?}"),
        }
    }
    // A constant outside the function is folded into it.
    let folded = ScalarFunction::parse("const c = 2.0; fn f(x: f32) -> f32 { return x * c; }");
    assert!(folded.is_ok() && !format!("{folded:?}").contains("const"));
}

#[test]
fn a_thousand_hostile_functions_are_refused_or_checked() {
    const PIECES: [&str; 30] = [
        "fn f(x: f32) -> f32 {",
        "return x;",
        "}",
        "{",
        "(",
        ")",
        "x",
        "+",
        "*",
        "1.0",
        "var a = x;",
        "a",
        "if x > 1.0 {",
        "loop {",
        "switch 1 {",
        "@group(0)",
        "fn g() {}",
        "array<f32, 9>",
        ";",
        "let",
        "=",
        "&&",
        "vec4<f32>(x)",
        "/*",
        "*/",
        "//",
        "\n",
        "\u{0}",
        "é",
        "0x1p-999999",
    ];
    let mut random = SplitMix64::new(11);
    let mut checked = 0;
    for _ in 0..1000 {
        let count = 1 + random.below(4);
        let mut text = match random.below(2) {
            0 => String::new(),
            _ => PIECES[0].to_owned(),
        };
        for _ in 0..count {
            text += PIECES[random.below(PIECES.len())];
            text += " ";
        }
        checked += u32::from(ScalarFunction::parse(&text).is_ok());
        let closed = format!(
            "{} {} return x; }}",
            PIECES[0],
            text.trim_start_matches(PIECES[0])
        );
        checked += u32::from(ScalarFunction::parse(&closed).is_ok());
    }
    assert!(checked > 5, "only {checked} were functions");
}

#[test]
fn products_of_matrices_are_those_of_the_definition() {
    let Some(gpu) = device("products_of_matrices_are_those_of_the_definition") else {
        return;
    };
    for (m, k, n) in [(1, 1, 1), (17, 40, 33), (64, 16, 5)] {
        let values = |count: usize, by: usize| -> Vec<f32> {
            (0..count).map(|i| (i * by % 19) as f32 - 9.0).collect()
        };
        let (a, b) = (values(m * k, 7), values(k * n, 5));
        let value =
            |i: usize| -> f32 { (0..k).map(|at| a[i / n * k + at] * b[at * n + i % n]).sum() };
        let expected: Vec<f32> = (0..m * n).map(value).collect();
        assert_eq!(gpu.matmul(&a, &b, k).unwrap(), expected, "{m} {k} {n}");
    }
}

#[test]
fn rows_are_partitioned_in_order() {
    let Some(gpu) = device("rows_are_partitioned_in_order") else {
        return;
    };
    for rows in [1, 5000] {
        let mut random = SplitMix64::new(rows);
        let partitions: Vec<u32> = (0..rows).map(|_| random.below(256) as u32).collect();
        let mut expected: Vec<u32> = (0..rows as u32).collect();
        expected.sort_by_key(|row| partitions[*row as usize]);
        assert_eq!(gpu.partition(&partitions, 8).unwrap(), expected);
    }
    assert_eq!(gpu.partition(&[], 8), Ok(Vec::new()));
}
