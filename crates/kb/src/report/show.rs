//! Text reports of the knowledge base for a terminal.

use super::page::TextPage;
use super::{Added, CommandLookup};
use crate::{Assumption, BUILT_IN, Finding, Fit, KnowledgeBase, SearchResult, Skill, Topic};

const DISAGREEMENTS: &str = "Where findings disagree, and what the planner assumes";

/// All skills with their topics.
pub fn areas(kb: &KnowledgeBase, page: &mut TextPage) {
    for skill in kb.skills() {
        let n = kb.findings().filter(|f| f.skill == skill.name).count();
        page.heading(&format!("{}  {n} findings", skill.name));
        page.paragraph("", &skill.description);
        page.gap();
        for topic in kb.topics_of_skill(skill) {
            let n = topic.findings().count();
            let lead = format!("  {:<32}{n:>3}  ", topic.slug());
            page.paragraph(&lead, &topic.description);
        }
    }
    footer("`paceline kb skill TOPIC` shows the findings of one", page);
}

/// A skill: its topics with all findings in short, quick answers, and where findings disagree.
pub fn skill(kb: &KnowledgeBase, skill: &Skill, page: &mut TextPage) {
    page.heading(&skill.name);
    page.paragraph("", &skill.description);
    for topic in kb.topics_of_skill(skill) {
        page.heading(&format!("{}  ({})", topic.name, topic.slug()));
        page.paragraph("", &topic.description);
        for finding in kb.findings_of(topic).filter(|f| f.skill == skill.name) {
            page.paragraph(&lead(finding.id), first_sentence(&finding.statement));
        }
    }
    let questions = kb.answers().iter().map(|answer| ("  ", &answer.question));
    list("Questions that have an answer", questions, page);
    page.heading(DISAGREEMENTS);
    let conflicts = kb.conflicts().into_iter();
    for assumption in unique(conflicts.flat_map(|pair| kb.assumptions_between(pair))) {
        page.paragraph("  ", &subject(assumption));
        page.paragraph("      ", &assumption.assumes);
    }
    footer(
        "`paceline kb detail ID` says why; `paceline kb skill TOPIC` shows a topic",
        page,
    );
}

/// A topic with its findings.
pub fn topic(kb: &KnowledgeBase, topic: &Topic, page: &mut TextPage) {
    page.heading(&topic.name);
    page.paragraph("", &topic.description);
    for finding in kb.findings_of(topic) {
        page.gap();
        page.bold(&lead(finding.id), &finding.statement);
        page.aside("     ", &summary(finding));
    }
    let assumptions = topic.findings().flat_map(|id| kb.assumptions_on(id));
    planner(DISAGREEMENTS, &unique(assumptions), page);
    let more = "`paceline kb detail ID` has evidence, sources and commands that check a finding";
    footer(more, page);
}

/// A finding with everything that is known about it.
pub fn detail(kb: &KnowledgeBase, finding: &Finding, known: CommandLookup, page: &mut TextPage) {
    page.bold(&lead(finding.id), &finding.statement);
    page.gap();
    let topics = kb.topics_of(finding.id).into_iter();
    let topics: Vec<_> = topics
        .map(|t| format!("{} ({})", t.name, t.slug()))
        .collect();
    for (label, text) in [
        ("evidence", finding.evidence.as_str()),
        ("source", &finding.source),
        ("confidence", finding.grade()),
        ("topic", &topics.join(", ")),
        ("tags", &finding.tags.join(", ")),
        ("from", &own_file(finding).unwrap_or_default()),
    ] {
        if !text.is_empty() {
            page.paragraph(&format!("{label:<12}"), text);
        }
    }
    disagreements(kb, finding, page);
    let checks = kb.checks_of(finding.id).into_iter().flat_map(|check| {
        let here = known(&check.command);
        let note = if here {
            ""
        } else {
            "  (not in this version yet)"
        };
        let command = format!("{}{note}", check.command);
        [("  ", command), ("      ", check.shows.clone())]
    });
    list("Check it on your machines", checks, page);
    let answers = kb.answers_on(finding.id).into_iter();
    let questions = answers.map(|answer| ("  ", &answer.question));
    list("Questions that it helps to answer", questions, page);
}

fn disagreements(kb: &KnowledgeBase, finding: &Finding, page: &mut TextPage) {
    let id = finding.id;
    let with = || {
        finding
            .conflicts
            .iter()
            .filter_map(|other| kb.finding(*other))
    };
    let others = with().map(|other| (format!("  {}", lead(other.id)), &other.statement));
    list("Disagrees with", others, page);
    let alone = with().next().is_none();
    if !finding.conflict_note.is_empty() {
        page.heading(if alone { "In doubt" } else { "How" });
        page.paragraph("  ", &finding.conflict_note);
    }
    let between = finding
        .conflicts
        .iter()
        .flat_map(|&other| kb.assumptions_between((id.min(other), id.max(other))));
    let assumptions = unique(kb.assumptions_on(id).into_iter().chain(between));
    if assumptions.is_empty() && !alone {
        page.heading("The planner assumes nothing here");
    }
    planner("What the planner assumes", &assumptions, page);
}

pub fn search(kb: &KnowledgeBase, found: &SearchResult, page: &mut TextPage) {
    for hit in &found.hits {
        let Some(finding) = kb.finding(hit.id) else {
            continue;
        };
        page.gap();
        let summary = format!("{}, {}", finding.topic, summary(finding));
        page.aside(&lead(hit.id), &summary);
        let field = match hit.field {
            "statement" => String::new(),
            other => format!("{}: ", other.replace('_', " ")),
        };
        let marks = hit.snippet.marks.iter();
        let marks = marks.map(|mark| mark.start + field.len()..mark.end + field.len());
        let text = format!("{field}{}", hit.snippet.text);
        page.marked("     ", &text, &marks.collect::<Vec<_>>());
    }
    let (shown, all) = (found.hits.len(), found.n_found);
    if all > shown {
        footer(
            &format!("{shown} of {all} findings; --limit N shows more"),
            page,
        );
    }
}

/// The answer to a question, and findings near to it.
pub fn ask(kb: &KnowledgeBase, fit: Option<Fit<'_>>, near: &SearchResult, page: &mut TextPage) {
    match fit.map(|fit| fit.answer) {
        Some(answer) => {
            page.bold("", &answer.question);
            page.gap();
            page.paragraph("", &answer.answer);
            page.gap();
            page.paragraph("findings    ", &ids(&answer.findings));
            if !answer.note.is_empty() {
                page.paragraph("note        ", &answer.note);
            }
            let assumptions = kb.assumptions_for(answer);
            planner("Where these findings disagree", &assumptions, page);
        }
        None => page.paragraph("", "No quick answer to that question was collected."),
    }
    let rests_on = |id: u32| fit.is_some_and(|fit| fit.answer.findings.contains(&id));
    let findings = near.hits.iter().filter_map(|hit| kb.finding(hit.id));
    let findings = findings.map(|finding| {
        let mark = if rests_on(finding.id) { "*" } else { " " };
        (format!("{mark} {}", lead(finding.id)), &finding.statement)
    });
    list("Findings nearest to the question", findings, page);
    if near.hits.iter().any(|hit| rests_on(hit.id)) {
        footer("* the answer rests on it", page);
    }
}

/// Counts of everything.
pub fn stats(kb: &KnowledgeBase, page: &mut TextPage) {
    let stats = kb.stats();
    let name = |grade: &str| grade.replace("none", "not graded");
    let grades = stats.by_confidence.iter();
    let grades: Vec<String> = grades
        .map(|(grade, n)| format!("{n} {}", name(grade)))
        .collect();
    let findings = format!(
        "{}, {} of them yours",
        grades.join(", "),
        stats.own_findings
    );
    for (label, n, more) in [
        ("findings", stats.findings, findings.as_str()),
        ("no source", stats.without_source, "findings that name none"),
        ("topics", stats.topics, ""),
        (
            "conflicts",
            stats.conflicts,
            "pairs of findings that disagree",
        ),
        (
            "assumptions",
            stats.assumptions,
            "of the planner where findings disagree or are in doubt",
        ),
        (
            "checkable",
            stats.checkable,
            "findings that a command checks",
        ),
        ("answers", stats.answers, "to common questions"),
        ("terms", stats.terms, "that search knows"),
    ] {
        page.paragraph(&format!("{label:<12}{n:>5}  "), more);
    }
}

/// The result of adding a file.
pub fn added(added: &Added, page: &mut TextPage) {
    let contents = &added.contents;
    let path = added.path.display();
    if !added.changed {
        return page.paragraph("", &format!("{path} is there already, nothing changed"));
    }
    let (n, n_answers) = (contents.findings.len(), contents.n_answers);
    page.paragraph(
        "",
        &format!("added {n} findings and {n_answers} quick answers to {path}"),
    );
    if n > 0 {
        page.paragraph("ids         ", &ids(&contents.findings));
    }
    if !contents.topics.is_empty() {
        page.paragraph("new topics  ", &contents.topics.join(", "));
    }
}

/// A heading with paragraphs of lead and text; nothing without paragraphs.
fn list<L, T>(heading: &str, paragraphs: impl Iterator<Item = (L, T)>, page: &mut TextPage)
where
    L: AsRef<str>,
    T: AsRef<str>,
{
    for (n, (lead, text)) in paragraphs.enumerate() {
        if n == 0 {
            page.heading(heading);
        }
        page.paragraph(lead.as_ref(), text.as_ref());
    }
}

fn planner(heading: &str, assumptions: &[&Assumption], page: &mut TextPage) {
    let paragraphs = assumptions.iter().flat_map(|assumption| {
        [
            ("  ", subject(assumption)),
            ("    planner  ", assumption.assumes.clone()),
            ("    because  ", assumption.why.clone()),
        ]
    });
    list(heading, paragraphs, page);
}

fn footer(text: &str, page: &mut TextPage) {
    page.gap();
    page.aside("", text);
}

fn subject(assumption: &Assumption) -> String {
    format!("{} ({})", assumption.subject, ids(&assumption.findings))
}

fn unique<'a>(assumptions: impl Iterator<Item = &'a Assumption>) -> Vec<&'a Assumption> {
    let mut unique = Vec::new();
    for assumption in assumptions {
        if !unique.contains(&assumption) {
            unique.push(assumption);
        }
    }
    unique
}

/// An id with the room that three digits take.
fn lead(id: u32) -> String {
    format!("{id:<3}  ")
}

fn ids(ids: &[u32]) -> String {
    let ids: Vec<String> = ids.iter().map(ToString::to_string).collect();
    ids.join(", ")
}

fn own_file(finding: &Finding) -> Option<String> {
    (finding.origin != BUILT_IN).then(|| format!("your file {}", finding.origin))
}

/// Grade, origin and conflicts in a line.
fn summary(finding: &Finding) -> String {
    let mut parts = vec![finding.grade().to_owned()];
    parts.extend(own_file(finding));
    if !finding.conflicts.is_empty() {
        parts.push(format!("disagrees with {}", ids(&finding.conflicts)));
    }
    parts.join(", ")
}

/// The first sentence of a claim, or all of it. A point ends one only before white space and a
/// capital: `26.2` and `e.g. this` have others.
fn first_sentence(text: &str) -> &str {
    let mut ends = text.match_indices(". ");
    let end = ends.find(|(at, _)| text[at + 2..].starts_with(char::is_uppercase));
    end.map_or(text, |(at, _)| &text[..=at])
}
