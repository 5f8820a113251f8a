//! Text reports of the knowledge base for a terminal.

use crate::{
    Assumption, Conflict, Finding, Fit, Found, KnowledgeBase, Origin, QuickAnswer, Skill, Topic,
};

use super::page::Page;
use super::{Added, Known};

/// All skills with their topics.
pub fn areas(kb: &KnowledgeBase, page: &mut Page) {
    for skill in kb.skills() {
        let n = kb.findings().filter(|f| f.skill == skill.name).count();
        page.heading(&format!("{}  {n} findings", skill.name));
        page.paragraph("", &skill.description);
        page.gap();
        for topic in super::topics_of_skill(kb, skill) {
            let n = topic.findings().count();
            page.paragraph(
                &format!("  {:<32}{n:>3}  ", topic.slug()),
                &topic.description,
            );
        }
    }
    page.gap();
    page.aside("", "`paceline kb skill TOPIC` shows the findings of one");
}

/// A skill: its topics with all findings in short, quick answers, and where findings disagree.
pub fn skill(kb: &KnowledgeBase, skill: &Skill, page: &mut Page) {
    page.heading(&skill.name);
    page.paragraph("", &skill.description);
    for topic in super::topics_of_skill(kb, skill) {
        page.heading(&format!("{}  ({})", topic.name, topic.slug()));
        page.paragraph("", &topic.description);
        let findings = topic.findings().filter_map(|id| kb.finding(id));
        for finding in findings.filter(|f| f.skill == skill.name) {
            page.paragraph(&lead(finding.id), &first_sentence(&finding.statement));
        }
    }
    page.heading("Questions that have an answer");
    for answer in kb.answers() {
        page.paragraph("  ", &answer.question);
    }
    page.heading("Where findings disagree, and what the planner assumes");
    let mut shown: Vec<&Assumption> = Vec::new();
    for conflict in kb.conflicts() {
        let new = kb.assumptions_between(conflict);
        for assumption in new {
            if !shown.contains(&assumption) {
                shown.push(assumption);
                page.paragraph(
                    "  ",
                    &format!("{} ({})", assumption.subject, ids(&assumption.findings)),
                );
                page.paragraph("      ", &assumption.assumes);
            }
        }
    }
    page.gap();
    page.aside(
        "",
        "`paceline kb detail ID` says why; `paceline kb skill TOPIC` shows a topic",
    );
}

/// A topic with its findings.
pub fn topic(kb: &KnowledgeBase, topic: &Topic, page: &mut Page) {
    page.heading(&topic.name);
    page.paragraph("", &topic.description);
    for finding in topic.findings().filter_map(|id| kb.finding(id)) {
        page.gap();
        page.emphasised(&lead(finding.id), &finding.statement);
        page.aside("     ", &about(finding));
    }
    let mut shown: Vec<&Assumption> = Vec::new();
    for id in topic.findings() {
        for assumption in kb.assumptions_on(id) {
            if !shown.contains(&assumption) {
                shown.push(assumption);
            }
        }
    }
    if !shown.is_empty() {
        page.heading("Where findings disagree, and what the planner assumes");
    }
    for assumption in shown {
        assumed(assumption, page);
    }
    page.gap();
    page.aside(
        "",
        "`paceline kb detail ID` has evidence, sources and commands that check a finding",
    );
}

/// A finding with everything that is known about it.
pub fn detail(kb: &KnowledgeBase, finding: &Finding, known: Known, page: &mut Page) {
    page.emphasised(&lead(finding.id), &finding.statement);
    page.gap();
    let topics = kb.topics_of(finding.id);
    let topics: Vec<String> = topics
        .iter()
        .map(|t| format!("{} ({})", t.name, t.slug()))
        .collect();
    let confidence = finding.confidence.map_or("not graded", |c| c.name());
    let own = match &finding.origin {
        Origin::BuiltIn => String::new(),
        Origin::File(name) => format!("your file {name}"),
    };
    for (label, text) in [
        ("evidence", finding.evidence.as_str()),
        ("source", &finding.source),
        ("confidence", confidence),
        ("topic", &topics.join(", ")),
        ("tags", &finding.tags.join(", ")),
        ("from", &own),
    ] {
        if !text.is_empty() {
            page.paragraph(&format!("{label:<12}"), text);
        }
    }
    disagreements(kb, finding, page);
    checks(kb, finding, known, page);
    let answers = kb.answers_on(finding.id);
    if !answers.is_empty() {
        page.heading("Questions that it helps to answer");
    }
    for answer in answers {
        page.paragraph("  ", &answer.question);
    }
}

fn disagreements(kb: &KnowledgeBase, finding: &Finding, page: &mut Page) {
    let id = finding.id;
    let with: Vec<&Finding> = finding
        .conflicts
        .iter()
        .filter_map(|c| kb.finding(*c))
        .collect();
    if !with.is_empty() {
        page.heading("Disagrees with");
    }
    for other in &with {
        page.paragraph(&format!("  {}", lead(other.id)), &other.statement);
    }
    if !finding.conflict_note.is_empty() {
        page.heading(if with.is_empty() { "In doubt" } else { "How" });
        page.paragraph("  ", &finding.conflict_note);
    }
    let mut assumptions = kb.assumptions_on(id);
    for &other in &finding.conflicts {
        let (first, second) = (id.min(other), id.max(other));
        for assumption in kb.assumptions_between(Conflict { first, second }) {
            if !assumptions.contains(&assumption) {
                assumptions.push(assumption);
            }
        }
    }
    if !assumptions.is_empty() {
        page.heading("What the planner assumes");
    } else if !with.is_empty() {
        page.heading("The planner assumes nothing here");
    }
    for assumption in assumptions {
        assumed(assumption, page);
    }
}

fn assumed(assumption: &Assumption, page: &mut Page) {
    page.paragraph(
        "  ",
        &format!("{} ({})", assumption.subject, ids(&assumption.findings)),
    );
    page.paragraph("    planner  ", &assumption.assumes);
    page.paragraph("    because  ", &assumption.why);
}

fn checks(kb: &KnowledgeBase, finding: &Finding, known: Known, page: &mut Page) {
    let checks = kb.checks_of(finding.id);
    if !checks.is_empty() {
        page.heading("Check it on your machines");
    }
    for check in checks {
        let here = known(&check.command);
        let note = if here {
            ""
        } else {
            "  (not in this version yet)"
        };
        page.paragraph("  ", &format!("{}{note}", check.command));
        page.paragraph("      ", &check.shows);
    }
}

/// The result of a search.
pub fn search(kb: &KnowledgeBase, found: &Found, page: &mut Page) {
    for hit in &found.hits {
        let Some(finding) = kb.finding(hit.id) else {
            continue;
        };
        page.gap();
        page.aside(
            &lead(hit.id),
            &format!("{}, {}", finding.topic, about(finding)),
        );
        let field = match hit.field {
            crate::Field::Statement => "     ".to_owned(),
            other => format!("     {}: ", other.name().replace('_', " ")),
        };
        let shift = field.len() - 5;
        let text = format!("{}{}", &field[5..], hit.snippet.text);
        let marks = hit.snippet.marks.iter();
        let marks: Vec<_> = marks.map(|m| m.start + shift..m.end + shift).collect();
        page.marked("     ", &text, &marks);
    }
    if found.n_found > found.hits.len() {
        page.gap();
        let (shown, all) = (found.hits.len(), found.n_found);
        page.aside(
            "",
            &format!("{shown} of {all} findings; --limit N shows more"),
        );
    }
}

/// The answer to a question, and findings near to it.
pub fn ask(kb: &KnowledgeBase, fit: Option<Fit<'_>>, near: &Found, page: &mut Page) {
    match fit {
        Some(fit) => {
            quick_answer(fit.answer, page);
            let assumptions = kb.assumptions_for(fit.answer);
            if !assumptions.is_empty() {
                page.heading("Where these findings disagree");
            }
            for assumption in assumptions {
                assumed(assumption, page);
            }
        }
        None => page.paragraph("", "No quick answer to that question was collected."),
    }
    let rests_on = |id: u32| fit.is_some_and(|fit| fit.answer.findings.contains(&id));
    let mut others = near
        .hits
        .iter()
        .filter_map(|hit| kb.finding(hit.id))
        .peekable();
    if others.peek().is_some() {
        page.heading("Findings nearest to the question");
    }
    for finding in others {
        let mark = if rests_on(finding.id) { "*" } else { " " };
        page.paragraph(&format!("{mark} {}", lead(finding.id)), &finding.statement);
    }
    if near.hits.iter().any(|hit| rests_on(hit.id)) {
        page.gap();
        page.aside("", "* the answer rests on it");
    }
}

fn quick_answer(answer: &QuickAnswer, page: &mut Page) {
    page.emphasised("", &answer.question);
    page.gap();
    page.paragraph("", &answer.answer);
    page.gap();
    page.paragraph("findings    ", &ids(&answer.findings));
    if !answer.note.is_empty() {
        page.paragraph("note        ", &answer.note);
    }
}

/// Counts of everything.
pub fn stats(kb: &KnowledgeBase, page: &mut Page) {
    let stats = kb.stats();
    let grade = |c: Option<crate::Confidence>| c.map_or("not graded", |c| c.name());
    let grades = stats.by_confidence.iter();
    let grades: Vec<String> = grades.map(|(c, n)| format!("{n} {}", grade(*c))).collect();
    for (label, n, more) in [
        (
            "findings",
            stats.n_findings,
            format!("{}, {} of them yours", grades.join(", "), stats.n_own),
        ),
        (
            "no source",
            stats.n_without_source,
            "findings that name none".to_owned(),
        ),
        ("topics", stats.n_topics, String::new()),
        (
            "conflicts",
            stats.n_conflicts,
            "pairs of findings that disagree".to_owned(),
        ),
        (
            "assumptions",
            stats.n_assumptions,
            "of the planner where findings disagree or are in doubt".to_owned(),
        ),
        (
            "checkable",
            stats.n_checkable,
            "findings that a command checks".to_owned(),
        ),
        ("answers", stats.n_answers, "to common questions".to_owned()),
        ("terms", stats.n_terms, "that search knows".to_owned()),
    ] {
        page.paragraph(&format!("{label:<12}{n:>5}  "), &more);
    }
}

/// The result of adding a file.
pub fn added(added: &Added, page: &mut Page) {
    let contents = &added.contents;
    let path = added.path.display();
    if !added.changed {
        page.paragraph("", &format!("{path} is there already, nothing changed"));
        return;
    }
    let n = contents.findings.len();
    let what = format!(
        "added {n} findings and {} quick answers to {path}",
        contents.n_answers
    );
    page.paragraph("", &what);
    if n > 0 {
        page.paragraph("ids         ", &ids(&contents.findings));
    }
    if !contents.topics.is_empty() {
        page.paragraph("new topics  ", &contents.topics.join(", "));
    }
}

/// An id with the room that three digits take.
fn lead(id: u32) -> String {
    format!("{id:<3}  ")
}

fn ids(ids: &[u32]) -> String {
    let ids: Vec<String> = ids.iter().map(ToString::to_string).collect();
    ids.join(", ")
}

/// Grade, origin and conflicts in a line.
fn about(finding: &Finding) -> String {
    let mut parts = vec![
        finding
            .confidence
            .map_or("not graded", |c| c.name())
            .to_owned(),
    ];
    if let Origin::File(name) = &finding.origin {
        parts.push(format!("your file {name}"));
    }
    if !finding.conflicts.is_empty() {
        parts.push(format!("disagrees with {}", ids(&finding.conflicts)));
    }
    parts.join(", ")
}

/// The first sentence of a claim, or all of it. A point ends one only before white space and a
/// capital: `26.2` and `e.g. this` have others.
fn first_sentence(text: &str) -> String {
    let ends = text.match_indices(". ").find(|(at, _)| {
        let next = text[at + 2..].chars().next();
        next.is_some_and(char::is_uppercase)
    });
    ends.map_or(text, |(at, _)| &text[..=at]).to_owned()
}
