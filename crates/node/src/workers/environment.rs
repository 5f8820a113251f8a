//! The environment variables passed to workers.
//!
//! A worker reads untrusted model and job files and needs no credentials. It gets variables that
//! locate files, and settings of libraries it may open: GPU drivers, MLX, NCCL, verbs. Nothing else
//! of the owner's environment is passed on, in particular no tokens of hubs or clouds.

use std::ffi::{OsStr, OsString};

/// Names that are passed on.
const NAMES: [&str; 9] = [
    "HOME",
    "LANG",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "LOGNAME",
    "PATH", // MLX's CPU build starts a compiler
    "TMPDIR",
    "TZ",
    "USER",
];

/// Prefixes of names that are passed on: locale, folders, dynamic loading on macOS, Rust's runtime
/// and sanitizers, libraries.
const BEGINNINGS: [&str; 23] = [
    "ASAN_",
    "CUDA",
    "DYLD_",
    "HIP_",
    "HSA_",
    "IBV_",
    "LC_",
    "LSAN_",
    "MESA_",
    "METAL_",
    "MLX5_",
    "MLX_",
    "MTL_",
    "NCCL_",
    "NVIDIA_",
    "OMP_",
    "PACELINE_",
    "RDMAV_",
    "ROCR_",
    "RUST_",
    "VK_",
    "WGPU_",
    "XDG_",
];

/// Exceptions to the prefixes: keys of this program's own API.
const SECRET: [&str; 1] = ["PACELINE_API_KEY"];

/// Environment of a worker: the variables of `all` that it needs.
pub fn for_workers(
    all: impl IntoIterator<Item = (OsString, OsString)>,
) -> Vec<(OsString, OsString)> {
    all.into_iter()
        .filter(|(name, _)| is_needed(name))
        .collect()
}

fn is_needed(name: &OsStr) -> bool {
    let Some(name) = name.to_str() else {
        return false;
    };
    let begins = BEGINNINGS.iter().any(|start| name.starts_with(start));
    (begins || NAMES.contains(&name)) && !SECRET.contains(&name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_and_libraries_are_passed_on_and_secrets_are_not() {
        for name in [
            "HOME",
            "PATH",
            "PACELINE_HOME",
            "CUDA_VISIBLE_DEVICES",
            "LC_ALL",
        ] {
            assert!(is_needed(name.as_ref()), "{name}");
        }
        for name in [
            "",
            "HF_TOKEN",
            "AWS_SECRET_ACCESS_KEY",
            "OPENAI_API_KEY",
            "PACELINE_API_KEY",
            "SSH_AUTH_SOCK",
            "HOMEBREW_GITHUB_API_TOKEN",
        ] {
            assert!(!is_needed(name.as_ref()), "{name}");
        }
        let pair = |name: &str| (OsString::from(name), OsString::from("x"));
        let kept = for_workers(["PATH", "HF_TOKEN"].map(pair));
        assert_eq!(kept, [pair("PATH")]);
    }
}
