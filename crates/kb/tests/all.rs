//! Promises of the knowledge base. The built-in findings can be found; questions lead to their
//! answers. User files join them as a whole or are refused with line and key.
#![allow(clippy::unwrap_used, reason = "test code outside of test functions")]

use std::collections::BTreeSet;

use paceline_kb::report::{CommandLookup, TextPage, json, show};
use paceline_kb::{Area, BUILT_IN, Error, FILE_BYTES_MAX, KnowledgeBase, PROBLEMS_MAX, UserFile};
use serde::Deserialize;

const OWN: &str = "[[finding]]\nid = 9001\nstatement = \"My quokka cluster answers in 4 µs.\"\n\
                   topic = \"RDMA Bandwidth & Latency\"\nconflicts = [306]\n\
                   [[finding]]\nid = 9002\nstatement = \"The garage is cold.\"\ntopic = \"Garage\"\n\
                   [[answer]]\nquestion = \"How cold is the garage?\"\nanswer = \"Very.\"\nfindings = [9002]\n";
const FINDINGS: &str = include_str!("../data/findings.toml");

fn file<'a>(name: &'a str, text: &'a str) -> UserFile<'a> {
    let bytes = text.as_bytes();
    UserFile { name, bytes }
}

/// The built-in findings and [`OWN`].
fn with_own() -> KnowledgeBase {
    let (kb, refused) = KnowledgeBase::with_files(&[file("own.toml", OWN)]);
    assert_eq!(refused, []);
    kb
}

fn refusal(bytes: &[u8]) -> Error {
    let name = "new.toml";
    with_own().check(UserFile { name, bytes }).unwrap_err()
}

#[test]
fn every_id_is_among_the_first_five_hits_for_its_own_words() {
    let kb = KnowledgeBase::built_in();
    for finding in kb.findings() {
        let words: Vec<&str> = finding.statement.split_whitespace().collect();
        let (first, second) = words.split_at(words.len() / 2);
        for query in [
            finding.statement.clone(),
            first.join(" "),
            second.join(" "),
            finding.evidence.clone(),
            finding.tags.join(" "),
            finding.id.to_string(),
            finding.conflict_note.clone(),
        ] {
            let found = kb.search(&query, 5);
            let here = found.hits.iter().any(|hit| hit.id == finding.id);
            assert!(here || query.is_empty(), "{}: {query}", finding.id);
        }
    }
}

#[test]
fn every_finding_is_in_its_topic() {
    let kb = KnowledgeBase::built_in();
    let counts = (kb.findings().count(), kb.topics().len(), kb.answers().len());
    assert_eq!((counts, kb.skills().len()), ((52, 16, 13), 1));
    for finding in kb.findings() {
        let topics = kb.topics_of(finding.id);
        assert_eq!(topics[0].name, finding.topic, "{}", finding.id);
        for name in [topics[0].slug(), finding.topic.to_uppercase()] {
            let listed = |topic: &paceline_kb::Topic| topic.findings().any(|id| id == finding.id);
            assert!(
                matches!(kb.area(&name), Area::Topic(topic) if listed(topic)),
                "{name}"
            );
        }
    }
    // All references exist, also those of answers and topics.
    let contents = KnowledgeBase::default().check(file("findings.toml", FINDINGS));
    assert_eq!(contents.unwrap().findings.len(), 52);
    for topic in kb.topics() {
        assert!(
            topic.findings().count() > 0 && topic.findings().all(|id| kb.finding(id).is_some())
        );
    }
}

#[test]
fn every_conflict_is_symmetric_as_written_and_has_one_assumption_of_the_planner() {
    let kb = KnowledgeBase::built_in();
    let written: toml::Table = FINDINGS.parse().unwrap();
    let written = written["finding"].as_array().unwrap().iter();
    let pairs = written.flat_map(|f| {
        let others = f.get("conflicts").and_then(|others| others.as_array());
        let others = others.into_iter().flatten();
        others.map(|other| (f["id"].as_integer(), other.as_integer()))
    });
    let pairs: BTreeSet<_> = pairs.collect();
    assert!(pairs.iter().all(|(a, b)| pairs.contains(&(*b, *a))));
    assert_eq!(kb.conflicts().len(), pairs.len() / 2);
    for pair in kb.conflicts() {
        let noted = |id| !kb.finding(id).unwrap().conflict_note.is_empty();
        assert!(noted(pair.0) && noted(pair.1), "{pair:?}");
        assert_eq!(kb.assumptions_between(pair).len(), 1, "{pair:?}");
    }
    assert_eq!(kb.finding(413).unwrap().conflicts, [550]);
}

#[test]
fn the_planners_file_names_findings_that_exist() {
    let kb = KnowledgeBase::built_in();
    let planner: toml::Table = include_str!("../data/planner.toml").parse().unwrap();
    for entry in planner
        .values()
        .flat_map(|entries| entries.as_array().unwrap())
    {
        let ids = entry["findings"].as_array().unwrap();
        let exists = |id: &toml::Value| kb.finding(id.as_integer().unwrap() as u32).is_some();
        assert!(!ids.is_empty() && ids.iter().all(exists), "{entry:?}");
        let command = entry
            .get("command")
            .map_or("paceline ", |c| c.as_str().unwrap());
        assert!(command.starts_with("paceline "), "{command}");
    }
}

#[test]
fn questions_lead_to_their_answer_and_others_to_none() {
    let kb = KnowledgeBase::built_in();
    let lines = include_str!("questions.txt").lines();
    for line in lines.filter(|line| !line.starts_with('#')) {
        let (question, wanted) = line.split_once('|').unwrap();
        let answer = kb.ask(question).map_or("", |fit| &fit.answer.question);
        let right = answer.contains(wanted.trim()) && answer.is_empty() == wanted.is_empty();
        assert!(right, "{question}: {answer}");
    }
    for answer in kb.answers() {
        let fit = kb.ask(&answer.question).unwrap();
        assert!(
            fit.answer == answer && fit.cover > 0.99,
            "{}",
            answer.question
        );
    }
}

#[test]
fn own_findings_join_the_built_in_ones() {
    let kb = with_own();
    assert_eq!(kb.search("quokka", 5).hits[0].id, 9001);
    assert_eq!(kb.finding(9002).unwrap().origin, "own.toml");
    assert_eq!(kb.finding(306).unwrap().origin, BUILT_IN);
    assert!(matches!(kb.area("garage"), Area::Topic(topic) if topic.also == [9002]));
    assert_eq!(
        kb.ask("is the garage cold?").unwrap().answer.answer,
        "Very."
    );
    assert_eq!(
        kb.finding(306).unwrap().conflicts,
        [58, 322, 337, 417, 9001]
    );
    let assumptions = kb.assumptions_between((306, 9001));
    assert!(!assumptions.is_empty() && assumptions == kb.assumptions_on(306));
    let contents = KnowledgeBase::built_in()
        .check(file("own.toml", OWN))
        .unwrap();
    assert_eq!(
        (contents.findings, contents.n_answers),
        (vec![9001, 9002], 1)
    );
    assert_eq!(contents.topics, ["Garage"]);
}

#[test]
fn the_file_names_the_skill_of_its_findings() {
    let text = "skill = \"own\"\n[[finding]]\nid = 7\nstatement = \"s\"\nconflicts = [415, 8]\n\
                [[finding]]\r\nid = 8\r\nskill = \"other\"\r\nstatement = \"t\"\r\n";
    let (kb, _) = KnowledgeBase::with_files(&[file("own.toml", text)]);
    let [first, second] = [7, 8].map(|id| kb.finding(id).unwrap());
    assert_eq!([&first.skill, &second.skill], ["own", "other"]);
    assert_eq!(
        (first.topic.as_str(), &first.conflicts[..]),
        ("Own findings", &[8, 415][..])
    );
}

#[derive(Deserialize)]
struct Refused {
    case: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    file: String,
    message: String,
}

#[test]
fn bad_files_are_refused_with_line_and_key() {
    let refused: Refused = toml::from_str(include_str!("refused.toml")).unwrap();
    for case in refused.case {
        let error = refusal(case.file.as_bytes());
        assert_eq!(error.to_string(), case.message, "{}", case.file);
    }
    let latin = b"[[finding]]\nid = 1\nstatement = \"\xff\"\n";
    let (line, at, byte) = (3, 32, 0xff);
    assert_eq!(refusal(latin), Error::NotUtf8 { line, at, byte });
    let max = FILE_BYTES_MAX;
    assert_eq!(refusal(&vec![b'#'; max + 1]), Error::TooLarge { max });
}

#[test]
fn all_problems_are_reported_by_line_and_thousands_are_not_listed() {
    let many = "[[finding]]\nid = 0\nstatment = \"s\"\n[[finding]]\nid = 2\nstatement = \"\"\n";
    let message = refusal(many.as_bytes()).to_string();
    let lines = message
        .lines()
        .map(|line| line.trim().split(", ").next().unwrap());
    assert_eq!(
        lines.collect::<Vec<_>>(),
        ["line 1", "line 2", "line 3", "line 6"]
    );
    let wide: String = (0..60_000).map(|n| format!("k{n} = 1\n")).collect();
    for (text, n) in [("[[finding]]\n".repeat(5000), 10_000), (wide, 60_000)] {
        let Error::Invalid { problems, more } = refusal(text.as_bytes()) else {
            panic!("invalid")
        };
        assert_eq!((problems.len(), more), (PROBLEMS_MAX, n - PROBLEMS_MAX));
    }
    for deep in [
        format!("x = {}", "[".repeat(500_000)),
        format!("x = {}", "{ a = ".repeat(100_000)),
        format!("[{}]", vec!["a"; 200_000].join(".")),
    ] {
        assert!(refusal(deep.as_bytes()).to_string().len() < 2000);
    }
}

#[test]
fn a_bad_file_takes_nothing_else_with_it() {
    let twice = "[[finding]]\nid = 9001\nstatement = \"again\"\n[[finding]]\nid = 7\nstatement = \"seven\"\n";
    let good = "[[finding]]\nid = 8\nstatement = \"eight\"\n";
    let files = [
        file("a", OWN),
        file("b", twice),
        file("c", "x"),
        file("d", good),
    ];
    let (kb, refused) = KnowledgeBase::with_files(&files);
    assert_eq!(
        refused.iter().map(|(place, _)| *place).collect::<Vec<_>>(),
        [1, 2]
    );
    assert!(kb.finding(7).is_none() && kb.finding(8).is_some() && kb.finding(9001).is_some());
}

#[test]
fn files_may_need_each_other_in_any_order() {
    let needs = |(id, other): (u32, u32)| {
        format!("[[finding]]\nid = {id}\nstatement = \"s\"\nconflicts = [{other}]\n")
    };
    let texts = [(1, 2), (2, 3), (3, 415), (4, 5), (5, 4)].map(needs);
    let files: Vec<UserFile<'_>> = texts.iter().map(|text| file("f", text)).collect();
    let (kb, refused) = KnowledgeBase::with_files(&files);
    assert!(kb.finding(1).is_some() && kb.finding(3).is_some());
    assert_eq!(
        refused.iter().map(|(place, _)| *place).collect::<Vec<_>>(),
        [3, 4]
    );
}

#[test]
fn an_answer_comes_with_what_its_findings_disagree_about() {
    let kb = KnowledgeBase::built_in();
    for (question, subjects) in [
        (
            "how fast is the link?",
            "Latency of RDMA over Thunderbolt 5, and its gain over TCP; Bandwidth of NVLink",
        ),
        ("which parallelism?", "Which parallelism sends least"),
        ("which operations are in mlx?", ""),
    ] {
        let assumptions = kb.assumptions_for(kb.ask(question).unwrap().answer);
        let named: Vec<&str> = assumptions.iter().map(|a| a.subject.as_str()).collect();
        assert_eq!(named.join("; "), subjects, "{question}");
    }
}

#[test]
fn links_to_absent_commands_are_marked() {
    let kb = KnowledgeBase::built_in();
    let finding = kb.finding(415).unwrap();
    for (known, marked) in [((|_| true) as CommandLookup, false), (|_| false, true)] {
        let mut page = TextPage::new(100, false);
        show::detail(&kb, finding, known, &mut page);
        let text = page.into_text();
        assert_eq!(text.contains("(not in this version yet)"), marked, "{text}");
        let available = &json::detail(&kb, finding, known)["checks"][0]["available"];
        assert_eq!(*available, !marked);
    }
}

#[test]
fn areas_go_by_any_form_of_their_name() {
    let kb = KnowledgeBase::built_in();
    for (typed, area) in [
        ("GPU Distributed", "skill gpu-distributed"),
        ("JACCL Backend", "JACCL Backend"),
        ("jaccl", "JACCL Backend"),
        ("cost", "Cost & Power"),
        ("rdma", "2 topics"),
        ("jacl", "like JACCL Backend"),
        ("gpu-distribted", "like gpu-distributed"),
        ("cooking", "like "),
        ("&", "like "),
    ] {
        let meant = match kb.area(typed) {
            Area::Skill(skill) => format!("skill {}", skill.name),
            Area::Topic(topic) => topic.name.clone(),
            Area::Ambiguous(topics) => format!("{} topics", topics.len()),
            Area::Unknown(near) => format!("like {}", near.join(", ")),
        };
        assert_eq!(meant, area, "{typed}");
    }
    assert_eq!(kb.ids_near(451, 3), [415, 421, 431]);
    assert_eq!(kb.ids_near(u32::MAX, 3).len(), 3);
}

#[test]
fn searches_are_ranked_and_name_unknown_words() {
    let kb = KnowledgeBase::built_in();
    let found = kb.search("thunderbold zzyzx", 5);
    assert_eq!(
        (found.n_words, found.hits.len(), found.unknown.len()),
        (2, 0, 2)
    );
    assert_eq!(found.unknown[0].word, "thunderbold");
    assert_eq!(found.unknown[0].nearest[0], "thunderbolt");
    assert!(found.unknown[1].nearest.is_empty());
    assert_eq!(kb.search("the of", 5).n_words, 0);
    // A prefix matches the words that it begins, unless it is a word itself.
    assert!(kb.search("thunderb", 5).n_found > 10 && kb.search("rdma", 0).hits.is_empty());
    let hit = &kb.search("SIGBUS", 5).hits[0];
    assert_eq!(
        (hit.id, &hit.snippet.text[hit.snippet.marks[0].clone()]),
        (415, "SIGBUS")
    );
    assert_eq!(
        kb.search("enable RDMA in System Settings", 3).hits[0].id,
        550
    );
    let found = kb.search("RDMA Thunderbolt", 50);
    assert!(found.hits.is_sorted_by(|a, b| a.score >= b.score));
    assert_eq!(
        found,
        KnowledgeBase::built_in().search("rdma   THUNDERBOLT?", 50)
    );
    let long = "rdma thunderbolt ".repeat(100_000);
    assert_eq!(kb.search(&long, 50).hits, found.hits);
}

proptest::proptest! {
    #[test]
    fn any_bytes_end_in_an_answer(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..300)) {
        let name = "any.toml";
        let _ = KnowledgeBase::default().check(UserFile { name, bytes: &bytes });
    }

    #[test]
    fn a_file_cut_or_changed_anywhere_ends_in_an_answer(at in 0usize..48_000, byte in proptest::num::u8::ANY) {
        let mut changed = FINDINGS.as_bytes().to_vec();
        changed[at] = byte;
        for bytes in [&FINDINGS.as_bytes()[..at], &changed] {
            let name = "changed.toml";
            if let Err(error) = KnowledgeBase::default().check(UserFile { name, bytes }) {
                proptest::prop_assert!(error.to_string().contains("line "));
            }
        }
    }
}
