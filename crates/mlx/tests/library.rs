//! MLX as it is here, and libraries that are not it.

#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "fake/build.rs"]
mod build;

use std::path::{Path, PathBuf};

use paceline_mlx::{
    Array, DeviceKind, Dtype, Error, LIBRARY_NAME, Library, LibraryPaths, Mask, ProductSizes,
    Quantised, QuantisedMode, Stream, WeightForm, product_rates,
};

/// A stream of the library that `PACELINE_MLXC` names, or a line that says why a test is
/// skipped.
fn path(test: &str) -> Option<PathBuf> {
    let found = std::env::var_os("PACELINE_MLXC").map(PathBuf::from);
    if found.is_none() {
        eprintln!("SKIPPED {test}: PACELINE_MLXC names no libmlxc (cargo xtask mlx)");
    }
    found
}

fn stream(test: &str) -> Option<Stream> {
    let library = Library::load(&path(test)?).unwrap();
    Some(library.stream(DeviceKind::Cpu).unwrap())
}

fn values(stream: &Stream, array: &Array) -> Vec<f32> {
    let rows = stream.rows_f32(array).unwrap();
    stream.eval([&rows]).unwrap();
    rows.as_f32().unwrap().to_vec()
}

#[test]
fn a_library_that_is_nowhere_is_named_with_all_places() {
    let folder = tempfile::tempdir().unwrap();
    let places = LibraryPaths {
        explicit: Some(folder.path().join("none.so")),
        ..LibraryPaths::default()
    };
    let error = Library::open(&places).unwrap_err();
    assert!(matches!(&error, Error::NotFound { looked, .. } if looked.len() == 1));
    assert!(error.to_string().contains("none.so"), "{error}");
}

#[test]
fn what_is_no_library_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(LIBRARY_NAME);
    for content in ["", "no library", "\x7fELF"] {
        std::fs::write(&path, content).unwrap();
        let error = Library::load(&path).unwrap_err();
        assert!(
            matches!(error, Error::NotALibrary { .. } | Error::Truncated { .. }),
            "{content:?}: {error}"
        );
    }
    let error = Library::load(folder.path()).unwrap_err();
    assert!(
        matches!(error, Error::NotALibrary { .. } | Error::Read { .. }),
        "{error}"
    );
}

/// A library of this system that is not MLX has none of its functions.
#[test]
#[cfg(target_os = "linux")]
fn another_library_lacks_the_functions() {
    let known = [
        "/lib/x86_64-linux-gnu/libm.so.6",
        "/lib/aarch64-linux-gnu/libm.so.6",
    ];
    let Some(other) = known.iter().map(Path::new).find(|path| path.exists()) else {
        return eprintln!("SKIPPED another library lacks the functions: no libm.so.6");
    };
    let error = Library::load(other).unwrap_err();
    assert!(
        matches!(error, Error::Symbol { symbol, .. } if symbol.starts_with("mlx_")),
        "{error}"
    );
}

/// A library that says it is of another version, or of the right one but lacks the functions;
/// `None` if there is no compiler.
fn fake(folder: &Path, cfg: &str) -> Option<PathBuf> {
    build::build(folder, "other.rs", &["--cfg", cfg])
}

#[test]
fn another_version_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let Some(other) = fake(folder.path(), "wrong_version") else {
        return eprintln!("SKIPPED mlx of another version is refused: no rustc");
    };
    let error = Library::load(&other).unwrap_err();
    assert!(
        error
            .to_string()
            .ends_with("is of version 0.31.1, expected 0.32.x"),
        "{error}"
    );
    let folder = tempfile::tempdir().unwrap();
    let hollow = fake(folder.path(), "right_version").unwrap();
    let error = Library::load(&hollow).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Symbol {
                symbol: "mlx_set_error_handler",
                ..
            }
        ),
        "{error}"
    );
}

/// Of places that all have a library, the first that fits is opened; if none does, the error has
/// the reason of each.
#[test]
fn a_library_that_does_not_fit_is_passed_over() {
    let (beside, installed) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let Some(other) = fake(beside.path(), "wrong_version") else {
        return eprintln!("SKIPPED mlx that does not fit is passed over: no rustc");
    };
    let hollow = fake(installed.path(), "right_version").unwrap();
    let mut places = LibraryPaths {
        explicit: None,
        beside: Some(beside.path().into()),
        installed: Some(hollow.clone()),
        hang_note: None,
    };
    if places.found().len() > 2 {
        return eprintln!("SKIPPED mlx that does not fit is passed over: Homebrew has one");
    }
    let error = Library::open(&places).unwrap_err().to_string();
    let (other, hollow) = (other.display(), hollow.display());
    assert_eq!(
        error,
        format!(
            "mlx: none of 2 libraries can be used: {other} is of version 0.31.1, expected 0.32.x; \
             {hollow} has no function mlx_set_error_handler"
        )
    );
    let Some(real) = path("mlx that fits is opened behind one that does not") else {
        return;
    };
    places.installed = Some(real.clone());
    assert_eq!(Library::open(&places).unwrap().path(), real);
}

#[test]
fn a_cut_library_is_refused_before_it_is_loaded() {
    let Some(whole) = path("a cut library is refused") else {
        return;
    };
    let bytes = std::fs::read(whole).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let cut = folder.path().join(LIBRARY_NAME);
    for part in [1, 2, 3] {
        std::fs::write(&cut, &bytes[..bytes.len() * part / 4]).unwrap();
        let error = Library::load(&cut).unwrap_err();
        assert!(
            matches!(error, Error::Truncated { .. }),
            "{part}/4: {error}"
        );
    }
}

#[test]
fn numbers_come_back() {
    let Some(stream) = stream("mlx numbers come back") else {
        return;
    };
    let x = stream
        .array_f32(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], &[2, 3])
        .unwrap();
    assert_eq!((x.shape(), x.dtype()), (vec![2, 3], Dtype::F32));
    let sum = stream.add(&x, &x).unwrap();
    assert_eq!(values(&stream, &sum), [2.0, 4.0, 6.0, 8.0, 10.0, 12.0]);
    let across = stream.transpose(&x, &[1, 0]).unwrap();
    assert_eq!(values(&stream, &across), [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
    let product = stream.matmul(&x, &across).unwrap();
    assert_eq!(values(&stream, &product), [14.0, 32.0, 32.0, 77.0]);
    let part = stream.slice(&x, &[0, 1], &[2, 3]).unwrap();
    assert_eq!(values(&stream, &part), [2.0, 3.0, 5.0, 6.0]);
    let both = stream.concatenate(&[&part, &part], 1).unwrap();
    assert_eq!(both.shape(), [2, 4]);
    let half = stream.astype(&x, Dtype::BF16).unwrap();
    assert_eq!((half.dtype(), half.n_bytes()), (Dtype::BF16, 12));
}

#[test]
fn what_is_not_computed_or_of_another_type_is_not_read() {
    let Some(stream) = stream("mlx memory is checked") else {
        return;
    };
    let x = stream.array_f32(&[1.0, 2.0], &[2]).unwrap();
    let half = stream.astype(&x, Dtype::F16).unwrap();
    let is_early = |error| matches!(error, Err(Error::NotComputed { .. }));
    assert!(is_early(half.as_bytes().map(drop)));
    assert!(is_early(stream.exp(&x).unwrap().as_f32().map(drop)));
    stream.eval([&half]).unwrap();
    assert_eq!(half.as_bytes().unwrap().len(), 4);
    assert!(matches!(half.as_f32(), Err(Error::Memory { .. })));
    let wide = stream.array_f32(&[1.0, 2.0, 3.0, 4.0], &[2, 2]).unwrap();
    let across = stream.transpose(&wide, &[1, 0]).unwrap();
    stream.eval([&across]).unwrap();
    assert!(matches!(
        across.as_f32(),
        Err(Error::Memory { rows: false, .. })
    ));
    let error = stream.array_f32(&[1.0], &[2]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "mlx: array of shape [2] and type float32: 4 bytes, expected 8"
    );
}

#[test]
fn errors_are_returned_and_do_not_end_the_process() {
    let Some(stream) = stream("mlx errors are returned") else {
        return;
    };
    let x = stream.array_f32(&[1.0, 2.0], &[2]).unwrap();
    let error = stream.reshape(&x, &[3]).unwrap_err();
    assert!(
        matches!(
            &error,
            Error::Call {
                call: "mlx_reshape",
                ..
            }
        ),
        "{error}"
    );
    assert!(error.to_string().contains("reshape"), "{error}");
    let error = stream.refused();
    assert!(
        matches!(
            &error,
            Error::Call {
                call: "mlx_sigmoid",
                ..
            }
        ),
        "{error}"
    );
    assert_eq!(values(&stream, &x), [1.0, 2.0], "it still computes");
}

/// The address of an array's memory.
fn address(array: &Array) -> usize {
    array.as_bytes().unwrap().as_ptr().addr()
}

/// MLX writes a result into the memory of an operand without another handle, even if the operand
/// was made of values. So a device must never use memory of its caller in place; a slice of an
/// array's memory borrows a handle.
#[test]
fn memory_is_reused_after_the_last_handle_and_never_before() {
    let Some(stream) = stream("mlx memory is reused") else {
        return;
    };
    let x = stream.array_f32(&[0.0; 4096], &[4096]).unwrap();
    let (before, kept) = (address(&x), x.clone());
    let y = stream.exp(&x).unwrap();
    drop(x);
    stream.eval([&y]).unwrap();
    assert_ne!(address(&y), before);
    assert_eq!(kept.as_f32().unwrap(), [0.0; 4096]);
    let z = stream.exp(&kept).unwrap();
    drop(kept);
    stream.eval([&z]).unwrap();
    assert_eq!(address(&z), before);
    assert_eq!(z.as_f32().unwrap(), y.as_f32().unwrap());
}

#[test]
fn attention_of_one_key_is_its_value() {
    let Some(stream) = stream("mlx attention") else {
        return;
    };
    let q = stream.array_f32(&[1.0; 16], &[1, 2, 1, 8]).unwrap();
    let v: Vec<f32> = (0..8).map(|i| i as f32).collect();
    let v = stream.array_f32(&v, &[1, 1, 1, 8]).unwrap();
    let out = stream
        .attention([&q, &v, &v], 0.5, Mask::Causal, None)
        .unwrap();
    assert_eq!(out.shape(), [1, 2, 1, 8]);
    assert_eq!(
        values(&stream, &out)[8..],
        [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    );
}

/// Products with chosen matrices of a stack are those with each by itself, plain and quantised.
#[test]
fn gathered_products_are_those_of_each_matrix() {
    let Some(stream) = stream("mlx gathered products") else {
        return;
    };
    let matrices: Vec<f32> = (0..12).map(|i| i as f32).collect();
    let stack = stream.array_f32(&matrices, &[3, 2, 2]).unwrap();
    let x = stream.array_f32(&[1.0, 10.0], &[1, 1, 1, 2]).unwrap();
    let chosen = stream.array_u32(&[2, 0], &[1, 2]).unwrap();
    let out = stream.gathered_matmul(&x, &stack, &chosen, false).unwrap();
    assert_eq!(out.shape(), [1, 2, 1, 2]);
    assert_eq!(values(&stream, &out), [108.0, 119.0, 20.0, 31.0]);

    // Two matrices (1, 32) of 8 bits: all values 1, and all values 3.
    let packed = [[1u8; 32], [3; 32]].concat();
    let ones = stream.array_f32(&[1.0, 1.0], &[2, 1, 1]).unwrap();
    let quantised = Quantised {
        packed: stream.array(&packed, &[2, 1, 8], Dtype::U32).unwrap(),
        scales: ones.clone(),
        biases: Some(stream.zeros(&[2, 1, 1], Dtype::F32).unwrap()),
        group: 32,
        bits: 8,
        mode: QuantisedMode::Affine,
    };
    let x = stream.array_f32(&[1.0; 32], &[1, 1, 1, 32]).unwrap();
    let chosen = stream.array_u32(&[0, 1], &[1, 2]).unwrap();
    let product = stream.gathered_quantised_matmul(&x, &quantised, &chosen, true);
    let product = product.unwrap();
    assert_eq!(product.shape(), [1, 2, 1, 1]);
    assert_eq!(values(&stream, &product), [32.0, 96.0]);
}

/// Choices with ties go to the first; sums, limits and logarithms are what they say.
#[test]
fn routers_and_recurrent_layers_have_their_operations() {
    let Some(stream) = stream("mlx operations of routers") else {
        return;
    };
    let array = |values: &[f32]| stream.array_f32(values, &[1, values.len() as i32]).unwrap();
    let scores = array(&[-2.0, -5.0, -2.0, -5.0]);
    let order = stream.argsort(&scores, 1).unwrap();
    assert_eq!(order.dtype(), Dtype::U32);
    assert_eq!(values(&stream, &order), [1.0, 3.0, 0.0, 2.0]);
    let sorted = stream.take_along(&scores, &order, 1).unwrap();
    assert_eq!(values(&stream, &sorted), [-5.0, -5.0, -2.0, -2.0]);
    let sums = stream.running_sum(&scores, 1).unwrap();
    assert_eq!(values(&stream, &sums), [-2.0, -7.0, -9.0, -14.0]);
    assert_eq!(
        values(&stream, &stream.sum_along(&scores, 1).unwrap()),
        [-14.0]
    );
    let zero = stream.scalar(0.0, Dtype::F32).unwrap();
    let soft = stream.log_add_exp(&array(&[200.0, 0.0]), &zero).unwrap();
    let soft = values(&stream, &soft);
    assert_eq!(soft[0], 200.0);
    assert!((soft[1] - std::f32::consts::LN_2).abs() < 1e-6, "{soft:?}");
    let shares = values(&stream, &stream.softmax(&array(&[1.0, 1.0]), 1).unwrap());
    assert_eq!(shares, [0.5, 0.5]);
    let (a, b) = (array(&[4.0, 9.0]), array(&[2.0, 16.0]));
    for (got, expected) in [
        (stream.subtract(&a, &b), [2.0, -7.0]),
        (stream.divide(&a, &b), [2.0, 0.5625]),
        (stream.maximum(&a, &b), [4.0, 16.0]),
        (stream.minimum(&a, &b), [2.0, 9.0]),
        (stream.less(&a, &b), [0.0, 1.0]),
        (stream.rsqrt(&b), [0.707_106_77, 0.25]),
        (stream.exp(&stream.subtract(&a, &a).unwrap()), [1.0, 1.0]),
    ] {
        let got = values(&stream, &got.unwrap());
        let near = got.iter().zip(expected).all(|(x, y)| (x - y).abs() < 1e-6);
        assert!(near, "{got:?}, expected {expected:?}");
    }
}

#[test]
fn the_device_has_memory() {
    let Some(stream) = stream("mlx memory") else {
        return;
    };
    assert!(stream.available().unwrap().0 > 1 << 28);
    let zeros = stream.zeros(&[1 << 20], Dtype::F32).unwrap();
    stream.eval([&zeros]).unwrap();
    assert!(stream.library().memory_use().unwrap().active.0 >= 4 << 20);
}

/// Bytes of any type are read and written where they lie; the speed of doing so is a number.
#[test]
fn memory_of_any_type_is_the_arrays_own() {
    let Some(stream) = stream("mlx memory of any type") else {
        return;
    };
    let halves = [0x3c00u16, 0x4000].map(u16::to_le_bytes).concat();
    let mut x = stream.array(&halves, &[2], Dtype::F16).unwrap();
    assert_eq!(x.as_bytes().unwrap(), halves);
    let start = x.as_bytes().unwrap().as_ptr();
    // SAFETY: nothing reads it.
    unsafe { x.as_bytes_mut() }.unwrap()[..2].copy_from_slice(&halves[2..]);
    assert_eq!(x.as_bytes().unwrap().as_ptr(), start);
    assert_eq!(values(&stream, &x), [2.0, 2.0]);
    let sum = stream.sum(&x).unwrap();
    assert_eq!(values(&stream, &sum), [4.0]);
    assert!(stream.shares_memory().unwrap());
    let rate = paceline_mlx::read_rate(stream.library(), DeviceKind::Cpu, 1 << 20).unwrap();
    assert!(rate.is_finite() && rate > 0.0, "{rate}");
    let (library, sizes) = (
        stream.library(),
        ProductSizes {
            width: 64,
            matrices: 2,
            rows: 2,
        },
    );
    for form in [WeightForm::Groups(4), WeightForm::Floats] {
        let form = (form, Dtype::F32);
        let rates = product_rates(library, DeviceKind::Cpu, form, sizes).unwrap();
        assert!(rates.reads > 0.0 && rates.computes > 0.0, "{rates:?}");
    }
    let took = paceline_mlx::operation_s(library, DeviceKind::Cpu).unwrap();
    assert!((0.0..1.0).contains(&took), "{took}");
}

/// Gradients of a function of two arrays, with a constant that it brings along; its own error, and
/// a panic, which does not cross MLX.
#[test]
fn gradients_and_failures_of_functions_arrive() {
    let Some(stream) = stream("mlx gradients") else {
        return;
    };
    let row = |values: &[f32]| stream.array_f32(values, &[1, values.len() as i32]).unwrap();
    let (a, b, c) = (row(&[1.0, 2.0]), row(&[3.0, -4.0]), row(&[0.5, 0.25]));
    let function = |inputs: &[Array]| -> Result<Vec<Array>, Error> {
        let product = stream.multiply(&inputs[0], &inputs[1])?;
        Ok(vec![
            stream.log_sum_exp(&stream.multiply(&product, &c)?, 1)?,
        ])
    };
    let two = stream.scalar(2.0, Dtype::F32).unwrap();
    let two = stream.reshape(&two, &[1, 1]).unwrap();
    let (value, grads) = stream.vjp(&function, &[&a, &b], &[&two]).unwrap();
    // ln(e^1.5 + e^-2), whose slopes are the shares of the softmax.
    let share = 1.0 / (1.0 + (-3.5f32).exp());
    let near = |got: &Array, expected: &[f32]| {
        let got = values(&stream, got);
        let near = got.iter().zip(expected).all(|(x, y)| (x - y).abs() < 1e-5);
        assert!(
            near && got.len() == expected.len(),
            "{got:?}, expected {expected:?}"
        );
    };
    near(&value[0], &[1.5 - share.ln()]);
    near(&grads[0], &[2.0 * share * 0.5 * 3.0, -2.0 * (1.0 - share)]);
    near(
        &grads[1],
        &[2.0 * share * 0.5, 2.0 * (1.0 - share) * 0.25 * 2.0],
    );

    let wrong = |inputs: &[Array]| -> Result<Vec<Array>, Error> {
        Ok(vec![stream.matmul(&inputs[0], &inputs[0])?])
    };
    let error = stream.vjp(&wrong, &[&a], &[&a]).unwrap_err().to_string();
    assert!(error.contains("mlx_matmul"), "{error}");
    let fall = |_: &[Array]| -> Result<Vec<Array>, Error> { panic!("on purpose") };
    let fallen = std::panic::AssertUnwindSafe(|| stream.vjp(&fall, &[&a], &[&a]));
    let panic = std::panic::catch_unwind(fallen).unwrap_err();
    assert_eq!(panic.downcast_ref::<&str>(), Some(&"on purpose"));
}

/// Functions whose kernels are one: of several sizes, noted once.
#[test]
fn a_compiled_function_computes_what_it_notes() {
    let Some(stream) = stream("mlx compiles") else {
        return;
    };
    let calls = std::rc::Rc::new(std::cell::Cell::new(0));
    let counted = std::rc::Rc::clone(&calls);
    let compiled = stream.compile(move |stream, inputs| {
        counted.set(counted.get() + 1);
        let gate = stream.multiply(&inputs[0], &stream.sigmoid(&inputs[0])?)?;
        Ok(vec![stream.multiply(&gate, &inputs[1])?])
    });
    let compiled = compiled.unwrap();
    for n in [1, 5, 300] {
        let gates: Vec<f32> = (0..n).map(|i| i as f32 / 16.0 - 4.0).collect();
        let [gate, up] = [1.0, 3.0].map(|factor| {
            let values: Vec<f32> = gates.iter().map(|x| x * factor).collect();
            stream.array_f32(&values, &[1, n]).unwrap()
        });
        let got = compiled.apply(&stream, &[&gate, &up]).unwrap();
        if let Err(error) = stream.eval(&got) {
            return eprintln!("SKIPPED mlx compiles: no C++ compiler for MLX's CPU build: {error}");
        }
        for (x, got) in gates.iter().zip(values(&stream, &got[0])) {
            let expected = x / (1.0 + (-x).exp()) * 3.0 * x;
            let off = (got - expected).abs() / expected.abs().max(1.0);
            assert!(off < 1e-5, "{x}: {got}, expected {expected}");
        }
    }
    assert_eq!(calls.get(), 1);
}
