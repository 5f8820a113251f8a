//! Launches ranks with Open MPI's `mpirun`.
//!
//! `mpirun` is a launch of one session on this machine, under a host agent like any other, so that
//! it ends with the launcher. It reaches the hosts by itself.

use std::path::Path;

use super::plan::RankPlan;
use super::{Launch, LaunchLimits, RankTags, StdinTo, WorkingDirectory};

/// Parameters of an `mpirun`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mpirun {
    /// The program, an absolute path.
    pub program: String,
    /// Major version of Open MPI, which changed the names of options with 5.
    pub major: u32,
    /// File name of Open MPI's library, for MLX, which searches a name that only development
    /// packages have; `None` if unknown.
    pub library: Option<String>,
    /// Further arguments.
    pub args: Vec<String>,
    /// `mpirun`'s own hostfile, see [`hostfile`].
    pub hostfile: String,
}

/// Lines `HOST slots=COUNT`; a host of several ranks appears once.
pub fn hostfile(ranks: &[RankPlan]) -> String {
    let mut counts: Vec<(&str, usize)> = Vec::new();
    for rank in ranks {
        match counts.iter_mut().find(|(host, _)| *host == rank.host) {
            Some((_, count)) => *count += 1,
            None => counts.push((&rank.host, 1)),
        }
    }
    let lines = counts
        .iter()
        .map(|(host, count)| format!("{host} slots={count}\n"));
    lines.collect()
}

/// The launch of `mpirun` that starts `command` on `ranks`, all with the environment of the first.
pub fn launch(
    mpirun: &Mpirun,
    ranks: &[RankPlan],
    command: Vec<String>,
    place: WorkingDirectory,
    stdin: StdinTo,
    limits: LaunchLimits,
) -> Launch {
    let mut words = vec![mpirun.program.clone()];
    let mut add = |more: &[&str]| words.extend(more.iter().map(|word| (*word).to_owned()));
    if mpirun.major >= 5 {
        add(&["--output", "tag"]);
    } else {
        add(&["--tag-output"]);
    }
    add(&[
        "--hostfile",
        &mpirun.hostfile,
        "--np",
        &ranks.len().to_string(),
    ]);
    add(&[
        "--stdin",
        match stdin {
            StdinTo::Rank0 => "0",
            StdinTo::All => "all",
            StdinTo::None => "none",
        },
    ]);
    if let WorkingDirectory::Required(folder) = &place {
        add(&["--wdir", folder]);
    }
    for (name, value) in library(mpirun).iter().chain(&ranks[0].env) {
        add(&["-x", &format!("{name}={value}")]);
    }
    words.extend(mpirun.args.iter().cloned());
    words.extend(command);
    let here = RankPlan {
        host: "127.0.0.1".to_owned(),
        ..RankPlan::default()
    };
    let stdin = if stdin == StdinTo::None {
        stdin
    } else {
        StdinTo::Rank0
    };
    Launch {
        ranks: vec![here],
        command: words,
        place,
        stdin,
        tags: RankTags::Mpirun,
        limits,
    }
}

/// The variable by which MLX finds the library.
fn library(mpirun: &Mpirun) -> Vec<(String, String)> {
    let Some(library) = &mpirun.library else {
        return Vec::new();
    };
    let folder = Path::new(&mpirun.program).ancestors().nth(2);
    let folder = folder.unwrap_or(Path::new("/")).join("lib");
    vec![
        ("DYLD_LIBRARY_PATH".to_owned(), folder.display().to_string()),
        ("MLX_MPI_LIBNAME".to_owned(), library.clone()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hostfile::Hostfile;
    use crate::launch::{Backend, Options, plan};

    #[test]
    fn mpirun_is_told_all() {
        let options = Options {
            env: vec!["A=b c".to_owned()],
            ..Options::default()
        };
        let hosts = Hostfile::from_names("a,b", 2).unwrap();
        let ranks = plan(Backend::Mpi, &hosts, &options).unwrap();
        assert_eq!(hostfile(&ranks), "a slots=2\nb slots=2\n");
        let mut mpirun = Mpirun {
            program: "/opt/bin/mpirun".to_owned(),
            major: 4,
            library: Some("libmpi.so.40".to_owned()),
            args: vec!["--oversubscribe".to_owned()],
            hostfile: "/tmp/h".to_owned(),
        };
        let words = |mpirun: &Mpirun, place| {
            let command = vec!["prog".to_owned(), "-x".to_owned()];
            let all = launch(
                mpirun,
                &ranks,
                command,
                place,
                StdinTo::All,
                LaunchLimits::default(),
            );
            assert_eq!(
                (all.ranks.len(), all.stdin, all.tags),
                (1, StdinTo::Rank0, RankTags::Mpirun)
            );
            all.command.join(" ")
        };
        assert_eq!(
            words(&mpirun, WorkingDirectory::Required("/d".to_owned())),
            "/opt/bin/mpirun --tag-output --hostfile /tmp/h --np 4 --stdin all --wdir /d \
             -x DYLD_LIBRARY_PATH=/opt/lib -x MLX_MPI_LIBNAME=libmpi.so.40 -x A=b c \
             --oversubscribe prog -x"
        );
        (mpirun.major, mpirun.library) = (5, None);
        assert_eq!(
            words(&mpirun, WorkingDirectory::IfPresent("/d".to_owned())),
            "/opt/bin/mpirun --output tag --hostfile /tmp/h --np 4 --stdin all -x A=b c \
             --oversubscribe prog -x"
        );
    }
}
