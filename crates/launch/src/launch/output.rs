//! Splits the output of many programs into whole lines with ranks.

use std::collections::BTreeMap;
use std::io::{self, Write};

use paceline_base::Rank;
use paceline_process::{LineBuffer, PrefixedWriter};

use super::RankTags;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OutputStream {
    Out,
    Errors,
}

/// The launcher's standard output and error.
pub(super) struct Output {
    out: PrefixedWriter<Box<dyn Write + Send>>,
    errors: PrefixedWriter<Box<dyn Write + Send>>,
}

impl Output {
    pub(super) fn new(out: Box<dyn Write + Send>, errors: Box<dyn Write + Send>) -> Self {
        Self {
            out: PrefixedWriter::new(out),
            errors: PrefixedWriter::new(errors),
        }
    }

    /// Writes a line; without a rank it is `mpirun`'s own.
    pub(super) fn line(
        &self,
        stream: OutputStream,
        rank: Option<Rank>,
        line: &str,
    ) -> io::Result<()> {
        let output = match stream {
            OutputStream::Out => &self.out,
            OutputStream::Errors => &self.errors,
        };
        match rank {
            Some(rank) => output.line(rank, line),
            None => output.labelled("mpirun", line),
        }
    }
}

/// Assigns the lines of one stream of one session to ranks.
#[derive(Debug)]
pub(super) enum LineRouter {
    Session(Rank, LineBuffer),
    Mpirun(LineBuffer, TagParser),
}

impl LineRouter {
    pub(super) fn new(tags: RankTags, rank: Rank) -> Self {
        match tags {
            RankTags::Session => Self::Session(rank, LineBuffer::default()),
            RankTags::Mpirun => Self::Mpirun(LineBuffer::default(), TagParser::default()),
        }
    }

    pub(super) fn feed(&mut self, bytes: &[u8], mut each: impl FnMut(Option<Rank>, &str)) {
        match self {
            Self::Session(rank, lines) => lines.feed(bytes, |line| each(Some(*rank), line)),
            Self::Mpirun(lines, tagged) => {
                lines.feed(bytes, |line| tagged.line(line, true, &mut each));
            }
        }
    }

    pub(super) fn finish(&mut self, mut each: impl FnMut(Option<Rank>, &str)) {
        match self {
            Self::Session(rank, lines) => lines.finish(|line| each(Some(*rank), line)),
            Self::Mpirun(lines, tagged) => {
                lines.finish(|line| tagged.line(line, false, &mut each));
                tagged.finish(each);
            }
        }
    }
}

/// Reverts `mpirun --tag-output`.
///
/// It puts `[JOB,RANK]<stdout>:` before each fragment that it reads of a rank's output, and again
/// after each newline in it. After a fragment without a newline, the tag of the next fragment
/// follows at once, of any rank. So `[1,0]<stdout>:a[1,1]<stdout>:b\n[1,0]<stdout>:c\n` is `ac` of
/// rank 0 and `b` of rank 1. Seen with Open MPI 4.1.4.
#[derive(Debug, Default)]
pub(super) struct TagParser {
    /// Unfinished lines.
    partial: BTreeMap<Rank, String>,
}

impl TagParser {
    fn line(&mut self, line: &str, complete: bool, each: &mut impl FnMut(Option<Rank>, &str)) {
        let Some(first) = Tag::find(line) else {
            return each(None, line);
        };
        if first.start > 0 {
            each(None, &line[..first.start]);
        }
        let mut tag = first;
        let mut rest = &line[tag.end..];
        while let Some(next) = Tag::find(rest) {
            *self.partial.entry(tag.rank).or_default() += &rest[..next.start];
            rest = &rest[next.end..];
            tag = next;
        }
        let whole = self.partial.entry(tag.rank).or_default();
        *whole += rest;
        if complete {
            let whole = std::mem::take(whole);
            self.partial.remove(&tag.rank);
            each(Some(tag.rank), &whole);
        }
    }

    fn finish(&mut self, mut each: impl FnMut(Option<Rank>, &str)) {
        for (rank, line) in std::mem::take(&mut self.partial) {
            if !line.is_empty() {
                each(Some(rank), &line);
            }
        }
    }
}

/// A tag `[JOB,RANK]<stdout>:` within a text.
#[derive(Clone, Copy, Debug)]
struct Tag {
    start: usize,
    end: usize,
    rank: Rank,
}

impl Tag {
    fn find(text: &str) -> Option<Self> {
        let mut from = 0;
        while let Some(at) = text[from..].find("]<std").map(|at| from + at) {
            if let Some(tag) = Self::around(text, at) {
                return Some(tag);
            }
            from = at + 1;
        }
        None
    }

    /// The tag with its closing bracket at `at`.
    fn around(text: &str, at: usize) -> Option<Self> {
        let names = ["]<stdout>:", "]<stderr>:"];
        let name = names.iter().find(|name| text[at..].starts_with(**name))?;
        let start = text[..at].rfind('[')?;
        let (_job, rank) = text[start + 1..at].rsplit_once(',')?;
        Some(Self {
            start,
            end: at + name.len(),
            rank: Rank(rank.parse().ok()?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sorted(tags: RankTags, text: &str) -> Vec<String> {
        let mut sorter = LineRouter::new(tags, Rank(7));
        let mut found = Vec::new();
        let mut note = |rank: Option<Rank>, line: &str| {
            found.push(format!(
                "{} {line}",
                rank.map_or("-".into(), |rank| rank.0.to_string())
            ));
        };
        text.as_bytes()
            .chunks(5)
            .for_each(|part| sorter.feed(part, &mut note));
        sorter.finish(note);
        found
    }

    #[test]
    fn a_session_is_a_rank() {
        assert_eq!(
            sorted(RankTags::Session, "a\n[1,0]<stdout>:b"),
            ["7 a", "7 [1,0]<stdout>:b"]
        );
    }

    #[test]
    fn mpiruns_tags_are_undone() {
        for (text, lines) in [
            ("", &[][..]),
            ("[1,0]<stdout>:a\n[1,1]<stdout>:b\n", &["0 a", "1 b"]),
            (
                "[1,0]<stdout>:a[1,1]<stdout>:a[1,0]<stdout>:b\n[1,1]<stdout>:b\n",
                &["0 ab", "1 ab"],
            ),
            ("[1,12]<stderr>:\n", &["12 "]),
            ("[1,0]<stdout>:end", &["0 end"]),
            ("mpirun says\n[1,0]<stdout>:x\n", &["- mpirun says", "0 x"]),
            ("[prterun-host-7@1,3]<stdout>:x\n", &["3 x"]),
            (
                "[1,x]<stdout>:y]<stdin>:\n",
                &["- [1,x]<stdout>:y]<stdin>:"],
            ),
        ] {
            assert_eq!(sorted(RankTags::Mpirun, text), lines, "{text:?}");
        }
    }
}
