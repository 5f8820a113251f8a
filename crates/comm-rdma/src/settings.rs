//! JACCL's configuration: environment variables, whose values `cli` passes in.

use std::net::{SocketAddr, ToSocketAddrs};
use std::num::ParseIntError;

use paceline_base::Rank;

use super::matrix::{Matrix, MatrixError};

/// Variables with the own rank; the first that is set counts.
pub const RANK: [&str; 2] = ["JACCL_RANK", "MLX_RANK"];
/// Path of the device file.
pub const DEVICES: [&str; 2] = ["JACCL_IBV_DEVICES", "MLX_IBV_DEVICES"];
/// `ip:port` at which rank 0 listens.
pub const COORDINATOR: [&str; 2] = ["JACCL_COORDINATOR", "MLX_JACCL_COORDINATOR"];
/// Prefers a ring if set, to any value.
pub const RING: [&str; 2] = ["JACCL_RING", "MLX_JACCL_RING"];

/// Why JACCL's settings are invalid.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    #[error("neither {} nor {} is set", .names[0], .names[1])]
    Missing { names: [&'static str; 2] },
    #[error("{name} is {value:?}: {source}")]
    Number {
        name: &'static str,
        value: String,
        source: ParseIntError,
    },
    #[error("{name} is {value:?}, expected ip:port")]
    Address { name: &'static str, value: String },
    #[error("{rank} has no row in the device file, which is for {size} ranks")]
    Rank { rank: Rank, size: usize },
    #[error(transparent)]
    Matrix(#[from] MatrixError),
}

/// The settings of JACCL's environment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JacclSettings {
    pub rank: Rank,
    /// Where rank 0 listens.
    pub coordinator: SocketAddr,
    pub matrix: Matrix,
    /// Use a ring even in a full mesh.
    pub ring: bool,
}

/// Returns the value of a variable.
pub type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

/// The path of the device file.
pub fn device_file(lookup: Lookup<'_>) -> Result<String, SettingsError> {
    first(lookup, DEVICES).map(|(_, path)| path)
}

fn first(
    lookup: Lookup<'_>,
    names: [&'static str; 2],
) -> Result<(&'static str, String), SettingsError> {
    let set = |name: &'static str| lookup(name).map(|value| (name, value));
    let found = names.into_iter().find_map(set);
    found.ok_or(SettingsError::Missing { names })
}

impl JacclSettings {
    /// Parses the variables; `devices` is the text of the device file.
    pub fn parse(lookup: Lookup<'_>, devices: &str) -> Result<Self, SettingsError> {
        let matrix = Matrix::parse(devices)?;
        let (name, value) = first(lookup, RANK)?;
        let rank = value.trim().parse().map_err(|source| {
            let value = value.clone();
            SettingsError::Number {
                name,
                value,
                source,
            }
        })?;
        let (name, value) = first(lookup, COORDINATOR)?;
        let mut addrs = value.trim().to_socket_addrs().ok();
        let coordinator = addrs
            .as_mut()
            .and_then(Iterator::next)
            .ok_or(SettingsError::Address { name, value })?;
        let (rank, size) = (Rank(rank), matrix.size());
        if rank.0 as usize >= size {
            return Err(SettingsError::Rank { rank, size });
        }
        Ok(Self {
            rank,
            coordinator,
            matrix,
            ring: first(lookup, RING).is_ok(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICES_OF_TWO: &str = r#"[[null,"rdma_en5"],["rdma_en4",null]]"#;

    fn parse(variables: &[(&str, &str)]) -> Result<JacclSettings, SettingsError> {
        let lookup = |name: &str| {
            let found = variables.iter().find(|(n, _)| *n == name);
            found.map(|(_, value)| value.to_string())
        };
        JacclSettings::parse(&lookup, DEVICES_OF_TWO)
    }

    #[test]
    fn variables_are_read() {
        let settings = parse(&[
            ("MLX_RANK", "1"),
            ("MLX_JACCL_COORDINATOR", "10.0.0.1:32323"),
        ]);
        let settings = settings.unwrap();
        assert_eq!(settings.rank, Rank(1));
        assert_eq!(settings.coordinator, "10.0.0.1:32323".parse().unwrap());
        assert_eq!(settings.matrix.devices(1, 0), ["rdma_en4"]);
        assert!(!settings.ring);
        // JACCL's own names take precedence; the value of the ring variable is ignored.
        let settings = parse(&[
            ("MLX_RANK", "1"),
            ("JACCL_RANK", "0"),
            ("JACCL_COORDINATOR", "127.0.0.1:1"),
            ("MLX_JACCL_RING", ""),
        ]);
        let settings = settings.unwrap();
        assert_eq!((settings.rank, settings.ring), (Rank(0), true));
        let path = |name: &str| (name == "MLX_IBV_DEVICES").then(|| "/tmp/x".to_string());
        assert_eq!(device_file(&path).unwrap(), "/tmp/x");
        assert!(device_file(&|_| None).is_err());
    }

    #[test]
    fn what_is_wrong_is_named() {
        let address = ("MLX_JACCL_COORDINATOR", "10.0.0.1:32323");
        for (variables, error) in [
            (vec![address], "neither JACCL_RANK nor MLX_RANK is set"),
            (
                vec![("MLX_RANK", "0")],
                "neither JACCL_COORDINATOR nor MLX_JACCL_COORDINATOR is set",
            ),
            (
                vec![("MLX_RANK", "x"), address],
                "MLX_RANK is \"x\": invalid digit found in string",
            ),
            (
                vec![("MLX_RANK", "2"), address],
                "rank 2 has no row in the device file, which is for 2 ranks",
            ),
            (
                vec![("MLX_RANK", "0"), ("MLX_JACCL_COORDINATOR", "10.0.0.1")],
                "MLX_JACCL_COORDINATOR is \"10.0.0.1\", expected ip:port",
            ),
        ] {
            assert_eq!(parse(&variables).unwrap_err().to_string(), error);
        }
    }
}
