//! The rule on import circles: files of one crate that import each other in a ring.
//!
//! An edge goes from one file to the file that defines a name which the first uses. The name is
//! used through `crate::` or `super::`, in a `use` or in a path, or through a name that such a
//! `use` imported. A module's own children (`mod x;`, then `x::f()`) are parts of it and make no
//! edge. A re-export counts as the definition: `crate::Error` is an edge to `error.rs`, not to
//! `lib.rs`. Test code is left out. [`scan`] reads a file's tokens, [`Modules::edges`] resolves
//! names, and [`circles`] finds the strongly connected components.

use std::collections::{BTreeMap, BTreeSet};

use super::{RustFile, TidyFinding};
use crate::repo;

/// A larger circle is a finding: four files that know each other still fit in one head.
const CIRCLE_MAX: usize = 4;

/// The same in the crates of the control plane, where a change of one rule should stay in one file.
const CONTROL_CIRCLE_MAX: usize = 3;

/// Files of the tree in circles over [`CIRCLE_MAX`]. It only falls.
const CIRCLED_FILES_MAX: usize = 0;

/// Words that no path begins with.
const KEYWORDS: [&str; 18] = [
    "as", "break", "const", "dyn", "else", "enum", "fn", "for", "if", "impl", "in", "let", "match",
    "move", "mut", "ref", "return", "where",
];

/// Keywords before an item's name.
const ITEMS: [&str; 8] = [
    "const", "enum", "fn", "static", "struct", "trait", "type", "union",
];

/// The parts of a path, or of a module's place below the crate's root.
type Segments = Vec<String>;

/// Edges from file to file.
type Edges = BTreeMap<String, BTreeSet<String>>;

/// Findings about the whole tree: its circles, once more files are in them than the limit says.
pub(crate) fn check(files: &[RustFile]) -> Vec<TidyFinding> {
    let circles = too_large(files);
    let circled: usize = circles.iter().map(Vec::len).sum();
    let finding = |circle: &Vec<String>| {
        let message = format!(
            "a circle of {} files, at most {CIRCLE_MAX} ({circled} files of the tree are in such \
             circles, at most {CIRCLED_FILES_MAX}): {}",
            circle.len(),
            circle.join(" ")
        );
        TidyFinding::error(&circle[0], 1, "import-circle", message)
    };
    let over = circles.iter().filter(|_| circled > CIRCLED_FILES_MAX);
    over.map(finding).collect()
}

/// The circles of all crates that are over the limit.
fn too_large(files: &[RustFile]) -> Vec<Vec<String>> {
    let mut crates: BTreeMap<&str, Vec<&RustFile>> = BTreeMap::new();
    for file in files.iter().filter(|file| !file.test_file) {
        if place(&file.path).is_some() {
            crates
                .entry(repo::crate_of(&file.path))
                .or_default()
                .push(file);
        }
    }
    let all = crates
        .values()
        .flat_map(|files| circles(&Modules::read(files).edges()));
    let most = |circle: &Vec<String>| match repo::crate_of(&circle[0]) {
        "board" | "cluster" | "fleet" | "node" => CONTROL_CIRCLE_MAX,
        _ => CIRCLE_MAX,
    };
    all.filter(|circle| circle.len() > most(circle)).collect()
}

/// The module that a file holds, from its crate's root; `None` for files outside of `src`.
fn place(path: &str) -> Option<Segments> {
    let (folder, rest) = path.split_once("/src/")?;
    if folder.trim_start_matches("crates/").contains('/') {
        return None;
    }
    let mut parts: Segments = rest
        .strip_suffix(".rs")?
        .split('/')
        .map(String::from)
        .collect();
    let last = parts.last().map(String::as_str);
    let is_root = parts.len() == 1 && matches!(last, Some("lib" | "main"));
    if is_root || last == Some("mod") {
        parts.pop();
    }
    Some(parts)
}

/// A `use` of one name, or of all (`*`).
struct Import {
    path: Segments,
    name: String,
    public: bool,
}

/// All that resolving names needs to know of a module, inline ones too.
#[derive(Default)]
struct Module {
    file: String,
    children: BTreeSet<String>,
    imports: Vec<Import>,
    /// The path behind each imported name.
    bound: BTreeMap<String, Segments>,
    /// Paths of two and more parts.
    paths: BTreeSet<Segments>,
    /// Every name that a path begins with.
    words: BTreeSet<String>,
    defined: BTreeSet<String>,
}

impl Module {
    /// True when a path leaves the module, by itself or by the name that it begins with.
    fn leaves(&self, path: &[String]) -> bool {
        let upward = |path: &[String]| matches!(path[0].as_str(), "crate" | "super");
        upward(path)
            || !self.children.contains(&path[0])
                && self.bound.get(&path[0]).is_some_and(|bound| upward(bound))
    }
}

/// The definition that a path leads to.
enum PathTarget {
    /// The module of this file: no edge until something in it is named, or all of it (`*`).
    Module { file: String },
    /// An item of the module of this file; `seen` when its definition was read.
    Item { file: String, seen: bool },
}

/// Names on the way of a path that is being resolved, so that re-exports in a ring end.
type Trail = Vec<(Segments, String)>;

/// The modules of one crate by their place.
#[derive(Default)]
struct Modules(BTreeMap<Segments, Module>);

impl Modules {
    fn read(files: &[&RustFile]) -> Modules {
        let mut modules = Modules::default();
        for file in files {
            if let Some(place) = place(&file.path) {
                scan(file, place, &mut modules);
            }
        }
        modules
    }

    fn at(&mut self, place: &[String], file: &str) -> &mut Module {
        self.0.entry(place.to_vec()).or_insert_with(|| Module {
            file: file.into(),
            ..Module::default()
        })
    }

    /// All edges between files. A re-export makes one only where its file uses the name too.
    fn edges(&self) -> Edges {
        let mut edges = Edges::new();
        for (place, module) in &self.0 {
            let used = |import: &&Import| !import.public || module.words.contains(&import.name);
            let imported = module.imports.iter().filter(used);
            let imported = imported.map(|import| (&import.path, import.name == "*"));
            let named = module.paths.iter().map(|path| (path, false));
            for (path, all) in imported.chain(named) {
                if let Some(file) = self.edge(place, module, path, all) {
                    edges.entry(module.file.clone()).or_default().insert(file);
                }
            }
        }
        edges
    }

    /// The other file that `path` in `module` leads to; `all` when it ends in `*`.
    fn edge(
        &self,
        place: &[String],
        module: &Module,
        path: &[String],
        all: bool,
    ) -> Option<String> {
        if !module.leaves(path) {
            return None;
        }
        let file = match self.resolve(place, path, &[])? {
            PathTarget::Module { file } if all => file,
            PathTarget::Module { .. } => return None,
            PathTarget::Item { file, .. } => file,
        };
        (file != module.file).then_some(file)
    }

    /// Follows `path` from the module at `place`; `None` when it leads out of the crate.
    fn resolve(
        &self,
        place: &[String],
        path: &[String],
        trail: &[(Segments, String)],
    ) -> Option<PathTarget> {
        let ups = path.iter().take_while(|part| *part == "super").count();
        let from_root = match path[0].as_str() {
            "crate" => path[1..].to_vec(),
            "self" => [place, &path[1..]].concat(),
            "super" => [&place[..place.len().checked_sub(ups)?], &path[ups..]].concat(),
            first => {
                let module = self.0.get(place)?;
                if module.children.contains(first) {
                    [place, path].concat()
                } else {
                    let bound = module.bound.get(first).filter(|bound| bound[0] != first)?;
                    return self.follow(place, bound, path, trail);
                }
            }
        };
        self.walk(&from_root, trail)
    }

    /// Resolves `rest` with its first part replaced by the path `bound` of the module at `place`.
    fn follow(
        &self,
        place: &[String],
        bound: &[String],
        rest: &[String],
        trail: &[(Segments, String)],
    ) -> Option<PathTarget> {
        let step = (place.to_vec(), rest[0].clone());
        if trail.contains(&step) {
            return None;
        }
        let trail: Trail = trail.iter().cloned().chain([step]).collect();
        self.resolve(place, &[bound, &rest[1..]].concat(), &trail)
    }

    /// Walks down from the crate's root, through re-exports where a module has the name from one.
    fn walk(&self, path: &[String], trail: &[(Segments, String)]) -> Option<PathTarget> {
        let below = |depth: &usize| self.0.contains_key(&path[..*depth]);
        let depth = (1..=path.len()).take_while(below).count();
        let (place, rest) = path.split_at(depth);
        let module = self.0.get(place)?;
        let Some(name) = rest.first() else {
            let file = module.file.clone();
            return Some(PathTarget::Module { file });
        };
        // A module cannot import and define one name: what is defined is an associated type then.
        if let Some(bound) = module.bound.get(name) {
            return self.follow(place, bound, rest, trail);
        }
        let seen = module.defined.contains(name);
        let step = (place.to_vec(), name.clone());
        if !seen && !trail.contains(&step) {
            let trail: Trail = trail.iter().cloned().chain([step]).collect();
            let globs = module.imports.iter().filter(|import| import.name == "*");
            for glob in globs {
                let inside = [glob.path.as_slice(), rest].concat();
                match self.resolve(place, &inside, &trail) {
                    None | Some(PathTarget::Item { seen: false, .. }) => {}
                    found => return found,
                }
            }
        }
        let file = module.file.clone();
        Some(PathTarget::Item { file, seen })
    }
}

/// Reads the code of a file, without its tests, into the modules that it holds.
fn scan(file: &RustFile, place: Segments, modules: &mut Modules) {
    let code = file.tokens.iter().filter(|token| !file.is_test(token.line));
    modules.at(&place, &file.path);
    let mut scanner = Scanner {
        file: &file.path,
        tokens: code.map(|token| token.text.as_str()).collect(),
        at: 0,
        depth: 0,
        open: vec![(place, 0)],
        modules,
    };
    while scanner.at < scanner.tokens.len() {
        scanner.step();
    }
}

/// The state of [`scan`].
struct Scanner<'a> {
    file: &'a str,
    tokens: Vec<&'a str>,
    at: usize,
    depth: usize,
    /// The file's module and the inline ones that are open, each with the depth of its items.
    open: Vec<(Segments, usize)>,
    modules: &'a mut Modules,
}

impl<'a> Scanner<'a> {
    /// The token `ahead` of the present one, or nothing.
    fn token(&self, ahead: usize) -> &'a str {
        self.tokens.get(self.at + ahead).copied().unwrap_or("")
    }

    /// The token `back` before the present one, or nothing.
    fn before(&self, back: usize) -> &'a str {
        let at = self.at.checked_sub(back);
        at.map_or("", |at| self.tokens[at])
    }

    fn module(&mut self) -> &mut Module {
        let place = self.open.last().map(|(place, _)| place.clone());
        self.modules.at(&place.unwrap_or_default(), self.file)
    }

    fn step(&mut self) {
        let word = self.token(0);
        match word {
            "{" => {
                self.depth += 1;
                self.at += 1;
            }
            "}" => self.close(),
            "mod" if is_name(self.token(1)) && matches!(self.token(2), "{" | ";") => self.child(),
            "use" if self.token(1) != "<" => self.import(),
            _ if is_name(word) && !KEYWORDS.contains(&word) && !self.is_continued() => {
                self.path();
            }
            _ => self.at += 1,
        }
    }

    /// True for a field, a method and the later parts of a path; not for the end of a range.
    fn is_continued(&self) -> bool {
        match self.before(1) {
            "." => self.before(2) != ".",
            before => before == "::",
        }
    }

    fn close(&mut self) {
        let inner = self.open.len() > 1;
        if inner
            && self
                .open
                .last()
                .is_some_and(|(_, depth)| *depth == self.depth)
        {
            self.open.pop();
        }
        self.depth = self.depth.saturating_sub(1);
        self.at += 1;
    }

    fn child(&mut self) {
        let (name, inline) = (self.token(1).to_string(), self.token(2) == "{");
        self.module().children.insert(name.clone());
        if inline {
            let mut place = self
                .open
                .last()
                .map_or_else(Vec::new, |(place, _)| place.clone());
            place.push(name);
            self.modules.at(&place, self.file);
            self.depth += 1;
            self.open.push((place, self.depth));
        }
        self.at += 3;
    }

    fn import(&mut self) {
        let public = self.before(1) == "pub" || self.before(1) == ")" && self.is_restricted();
        let whole = self
            .open
            .last()
            .is_some_and(|(_, depth)| *depth == self.depth);
        self.at += 1;
        let mut found = Vec::new();
        self.tree(&[], &mut found);
        let module = self.module();
        for (path, name) in found {
            if whole || !module.bound.contains_key(&name) {
                module.bound.insert(name.clone(), path.clone());
            }
            module.imports.push(Import { path, name, public });
        }
    }

    /// True when the parenthesis before the present token ends a `pub(...)`.
    fn is_restricted(&self) -> bool {
        let opening = (2..=self.at).find(|back| self.before(*back) == "(");
        opening.is_some_and(|back| self.before(back + 1) == "pub")
    }

    /// A tree of a `use`, with each name that it brings in and the name's path.
    fn tree(&mut self, prefix: &[String], found: &mut Vec<(Segments, String)>) {
        let mut path = prefix.to_vec();
        loop {
            let word = self.token(0);
            self.at += 1;
            match word {
                "::" => {}
                "{" => return self.branches(&path, found),
                "*" => return found.push((path, "*".into())),
                _ if !is_name(word) => return,
                _ => {
                    path.push(word.to_string());
                    if self.token(0) != "::" {
                        break;
                    }
                }
            }
        }
        if path.len() > 1 && path.last().is_some_and(|last| last == "self") {
            path.pop();
        }
        let mut name = path.last().cloned().unwrap_or_default();
        if self.token(0) == "as" {
            name = self.token(1).to_string();
            self.at += 2;
        }
        found.push((path, name));
    }

    /// The trees between braces, after the opening one.
    fn branches(&mut self, path: &[String], found: &mut Vec<(Segments, String)>) {
        while !matches!(self.token(0), "}" | "") {
            self.tree(path, found);
            if self.token(0) == "," {
                self.at += 1;
            }
        }
        self.at += 1;
    }

    fn path(&mut self) {
        let before = self.before(1);
        let defines = ITEMS.contains(&before) || before == "!" && self.before(2) == "macro_rules";
        let mut path = vec![self.token(0).to_string()];
        self.at += 1;
        while self.token(0) == "::" && is_name(self.token(1)) {
            path.push(self.token(1).to_string());
            self.at += 2;
        }
        let module = self.module();
        module.words.insert(path[0].clone());
        if defines {
            module.defined.insert(path[0].clone());
        }
        if path.len() > 1 {
            module.paths.insert(path);
        }
    }
}

fn is_name(token: &str) -> bool {
    let token = token.strip_prefix("r#").unwrap_or(token);
    token.starts_with(|c: char| c.is_alphabetic() || c == '_')
        && token.chars().all(|c| c.is_alphanumeric() || c == '_')
}

/// The strongly connected components of two and more files.
fn circles(edges: &Edges) -> Vec<Vec<String>> {
    let reached: BTreeMap<&String, BTreeSet<&String>> = edges
        .keys()
        .map(|file| (file, reach(edges, file)))
        .collect();
    let mut circles: BTreeSet<Vec<String>> = BTreeSet::new();
    for (file, others) in &reached {
        let back = |other: &&&String| reached.get(**other).is_some_and(|r| r.contains(file));
        let circle: Vec<String> = others
            .iter()
            .filter(back)
            .map(|other| (*other).clone())
            .collect();
        if circle.len() > 1 {
            circles.insert(circle);
        }
    }
    circles.into_iter().collect()
}

/// Every file that edges lead to from `file`, itself only when they lead back to it.
fn reach<'a>(edges: &'a Edges, file: &str) -> BTreeSet<&'a String> {
    let mut reached = BTreeSet::new();
    let mut open: Vec<&String> = edges.get(file).into_iter().flatten().collect();
    while let Some(next) = open.pop() {
        if reached.insert(next) {
            open.extend(edges.get(next).into_iter().flatten());
        }
    }
    reached
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(files: &[(&str, &str)]) -> Vec<RustFile> {
        let parse = |(name, text): &(&str, &str)| {
            RustFile::parse(&format!("crates/a/src/{name}.rs"), text).expect("the sample is Rust")
        };
        files.iter().map(parse).collect()
    }

    /// Edges as `from>to`, names without folder and ending.
    fn edges(files: &[(&str, &str)]) -> Vec<String> {
        let files = parsed(files);
        let short = |path: &str| path["crates/a/src/".len()..path.len() - 3].to_string();
        let edges = Modules::read(&files.iter().collect::<Vec<_>>()).edges();
        let pairs = edges
            .iter()
            .flat_map(|(from, to)| to.iter().map(move |to| (from, to)));
        pairs
            .map(|(from, to)| format!("{}>{}", short(from), short(to)))
            .collect()
    }

    #[test]
    fn edges_are_the_names_that_leave_a_module() {
        let lib = ("lib", "mod x;\nmod y;\npub use y::Error;\nfn root() {}");
        let y = ("y", "pub struct Error;\npub fn f() {}");
        let cases = [
            ("use crate::y::f;", "x>y"),
            ("use super::y::{Error as E, f};", "x>y"),
            ("use crate::Error;", "x>y"),
            ("use super::*;", "x>lib"),
            ("fn g() { for n in 0..crate::y::f() {} }", "x>y"),
            ("fn g() { crate::y::f(); }", "x>y"),
            ("use crate::y;\nfn g() { y::f(); }", "x>y"),
            ("use crate::y;", ""),
            ("fn g() { let x = crate::root(); }", "x>lib"),
            ("mod deep {\n fn g() { super::super::y::f(); }\n}", "x>y"),
            ("pub use crate::y::f;", ""),
            ("pub(crate) use crate::y::f;\nfn g() { f(); }", "x>y"),
            ("use std::y::f;\nfn g() { y::f(); }", ""),
            ("// use crate::y::f;\n#[cfg(test)]\nuse crate::y::f;", ""),
        ];
        for (x, expected) in cases {
            let found = edges(&[lib, ("x", x), y]);
            let expected: Vec<&str> = expected.split_terminator(' ').collect();
            assert_eq!(found, expected, "{x}");
        }
    }

    #[test]
    fn children_are_parts_of_their_module() {
        let files = [
            ("lib", "mod x;\nmod z;"),
            (
                "x/mod",
                "mod y;\nuse y::f;\nfn g() { f(); y::h(); }\npub struct S;",
            ),
            (
                "x/y",
                "use super::S;\npub(super) fn f() {}\npub(super) fn h() {}",
            ),
            ("z", "pub use crate::x::*;\nfn k(_: crate::x::y::S) {}"),
        ];
        assert_eq!(edges(&files), ["x/y>x/mod", "z>x/mod"]);
    }

    #[test]
    fn globs_and_rings_of_reexports_end() {
        let files = [
            ("lib", "mod x;\nmod y;\npub use x::*;\npub use y::*;"),
            (
                "x",
                "pub use crate::*;\nuse crate::{Here, Nowhere};\nfn f(_: Here, _: Nowhere) {}",
            ),
            ("y", "pub struct Here;"),
        ];
        assert_eq!(edges(&files), ["x>lib", "x>y"]);
    }

    #[test]
    fn circles_are_strongly_connected() {
        let ring = |names: &[&str]| {
            let mut edges = Edges::new();
            for (at, name) in names.iter().enumerate() {
                let next = names[(at + 1) % names.len()];
                edges.entry((*name).into()).or_default().insert(next.into());
            }
            edges
        };
        let mut edges = ring(&["a", "b", "c"]);
        edges.extend(ring(&["d", "e"]));
        edges.entry("a".into()).or_default().insert("d".into());
        edges.entry("f".into()).or_default().insert("a".into());
        assert_eq!(circles(&edges), [vec!["a", "b", "c"], vec!["d", "e"]]);
    }

    #[test]
    fn only_circles_over_the_limit_count() {
        let ring = |length: usize| {
            let names: Vec<String> = (0..length).map(|n| format!("f{n}")).collect();
            let text = |n: usize| {
                let next = (n + 1) % length;
                format!("use crate::f{next}::g{next};\npub fn g{n}() {{}}")
            };
            let files: Vec<(String, String)> = names
                .iter()
                .enumerate()
                .map(|(n, name)| (name.clone(), text(n)))
                .collect();
            let files: Vec<(&str, &str)> = files
                .iter()
                .map(|(n, t)| (n.as_str(), t.as_str()))
                .collect();
            too_large(&parsed(&files))
        };
        assert!(ring(CIRCLE_MAX).is_empty());
        assert_eq!(ring(CIRCLE_MAX + 1)[0].len(), CIRCLE_MAX + 1);
    }
}
