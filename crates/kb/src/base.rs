//! The knowledge base: built-in entries and user files, linked and indexed, with all lookups.

use std::collections::{BTreeMap, BTreeSet};

use crate::ask::{self, Fit, Known};
use crate::entry::{
    Assumption, Check, Confidence, Conflict, Finding, Origin, QuickAnswer, Topic, slug,
};
use crate::error::{Error, Fault, Problem};
use crate::nearest::nearest;
use crate::read::{self, Dialect, Document};
use crate::search::{Found, Index, hit};

/// Collected findings on distributed GPU computing; its head says how it was collected.
const FINDINGS: &str = include_str!("../data/findings.toml");

/// Assumptions of the planner where findings disagree, and commands that check findings.
const PLANNER: &str = include_str!("../data/planner.toml");

#[derive(Debug, Clone, Copy)]
pub struct UserFile<'a> {
    /// Its name, for messages.
    pub name: &'a str,
    /// Its bytes, as they were found.
    pub bytes: &'a [u8],
}

/// Contents of a valid file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Contents {
    /// Ids of its findings in the order of the file.
    pub findings: Vec<u32>,
    /// Topics that are new with it.
    pub topics: Vec<String>,
    pub n_answers: usize,
}

/// A knowledge area and its topics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Skill {
    /// Its short name, such as `gpu-distributed`.
    pub name: String,
    pub description: String,
}

/// The area that a name on the command line means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Area<'a> {
    /// All topics of a skill.
    Skill(&'a Skill),
    Topic(&'a Topic),
    /// Several topics that the name is part of.
    Ambiguous(Vec<&'a Topic>),
    /// None; with names that look like it, nearest first.
    Unknown(Vec<&'a str>),
}

/// Counts of everything.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stats {
    /// Findings, the user's included.
    pub n_findings: usize,
    /// Findings of the user's.
    pub n_own: usize,
    /// Findings by grade; `None` for those without one.
    pub by_confidence: Vec<(Option<Confidence>, usize)>,
    /// Findings without a source.
    pub n_without_source: usize,
    pub n_topics: usize,
    /// Pairs of findings that disagree.
    pub n_conflicts: usize,
    /// Assumptions of the planner about them.
    pub n_assumptions: usize,
    /// Findings that a command checks.
    pub n_checkable: usize,
    /// Quick answers.
    pub n_answers: usize,
    /// Different terms that search knows.
    pub n_terms: usize,
}

/// Findings, topics and quick answers, ready to be searched.
///
/// ```
/// let kb = paceline_kb::KnowledgeBase::built_in();
/// let found = kb.search("RDMA Thunderbolt", 5);
/// assert_eq!(found.hits.len(), 5);
/// assert!(kb.finding(found.hits[0].id).is_some());
/// ```
#[derive(Debug)]
pub struct KnowledgeBase {
    skills: Vec<Skill>,
    topics: Vec<Topic>,
    findings: BTreeMap<u32, Finding>,
    answers: Vec<QuickAnswer>,
    assumptions: Vec<Assumption>,
    checks: Vec<Check>,
    index: Index,
    /// The terms of `answers`, in their order.
    known: Vec<Known>,
}

impl KnowledgeBase {
    /// The knowledge base that is built into the program.
    ///
    /// Cost: reads 48 KB of TOML and indexes 52 findings, some milliseconds
    /// (`cargo bench -p paceline-kb`).
    pub fn built_in() -> Self {
        Self::with_files(&[]).0
    }

    /// The built-in knowledge base and the user's files. Where several files define an id, the
    /// first wins. Files may refer to each other's findings in any order, but not in a circle.
    ///
    /// A file that is invalid, alone or together with the others, is left out as a whole. The
    /// second result names it by its index in `files` and gives the reason.
    pub fn with_files(files: &[UserFile<'_>]) -> (Self, Vec<(usize, Error)>) {
        let mut parts = Parts::built_in();
        let mut refused = Vec::new();
        let mut waiting = Vec::new();
        for (place, file) in files.iter().enumerate() {
            let origin = Origin::File(file.name.to_owned());
            match read::read(file.bytes, Dialect::Findings, &origin) {
                Ok(document) => waiting.push((place, document)),
                Err(error) => refused.push((place, error)),
            }
        }
        refused.extend(parts.add_all(waiting));
        refused.sort_by_key(|(place, _)| *place);
        (parts.finish(), refused)
    }

    /// Whether a file could be added to this knowledge base, and what it would bring.
    ///
    /// # Errors
    /// Those of [`Error`]; the file as a whole is then of no use.
    pub fn check(&self, file: UserFile<'_>) -> Result<Contents, Error> {
        let origin = Origin::File(file.name.to_owned());
        let document = read::read(file.bytes, Dialect::Findings, &origin)?;
        check(&document, &self.findings, &self.topics)?;
        let findings: Vec<u32> = document.findings.iter().map(|(_, f)| f.id).collect();
        let mut topics: Vec<String> = Vec::new();
        let declared = document.topics.iter().map(|(_, topic)| &topic.name);
        for name in declared.chain(document.findings.iter().map(|(_, f)| &f.topic)) {
            let there = self.topics.iter().any(|topic| topic.name == *name);
            if !there && !topics.contains(name) {
                topics.push(name.clone());
            }
        }
        Ok(Contents {
            findings,
            topics,
            n_answers: document.answers.len(),
        })
    }

    /// The skills, built-in ones first.
    pub fn skills(&self) -> &[Skill] {
        &self.skills
    }

    /// All topics, built-in ones first.
    pub fn topics(&self) -> &[Topic] {
        &self.topics
    }

    /// All findings by id.
    pub fn findings(&self) -> impl Iterator<Item = &Finding> {
        self.findings.values()
    }

    /// The finding called `id`.
    pub fn finding(&self, id: u32) -> Option<&Finding> {
        self.findings.get(&id)
    }

    pub fn answers(&self) -> &[QuickAnswer] {
        &self.answers
    }

    /// The topics that a finding is listed in; the first is its own.
    pub fn topics_of(&self, id: u32) -> Vec<&Topic> {
        let own = self.finding(id).map_or("", |finding| &finding.topic);
        let mut all: Vec<&Topic> = self
            .topics
            .iter()
            .filter(|t| t.findings().any(|f| f == id))
            .collect();
        all.sort_by_key(|topic| topic.name != own);
        all
    }

    /// The quick answers that rest on a finding.
    pub fn answers_on(&self, id: u32) -> Vec<&QuickAnswer> {
        let rests = |answer: &&QuickAnswer| answer.findings.contains(&id);
        self.answers.iter().filter(rests).collect()
    }

    /// Commands that check a finding.
    pub fn checks_of(&self, id: u32) -> Vec<&Check> {
        let of = self
            .checks
            .iter()
            .filter(|check| check.findings.contains(&id));
        of.collect()
    }

    /// All pairs of findings that disagree, ascending.
    pub fn conflicts(&self) -> Vec<Conflict> {
        let pairs = self.findings.values().flat_map(|finding| {
            let first = finding.id;
            let later = finding
                .conflicts
                .iter()
                .filter(move |second| **second > first);
            later.map(move |&second| Conflict { first, second })
        });
        pairs.collect()
    }

    /// Assumptions of the planner where a finding disagrees with others or is in doubt.
    pub fn assumptions_on(&self, id: u32) -> Vec<&Assumption> {
        let all = self.assumptions.iter();
        all.filter(|a| a.findings.contains(&id)).collect()
    }

    /// Assumptions of the planner between two findings. Where one of the pair is the user's, which
    /// the planner cannot know, they are those about the built-in finding.
    pub fn assumptions_between(&self, conflict: Conflict) -> Vec<&Assumption> {
        let built_in = |id: u32| {
            self.finding(id)
                .is_some_and(|f| f.origin == Origin::BuiltIn)
        };
        let Conflict { first, second } = conflict;
        match (built_in(first), built_in(second)) {
            (true, true) => {
                let mut both = self.assumptions_on(first);
                both.retain(|a| a.findings.contains(&second));
                both
            }
            (true, false) => self.assumptions_on(first),
            (false, true) => self.assumptions_on(second),
            (false, false) => Vec::new(),
        }
    }

    /// Assumptions of the planner where findings of a quick answer disagree with each other or are
    /// in doubt by themselves.
    pub fn assumptions_for(&self, answer: &QuickAnswer) -> Vec<&Assumption> {
        let here = |id: &u32| answer.findings.contains(id);
        let concerns = |a: &&Assumption| match &a.findings[..] {
            [single] => here(single),
            several => several.iter().filter(|id| here(id)).count() > 1,
        };
        self.assumptions.iter().filter(concerns).collect()
    }

    /// The area that `name` means: a skill, a topic by name or as typed (`cost-power`), or the only
    /// topic that has it in its name.
    pub fn area(&self, name: &str) -> Area<'_> {
        let typed = slug(name);
        if let Some(skill) = self.skills.iter().find(|skill| slug(&skill.name) == typed) {
            return Area::Skill(skill);
        }
        if let Some(topic) = self.topics.iter().find(|topic| topic.slug() == typed) {
            return Area::Topic(topic);
        }
        let part = |topic: &&Topic| !typed.is_empty() && topic.slug().contains(&typed);
        let parts: Vec<&Topic> = self.topics.iter().filter(part).collect();
        match parts[..] {
            [] => Area::Unknown(self.areas_like(&typed)),
            [topic] => Area::Topic(topic),
            _ => Area::Ambiguous(parts),
        }
    }

    /// Names of areas that look like `typed`, as a whole or by one of their words.
    fn areas_like(&self, typed: &str) -> Vec<&str> {
        let skills = self.skills.iter().map(|skill| skill.name.as_str());
        let names: Vec<&str> = skills
            .chain(self.topics.iter().map(|t| t.name.as_str()))
            .collect();
        let like = |name: &str| {
            let slugged = slug(name);
            let words = slugged.split('-').chain([slugged.as_str()]);
            !nearest(typed, words, 1).is_empty()
        };
        names
            .into_iter()
            .filter(|name| like(name))
            .take(3)
            .collect()
    }

    /// Ids near to one that does not exist, ascending, at most `max`.
    pub fn ids_near(&self, id: u32, max: usize) -> Vec<u32> {
        let mut ids: Vec<u32> = self.findings.keys().copied().collect();
        // A mistyped digit is likelier than a neighbour, so ids of one slip's difference go first.
        ids.sort_by_key(|other| (digits_apart(id, *other), other.abs_diff(id)));
        ids.truncate(max);
        ids.sort_unstable();
        ids
    }

    /// The findings with words of `query`, best first, at most `limit`.
    ///
    /// Cost: linear in the words of the findings found; about a millisecond for the built-in ones.
    pub fn search(&self, query: &str, limit: usize) -> Found {
        let (ranked, query) = self.index.rank(query);
        let hits = ranked.iter().take(limit).filter_map(|&(id, score)| {
            let finding = self.findings.get(&id)?;
            Some(hit(finding, score, &query.terms, &self.index))
        });
        Found {
            hits: hits.collect(),
            n_found: ranked.len(),
            unknown: query.unknown,
            n_words: query.n_words,
        }
    }

    /// The quick answer that fits `question`, if there is one.
    pub fn ask(&self, question: &str) -> Option<Fit<'_>> {
        let (place, cover) = ask::best(&self.known, question, &self.index)?;
        let answer = &self.answers[place];
        Some(Fit { answer, cover })
    }

    /// Counts of everything.
    pub fn stats(&self) -> Stats {
        let count =
            |is: &dyn Fn(&Finding) -> bool| self.findings.values().filter(|f| is(f)).count();
        let grades = Confidence::ALL.into_iter().map(Some).chain([None]);
        let by_confidence = grades.map(|grade| (grade, count(&|f| f.confidence == grade)));
        let checked: BTreeSet<u32> = self
            .checks
            .iter()
            .flat_map(|c| &c.findings)
            .copied()
            .collect();
        Stats {
            n_findings: self.findings.len(),
            n_own: count(&|f| f.origin != Origin::BuiltIn),
            by_confidence: by_confidence.filter(|(_, n)| *n > 0).collect(),
            n_without_source: count(&|f| f.source.is_empty()),
            n_topics: self.topics.len(),
            n_conflicts: self.conflicts().len(),
            n_assumptions: self.assumptions.len(),
            n_checkable: checked.len(),
            n_answers: self.answers.len(),
            n_terms: self.index.n_terms(),
        }
    }
}

/// Slips of the finger between two numbers: a digit too many, too few, wrong, or two swapped.
fn digits_apart(a: u32, b: u32) -> usize {
    strsim::damerau_levenshtein(&a.to_string(), &b.to_string())
}

/// A knowledge base while it is put together.
struct Parts {
    skills: Vec<Skill>,
    topics: Vec<Topic>,
    findings: BTreeMap<u32, Finding>,
    answers: Vec<QuickAnswer>,
    assumptions: Vec<Assumption>,
    checks: Vec<Check>,
}

impl Parts {
    fn built_in() -> Self {
        let parse = |text: &str, dialect| read::read(text.as_bytes(), dialect, &Origin::BuiltIn);
        let planner = parse(PLANNER, Dialect::Planner).expect("tested: planner.toml is valid");
        let mut parts = Self {
            skills: Vec::new(),
            topics: Vec::new(),
            findings: BTreeMap::new(),
            answers: Vec::new(),
            assumptions: planner.assumptions,
            checks: planner.checks,
        };
        let findings = parse(FINDINGS, Dialect::Findings).expect("tested: findings.toml is valid");
        let refused = parts.add_all(vec![(0, findings)]);
        assert!(refused.is_empty(), "tested: findings.toml is valid");
        parts
    }

    /// Adds the documents that fit, in rounds: one may need a finding of another. Gives those that
    /// never do, with their places.
    fn add_all(&mut self, mut waiting: Vec<(usize, Document)>) -> Vec<(usize, Error)> {
        loop {
            let before = waiting.len();
            let mut refused = Vec::new();
            let mut left = Vec::new();
            for (place, document) in waiting {
                match check(&document, &self.findings, &self.topics) {
                    Ok(()) => self.add(document),
                    Err(error) => {
                        refused.push((place, error));
                        left.push((place, document));
                    }
                }
            }
            if left.is_empty() || left.len() == before {
                return refused;
            }
            waiting = left;
        }
    }

    /// Adds a document that [`check`] has passed.
    fn add(&mut self, document: Document) {
        self.add_skill(document.skill, document.description);
        self.topics
            .extend(document.topics.into_iter().map(|(_, topic)| topic));
        for (_, finding) in document.findings {
            self.add_finding(finding);
        }
        self.answers
            .extend(document.answers.into_iter().map(|(_, answer)| answer));
    }

    fn add_skill(&mut self, name: Option<String>, description: String) {
        let Some(name) = name else { return };
        if !self
            .skills
            .iter()
            .any(|skill| slug(&skill.name) == slug(&name))
        {
            self.skills.push(Skill { name, description });
        }
    }

    fn add_finding(&mut self, mut finding: Finding) {
        let id = finding.id;
        finding.conflicts.sort_unstable();
        finding.conflicts.dedup();
        self.add_skill(Some(finding.skill.clone()), String::new());
        let place = self
            .topics
            .iter()
            .position(|topic| topic.name == finding.topic);
        let place = place.unwrap_or_else(|| {
            self.topics.push(Topic {
                name: finding.topic.clone(),
                description: String::new(),
                ids: Vec::new(),
                also: Vec::new(),
                origin: finding.origin.clone(),
            });
            self.topics.len() - 1
        });
        let topic = &mut self.topics[place];
        if !topic.findings().any(|listed| listed == id) {
            topic.also.push(id);
        }
        self.findings.insert(id, finding);
    }

    fn finish(mut self) -> KnowledgeBase {
        self.make_conflicts_symmetric();
        let index = Index::new(self.findings.values());
        let findings = &self.findings;
        let known = self.answers.iter().map(|answer| {
            let rests_on = answer.findings.iter().filter_map(|id| findings.get(id));
            Known::new(answer, rests_on)
        });
        let known = known.collect();
        KnowledgeBase {
            skills: self.skills,
            topics: self.topics,
            findings: self.findings,
            answers: self.answers,
            assumptions: self.assumptions,
            checks: self.checks,
            index,
            known,
        }
    }

    /// A finding of the user's may disagree with a built-in one, which cannot know of it.
    fn make_conflicts_symmetric(&mut self) {
        let all = self.findings.values().flat_map(|finding| {
            let id = finding.id;
            finding.conflicts.iter().map(move |&other| (other, id))
        });
        let all: Vec<(u32, u32)> = all.collect();
        for (of, with) in all {
            if let Some(finding) = self.findings.get_mut(&of)
                && let Err(place) = finding.conflicts.binary_search(&with)
            {
                finding.conflicts.insert(place, with);
            }
        }
    }
}

/// Whether a document fits with `findings` and `topics`: its ids are new, its references exist.
fn check(
    document: &Document,
    findings: &BTreeMap<u32, Finding>,
    topics: &[Topic],
) -> Result<(), Error> {
    let mut problems = check_topics(document, topics);
    problems.extend(check_ids(document, findings));
    let new: BTreeSet<u32> = document.findings.iter().map(|(_, f)| f.id).collect();
    let exists = |id: &u32| new.contains(id) || findings.contains_key(id);
    for (place, finding) in &document.findings {
        if finding.conflicts.contains(&finding.id) {
            let fault = Fault::ConflictsWithItself { id: finding.id };
            problems.push(place.problem("conflicts", fault));
        }
    }
    let conflicts = document
        .findings
        .iter()
        .map(|(place, f)| (place, "conflicts", &f.conflicts));
    let of_answers = document
        .answers
        .iter()
        .map(|(place, a)| (place, "findings", &a.findings));
    let of_topics = document
        .topics
        .iter()
        .flat_map(|(place, t)| [(place, "ids", &t.ids), (place, "also", &t.also)]);
    for (place, key, ids) in conflicts.chain(of_answers).chain(of_topics) {
        for &id in ids.iter().filter(|id| !exists(id)) {
            problems.push(place.problem(key, Fault::NoSuchFinding { id }));
        }
    }
    read::finish(problems)
}

fn check_ids(document: &Document, findings: &BTreeMap<u32, Finding>) -> Vec<Problem> {
    let mut problems = Vec::new();
    let mut seen: BTreeSet<u32> = BTreeSet::new();
    for (place, Finding { id, .. }) in &document.findings {
        let by = match findings.get(id) {
            Some(other) => whose(&other.origin, "finding"),
            None if seen.contains(id) => "another finding of this file".to_owned(),
            None => {
                seen.insert(*id);
                continue;
            }
        };
        problems.push(place.problem("id", Fault::IdTaken { id: *id, by }));
    }
    problems
}

fn whose(origin: &Origin, what: &str) -> String {
    match origin {
        Origin::BuiltIn => format!("a built-in {what}"),
        Origin::File(name) => format!("a {what} of {name}"),
    }
}

/// Topics are declared once; a finding may name a new one, unless it looks like a slip.
fn check_topics(document: &Document, topics: &[Topic]) -> Vec<Problem> {
    let mut problems = Vec::new();
    let mut declared: Vec<&str> = Vec::new();
    for (place, topic) in &document.topics {
        let same = |name: &str| slug(name) == topic.slug();
        let by = match topics.iter().find(|other| same(&other.name)) {
            Some(other) => Some(whose(&other.origin, "topic")),
            None if declared.iter().any(|name| same(name)) => Some("this file".to_owned()),
            None => None,
        };
        if let Some(by) = by {
            let name = topic.name.clone();
            problems.push(place.problem("name", Fault::TopicTaken { name, by }));
        }
        declared.push(&topic.name);
    }
    let there = || {
        topics
            .iter()
            .map(|t| t.name.as_str())
            .chain(declared.iter().copied())
    };
    for (place, finding) in &document.findings {
        if there().any(|name| name == finding.topic) {
            continue;
        }
        if let Some(near) = nearest(&finding.topic, there(), 1).first() {
            let (name, nearest) = (finding.topic.clone(), (*near).to_owned());
            problems.push(place.problem("topic", Fault::NearTopic { name, nearest }));
        }
    }
    problems
}

#[cfg(test)]
mod tests;
