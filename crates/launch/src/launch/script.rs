//! The two scripts that run on each machine.
//!
//! ```text
//!  launcher ══ ssh, connection leader ══▶ host agent: lifeline, signals, scratch folder
//!           ══ ssh, joined ═════════════▶ shell of rank r ──starts──▶ the program
//! ```
//!
//! The *host agent*'s standard input is its lifeline. When it ends, or is silent for [`SILENCE_S`],
//! the launcher or the connection is lost. Then the host agent ends all programs of its host:
//! SIGTERM, then SIGKILL. It addresses them by process group, which the rank's shell leads. A
//! program starts only after the host agent has registered its group, so no program is ever
//! unguarded.
//!
//! The *rank's shell* prints `ready GROUP`, waits for `go`, runs the program with its own streams,
//! and prints `exit CODE`. Then it kills the rest of the program's group, itself included.

use super::plan::RankPlan;
use super::{Launch, WorkingDirectory};
use crate::remote::quote;

/// Seconds of silence after which a host agent declares the launcher lost. Long, because a
/// suspended launcher (Ctrl-Z) is silent too; the purpose is a pulled cable. Only bash can wait
/// with a limit; under other shells only the end of the connection counts.
pub(super) const SILENCE_S: u32 = 120;

/// Exit code of a rank's shell that failed before the program, as of `env` and `timeout`.
pub(super) const CODE_NO_START: i32 = 125;

pub(super) fn host_agent(token: &str) -> String {
    format!(
        r#"{{
trap : HUP INT QUIT TERM
d=$(mktemp -d "${{TMPDIR:-/tmp}}/paceline.XXXXXX") || exit {CODE_NO_START}
all=
each() {{ for g in $all; do kill -s "$1" -- "-$g" 2>/dev/null; done; }}
live() {{ for g in $all; do kill -s 0 -- "-$g" 2>/dev/null && return 0; done; return 1; }}
w=; if [ -n "$BASH_VERSION" ]; then w='-t {SILENCE_S}'; fi
printf '\036{token} ready %s\n' "$d"
while read -r $w verb g r; do
case $verb in
add) all="$all $g"; printf '\036{token} added %s\n' "$r" ;;
del) rest=; for p in $all; do [ "$p" = "$g" ] || rest="$rest $p"; done; all=$rest ;;
INT|TERM|KILL) kill -s "$verb" -- "-$g" 2>/dev/null ;;
esac
done
each TERM
n=0
while [ $n -lt 20 ] && live; do n=$((n+1)); sleep 0.1; done
each KILL
rm -rf "$d"
exit 0
}}
"#
    )
}

/// The script of a rank, with `folder` as its host agent's scratch folder.
pub(super) fn rank(launch: &Launch, rank: usize, token: &str, folder: &str) -> String {
    let plan = &launch.ranks[rank];
    let mut text = String::from("{\ntrap : HUP INT QUIT TERM\n");
    text += "if [ -r /proc/$$/stat ]; then read -r a b c e g h </proc/$$/stat\n";
    text += "else g=$(ps -o pgid= -p $$ | tr -d ' '); fi\n";
    text += &format!("if [ \"$g\" != \"$$\" ]; then printf '\\036{token} shared\\n'; ");
    text += &format!("exit {CODE_NO_START}; fi\n");
    text += &working_folder(&launch.place);
    text += &environment(plan, rank, folder);
    text += &format!("printf '\\036{token} ready %s\\n' $$\nread -r go || exit {CODE_NO_START}\n");
    let words: Vec<String> = launch.command.iter().map(|word| quote(word)).collect();
    let input = if launch.stdin.reaches(rank) {
        ""
    } else {
        " </dev/null"
    };
    // The shell would report the program's death by a signal on its own standard error.
    text += "exec 5>&2 2>/dev/null\n";
    text += &format!("( exec {} ) 2>&5 5>&-{input}\n", words.join(" "));
    text += &format!("printf '\\036{token} exit %s\\n' $?\nkill -s KILL 0\nexit 0\n}}\n");
    text
}

fn working_folder(place: &WorkingDirectory) -> String {
    match place {
        WorkingDirectory::Required(folder) => {
            let folder = quote(folder);
            format!(
                "cd -- {folder} 2>/dev/null || {{ printf 'cannot change to %s\\n' {folder} >&2; \
                 exit {CODE_NO_START}; }}\n"
            )
        }
        WorkingDirectory::IfPresent(folder) => format!("cd -- {} 2>/dev/null\n", quote(folder)),
    }
}

fn environment(plan: &RankPlan, rank: usize, folder: &str) -> String {
    let mut text = String::new();
    for (name, value) in &plan.env {
        text += &format!("export {name}={}\n", quote(value));
    }
    for (name, content) in &plan.files {
        let (file, of_keeper) = (quote(&format!("{folder}/{name}.{rank}")), quote(folder));
        // If the host agent has removed its folder, the launch ends for another reason.
        text += &format!(
            "(printf '%s\\n' {} >{file}) 2>/dev/null || {{ [ ! -d {of_keeper} ] || \
             echo cannot write {file} >&2; exit {CODE_NO_START}; }}\n",
            quote(content)
        );
        text += &format!("export {name}={file}\n");
    }
    text + &format!("export MLX_RANK={rank}\n")
}
