//! Name of the numbers that the ranks of a split compute: kernel classes, devices and layers.

use std::ops::Range;

use paceline_base::KernelClass;

use crate::Split;

/// Names the numbers of ranks: `mlx(metal):0-47+cpu:48-63`. `None` if all compute in one exact
/// class, whose name is enough. `ranks` has kernel classes and devices, the latter as
/// [`LoadedModel::device`](crate::LoadedModel::device) names them.
///
/// Stages of equal arithmetic that follow one another are one part, with its first and last layer.
/// A model of one part has no layers in its name. A stage on `n` ranks of a near class adds `xn`,
/// because its sums differ.
pub fn numbers_name(split: &Split, ranks: &[(KernelClass, &str)]) -> Option<String> {
    let (first, _) = ranks.first()?;
    if first.is_exact() && ranks.iter().all(|(class, _)| class == first) {
        return None;
    }
    let mut parts: Vec<(String, Range<usize>)> = Vec::new();
    let mut rest = ranks;
    for (layers, shares) in split.each_stage() {
        let (stage, others) = rest.split_at_checked(shares.len())?;
        rest = others;
        let arithmetic = arithmetic(stage);
        match parts.last_mut() {
            Some((last, of)) if *last == arithmetic => of.end = layers.end,
            _ => parts.push((arithmetic, layers)),
        }
    }
    let part = |(name, of): &(String, Range<usize>)| format!("{name}:{}-{}", of.start, of.end - 1);
    Some(match &parts[..] {
        [(name, _)] => name.clone(),
        parts => parts.iter().map(part).collect::<Vec<_>>().join("+"),
    })
}

/// Class, device kinds and number of a stage's ranks; an exact class has no more than its name.
fn arithmetic(stage: &[(KernelClass, &str)]) -> String {
    let (class, _) = stage[0];
    if class.is_exact() {
        return class.to_string();
    }
    // A device's name is the engine, its version, the kind, and the product.
    let kind = |device: &'_ str| device.split(' ').nth(2).unwrap_or("?").to_owned();
    let mut kinds: Vec<String> = stage.iter().map(|(_, device)| kind(device)).collect();
    kinds.dedup();
    let kinds = kinds.join(",");
    match stage.len() {
        1 => format!("{class}({kinds})"),
        n => format!("{class}({kinds})x{n}"),
    }
}

#[cfg(test)]
mod tests {
    use KernelClass::{Cpu, Mlx, MlxExact};

    use super::*;
    use crate::SplitKind;
    use crate::split::tests::smollm2;

    const METAL: &str = "mlx 0.32.2 metal Apple M4 Max";
    const CUDA: &str = "mlx 0.32.2 cuda NVIDIA GB10";

    /// The name, with `A` for the last layer of the first stage, and `B` for the layer behind it.
    fn name(kind: SplitKind, ranks: &[(KernelClass, &str)]) -> Option<String> {
        let split = Split::plan(&smollm2(), kind, ranks.len() as u32, &[]).unwrap();
        let end = split.each_stage().next().unwrap().0.end;
        let name = numbers_name(&split, ranks)?;
        let name = name.replace(&format!(":0-{}+", end - 1), ":0-A+");
        Some(name.replace(&format!(":{end}-"), ":B-"))
    }

    #[test]
    fn names_have_class_device_and_layers() {
        use SplitKind::{Pipeline, Tensor};
        let (metal, cuda, cpu) = ((Mlx, METAL), (Mlx, CUDA), (Cpu, "avx2"));
        let exact = (MlxExact, METAL);
        let grid = SplitKind::Grid {
            tensor: 2,
            pipeline: 2,
        };
        for (kind, ranks, expected) in [
            (Pipeline, &[cpu, cpu][..], None),
            (Tensor, &[exact, exact], None),
            (Pipeline, &[metal], Some("mlx(metal)")),
            (Pipeline, &[metal, metal], Some("mlx(metal)")),
            (Tensor, &[metal, metal], Some("mlx(metal)x2")),
            (Tensor, &[metal, cuda], Some("mlx(metal,cuda)x2")),
            (Pipeline, &[metal, cpu], Some("mlx(metal):0-A+cpu:B-29")),
            (
                Pipeline,
                &[cuda, metal, metal],
                Some("mlx(cuda):0-A+mlx(metal):B-29"),
            ),
            (Pipeline, &[exact, cpu], Some("mlx-exact:0-A+cpu:B-29")),
            (
                grid,
                &[metal, metal, cpu, cpu],
                Some("mlx(metal)x2:0-A+cpu:B-29"),
            ),
        ] {
            assert_eq!(name(kind, ranks).as_deref(), expected, "{ranks:?}");
        }
    }
}
