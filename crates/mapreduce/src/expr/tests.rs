//! Expressions: what they mean, and what is refused.

use super::{ExprProgram, Registers};
use crate::philox::Philox;

fn value(text: &str, columns: &[f64]) -> Result<f64, String> {
    let program = ExprProgram::parse(text, columns.len()).map_err(|error| error.to_string())?;
    let columns: Vec<&[f64]> = columns.iter().map(std::slice::from_ref).collect();
    let mut out = Vec::new();
    program.run(&columns, 7, &mut Registers::default(), &mut out);
    assert_eq!(out.len(), 1);
    Ok(out[0])
}

#[test]
fn expressions_mean_what_they_say() {
    let (x, y) = (2.25, -3.0);
    for (text, expected) in [
        ("x", x),
        (" x + y * 2 ", x + y * 2.0),
        ("(x + y) * 2", (x + y) * 2.0),
        ("x - y - 1", x - y - 1.0),
        ("x / y / 2", x / y / 2.0),
        ("-x ^ 2", -(x * x)),
        ("2 ^ 3 ^ 2", 512.0),
        ("2 ^ -1", 0.5),
        ("7 % 4 - 7 % -4", 0.0),
        ("y % 2", -1.0),
        ("i", 7.0),
        ("1e3 + .5 + 2.", 1002.5),
        ("pi", std::f64::consts::PI),
        ("sqrt(x) + abs(y)", 4.5),
        ("min(x, y) * max(x, y)", x * y),
        ("round(2.5) + round(-3.5)", -2.0),
        ("floor(x) + ceil(x) + trunc(y)", 2.0),
        ("x > y", 1.0),
        ("x < y || !(x == y) && true", 1.0),
        ("select(x >= 2.25, y, 0)", y),
        ("select(x != x, 1, select(y <= -3, 2, 3))", 2.0),
        ("true == (x > 0)", 1.0),
        ("+x", x),
        ("hypot(3, 4) + pow(2, 10)", 1029.0),
        ("log(exp(1))", 1.0),
        ("tan(0) + atan(0) + tanh(0) + sin(0) + cos(0)", 1.0),
    ] {
        assert_eq!(value(text, &[x, y]), Ok(expected), "{text}");
    }
    assert!(value("min(nan, x)", &[x]).unwrap().is_nan());
    assert!(value("max(x, nan)", &[x]).unwrap().is_nan());
    assert_eq!(
        value("min(0, -0.0)", &[x]).unwrap().to_bits(),
        (-0.0f64).to_bits()
    );
    assert_eq!(
        value("max(-0.0, 0)", &[x]).unwrap().to_bits(),
        0.0f64.to_bits()
    );
}

#[test]
fn what_is_no_expression_is_refused_with_its_place() {
    let long = "1+".repeat(9000) + "1";
    let steps = "x+".repeat(600) + "x";
    let deep = "(".repeat(1200) + "x" + &")".repeat(1200);
    let signs = "-".repeat(1200) + "x";
    let powers = "x^".repeat(1200) + "x";
    let calls = "abs(".repeat(1200) + "x" + &")".repeat(1200);
    for (text, said) in [
        ("", "expected a number, a name or (, at character 1 "),
        ("x +", "expected a number, a name or (, at character 4 "),
        ("x y", "expected an operator or the end, at character 3 "),
        ("x; y", "expected an operator or the end"),
        ("x; } fn evil() -> f32 { return 1.0", "expected an operator"),
        ("o[0]", "no column or function is called \"o\""),
        ("y + 1", "y is input 2, but there are 1, at character 1 "),
        (
            "x + (x > 0)",
            "expected a number, got a truth value, at character 5 ",
        ),
        ("x && x", "expected a truth value, got a number"),
        ("!x", "expected a truth value, got a number"),
        ("-(x < 1)", "expected a number, got a truth value"),
        ("1 < x < 2", "expected a number, got a truth value"),
        (
            "select(x, 1, 2)",
            "expected a truth value, got a number, at character 8 ",
        ),
        (
            "select(x > 0, 1, true)",
            "expected a number, got a truth value",
        ),
        ("select(x > 0, 1)", "select takes 3 arguments, got 2"),
        ("sqrt(x, x)", "sqrt takes 1 arguments, got 2"),
        ("min(x)", "min takes 2 arguments, got 1"),
        ("sqrt x", "expected ("),
        ("sqrt(", "expected a number"),
        ("(x", "expected ), at character 3 "),
        ("1.2.3", "expected an operator"),
        ("1e", "expected a number"),
        ("0x10", "expected an operator"),
        ("système(x)", "called \"syst\""),
        ("x + 🙂", "at character 5 "),
        ("__import__(1)", "no column or function"),
        (&long, "more than 16384 bytes"),
        (&steps, "more than 1000 operations"),
        (&deep, "more than 200 levels"),
        (&signs, "more than 200 levels"),
        (&powers, "more than 200 levels"),
        (&calls, "more than 200 levels"),
    ] {
        let got = value(text, &[1.0]).unwrap_err();
        let start: String = text.chars().take(40).collect();
        assert!(got.contains(said), "{start}: {got}");
    }
}

#[test]
fn a_thousand_hostile_texts_are_refused_or_computed() {
    const PIECES: [&str; 28] = [
        "x", "y", "i", "1", "2.5", "1e308", "nan", "+", "-", "*", "/", "%", "^", "(", ")", "<",
        "==", "&&", "!", "select(", "sqrt(", "min(", ",", " ", "true", "\u{0}", "é", "1e999",
    ];
    let random = Philox::new(3);
    let mut computed = 0;
    for text in 0..3000 {
        let length = random.word(text, 0) % 12;
        let pieces = (0..=length).map(|i| {
            let at = random.word(text, 1 + i as u32) % PIECES.len() as u64;
            PIECES[at as usize]
        });
        let text: String = pieces.collect();
        computed += u32::from(value(&text, &[0.5, 3.0]).is_ok());
    }
    assert!(computed > 50, "only {computed} were expressions");
}

#[test]
fn any_cut_gives_the_same_rows() {
    let random = Philox::new(4);
    let x: Vec<f64> = (0..5000).map(|i| random.uniform(i, 0)).collect();
    let program = ExprProgram::parse("sin(x) * i + select(x > 0.5, x ^ 3, 1 / x)", 1).unwrap();
    let run = |cut: usize| {
        let mut out = Vec::new();
        let mut registers = Registers::default();
        for (number, part) in x.chunks(cut).enumerate() {
            let first = (number * cut) as u64;
            program.run(&[part], first, &mut registers, &mut out);
        }
        out.iter().map(|value| value.to_bits()).collect::<Vec<_>>()
    };
    let whole = run(5000);
    assert_eq!(whole.len(), 5000);
    for cut in [1, 511, 512, 513] {
        assert!(run(cut) == whole, "cut {cut}");
    }
}
