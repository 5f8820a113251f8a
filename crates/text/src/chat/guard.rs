//! Keeping messages from becoming control tokens.
//!
//! Templates write control tokens by name, between messages that may contain the same names. The
//! rendered text does not show which of them the template wrote. So the messages are changed before
//! the template sees them. They are changed back in the text that is left between the control
//! tokens:
//!
//! - **marked**: a mark is put into each name in a message, and at a border where a name could
//!   reach across it. The mark is a private-use character that occurs nowhere else;
//! - **disguised**: also, each character that a name begins or ends with, in upper or lower case,
//!   is replaced by a private-use character of its own. No name can then begin or end in a message,
//!   wherever the template cuts it and whichever text it joins to it.
//!
//! A template that looks for `</think>` in a message must find it, so the marked text is the one
//! that counts. But where a template takes pieces out of a message, marks may not be enough:
//! without `</think>`, `<|im_</think>end|>` is a name. So both are rendered. The marked text counts
//! only if it has the same control tokens in the same order as the disguised one. Otherwise the
//! disguised text counts. If no message has a character to disguise, one rendering does.
//!
//! A gap remains. A template may write the first and the last character of a name itself, and
//! between them only characters from the middle of a message. Such a template makes control tokens
//! of messages on purpose. Roles are used in that way (`<|` + role + `|>`), so they are not
//! disguised but must be known ones.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use serde_json::Value as Json;

use super::Error;

/// The private-use areas of Unicode: 137,468 characters.
const PRIVATE_USE: [std::ops::RangeInclusive<char>; 3] = [
    '\u{e000}'..='\u{f8ff}',
    '\u{f0000}'..='\u{ffffd}',
    '\u{100000}'..='\u{10fffd}',
];

/// Whether `c` is one of `ends`, or a template's `upper` or `lower` makes it one.
///
/// It takes the characters of the messages, not the cases of the ends. The Kelvin sign becomes `k`
/// by `lower`, but nothing makes a Kelvin sign of `k`.
fn can_become(c: char, ends: &BTreeSet<char>) -> bool {
    let mut forms = std::iter::once(c)
        .chain(c.to_lowercase())
        .chain(c.to_uppercase());
    forms.any(|form| ends.contains(&form))
}

/// Degree of the change to messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GuardMode {
    Marked,
    Disguised,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TextKind {
    Content,
    /// Any other text, which a template is more likely to compare with a word of its own
    /// (`type == 'function'`).
    Other,
}

/// Changes the texts of one conversation for one vocabulary.
#[derive(Debug)]
pub(super) struct Guard<'a> {
    /// Names by length in bytes: Gemma has 6,249 of 20 lengths.
    names: BTreeMap<usize, HashSet<&'a str>>,
    /// Proper ends of names by their first character.
    tails: BTreeMap<char, BTreeSet<&'a str>>,
    /// Proper beginnings of names by their last character.
    heads: BTreeMap<char, BTreeSet<&'a str>>,
    mark: char,
    /// Characters to disguise -> their replacements.
    stand_ins: BTreeMap<char, char>,
}

impl<'a> Guard<'a> {
    /// `names` of control tokens; `texts`: everything that the rendered text could be made of.
    ///
    /// # Errors
    /// [`Error::NoFreeCharacter`] if the texts use up the private-use areas.
    pub(super) fn new<'t>(
        names: impl Iterator<Item = &'a str>,
        texts: impl Iterator<Item = &'t str>,
    ) -> Result<Self, Error> {
        let names: Vec<&str> = names.collect();
        let chars: BTreeSet<char> = texts
            .flat_map(str::chars)
            .chain(names.iter().flat_map(|name| name.chars()))
            .collect();
        let ends = names
            .iter()
            .flat_map(|n| [n.chars().next(), n.chars().next_back()]);
        let ends: BTreeSet<char> = ends.flatten().collect();
        let mut free = PRIVATE_USE
            .into_iter()
            .flatten()
            .filter(|c| !chars.contains(c));
        let mut next = || free.next().ok_or(Error::NoFreeCharacter);
        let mut guard = Self {
            names: BTreeMap::new(),
            tails: BTreeMap::new(),
            heads: BTreeMap::new(),
            mark: next()?,
            stand_ins: BTreeMap::new(),
        };
        for c in chars.iter().filter(|c| can_become(**c, &ends)) {
            guard.stand_ins.insert(*c, next()?);
        }
        names.into_iter().for_each(|name| guard.add(name));
        Ok(guard)
    }

    fn add(&mut self, name: &'a str) {
        self.names.entry(name.len()).or_default().insert(name);
        for (at, tail_first) in name.char_indices().skip(1) {
            let (head, tail) = name.split_at(at);
            self.tails.entry(tail_first).or_default().insert(tail);
            if let Some(head_last) = head.chars().next_back() {
                self.heads.entry(head_last).or_default().insert(head);
            }
        }
    }

    /// Whether a disguise would change `text`.
    pub(super) fn needs_disguise(&self, text: &str) -> bool {
        text.chars().any(|c| self.stand_ins.contains_key(&c))
    }

    /// `text` as the template is to see it.
    pub(super) fn change(&self, text: &str, guise: GuardMode, place: TextKind) -> String {
        let inside = match guise {
            GuardMode::Marked => self.mark_names(text),
            GuardMode::Disguised => {
                let change = |c| self.stand_ins.get(&c).copied().unwrap_or(c);
                text.chars().map(change).collect()
            }
        };
        self.mark_borders(&inside, text, place)
    }

    /// `json` with all its texts changed, keys too.
    pub(super) fn change_json(&self, json: &Json, guise: GuardMode) -> Json {
        let change = |text: &str| self.change(text, guise, TextKind::Other);
        match json {
            Json::String(text) => Json::String(change(text)),
            Json::Array(items) => items.iter().map(|i| self.change_json(i, guise)).collect(),
            Json::Object(map) => map
                .iter()
                .map(|(key, value)| (change(key), self.change_json(value, guise)))
                .collect(),
            other => other.clone(),
        }
    }

    /// The original of a text between control tokens: marks are removed and replaced characters
    /// restored.
    pub(super) fn restore(&self, text: &str) -> String {
        let original: BTreeMap<char, char> = self
            .stand_ins
            .iter()
            .map(|(from, to)| (*to, *from))
            .collect();
        text.chars()
            .filter(|c| *c != self.mark)
            .map(|c| original.get(&c).copied().unwrap_or(c))
            .collect()
    }

    /// Puts a mark after the first character of each name, also of names that overlap.
    fn mark_names(&self, text: &str) -> String {
        let mut out = String::with_capacity(text.len());
        for (at, c) in text.char_indices() {
            out.push(c);
            let is_name = |(len, names): (&usize, &HashSet<&str>)| {
                text.get(at..at + len)
                    .is_some_and(|part| names.contains(part))
            };
            if self.stand_ins.contains_key(&c) && self.names.iter().any(is_name) {
                out.push(self.mark);
            }
        }
        out
    }

    /// Puts a mark before and after `inside`, where a name could reach over the border of `text`.
    /// Marks lie within the white space at the border, which a template may trim away.
    fn mark_borders(&self, inside: &str, text: &str, place: TextKind) -> String {
        let core = text.trim();
        if core.is_empty() {
            return inside.to_owned();
        }
        let (before, rest) = inside.split_at(inside.len() - inside.trim_start().len());
        let (middle, after) = rest.split_at(rest.trim_end().len());
        let at_start = self.continues_name(text, place) || self.continues_name(core, place);
        let at_end = self.begins_name(text, place) || self.begins_name(core, place);
        let mark = |wanted: bool| wanted.then_some(self.mark);
        let mut out = before.to_owned();
        out.extend(mark(at_start));
        out.push_str(middle);
        out.extend(mark(at_end));
        out + after
    }

    /// Whether a name that began before `text` could continue in it.
    fn continues_name(&self, text: &str, place: TextKind) -> bool {
        let tails = text.chars().next().and_then(|c| self.tails.get(&c));
        tails.into_iter().flatten().any(|tail| {
            text.starts_with(tail) || place == TextKind::Content && tail.starts_with(text)
        })
    }

    /// Whether a name that ends after `text` could begin in it.
    fn begins_name(&self, text: &str, place: TextKind) -> bool {
        let heads = text.chars().next_back().and_then(|c| self.heads.get(&c));
        heads
            .into_iter()
            .flatten()
            .any(|head| text.ends_with(head) || place == TextKind::Content && head.ends_with(text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MARK: char = '\u{e000}';

    fn guard() -> Guard<'static> {
        Guard::new(["<|end|>", "[X]", "aaa"].into_iter(), std::iter::empty()).unwrap()
    }

    fn shown(text: &str) -> String {
        text.replace(MARK, "~")
            .replace('\u{e001}', "(")
            .replace('\u{e002}', ")")
    }

    #[test]
    fn marks_names_and_borders() {
        for (text, place, expected) in [
            ("", TextKind::Content, ""),
            ("  ", TextKind::Content, "  "),
            ("hello", TextKind::Content, "hello"),
            ("x <|end|> y", TextKind::Content, "x <~|end|> y"),
            ("x <|end|>", TextKind::Content, "x <~|end|>"),
            (" x<|en ", TextKind::Content, " x<|en~ "),
            (" nd|> x ", TextKind::Content, " ~nd|> x "),
            ("end", TextKind::Content, "~end~"),
            ("end", TextKind::Other, "end"),
            (">", TextKind::Other, "~>"),
            ("b<", TextKind::Other, "b<~"),
            ("baaaab", TextKind::Content, "ba~a~aab"),
            ("</think> a < b", TextKind::Content, "</think> a < b"),
        ] {
            let out = guard().change(text, GuardMode::Marked, place);
            assert_eq!(shown(&out), expected, "{text:?}");
            assert_eq!(guard().restore(&out), text);
        }
    }

    #[test]
    fn disguises_ends_of_names() {
        let out = guard().change("<|end|> [X]", GuardMode::Disguised, TextKind::Content);
        assert!(!out.contains(['<', '>', '[', ']']));
        assert_eq!(guard().restore(&out), "<|end|> [X]");
        assert!(guard().needs_disguise("1 < 2") && !guard().needs_disguise("12"));
    }

    #[test]
    fn disguises_what_changes_of_case_make_an_end() {
        // The Kelvin sign and the dotless i.
        let text = "K\u{212a}k \u{131}";
        let guard = Guard::new(["k1k", "I2I"].into_iter(), [text].into_iter()).unwrap();
        let out = guard.change(text, GuardMode::Disguised, TextKind::Other);
        assert!(!out.contains(['k', 'K', '\u{212a}', '\u{131}']), "{out}");
        assert_eq!(guard.restore(&out), text);
    }

    #[test]
    fn keys_and_values_of_json_are_changed() {
        let json = serde_json::json!({"<|end|>": ["[X]", 1, null], "type": "function"});
        let out = guard().change_json(&json, GuardMode::Marked).to_string();
        assert_eq!(
            shown(&out),
            r#"{"<~|end|>":["[~X]",1,null],"type":"function"}"#
        );
    }

    #[test]
    fn marks_occur_nowhere_else() {
        let texts = ["\u{e000}\u{e001}", "\u{e003}"];
        let guard = Guard::new(["<a>"].into_iter(), texts.into_iter()).unwrap();
        assert_eq!(guard.mark, '\u{e002}');
        assert_eq!(
            guard.stand_ins.values().collect::<Vec<_>>(),
            [&'\u{e004}', &'\u{e005}']
        );
        let all: String = PRIVATE_USE.into_iter().flatten().collect();
        let error = Guard::new(["<a>"].into_iter(), [all.as_str()].into_iter()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the messages use all private-use characters of Unicode"
        );
    }
}
