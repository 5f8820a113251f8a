//! Reads the entries of a map of a configuration, each with its line.

use super::Error;
use super::yaml::{YamlEntry, YamlNode, YamlValue};

/// A map, and the names of the maps around it with their dots.
#[derive(Debug)]
pub(super) struct Entries<'a> {
    path: String,
    line: usize,
    entries: &'a [YamlEntry],
}

impl<'a> Entries<'a> {
    pub(super) const fn new(path: String, line: usize, entries: &'a [YamlEntry]) -> Self {
        Self {
            path,
            line,
            entries,
        }
    }

    fn entry(&self, name: &str) -> Option<&'a YamlEntry> {
        self.entries.iter().find(|entry| entry.name == name)
    }

    /// The value of an entry, unless it is null.
    pub(super) fn get(&self, name: &str) -> Option<&'a YamlNode> {
        let node = self.entry(name).map(|entry| &entry.node);
        node.filter(|node| node.value != YamlValue::Null)
    }

    /// The value of an entry; null in the map's line if it is absent.
    pub(super) fn node(&self, name: &str) -> YamlNode {
        let absent = YamlNode {
            line: self.line,
            value: YamlValue::Null,
        };
        self.entry(name).map_or(absent, |entry| entry.node.clone())
    }

    pub(super) fn wrong(&self, name: &str, node: &YamlNode, expected: &str) -> Error {
        Error::Value {
            line: node.line,
            name: format!("{}{name}", self.path),
            value: node.value.to_string(),
            expected: expected.to_owned(),
        }
    }

    /// Refuses entries of other names.
    pub(super) fn only(&self, known: &[&str]) -> Result<(), Error> {
        let mut entries = self.entries.iter();
        match entries.find(|entry| !known.contains(&entry.name.as_str())) {
            None => Ok(()),
            Some(entry) => Err(Error::Unknown {
                line: entry.line,
                name: format!("{}{}", self.path, entry.name),
            }),
        }
    }

    pub(super) fn map(&self, name: &str) -> Result<Option<Self>, Error> {
        match self.get(name).map(|node| (node, &node.value)) {
            None => Ok(None),
            Some((node, YamlValue::Map(entries))) => {
                let path = format!("{}{name}.", self.path);
                Ok(Some(Self::new(path, node.line, entries)))
            }
            Some((node, _)) => Err(self.wrong(name, node, "a map")),
        }
    }

    pub(super) fn text(&self, name: &str) -> Result<Option<&'a str>, Error> {
        match self.get(name).map(|node| (node, &node.value)) {
            None => Ok(None),
            Some((_, YamlValue::Text(text))) => Ok(Some(text)),
            Some((node, _)) => Err(self.wrong(name, node, "a text")),
        }
    }

    pub(super) fn flag(&self, name: &str, usual: bool) -> Result<bool, Error> {
        match self.get(name).map(|node| (node, &node.value)) {
            None => Ok(usual),
            Some((_, YamlValue::Bool(flag))) => Ok(*flag),
            Some((node, _)) => Err(self.wrong(name, node, "true or false")),
        }
    }

    /// A count. `1e3` is a float, with which mlx-lm counts nothing.
    pub(super) fn whole(&self, name: &str, usual: u64) -> Result<u64, Error> {
        let Some(node) = self.get(name) else {
            return Ok(usual);
        };
        let whole = match node.value {
            YamlValue::Integer(n) => u64::try_from(n).ok(),
            _ => None,
        };
        whole.ok_or_else(|| self.wrong(name, node, "a whole number"))
    }

    pub(super) fn number(&self, name: &str, usual: f64) -> Result<f64, Error> {
        let Some(node) = self.get(name) else {
            return Ok(usual);
        };
        finite(node).ok_or_else(|| self.wrong(name, node, "a number"))
    }

    /// A list of `least` numbers, 2 or 3, or of 3.
    pub(super) fn numbers(&self, name: &str, least: usize) -> Result<Vec<f64>, Error> {
        let node = self.node(name);
        let expected = if least == 3 {
            "3 numbers"
        } else {
            "2 or 3 numbers"
        };
        let wrong = || self.wrong(name, &node, expected);
        let YamlValue::List(items) = &node.value else {
            return Err(wrong());
        };
        if !(least..=3).contains(&items.len()) {
            return Err(wrong());
        }
        let number = |item| finite(item).ok_or_else(|| self.wrong(name, item, "a number"));
        items.iter().map(number).collect()
    }

    pub(super) fn one_of<'b>(
        &self,
        name: &str,
        usual: &str,
        known: &[(&str, &'b str)],
    ) -> Result<&'b str, Error> {
        let word = match self.get(name).map(|node| &node.value) {
            None => usual,
            Some(YamlValue::Text(word)) => word,
            Some(_) => "",
        };
        let found = known.iter().find(|(theirs, _)| *theirs == word);
        found.map(|(_, ours)| *ours).ok_or_else(|| {
            let names: Vec<&str> = known.iter().map(|(theirs, _)| *theirs).collect();
            self.wrong(
                name,
                &self.node(name),
                &format!("one of {}", names.join(", ")),
            )
        })
    }
}

fn finite(node: &YamlNode) -> Option<f64> {
    match node.value {
        YamlValue::Integer(n) => Some(n as f64),
        YamlValue::Float(x) if x.is_finite() => Some(x),
        _ => None,
    }
}
