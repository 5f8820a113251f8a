//! Finds Open MPI's `mpirun` on this machine and checks its version.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use std::{env, fs, io};

use super::mpi::{Mpirun, hostfile};
use super::plan::RankPlan;
use crate::remote::{Error as RemoteError, ScriptOutput, SshClient};

/// Why no `mpirun` can be used.
#[derive(Debug, thiserror::Error)]
pub enum FindError {
    /// No `mpirun`.
    #[error("there is no mpirun in PATH")]
    NoMpirun,
    #[error("mpirun is not Open MPI's: it says {said:?}")]
    NotOpenMpi {
        /// The first line of `mpirun --version`.
        said: String,
    },
    #[error("{0}")]
    Asked(#[from] RemoteError),
    #[error("cannot write mpirun's hostfile")]
    Hostfile(#[source] io::Error),
}

/// Time limit of programs that print a version or a list of libraries.
const LIMIT: Duration = Duration::from_secs(20);

/// The `mpirun` of `folders`, as PATH lists them, with its hostfile written into `scratch`.
pub fn find(
    folders: Option<&OsStr>,
    args: &[String],
    ranks: &[RankPlan],
    scratch: &Path,
) -> Result<Mpirun, FindError> {
    let program = in_path(folders, "mpirun").ok_or(FindError::NoMpirun)?;
    let said = said(&program, "--version")?;
    let major = major(&said).ok_or_else(|| FindError::NotOpenMpi {
        said: said.lines().next().unwrap_or("").to_owned(),
    })?;
    let path = scratch.join("mpi-hosts");
    fs::write(&path, hostfile(ranks)).map_err(FindError::Hostfile)?;
    Ok(Mpirun {
        library: library(folders),
        program,
        major,
        args: args
            .iter()
            .flat_map(|arg| arg.split_whitespace().map(str::to_owned))
            .collect(),
        hostfile: path.display().to_string(),
    })
}

/// The file of an executable in one of `folders`, as PATH lists them.
pub fn in_path(folders: Option<&OsStr>, name: &str) -> Option<String> {
    let mut files = env::split_paths(folders?).map(|folder| folder.join(name));
    let found = files.find(|file| is_executable(file))?;
    found.into_os_string().into_string().ok()
}

fn is_executable(file: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    fs::metadata(file).is_ok_and(|facts| facts.is_file() && facts.permissions().mode() & 0o111 != 0)
}

/// The output of a program, with a time limit.
fn said(program: &str, arg: &str) -> Result<String, RemoteError> {
    let words = format!("'{}' '{arg}' </dev/null", program.replace('\'', "'\\''"));
    let ScriptOutput { stdout, .. } =
        SshClient::new("ssh", None).run_script("127.0.0.1", &words, LIMIT)?;
    Ok(String::from_utf8_lossy(&stdout).into_owned())
}

/// 4 of `mpirun (Open MPI) 4.1.4`.
fn major(version: &str) -> Option<u32> {
    let (_, number) = version.split_once("(Open MPI) ")?;
    number.split('.').next()?.parse().ok()
}

/// File name of the library that `ompi_info` uses, which belongs to the same installation as
/// `mpirun`. MLX searches `libmpi.so`, which only development packages have.
fn library(folders: Option<&OsStr>) -> Option<String> {
    let info = in_path(folders, "ompi_info")?;
    let words = if cfg!(target_os = "macos") {
        ["otool", "-L"].as_slice()
    } else {
        &["ldd"]
    };
    let list = Command::new(words[0])
        .args(&words[1..])
        .arg(info)
        .output()
        .ok()?;
    let list = String::from_utf8_lossy(&list.stdout).into_owned();
    let line = list.lines().find(|line| line.contains("libmpi"))?;
    let name = line.split_whitespace().next()?;
    Some(name.strip_prefix("@rpath/").unwrap_or(name).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_open_mpi() {
        assert_eq!(major("mpirun (Open MPI) 4.1.4\n\nReport bugs\n"), Some(4));
        assert_eq!(major("mpirun (Open MPI) 5.0.8"), Some(5));
        assert_eq!(major("HYDRA build details:"), None);
    }
}
