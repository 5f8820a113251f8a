//! Selection over file lists of repositories as they are on the hub.

use super::*;

fn listed(names: &[&str]) -> Vec<ListedFile> {
    let file = |name: &&str| ListedFile {
        path: (*name).to_owned(),
        bytes: Some(10),
        sha256: None,
    };
    names.iter().map(file).collect()
}

fn names(list: &[&str]) -> Vec<String> {
    list.iter().map(|name| (*name).to_owned()).collect()
}

fn id() -> HubId {
    HubId::parse("o/r").unwrap()
}

/// The selected files, or the selectors of the choices.
fn selected(files: &[&str], selector: &str) -> Result<Vec<String>, Vec<String>> {
    let selector = Some(selector).filter(|text| !text.is_empty());
    let all = |choices: Vec<GgufChoice>| choices.into_iter().map(|it| it.selector).collect();
    match choose(&id(), selector, &listed(files)) {
        Ok(ModelFileSet::Gguf(files) | ModelFileSet::Folder(files)) => Ok(files),
        Err(Error::AmbiguousGguf { choices, .. } | Error::NoMatchingGguf { choices, .. }) => {
            Err(all(choices))
        }
        Err(_) => Err(Vec::new()),
    }
}

/// Names of each kind of publisher. Shard counts are smaller than in reality.
const UNSLOTH: &[&str] = &[
    "BF16/Qwen3.8-27B-BF16-00001-of-00002.gguf",
    "BF16/Qwen3.8-27B-BF16-00002-of-00002.gguf",
    "MTP/mtp-Qwen3.8-27B-Q4_0.gguf",
    "Qwen3.8-27B-IQ4_XS.gguf",
    "Qwen3.8-27B-Q4_0.gguf",
    "Qwen3.8-27B-Q4_K_M.gguf",
    "Qwen3.8-27B-Q4_K_S.gguf",
    "Qwen3.8-27B-UD-IQ2_M.gguf",
    "Qwen3.8-27B-UD-Q4_K_XL.gguf",
    "config.json",
    "imatrix_unsloth.gguf",
    "mmproj-BF16.gguf",
    "mmproj-F16.gguf",
];
const KIMI: &[&str] = &[
    "UD-IQ1_S/Kimi-K2-Instruct-UD-IQ1_S-00001-of-00003.gguf",
    "UD-IQ1_S/Kimi-K2-Instruct-UD-IQ1_S-00002-of-00003.gguf",
    "UD-IQ1_S/Kimi-K2-Instruct-UD-IQ1_S-00003-of-00003.gguf",
    "UD-Q2_K_XL/Kimi-K2-Instruct-UD-Q2_K_XL-00001-of-00002.gguf",
    "UD-Q2_K_XL/Kimi-K2-Instruct-UD-Q2_K_XL-00002-of-00002.gguf",
    "Q8_0/Kimi-K2-Instruct-Q8_0-00001-of-00003.gguf",
];
const APEX: &[&str] = &[
    "Step-3.7-Flash-APEX-Balanced.gguf",
    "Step-3.7-Flash-APEX-Compact.gguf",
    "Step-3.7-Flash-APEX-I-Balanced.gguf",
    "Step-3.7-Flash-APEX-I-Compact.gguf",
    "Step-3.7-Flash-APEX-I-Mini.gguf",
];
const DEEPSEEK: &[&str] = &[
    "DeepSeek-R1-Q4_K_M/DeepSeek-R1-Q4_K_M-00001-of-00002.gguf",
    "DeepSeek-R1-Q4_K_M/DeepSeek-R1-Q4_K_M-00002-of-00002.gguf",
    "DeepSeek-R1-UD-IQ1_S/DeepSeek-R1-UD-IQ1_S-00001-of-00002.gguf",
    "DeepSeek-R1-UD-IQ1_S/DeepSeek-R1-UD-IQ1_S-00002-of-00002.gguf",
];
const MRADERMACHER: &[&str] = &[
    "Qwen2.5-VL-7B.i1-IQ2_M.gguf",
    "Qwen2.5-VL-7B.i1-Q4_K_M.gguf",
    "Qwen2.5-VL-7B.imatrix.gguf",
    "Qwen2.5-VL-7B.mmproj-Q8_0.gguf",
    "Qwen2.5-VL-7B.mmproj-f16.gguf",
    "imatrix.dat",
];
const GGML_ORG: &[&str] = &[
    "gemma-3-4b-it-Q4_K_M.gguf",
    "gemma-3-4b-it-Q8_0.gguf",
    "gemma-3-4b-it-f16.gguf",
    "mmproj-model-f16.gguf",
];
const GEMMA_QAT: &[&str] = &["gemma-3-4b-it-q4_0.gguf", "mmproj-model-f16-4B.gguf"];
const GEMMA_MTP: &[&str] = &[
    "MTP/gemma-4-E2B-it-BF16-MTP.gguf",
    "MTP/gemma-4-E2B-it-Q8_0-MTP.gguf",
    "gemma-4-E2B-it-Q8_0.gguf",
    "mtp-gemma-4-E2B-it.gguf",
];
const ORNITH: &[&str] = &[
    "mtp-ornith-9b-mtp-kl-Q8_0.gguf",
    "ornith-9b-mtp-kl-IQ3_M.gguf",
    "ornith-9b-mtp-kl-Q8_0.gguf",
];
const BARTOWSKI: &[&str] = &[
    "Kwaipilot_KAT-Dev-Q4_K_M.gguf",
    "Kwaipilot_KAT-Dev-bf16/Kwaipilot_KAT-Dev-bf16-00001-of-00002.gguf",
    "Kwaipilot_KAT-Dev-bf16/Kwaipilot_KAT-Dev-bf16-00002-of-00002.gguf",
    "Kwaipilot_KAT-Dev-imatrix.gguf",
];

#[test]
#[expect(clippy::too_many_lines, reason = "a table of cases")]
fn selectors_mean_what_people_mean() {
    for (files, selector, expected) in [
        (UNSLOTH, "BF16", &UNSLOTH[0..2]),
        (UNSLOTH, "q4_0", &UNSLOTH[4..5]),
        (UNSLOTH, "Q4_K_XL", &UNSLOTH[8..9]),
        (UNSLOTH, "UD-IQ2_M", &UNSLOTH[7..8]),
        (UNSLOTH, "mmproj-F16.gguf", &UNSLOTH[12..13]),
        (UNSLOTH, "MTP", &UNSLOTH[2..3]),
        (KIMI, "UD-Q2_K_XL", &KIMI[3..5]),
        (KIMI, "ud-iq1_s", &KIMI[0..3]),
        (APEX, "Compact", &APEX[1..2]),
        (APEX, "i-compact", &APEX[3..4]),
        (APEX, "Mini", &APEX[4..5]),
        (DEEPSEEK, "Q4_K_M", &DEEPSEEK[0..2]),
        (DEEPSEEK, "IQ1_S", &DEEPSEEK[2..4]),
        (MRADERMACHER, "Q4_K_M", &MRADERMACHER[1..2]),
        (MRADERMACHER, "i1-IQ2_M", &MRADERMACHER[0..1]),
        (GGML_ORG, "F16", &GGML_ORG[2..3]),
        (GGML_ORG, "gemma-3-4b-it-Q8_0", &GGML_ORG[1..2]),
        (GEMMA_QAT, "", &GEMMA_QAT[0..1]),
        (GEMMA_QAT, "q4_0", &GEMMA_QAT[0..1]),
        (GEMMA_MTP, "", &GEMMA_MTP[2..3]),
        (GEMMA_MTP, "Q8_0", &GEMMA_MTP[2..3]),
        (ORNITH, "Q8_0", &ORNITH[2..3]),
        (BARTOWSKI, "BF16", &BARTOWSKI[1..3]),
        (&["g-Q4_K_M.gguf", "g-imatrix.gguf"], "", &["g-Q4_K_M.gguf"]),
        (
            &["g-Q4_K_M.gguf", "dflash-g-Q4_K_M.gguf"],
            "Q4_K_M",
            &["g-Q4_K_M.gguf"],
        ),
        (
            &["g-Q4_K_M-imat.gguf", "g-Q8_0-imat.gguf"],
            "Q4_K_M",
            &["g-Q4_K_M-imat.gguf"],
        ),
        (&["a-imatrix-Q4_K_M.gguf"], "", &["a-imatrix-Q4_K_M.gguf"]),
        // The repository is that of the draft model.
        (
            &["dflash-draft-3.6-q8_0.gguf", "README.md"],
            "",
            &["dflash-draft-3.6-q8_0.gguf"],
        ),
        // Split and whole are the same model.
        (
            &[
                "m-Q8_0-00001-of-00002.gguf",
                "m-Q8_0-00002-of-00002.gguf",
                "m-Q8_0.gguf",
            ],
            "Q8_0",
            &["m-Q8_0.gguf"],
        ),
        (
            &[
                "BF16/model-00001-of-00002.gguf",
                "BF16/model-00002-of-00002.gguf",
                "g-Q8_0.gguf",
            ],
            "BF16",
            &[
                "BF16/model-00001-of-00002.gguf",
                "BF16/model-00002-of-00002.gguf",
            ],
        ),
        (
            &["sub/m-Q8_0.gguf", "m-Q4_0.gguf"],
            "sub/m-Q8_0.gguf",
            &["sub/m-Q8_0.gguf"],
        ),
        // GGUF files that are no models leave the folder.
        (
            &[
                "config.json",
                "imatrix.gguf",
                "mmproj-F16.gguf",
                "model.safetensors",
            ],
            "",
            &["config.json", "model.safetensors"],
        ),
    ] {
        assert_eq!(
            selected(files, selector),
            Ok(names(expected)),
            "{selector:?} of {files:?}"
        );
    }
}

#[test]
fn other_selectors_are_answered_with_the_choices() {
    for (files, selector, expected) in [
        (GGML_ORG, "", &["Q4_K_M", "Q8_0", "f16"][..]),
        (GGML_ORG, "Q4_K", &["Q4_K_M", "Q8_0", "f16"]),
        (GEMMA_QAT, "F16", &["q4_0"]),
        (
            APEX,
            "Balance",
            &["Balanced", "Compact", "I-Balanced", "I-Compact", "I-Mini"],
        ),
        (KIMI, "", &["Q2_K_XL", "IQ1_S"]),
        (MRADERMACHER, "", &["IQ2_M", "Q4_K_M"]),
        (&["mQ4_1.gguf"], "Q4_1", &["mQ4_1.gguf"]),
        (&["a/m-Q8_0.gguf", "b/m-Q8_0.gguf"], "Q8_0", &["a", "b"]),
        (&["mmproj-F16.gguf", "imatrix.gguf"], "", &[]),
        (&["a-00001-of-65535.gguf", "b-00002-of-00002.gguf"], "", &[]),
    ] {
        assert_eq!(
            selected(files, selector),
            Err(names(expected)),
            "{selector:?} of {files:?}"
        );
    }
}

#[test]
fn each_choice_is_selected_by_its_selector() {
    for files in [
        UNSLOTH,
        KIMI,
        APEX,
        DEEPSEEK,
        MRADERMACHER,
        GGML_ORG,
        ORNITH,
        BARTOWSKI,
    ] {
        let Err(Error::AmbiguousGguf { choices, .. }) = choose(&id(), None, &listed(files)) else {
            panic!("{files:?}");
        };
        for choice in choices {
            let one = selected(files, &choice.selector);
            assert_eq!(one.map(|files| files.len()), Ok(choice.files), "{choice:?}");
            assert_eq!(choice.bytes, Some(Bytes(10 * choice.files as u64)));
        }
    }
}

#[test]
fn a_folder_takes_what_inference_needs() {
    let files = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "consolidated.safetensors",
        "tokenizer.json",
        "pytorch_model.bin",
        "original/params.json",
        "1_Pooling/config.json",
        "2_Dense/model.safetensors",
        "../config.json",
        "run.py",
    ];
    let chosen = selected(&files, "").unwrap();
    assert_eq!(
        chosen,
        names(&[
            "1_Pooling/config.json",
            "2_Dense/model.safetensors",
            "config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "tokenizer.json",
        ])
    );
    for lacking in [&["config.json"][..], &["model.safetensors"], &[]] {
        assert!(matches!(
            choose(&id(), None, &listed(lacking)),
            Err(Error::NothingUsable { .. })
        ));
    }
}

#[test]
fn quantisations_are_read_from_names() {
    for (file, quant) in [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", Some("Q4_1")),
        ("gemma-3-270m-q4_k_m.gguf", Some("q4_k_m")),
        ("x-IQ4_XS-00001-of-00002.gguf", Some("IQ4_XS")),
        ("m-bf16.gguf", Some("bf16")),
        ("Qwen.gguf", None),
        ("model.bin", None),
    ] {
        assert_eq!(quant_of_name(file), quant, "{file}");
    }
}
