//! Functions over blocks on any adapter, and texts that are refused.

use super::{BlockFunction, BlockRange};
use crate::Error;
use crate::tests::device;

fn range(first: u64, count: u64, loaded: std::ops::Range<u64>, rows: u64) -> BlockRange {
    BlockRange {
        first,
        count,
        loaded_first: loaded.start,
        loaded: loaded.end - loaded.start,
        rows,
    }
}

/// A stencil with a helper, a constant and a name of ours, in two blocks and in one; a row as an
/// array by loops.
#[test]
fn functions_over_blocks_read_rows_nearby() {
    let stencil = "const weight = 0.25;
        fn side(row: i32, columns: i32) -> f32 { return weight * x(row, columns); }
        fn f(row: i32, column: i32) -> f32 {
            return side(row - 1, column) + side(row + 1, column)
                + side(row, column - 1) + side(row, column + 1);
        }";
    let stencil = BlockFunction::parse(stencil, &[5]).unwrap();
    let moments = "fn f(row: i32) -> array<f32, 3> {
            var all: array<f32, 3>;
            for (var other = 0; other < rows(); other += 1) {
                var power = 1.0;
                for (var k = 0; k < 3; k += 1) {
                    all[k] += power * y(other, 0);
                    power *= x(row, 0);
                }
            }
            return all;
        }";
    let moments = BlockFunction::parse(moments, &[5, 1]).unwrap();
    assert_eq!((stencil.result_columns(), moments.result_columns()), (5, 3));
    let Some(gpu) = device("functions_over_blocks_read_rows_nearby") else {
        return;
    };
    let x: Vec<f32> = (0..200).map(|i| ((i * 37 % 101) as f32) / 8.0).collect();
    let at = |row: i64, column: i64| {
        let (row, column) = (row.clamp(0, 39), column.clamp(0, 4));
        0.25 * x[(row * 5 + column) as usize]
    };
    let expected: Vec<f32> = (0..200i64)
        .map(|i| (i / 5, i % 5))
        .map(|(r, c)| at(r - 1, c) + at(r + 1, c) + at(r, c - 1) + at(r, c + 1))
        .collect();
    let whole = gpu.block(&stencil, &[&x], range(0, 40, 0..40, 40)).unwrap();
    assert_eq!(whole, expected);
    let mut halves = gpu
        .block(&stencil, &[&x[..105]], range(0, 20, 0..21, 40))
        .unwrap();
    halves.extend(
        gpu.block(&stencil, &[&x[95..]], range(20, 20, 19..40, 40))
            .unwrap(),
    );
    assert_eq!(halves, expected);
    let beyond = gpu.block(&stencil, &[&x[..100]], range(0, 20, 0..20, 40));
    let expected = Error::Halo {
        row: 20,
        first: 0,
        end: 20,
    };
    assert_eq!(beyond, Err(expected));

    let y: Vec<f32> = (0..40).map(|i| i as f32).collect();
    let found = gpu
        .block(&moments, &[&x, &y], range(3, 2, 0..40, 40))
        .unwrap();
    let powers = [x[15], x[20]].map(|x| [780.0, 780.0 * x, 780.0 * x * x]);
    assert_eq!(found, powers.concat());
    // Not all inputs are used; loops that do not end are ended.
    let endless = "fn f(row: i32) -> f32 { var n = 0.0; while true { n += 1.0; } return n; }";
    let endless = BlockFunction::parse(endless, &[5, 1]).unwrap();
    let late = gpu.block(&endless, &[&x, &y], range(0, 2, 0..40, 40));
    assert!(matches!(late, Err(Error::Iterations { .. })), "{late:?}");
    assert_eq!(gpu.lost(), None);
}

#[test]
fn hostile_functions_over_blocks_are_refused_by_name() {
    let deep = (1..9).fold(
        "fn f0(v: f32) -> f32 { return v; }".to_owned(),
        |text, i| {
            let k = i - 1;
            format!("{text} fn f{i}(v: f32) -> f32 {{ return f{k}(v) + f{k}(v); }}")
        },
    );
    let deep = format!("{deep} fn f(row: i32) -> f32 {{ return f8(1.0); }}");
    for (text, why) in [
        ("fn g(row: i32) -> f32 { return 1.0; }", "no function f"),
        ("fn f(row: u32) -> f32 { return 1.0; }", "expected fn f"),
        ("fn f(row: i32) -> i32 { return 1; }", "expected fn f"),
        (
            "fn f(row: i32) -> array<f32, 65> { var a: array<f32, 65>; return a; }",
            "65 values",
        ),
        (
            "fn f(row: i32) -> f32 { var a: array<f32, 1025>; return a[row]; }",
            "4100 bytes",
        ),
        (
            "fn f(row: i32) -> f32 { return paceline_x[0]; }",
            "are taken",
        ),
        (
            "var<private> p: f32; fn f(row: i32) -> f32 { return p; }",
            "1 variables",
        ),
        (
            "var<workgroup> p: f32; fn f(row: i32) -> f32 { return p; }",
            "1 variables",
        ),
        (
            "@compute @workgroup_size(1) fn e() {} fn f(row: i32) -> f32 { return 1.0; }",
            "1 entry",
        ),
        (
            "fn f(row: i32) -> f32 { workgroupBarrier(); return 1.0; }",
            "",
        ),
        ("fn f(row: i32) -> f32 { return f(row); }", ""),
        ("fn f(row: i32) -> f32 { return z(row, 0); }", "z"),
        (
            "fn x(row: i32, column: i32) -> f32 { return 1.0; } fn f(row: i32) -> f32 { return 1.0; }",
            "",
        ),
        ("fn f(row: i32) -> f32 { return 1.0; } /*", ""),
        (&deep, "calls"),
    ] {
        match BlockFunction::parse(text, &[3]) {
            Err(Error::Function { reason }) => assert!(reason.contains(why), "{text}: {reason}"),
            other => panic!("{text}: {other:?}"),
        }
    }
    assert!(BlockFunction::parse("fn f(row: i32) -> f32 { return 1.0; }", &[0]).is_err());
}
