//! Size, licence and memory of a model before its download.

use paceline_base::{Bytes, counted, printable};
use paceline_cluster::machine::MainMemory;
use paceline_store::PullPreview;

/// Share of a machine's memory for a model's weights, as placements over machines have it.
pub const USABLE: f64 = 0.8;

/// Why weights do not fit this machine, with its system and a cache; `None` if they do, or if that
/// is unknown.
pub fn misfit(weights: Option<Bytes>, memory: Option<MainMemory>) -> Option<String> {
    let (weights, total) = (weights?, memory?.total);
    (weights.0 as f64 > total.0 as f64 * USABLE).then(|| {
        format!("too large for this machine alone: {weights} of weights, {total} of memory")
    })
}

/// Lines for people about a selected download.
pub fn announcement(model: &PullPreview, memory: Option<MainMemory>) -> Vec<String> {
    let mut about = vec![counted(model.files.len(), "file")];
    about.extend(model.bytes().map(|bytes| bytes.to_string()));
    let licence = model.licence.as_deref().unwrap_or("unknown");
    about.push(format!("licence {}", printable(licence)));
    let mut lines = vec![format!("{}: {}", model.name, about.join(", "))];
    let misfit = misfit(model.bytes(), memory);
    lines.extend(misfit.map(|why| format!("warning: {why}")));
    lines
}

#[cfg(test)]
mod tests {
    use paceline_store::{Home, Resolution, resolve};

    use super::*;

    #[test]
    fn large_models_are_announced_with_a_warning() {
        let home = Home::new("/nonexistent");
        let Ok(Resolution::NeedsDownload(plan)) = resolve(&home, "smollm2") else {
            panic!("it is not there");
        };
        let (options, cancel) = Default::default();
        let mut model = paceline_store::preview(&plan, &options, &cancel).unwrap();
        model.licence = Some("mit\u{1b}[2J".to_owned());
        let memory = |mib: u64| {
            Some(MainMemory {
                total: Bytes(mib << 20),
                available: None,
            })
        };
        let lines = announcement(&model, memory(128));
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(
            lines[0].starts_with("smollm2: 1 file, 93.8 MiB, licence mit"),
            "{lines:?}"
        );
        assert!(!lines[0].contains('\u{1b}'), "{lines:?}");
        let lines = announcement(&model, memory(100));
        let warning = "warning: too large for this machine alone: 93.8 MiB of weights, 100.0 MiB \
                       of memory";
        assert_eq!(lines[1], warning);
        assert_eq!(announcement(&model, None).len(), 1);
    }
}
