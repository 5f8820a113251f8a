//! Wheels and sources of the MLX engine, by version and hash.
//!
//! All hashes were taken from the package index on 2026-11-21, by `pip install --dry-run --report`
//! for each platform, and of the sources from Cargo's index. `mlx-c` 0.7.0 names MLX 0.32.2 in its
//! `CMakeLists.txt`; another MLX may lack what the C layer calls.

use crate::options::SystemVersion;

/// Version of MLX, its wheels, and their install folder.
pub(super) const MLX_VERSION: &str = "0.32.2";

/// Version of the C layer, and of the crate with its sources.
pub(super) const MLX_C_VERSION: &str = "0.7.0";

/// SHA-256 of the crate `mlx-sys` 0.7.0, as Cargo's index has it.
pub(super) const MLX_SYS_SHA256: &str =
    "da965f83ce211b80f9b681d9bbd6fa625fe6bb2e659ba7bc55dd95eea8d3b028";

/// Result of `tree_hash` for the folder `src/mlx-c/mlx/c` of that crate, taken on 2026-11-23.
pub(super) const MLX_C_SOURCES_SHA256: &str =
    "d1442b68216132088b3b6463822babfaf9cbd951aebf68c3695bf9b9c09c59e2";

/// Oldest C library of Linux that MLX's wheels run with, by their tag `manylinux_2_35`.
pub(super) const GLIBC: SystemVersion = SystemVersion(2, 35);

/// Versions of macOS that MLX has wheels for, by their tags `macosx_*_0_arm64`.
pub(super) const MACOS: [SystemVersion; 3] = [
    SystemVersion(14, 0),
    SystemVersion(15, 0),
    SystemVersion(26, 0),
];

/// A wheel with its hashes: pip selects the file for the platform.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pin {
    /// `NAME==VERSION`.
    pub(super) requirement: &'static str,
    /// SHA-256 of the wheel for each platform, lower-case hex: of Linux on x86-64 and on AArch64;
    /// or of the systems in [`MACOS`].
    pub(super) sha256: &'static [&'static str],
}

impl Pin {
    pub(super) fn for_linux(&self, arch: &str) -> &'static str {
        self.sha256[usize::from(arch == "aarch64")]
    }

    /// The hash for the newest of [`MACOS`] that runs on `system`; the oldest if that is unknown.
    pub(super) fn for_macos(&self, system: Option<SystemVersion>) -> &'static str {
        let fits = |needed: &SystemVersion| system.is_some_and(|system| *needed <= system);
        self.sha256[MACOS.iter().rposition(fits).unwrap_or(0)]
    }
}

/// Linux.
pub(super) const CPU: &[Pin] = &[Pin {
    requirement: "mlx-cpu==0.32.2",
    sha256: &[
        "fc5d31b90fc4f457b2f9614ed45651a567d22a6a11a03d114a90a4e10bdd8878",
        "d0f94625588b51a878786dd51cec5617894ce586cf3c94645ce1b64e24c27c0b",
    ],
}];

/// macOS 14, 15 and 26 on Apple silicon.
pub(super) const METAL: &[Pin] = &[Pin {
    requirement: "mlx-metal==0.32.2",
    sha256: &[
        "3825fff379dbc107dd3413e564a06caeaa24819910ec49c0439e454c06a1b9b8",
        "55a369250d220b2cf10213a87a2ac1b1a420608c5b35b1df4e7147ac8e32f121",
        "e6abeac9ac5265830c9c1541b6f96e9be37a85c2446763a46ad466c63a3837ab",
    ],
}];

/// Linux with an NVIDIA driver for CUDA 12, and the libraries that the wheel asks for.
pub(super) const CUDA_12: &[Pin] = &[
    Pin {
        requirement: "mlx-cuda-12==0.32.2",
        sha256: &[
            "35445ead9724855826f310b9085d57137d0a2c5381cc293cb6d86b03bb4feadf",
            "c794c697dcd28e00a51ce8813189ece1a8c62559de7cc5e27803cc591f55df05",
        ],
    },
    Pin {
        requirement: "nvidia-cublas-cu12==12.9.3.13",
        sha256: &[
            "d7d51055f161b317c7105ddaae90e71eda059026074ffef93cf7cde2886bfe72",
            "918a8781956115d34b1db49e0e7b7befba8d101661c4b560ed4d42e0e17bebc3",
        ],
    },
    Pin {
        requirement: "nvidia-cuda-nvrtc-cu12==12.9.86",
        sha256: &[
            "210cf05005a447e29214e9ce50851e83fc5f4358df8b453155d5e1918094dcb4",
            "096d4de6bda726415dfaf3198d4f5c522b8e70139c97feef5cd2ca6d4cd9cead",
        ],
    },
    Pin {
        requirement: "nvidia-cudnn-cu12==9.28.0.42",
        sha256: &[
            "9ff58b7f36dacd0a93e89f8f2957b52466889217963701daa15e577317cfa375",
            "f88db8fc1a0a5f458e19aa7b08fbe3500aeb9e2bb8dea6293ecbce170364ad72",
        ],
    },
    Pin {
        requirement: "nvidia-cufft-cu12==11.4.1.4",
        sha256: &[
            "c67884f2a7d276b4b80eb56a79322a95df592ae5e765cf1243693365ccab4e28",
            "1a28c9b12260a1aa7a8fd12f5ebd82d027963d635ba82ff39a1acfa7c4c0fbcf",
        ],
    },
    Pin {
        requirement: "nvidia-nccl-cu12==2.32.3",
        sha256: &[
            "bb94b2348e4861d5e8aa00b36c3d12d9bdf9c6369b82cbb723de0b582280a21c",
            "061af42ae1044816820e16b872075e243d1ac0656f51860fbc8e106c257aa83a",
        ],
    },
    Pin {
        requirement: "nvidia-nvjitlink-cu12==12.9.86",
        sha256: &[
            "e3f1171dbdc83c5932a45f0f4c99180a70de9bd2718c1ab77d14104f6d7147f9",
            "994a05ef08ef4b0b299829cde613a424382aff7efb08a7172c1fa616cc3af2ca",
        ],
    },
];

/// The same for CUDA 13.
pub(super) const CUDA_13: &[Pin] = &[
    Pin {
        requirement: "mlx-cuda-13==0.32.2",
        sha256: &[
            "335094ccd1c0c6dc3e09c8caba207c8180602bacc0c38ba20c1d81e9456ab394",
            "49b1a25df9021f3b519a534fd39a32a5cdbf93a1b265a31e59671c2d9fc9f4a2",
        ],
    },
    Pin {
        requirement: "nvidia-cublas==13.10.0.20",
        sha256: &[
            "dcc6d63884c53d07e267ce7e6feac17b2538cebaafec5db865736c3e28e4dc84",
            "c5f3418c0a845232a8cabc58f6fa52cfae7d8bd3680d94c3907aca710fd48d70",
        ],
    },
    // Kernels that MLX compiles at run time include `mma.h`, whose other half `crt/mma.h` has its
    // own package since CUDA 13. MLX's wheel does not ask for it.
    Pin {
        requirement: "nvidia-cuda-crt==13.5.37",
        sha256: &[
            "e898b7f73d3035fa89915a3f7bf3b54a73e90249746111aed295822c4729bb29",
            "9ed2c565fdf3244fa6719769a80a466b85bfd4b1467ea339353bc91c971d09e0",
        ],
    },
    Pin {
        requirement: "nvidia-cuda-nvrtc==13.5.37",
        sha256: &[
            "86b4d68058807988b7d9af5b44917a0601e9c337f35ccd657bfb3c759ff8d8bc",
            "36e4fa2a8ada293f5693d308e531c196ab6f91cf7a0ff479bf96a537d43a6096",
        ],
    },
    Pin {
        requirement: "nvidia-cuda-runtime==13.5.37",
        sha256: &[
            "df2b79a8852f10d1fef8c848489c49eebb5754051bf870202a862831412b179d",
            "de2dc5a7367974228b0a69588a9acc9340d3768bef1bf38bf0801eb08497cd2d",
        ],
    },
    Pin {
        requirement: "nvidia-cudnn-cu13==9.28.0.42",
        sha256: &[
            "7358353c75bb121a58e5f7712fe6d588883dc1df8ba00f428237e44e97543c4d",
            "97c70c7fe0ea32e97fcd0b40157915d27f0d1e238479e537e81b12ed3c8f17ae",
        ],
    },
    Pin {
        requirement: "nvidia-cufft==12.5.0.14",
        sha256: &[
            "b8be26837a5abad2b5b74f3e92dd29f622a42934b355be0961a48712cbba23ad",
            "091cde103312d6e09366122fe3f67092dcfd94cc9785029d695d6bcffaa76fdf",
        ],
    },
    Pin {
        requirement: "nvidia-nccl-cu13==2.32.3",
        sha256: &[
            "1459723080ac889d73a26edfa3e04383a7928ab31ac8f0ec43b3ea9548b04ff3",
            "a5bee92b2f4af218c109f8d221c3c9adcc752b94ae0ffcb0ed5abf9341a7724c",
        ],
    },
    Pin {
        requirement: "nvidia-nvjitlink==13.5.37",
        sha256: &[
            "280d7cb9649704145f074b8dbde500de04ce02d0872e066e20a83c17bcaa93eb",
            "893f6f9a55b2720ed94913b5ba3332e972da8c78dfa2863d0244403dbd528ffc",
        ],
    },
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::is_sha256;

    #[test]
    fn pins_are_exact_and_of_one_version() {
        for pins in [CPU, METAL, CUDA_12, CUDA_13] {
            assert!(pins[0].requirement.ends_with(&format!("=={MLX_VERSION}")));
            for pin in pins {
                assert_eq!(pin.requirement.matches("==").count(), 1, "{pin:?}");
                assert!(pin.sha256.iter().all(|hash| is_sha256(hash)), "{pin:?}");
                assert_eq!(
                    pin.sha256.len(),
                    if pins == METAL { 3 } else { 2 },
                    "{pin:?}"
                );
            }
        }
        assert!(is_sha256(MLX_SYS_SHA256));
    }

    #[test]
    fn a_pin_gives_the_wheel_of_the_platform() {
        let [cpu, metal] = [CPU[0], METAL[0]];
        assert_eq!(cpu.for_linux("x86_64"), cpu.sha256[0]);
        assert_eq!(cpu.for_linux("aarch64"), cpu.sha256[1]);
        for (system, wheel) in [
            (None, 0),
            (Some(SystemVersion(14, 6)), 0),
            (Some(SystemVersion(15, 0)), 1),
            (Some(SystemVersion(15, 7)), 1),
            (Some(SystemVersion(26, 1)), 2),
        ] {
            assert_eq!(metal.for_macos(system), metal.sha256[wheel], "{system:?}");
        }
    }
}
