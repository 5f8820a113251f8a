//! The same as [`show`](super::show) says, for programs.

use crate::{
    Assumption, Conflict, Finding, Fit, Found, Hit, KnowledgeBase, Origin, QuickAnswer, Skill,
    Topic,
};
use serde_json::{Value, json};

use super::{Added, Known};

/// All skills with their topics.
pub fn areas(kb: &KnowledgeBase) -> Value {
    let skill = |skill: &Skill| json!({ "name": skill.name, "description": skill.description });
    json!({
        "skills": kb.skills().iter().map(skill).collect::<Vec<_>>(),
        "topics": kb.topics().iter().map(topic_head).collect::<Vec<_>>(),
    })
}

/// A skill: its topics with all findings in short, quick answers, and where findings disagree.
pub fn skill(kb: &KnowledgeBase, skill: &Skill) -> Value {
    let of_skill = |f: &&Finding| f.skill == skill.name;
    let topics = super::topics_of_skill(kb, skill).into_iter().map(|topic| {
        let findings = topic.findings().filter_map(|id| kb.finding(id));
        let short = |f: &Finding| json!({ "id": f.id, "statement": f.statement });
        let mut object = topic_head(topic);
        object["findings"] = findings.filter(of_skill).map(short).collect();
        object
    });
    json!({
        "skill": skill.name,
        "description": skill.description,
        "topics": topics.collect::<Vec<_>>(),
        "answers": kb.answers().iter().map(answer).collect::<Vec<_>>(),
        "conflicts": kb.conflicts().iter().map(|c| conflict(kb, *c)).collect::<Vec<_>>(),
    })
}

/// A topic with all of its findings.
pub fn topic(kb: &KnowledgeBase, topic: &Topic, known: Known) -> Value {
    let findings = topic.findings().filter_map(|id| kb.finding(id));
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
        "origin": origin(&topic.origin),
    })
}

/// A finding with everything that is known about it.
pub fn detail(kb: &KnowledgeBase, finding: &Finding, known: Known) -> Value {
    let mut object = head(finding);
    let id = finding.id;
    let topics = kb.topics_of(id);
    let with = finding.conflicts.iter().map(|&other| Conflict {
        first: id.min(other),
        second: id.max(other),
    });
    let checks = kb.checks_of(id).into_iter().map(|check| {
        json!({
            "command": check.command,
            "shows": check.shows,
            "available": known(&check.command),
        })
    });
    let answers = kb.answers_on(id);
    object["evidence"] = finding.evidence.clone().into();
    object["source"] = finding.source.clone().into();
    object["tags"] = json!(finding.tags);
    object["topics"] = topics.iter().map(|topic| topic.name.clone()).collect();
    object["conflict_note"] = finding.conflict_note.clone().into();
    object["disagreements"] = with.map(|c| conflict(kb, c)).collect();
    object["assumptions"] = kb.assumptions_on(id).into_iter().map(assumption).collect();
    object["checks"] = checks.collect();
    object["answers"] = answers.iter().map(|a| a.question.clone()).collect();
    object
}

fn head(finding: &Finding) -> Value {
    json!({
        "id": finding.id,
        "skill": finding.skill,
        "topic": finding.topic,
        "statement": finding.statement,
        "confidence": finding.confidence.map(|c| c.name()),
        "conflicts": finding.conflicts,
        "origin": origin(&finding.origin),
    })
}

fn conflict(kb: &KnowledgeBase, conflict: Conflict) -> Value {
    let assumptions = kb.assumptions_between(conflict);
    json!({
        "between": [conflict.first, conflict.second],
        "assumptions": assumptions.into_iter().map(assumption).collect::<Vec<_>>(),
    })
}

fn assumption(assumption: &Assumption) -> Value {
    json!({
        "subject": assumption.subject,
        "findings": assumption.findings,
        "assumes": assumption.assumes,
        "why": assumption.why,
    })
}

fn answer(answer: &QuickAnswer) -> Value {
    json!({
        "question": answer.question,
        "answer": answer.answer,
        "findings": answer.findings,
        "note": answer.note,
        "origin": origin(&answer.origin),
    })
}

fn origin(origin: &Origin) -> &str {
    match origin {
        Origin::BuiltIn => "built-in",
        Origin::File(name) => name,
    }
}

/// The result of a search.
pub fn search(kb: &KnowledgeBase, query: &str, found: &Found) -> Value {
    let unknown = found.unknown.iter();
    let unknown = unknown.map(|u| json!({ "word": u.word, "nearest": u.nearest }));
    json!({
        "query": query,
        "n_found": found.n_found,
        "hits": found.hits.iter().filter_map(|h| hit(kb, h)).collect::<Vec<_>>(),
        "unknown": unknown.collect::<Vec<_>>(),
    })
}

fn hit(kb: &KnowledgeBase, hit: &Hit) -> Option<Value> {
    let mut object = head(kb.finding(hit.id)?);
    let marks = hit.snippet.marks.iter().map(|m| json!([m.start, m.end]));
    object["score"] = hit.score.into();
    object["field"] = hit.field.name().into();
    object["snippet"] = hit.snippet.text.clone().into();
    object["marks"] = marks.collect();
    Some(object)
}

/// The answer to a question, or `null`, and findings near to it.
pub fn ask(kb: &KnowledgeBase, question: &str, fit: Option<Fit<'_>>, near: &Found) -> Value {
    let answered = fit.map(|fit| {
        let mut object = answer(fit.answer);
        let assumptions = kb.assumptions_for(fit.answer);
        object["assumptions"] = assumptions.into_iter().map(assumption).collect();
        object["cover"] = fit.cover.into();
        object
    });
    json!({
        "question": question,
        "answer": answered,
        "related": near.hits.iter().filter_map(|h| hit(kb, h)).collect::<Vec<_>>(),
    })
}

/// Counts of everything.
pub fn stats(kb: &KnowledgeBase) -> Value {
    let stats = kb.stats();
    let name = |c: Option<crate::Confidence>| c.map_or("none", |c| c.name());
    let grades = stats.by_confidence.iter();
    let grades = grades.map(|(c, n)| (name(*c).to_owned(), json!(n)));
    json!({
        "findings": stats.n_findings,
        "own_findings": stats.n_own,
        "by_confidence": grades.collect::<serde_json::Map<_, _>>(),
        "without_source": stats.n_without_source,
        "topics": stats.n_topics,
        "conflicts": stats.n_conflicts,
        "assumptions": stats.n_assumptions,
        "checkable": stats.n_checkable,
        "answers": stats.n_answers,
        "terms": stats.n_terms,
    })
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
