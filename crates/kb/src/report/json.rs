//! The same as [`show`](super::show) says, for programs.

use serde_json::{Value, json};

use super::{Added, CommandLookup};
use crate::{Finding, Fit, Hit, KnowledgeBase, SearchResult, Skill, Topic};

/// All skills with their topics.
pub fn areas(kb: &KnowledgeBase) -> Value {
    let topics: Vec<Value> = kb.topics().iter().map(topic_head).collect();
    json!({ "skills": kb.skills(), "topics": topics })
}

/// A skill: its topics with all findings in short, quick answers, and where findings disagree.
pub fn skill(kb: &KnowledgeBase, skill: &Skill) -> Value {
    let short = |f: &Finding| json!({ "id": f.id, "statement": f.statement });
    let topics = kb.topics_of_skill(skill).map(|topic| {
        let findings = kb.findings_of(topic).filter(|f| f.skill == skill.name);
        let mut object = topic_head(topic);
        object["findings"] = findings.map(short).collect();
        object
    });
    let conflicts = kb.conflicts().into_iter().map(|pair| conflict(kb, pair));
    json!({
        "skill": skill.name,
        "description": skill.description,
        "topics": topics.collect::<Value>(),
        "answers": kb.answers(),
        "conflicts": conflicts.collect::<Value>(),
    })
}

/// A topic with all of its findings.
pub fn topic(kb: &KnowledgeBase, topic: &Topic, known: CommandLookup) -> Value {
    let findings = kb.findings_of(topic);
    let mut object = topic_head(topic);
    object["topic"] = topic.name.clone().into();
    object["findings"] = findings.map(|f| detail(kb, f, known)).collect();
    object
}

fn topic_head(topic: &Topic) -> Value {
    json!({
        "name": topic.name,
        "slug": topic.slug(),
        "description": topic.description,
        "ids": topic.findings().collect::<Vec<_>>(),
        "origin": topic.origin,
    })
}

/// A finding with everything that is known about it.
pub fn detail(kb: &KnowledgeBase, finding: &Finding, known: CommandLookup) -> Value {
    let id = finding.id;
    let conflicts = finding.conflicts.iter();
    let conflicts = conflicts.map(|&other| conflict(kb, (id.min(other), id.max(other))));
    let checks = kb.checks_of(id).into_iter().map(|check| {
        let (command, shows) = (&check.command, &check.shows);
        json!({ "command": command, "shows": shows, "available": known(command) })
    });
    let mut object = head(finding);
    object["evidence"] = json!(finding.evidence);
    object["source"] = json!(finding.source);
    object["tags"] = json!(finding.tags);
    object["topics"] = kb.topics_of(id).iter().map(|t| t.name.clone()).collect();
    object["conflict_note"] = json!(finding.conflict_note);
    object["disagreements"] = conflicts.collect();
    object["assumptions"] = json!(kb.assumptions_on(id));
    object["checks"] = checks.collect();
    object["answers"] = kb
        .answers_on(id)
        .iter()
        .map(|a| a.question.clone())
        .collect();
    object
}

fn head(finding: &Finding) -> Value {
    json!({
        "id": finding.id,
        "skill": finding.skill,
        "topic": finding.topic,
        "statement": finding.statement,
        "confidence": finding.confidence,
        "conflicts": finding.conflicts,
        "origin": finding.origin,
    })
}

fn conflict(kb: &KnowledgeBase, pair: (u32, u32)) -> Value {
    json!({ "between": pair, "assumptions": kb.assumptions_between(pair) })
}

pub fn search(kb: &KnowledgeBase, query: &str, found: &SearchResult) -> Value {
    json!({
        "query": query,
        "n_found": found.n_found,
        "hits": hits(kb, &found.hits),
        "unknown": found.unknown,
    })
}

fn hits(kb: &KnowledgeBase, hits: &[Hit]) -> Value {
    let hits = hits.iter().filter_map(|hit| {
        let mut object = head(kb.finding(hit.id)?);
        let marks = hit.snippet.marks.iter();
        object["score"] = hit.score.into();
        object["field"] = hit.field.into();
        object["snippet"] = json!(hit.snippet.text);
        object["marks"] = marks.map(|mark| json!([mark.start, mark.end])).collect();
        Some(object)
    });
    hits.collect()
}

/// The answer to a question, or `null`, and findings near to it.
pub fn ask(kb: &KnowledgeBase, question: &str, fit: Option<Fit<'_>>, near: &SearchResult) -> Value {
    let answer = fit.map(|fit| {
        let mut object = json!(fit.answer);
        object["assumptions"] = json!(kb.assumptions_for(fit.answer));
        object["cover"] = fit.cover.into();
        object
    });
    json!({ "question": question, "answer": answer, "related": hits(kb, &near.hits) })
}

/// Counts of everything.
pub fn stats(kb: &KnowledgeBase) -> Value {
    json!(kb.stats())
}

/// The result of adding a file.
pub fn added(added: &Added) -> Value {
    json!({
        "file": added.path.to_string_lossy(),
        "changed": added.changed,
        "findings": added.contents.findings,
        "topics": added.contents.topics,
        "answers": added.contents.n_answers,
    })
}
