//! Hints for errors of `paceline kb`.

use paceline_board::findings::Error;

use crate::output::printable;

pub(crate) fn hint(error: &Error) -> Option<String> {
    Some(match error {
        Error::Read { source, .. } | Error::Write { source, .. } => return hint(source),
        Error::System(_) => return None,
        Error::NoSuchFinding { near, .. } => {
            let near: Vec<String> = near.iter().map(ToString::to_string).collect();
            format!(
                "did you mean {}? `paceline kb search WORDS` finds ids",
                near.join(", ")
            )
        }
        Error::NoSuchTopic { near, .. } if near.is_empty() => {
            "`paceline kb skill` lists the topics".into()
        }
        Error::NoSuchTopic { near, .. } => {
            let near = near.join(" or ");
            format!(
                "did you mean {}? `paceline kb skill` lists the topics",
                printable(&near)
            )
        }
        Error::AmbiguousTopic { choices, .. } => {
            format!("name one of {}", printable(&choices.join(", ")))
        }
        Error::NoWords { .. } => "give it words that say what it is about, such as RDMA".into(),
        Error::NotAFile { .. } => "findings come as a TOML file; docs/kb.md shows one".into(),
        Error::NoName { .. } => "give the file a name that ends in .toml".into(),
        Error::Invalid { .. } => {
            "nothing was changed; docs/kb.md has an example and all keys".into()
        }
        Error::Orphan { .. } => {
            "nothing was changed; keep those findings, or change the other file first".into()
        }
        Error::Taken { .. } => {
            "rename your file to keep both, or replace the old one with --replace".into()
        }
    })
}
