//! The knowledge base: built-in entries and user files, linked and indexed, with all lookups.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::entry::{Assumption, BUILT_IN, Check, Finding, GRADES, QuickAnswer, Topic, slug};
use crate::error::{EntryError, Error, KeyError};
use crate::file::{Document, UserFile};
use crate::question::{AnswerTerms, Fit, best};
use crate::search::{Index, SearchResult, hit};
use crate::similarity::nearest;

/// Collected findings on distributed GPU computing; its head says how it was collected.
const FINDINGS: &str = include_str!("../data/findings.toml");

/// Assumptions of the planner where findings disagree, and commands that check findings.
const PLANNER: &str = include_str!("../data/planner.toml");

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Planner {
    assumption: Vec<Assumption>,
    check: Vec<Check>,
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
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Skill {
    /// Its short name, such as `gpu-distributed`.
    pub name: String,
    pub description: String,
}

/// The area that a name on the command line means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Area<'a> {
    Skill(&'a Skill),
    Topic(&'a Topic),
    /// Several topics that the name is part of.
    Ambiguous(Vec<&'a Topic>),
    /// None; with names that look like it.
    Unknown(Vec<&'a str>),
}

/// Counts of everything, named as in JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Stats {
    pub findings: usize,
    pub own_findings: usize,
    /// Findings by grade; `none` for those without one.
    pub by_confidence: serde_json::Map<String, serde_json::Value>,
    pub without_source: usize,
    pub topics: usize,
    /// Pairs of findings that disagree.
    pub conflicts: usize,
    pub assumptions: usize,
    /// Findings that a command checks.
    pub checkable: usize,
    pub answers: usize,
    /// Different terms that search knows.
    pub terms: usize,
}

/// Findings, topics and quick answers, ready to be searched.
///
/// ```
/// let kb = paceline_kb::KnowledgeBase::built_in();
/// let found = kb.search("RDMA Thunderbolt", 5);
/// assert_eq!(found.hits.len(), 5);
/// assert!(kb.finding(found.hits[0].id).is_some());
/// ```
#[derive(Debug, Default)]
pub struct KnowledgeBase {
    skills: Vec<Skill>,
    topics: Vec<Topic>,
    findings: BTreeMap<u32, Finding>,
    answers: Vec<QuickAnswer>,
    planner: Planner,
    index: Index,
    /// The terms of `answers`, in their order.
    answer_terms: Vec<AnswerTerms>,
}

impl KnowledgeBase {
    /// The knowledge base that is built into the program: 48 KB of TOML, some milliseconds.
    pub fn built_in() -> Self {
        Self::with_files(&[]).0
    }

    /// The built-in knowledge base and the user's files. Where several files define an id, the
    /// first wins. Files may refer to each other's findings in any order, but not in a circle.
    ///
    /// A file that is invalid, alone or together with the others, is left out as a whole. The
    /// second result names it by its index in `files` and gives the reason.
    pub fn with_files(files: &[UserFile<'_>]) -> (Self, Vec<(usize, Error)>) {
        let bytes = FINDINGS.as_bytes();
        let name = BUILT_IN;
        let built_in = Document::read(UserFile { name, bytes }).expect("tested: valid findings");
        let mut kb = Self {
            planner: toml::from_str(PLANNER).expect("tested: valid planner's file"),
            ..Self::default()
        };
        kb.add(built_in);
        let mut refused = Vec::new();
        let mut waiting = Vec::new();
        for (place, file) in files.iter().enumerate() {
            match Document::read(*file) {
                Ok(document) => waiting.push((place, document)),
                Err(error) => refused.push((place, error)),
            }
        }
        refused.extend(kb.add_all(waiting));
        refused.sort_by_key(|(place, _)| *place);
        kb.finish();
        (kb, refused)
    }

    /// Whether a file could be added to this knowledge base, and what it would bring.
    ///
    /// # Errors
    /// The errors of [`Error`]; the file as a whole is then of no use.
    pub fn check(&self, file: UserFile<'_>) -> Result<Contents, Error> {
        let document = Document::read(file)?;
        self.fits(&document)?;
        let mut topics: Vec<String> = Vec::new();
        let declared = document.topics.iter().map(|topic| &topic.name);
        for name in declared.chain(document.findings.iter().map(|f| &f.topic)) {
            let exists = self.topics.iter().any(|topic| topic.name == *name);
            if !exists && !topics.contains(name) {
                topics.push(name.clone());
            }
        }
        Ok(Contents {
            findings: document.findings.iter().map(|f| f.id).collect(),
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

    pub fn finding(&self, id: u32) -> Option<&Finding> {
        self.findings.get(&id)
    }

    pub fn answers(&self) -> &[QuickAnswer] {
        &self.answers
    }

    /// The topics that a finding is listed in; the first is its own.
    pub fn topics_of(&self, id: u32) -> Vec<&Topic> {
        let own = self.finding(id).map_or("", |finding| &finding.topic);
        let lists = |topic: &&Topic| topic.findings().any(|listed| listed == id);
        let mut all: Vec<&Topic> = self.topics.iter().filter(lists).collect();
        all.sort_by_key(|topic| topic.name != own);
        all
    }

    pub(crate) fn topics_of_skill(&self, skill: &Skill) -> impl Iterator<Item = &Topic> {
        let of_skill = |id| self.finding(id).is_some_and(|f| f.skill == skill.name);
        let topics = self.topics.iter();
        topics.filter(move |topic| topic.findings().any(of_skill))
    }

    pub(crate) fn findings_of(&self, topic: &Topic) -> impl Iterator<Item = &Finding> {
        topic.findings().filter_map(|id| self.finding(id))
    }

    /// The quick answers that rest on a finding.
    pub fn answers_on(&self, id: u32) -> Vec<&QuickAnswer> {
        let answers = self.answers.iter();
        answers.filter(|a| a.findings.contains(&id)).collect()
    }

    /// Commands that check a finding.
    pub fn checks_of(&self, id: u32) -> Vec<&Check> {
        let checks = self.planner.check.iter();
        checks.filter(|c| c.findings.contains(&id)).collect()
    }

    /// All pairs of findings that disagree, ascending, the smaller id first.
    pub fn conflicts(&self) -> Vec<(u32, u32)> {
        let findings = self.findings.values();
        let pairs = findings.flat_map(|f| f.conflicts.iter().map(|&other| (f.id, other)));
        pairs.filter(|(first, second)| first < second).collect()
    }

    /// Assumptions of the planner where a finding disagrees with others or is in doubt.
    pub fn assumptions_on(&self, id: u32) -> Vec<&Assumption> {
        let all = self.planner.assumption.iter();
        all.filter(|a| a.findings.contains(&id)).collect()
    }

    /// Assumptions of the planner between two findings. Where one of the pair is the user's, which
    /// the planner cannot know, they are those about the built-in finding.
    pub fn assumptions_between(&self, (first, second): (u32, u32)) -> Vec<&Assumption> {
        let built_in = |id: &u32| self.finding(*id).is_some_and(|f| f.origin == BUILT_IN);
        let known: Vec<u32> = [first, second].into_iter().filter(built_in).collect();
        let about = |a: &&Assumption| known.iter().all(|id| a.findings.contains(id));
        let all = self.planner.assumption.iter();
        all.filter(|a| !known.is_empty() && about(a)).collect()
    }

    /// Assumptions of the planner where findings of a quick answer disagree with each other or are
    /// in doubt by themselves.
    pub fn assumptions_for(&self, answer: &QuickAnswer) -> Vec<&Assumption> {
        let concerns = |a: &&Assumption| {
            let shared = a.findings.iter().filter(|id| answer.findings.contains(id));
            shared.count() >= a.findings.len().clamp(1, 2)
        };
        self.planner.assumption.iter().filter(concerns).collect()
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
        let names = skills.chain(self.topics.iter().map(|topic| topic.name.as_str()));
        let like = |name: &&str| {
            let slugged = slug(name);
            let words = slugged.split('-').chain([slugged.as_str()]);
            !nearest(typed, words, 1).is_empty()
        };
        names.filter(like).take(3).collect()
    }

    /// Ids near to one that does not exist, ascending, at most `max`.
    pub fn ids_near(&self, id: u32, max: usize) -> Vec<u32> {
        let mut ids: Vec<u32> = self.findings.keys().copied().collect();
        // A mistyped digit is likelier than a neighbour.
        let slips = |a: u32, b: u32| strsim::damerau_levenshtein(&a.to_string(), &b.to_string());
        ids.sort_by_key(|other| (slips(id, *other), other.abs_diff(id)));
        ids.truncate(max);
        ids.sort_unstable();
        ids
    }

    /// The findings with words of `query`, best first, at most `limit`.
    ///
    /// Cost: linear in the words of the findings found; about a millisecond for the built-in ones.
    pub fn search(&self, query: &str, limit: usize) -> SearchResult {
        let query = self.index.parse(query);
        let ranked = self.index.rank(&query.terms);
        let terms = &query.terms;
        let hits = ranked.iter().take(limit);
        let hits = hits.map(|(id, score)| hit(&self.findings[id], *score, terms, &self.index));
        SearchResult {
            hits: hits.collect(),
            n_found: ranked.len(),
            unknown: query.unknown,
            n_words: query.n_words,
        }
    }

    /// The quick answer that fits `question`, if there is one.
    pub fn ask(&self, question: &str) -> Option<Fit<'_>> {
        let (place, cover) = best(&self.answer_terms, question, &self.index)?;
        let answer = &self.answers[place];
        Some(Fit { answer, cover })
    }

    pub fn stats(&self) -> Stats {
        let findings = || self.findings.values();
        let grades = GRADES.into_iter().map(Some).chain([None]);
        let grades = grades.map(|name| {
            (
                name,
                findings()
                    .filter(|f| f.confidence.as_deref() == name)
                    .count(),
            )
        });
        let by_confidence = grades.filter(|(_, n)| *n > 0);
        let checks = self.planner.check.iter();
        let checked: BTreeSet<&u32> = checks.flat_map(|check| &check.findings).collect();
        Stats {
            findings: self.findings.len(),
            own_findings: findings().filter(|f| f.origin != BUILT_IN).count(),
            by_confidence: by_confidence
                .map(|(name, n)| (name.unwrap_or("none").to_owned(), n.into()))
                .collect(),
            without_source: findings().filter(|f| f.source.is_empty()).count(),
            topics: self.topics.len(),
            conflicts: self.conflicts().len(),
            assumptions: self.planner.assumption.len(),
            checkable: checked.len(),
            answers: self.answers.len(),
            terms: self.index.n_terms(),
        }
    }

    /// Adds the documents that fit, in rounds: one may need a finding of another. Returns those
    /// that never do, with their places.
    fn add_all(&mut self, mut waiting: Vec<(usize, Document)>) -> Vec<(usize, Error)> {
        loop {
            let before = waiting.len();
            let mut refused = Vec::new();
            let mut left = Vec::new();
            for (place, document) in waiting {
                match self.fits(&document) {
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

    /// Adds a document that [`Self::fits`] has passed.
    fn add(&mut self, document: Document) {
        if let Some(name) = document.skill {
            self.add_skill(name, document.description);
        }
        self.topics.extend(document.topics);
        for mut finding in document.findings {
            finding.conflicts.sort_unstable();
            finding.conflicts.dedup();
            self.add_skill(finding.skill.clone(), String::new());
            self.add_to_topic(&finding);
            self.findings.insert(finding.id, finding);
        }
        self.answers.extend(document.answers);
    }

    fn add_skill(&mut self, name: String, description: String) {
        if !self.skills.iter().any(|s| slug(&s.name) == slug(&name)) {
            self.skills.push(Skill { name, description });
        }
    }

    fn add_to_topic(&mut self, finding: &Finding) {
        let own = |topic: &Topic| topic.name == finding.topic;
        let place = self.topics.iter().position(own).unwrap_or_else(|| {
            self.topics.push(Topic {
                name: finding.topic.clone(),
                origin: finding.origin.clone(),
                ..Topic::default()
            });
            self.topics.len() - 1
        });
        let topic = &mut self.topics[place];
        if !topic.findings().any(|listed| listed == finding.id) {
            topic.also.push(finding.id);
        }
    }

    /// Makes conflicts symmetric and indexes all. A finding of the user's may disagree with a
    /// built-in one, which cannot know of it.
    fn finish(&mut self) {
        let findings = self.findings.values();
        let pairs = findings.flat_map(|f| f.conflicts.iter().map(|&other| (other, f.id)));
        for (of, with) in pairs.collect::<Vec<_>>() {
            if let Some(finding) = self.findings.get_mut(&of)
                && let Err(place) = finding.conflicts.binary_search(&with)
            {
                finding.conflicts.insert(place, with);
            }
        }
        self.index = Index::new(self.findings.values());
        let terms = |answer| AnswerTerms::new(answer, &self.findings);
        self.answer_terms = self.answers.iter().map(terms).collect();
    }

    /// Whether a document fits: its ids are new, its references exist.
    fn fits(&self, document: &Document) -> Result<(), Error> {
        let mut problems = self.topic_problems(document);
        let mut new = BTreeSet::new();
        for (n, Finding { id, .. }) in document.findings.iter().enumerate() {
            let by = match self.findings.get(id) {
                Some(other) => owner(&other.origin, "finding"),
                None if new.insert(*id) => continue,
                None => "another finding of this file".to_owned(),
            };
            problems.push(document.problem(
                ("finding", n),
                "id",
                KeyError::IdTaken { id: *id, by },
            ));
        }
        for (n, finding) in document.findings.iter().enumerate() {
            let id = finding.id;
            if finding.conflicts.contains(&id) {
                let fault = KeyError::ConflictsWithItself { id };
                problems.push(document.problem(("finding", n), "conflicts", fault));
            }
        }
        for (place, key, ids) in references(document) {
            let exists = |id: &u32| new.contains(id) || self.findings.contains_key(id);
            for &id in ids.iter().filter(|id| !exists(id)) {
                problems.push(document.problem(place, key, KeyError::NoSuchFinding { id }));
            }
        }
        Error::of(problems)
    }

    /// Topics are declared once; a finding may name a new one, unless it looks like a slip.
    fn topic_problems(&self, document: &Document) -> Vec<EntryError> {
        let mut problems = Vec::new();
        for (n, topic) in document.topics.iter().enumerate() {
            let same = |other: &&Topic| other.slug() == topic.slug();
            let by = match self.topics.iter().find(same) {
                Some(other) => owner(&other.origin, "topic"),
                None if document.topics[..n].iter().any(|other| same(&other)) => "this file".into(),
                None => continue,
            };
            let name = topic.name.clone();
            problems.push(document.problem(
                ("topic", n),
                "name",
                KeyError::TopicTaken { name, by },
            ));
        }
        let topics = self.topics.iter().chain(&document.topics);
        let names: Vec<&str> = topics.map(|topic| topic.name.as_str()).collect();
        for (n, Finding { topic, .. }) in document.findings.iter().enumerate() {
            if names.contains(&topic.as_str()) {
                continue;
            }
            for near in nearest(topic, names.iter().copied(), 1) {
                let (name, nearest) = (topic.clone(), near.to_owned());
                let fault = KeyError::NearTopic { name, nearest };
                problems.push(document.problem(("finding", n), "topic", fault));
            }
        }
        problems
    }
}

fn owner(origin: &str, what: &str) -> String {
    match origin {
        BUILT_IN => format!("a built-in {what}"),
        name => format!("a {what} of {name}"),
    }
}

type Reference<'a> = ((&'static str, usize), &'static str, &'a [u32]);

/// All lists of ids in a document with entry and key.
fn references(document: &Document) -> impl Iterator<Item = Reference<'_>> {
    let findings = document.findings.iter().map(|f| &f.conflicts[..]);
    let findings = findings
        .enumerate()
        .map(|(n, ids)| (("finding", n), "conflicts", ids));
    let answers = document.answers.iter().map(|answer| &answer.findings[..]);
    let answers = answers
        .enumerate()
        .map(|(n, ids)| (("answer", n), "findings", ids));
    let topics = document.topics.iter().enumerate();
    let topics = topics.flat_map(|(n, topic)| {
        [("ids", &topic.ids), ("also", &topic.also)].map(|(key, ids)| (("topic", n), key, &ids[..]))
    });
    findings.chain(answers).chain(topics)
}
