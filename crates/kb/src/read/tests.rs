//! Invalid user files and the error texts for them.

use super::*;

fn user(text: &str) -> Result<Document, Error> {
    read(
        text.as_bytes(),
        Dialect::Findings,
        &Origin::File("own.toml".into()),
    )
}

/// The message that a user gets about `text`.
fn told(text: &str) -> String {
    match user(text) {
        Ok(document) => panic!("{text}: {document:?}"),
        Err(error) => error.to_string(),
    }
}

const GOOD: &str = "[[finding]]\nid = 9001\nstatement = \"It rains.\"\n";

#[test]
fn a_small_finding_is_enough() {
    let document = user(GOOD).unwrap();
    let (place, finding) = &document.findings[0];
    assert_eq!(finding.id, 9001);
    assert_eq!(finding.topic, DEFAULT_TOPIC);
    assert_eq!(finding.skill, DEFAULT_SKILL);
    assert_eq!(finding.confidence, None);
    let problem = place.problem("statement", Fault::Empty).to_string();
    assert_eq!(
        problem,
        "line 3, [[finding]] 1 (id 9001), key `statement`: empty"
    );
}

#[test]
fn a_full_file_keeps_everything() {
    let document = user(
        "skill = \"own\"\ndescription = \"Mine\"\n\
         [[topic]]\nname = \"Racks\"\ndescription = \"d\"\nids = [7]\nalso = [8]\n\
         [[finding]]\nid = 0x7\nskill = \"other\"\nstatement = \"s\"\nevidence = \"e\"\n\
         confidence = \"low\"\nsource = \"src\"\ntags = [\"a\", \"b\"]\ntopic = \"Racks\"\n\
         conflicts = [8, 415]\nconflict_note = '''two\nlines'''\n\
         [[finding]]\r\nid = 8\r\nstatement = \"t\"\r\n\
         [[answer]]\nquestion = \"q\"\nanswer = \"a\"\nfindings = [7]\nnote = \"n\"\n",
    )
    .unwrap();
    assert_eq!(document.skill.as_deref(), Some("own"));
    let finding = &document.findings[0].1;
    assert_eq!((finding.id, finding.skill.as_str()), (7, "other"));
    assert_eq!(finding.confidence, Some(Confidence::Low));
    assert_eq!(finding.tags, ["a", "b"]);
    assert_eq!(finding.conflicts, [8, 415]);
    assert_eq!(finding.conflict_note, "two\nlines");
    assert_eq!(document.findings[1].1.skill, "own");
    assert_eq!(document.topics[0].1.also, [8]);
    assert_eq!(document.answers[0].1.note, "n");
}

#[test]
fn broken_toml_is_told_with_line_and_key() {
    for (text, line, key) in [
        (
            "[[finding]]\nid = 9001\nstatement = \"open\nevidence = \"e\"\n",
            3,
            "statement",
        ),
        (
            "[[finding]]\nid = 9001\nstatement = It rains\n",
            3,
            "statement",
        ),
        ("[[finding]]\nid = 9001\nid = 9002\n", 3, "id"),
        ("[[finding]\nid = 9001\n", 1, "[[finding]"),
        ("[[finding]]\nid =\n", 2, "id"),
        ("[[finding]]\nid = 12monkeys\n", 2, "id"),
        ("[[finding]]\ntags = [\"a\",\n \"b\"\n\nid = 3\n", 5, "id"),
        ("[[finding]]\nstatement = \"\\q\"\n", 2, "statement"),
        (
            "[[finding]]\nstatement = '''open\nline\nline",
            4,
            "statement",
        ),
        ("[finding]\nid = 1\n[[finding]]\nid = 2\n", 3, "[[finding]]"),
    ] {
        let Err(Error::Syntax {
            line: l, key: k, ..
        }) = user(text)
        else {
            panic!("{text}: {:?}", user(text));
        };
        assert_eq!((l, k.as_deref()), (line, Some(key)), "{text}");
        let said = told(text);
        assert!(said.starts_with(&format!("line {line}, column ")), "{said}");
        assert!(said.contains(&format!("key `{key}`")), "{said}");
    }
}

fn check_told(cases: &[(&str, &str)]) {
    for (text, message) in cases {
        assert_eq!(told(text), *message);
    }
}

#[test]
fn wrong_values_are_told_with_line_entry_and_key() {
    check_told(&[
        (
            "[[finding]]\nid = \"9001\"\nstatement = \"s\"\n",
            "line 2, [[finding]] 1, key `id`: expected a whole number from 1 to 4294967295, got \"9001\"",
        ),
        (
            "\n[[finding]]\nstatement = \"s\"\n",
            "line 2, [[finding]] 1, key `id`: missing",
        ),
        (
            "[[finding]]\nid = 9001\n",
            "line 1, [[finding]] 1 (id 9001), key `statement`: missing",
        ),
        (
            "[[finding]]\nid = 9001\nstatement = \" \\n\"\n",
            "line 3, [[finding]] 1 (id 9001), key `statement`: empty",
        ),
        (
            "[[finding]]\nid = 9001\nstatement = 7\n",
            "line 3, [[finding]] 1 (id 9001), key `statement`: expected a string, got integer",
        ),
        (
            "[[finding]]\nid = 9001\nstatement = \"s\"\ntags = \"a\"\n",
            "line 4, [[finding]] 1 (id 9001), key `tags`: expected a list of strings, got string",
        ),
        (
            "[[finding]]\nid = 9001\nstatement = \"s\"\ntags = [\n  \"a\",\n  1.5,\n]\n",
            "line 6, [[finding]] 1 (id 9001), key `tags`: expected a list of strings, got float",
        ),
        (
            "[[finding]]\nid = 9001\nstatement = \"s\"\nconflicts = [-1]\n",
            "line 4, [[finding]] 1 (id 9001), key `conflicts`: expected a whole number from 1 to 4294967295, got -1",
        ),
        (
            "[[finding]]\nid = 9001\nstatement = \"s\"\nconfidence = \"sure\"\n",
            "line 4, [[finding]] 1 (id 9001), key `confidence`: expected verified, high, medium or low, got \"sure\"",
        ),
        (
            "[[finding]]\nid = 9001\nstatement = \"s\"\nconflict = [1]\n",
            "line 4, [[finding]] 1 (id 9001), key `conflict`: unknown key, did you mean \"conflicts\"?, expected one of \
             id, skill, statement, evidence, confidence, source, tags, topic, conflicts, conflict_note",
        ),
        (
            "[[finding]]\nid = 9001\nstatement = \"a\\u001b[2J\"\n",
            "line 3, [[finding]] 1 (id 9001), key `statement`: control character 0x1b in the text",
        ),
    ]);
}

#[test]
fn what_is_no_finding_is_told_with_line_and_key() {
    check_told(&[
        (
            "\"a\\u001b[2J\" = 1\n[[finding]]\nid = 1\nstatement = \"s\"\n",
            "line 1, key `a\\u{1b}[2J`: unknown key, expected one of skill, description, topic, \
             finding, answer",
        ),
        (
            "[[finding]]\nid = '''two\nlines'''\nstatement = \"s\"\n",
            "line 2, [[finding]] 1, key `id`: expected a whole number from 1 to 4294967295, got \
             '''two lines'''",
        ),
        (
            "[[findings]]\nid = 9001\n",
            "line 1, key `findings`: unknown key, did you mean \"finding\"?, expected one of skill, description, topic, \
             finding, answer",
        ),
        (
            "finding = 3\n",
            "line 1, key `finding`: expected a list of tables ([[...]]), got integer",
        ),
        (
            "finding = [3]\n",
            "line 1, key `finding`: expected a table ([[...]]), got integer",
        ),
        (
            "",
            "line 1: nothing to add: expected at least one [[finding]] or [[answer]]",
        ),
        (
            "[[topic]]\nname = \"T\"\n",
            "line 1: nothing to add: expected at least one [[finding]] or [[answer]]",
        ),
        (
            "[[answer]]\nquestion = \"q\"\n",
            "line 1, [[answer]] 1, key `answer`: missing",
        ),
    ]);
}

#[test]
fn all_problems_are_told_at_once_by_line() {
    let said =
        told("[[finding]]\nid = 0\nstatment = \"s\"\n[[finding]]\nid = 2\nstatement = \"\"\n");
    let lines: Vec<&str> = said
        .lines()
        .map(|line| line.trim().split(':').next().unwrap())
        .collect();
    assert_eq!(
        lines,
        [
            "line 1, [[finding]] 1, key `statement`",
            "line 2, [[finding]] 1, key `id`",
            "line 3, [[finding]] 1, key `statment`",
            "line 6, [[finding]] 2 (id 2), key `statement`",
        ]
    );
}

#[test]
fn thousands_of_problems_are_not_listed() {
    let Err(Error::Invalid { problems, more }) = user(&"[[finding]]\n".repeat(5000)) else {
        panic!("invalid");
    };
    assert_eq!(
        (problems.len(), more),
        (PROBLEMS_MAX, 10_000 - PROBLEMS_MAX)
    );
}

#[test]
fn what_is_no_text_is_refused() {
    let read = |bytes: &[u8]| read(bytes, Dialect::Findings, &Origin::BuiltIn);
    assert_eq!(
        read(b"[[finding]]\nid = 1\nstatement = \"\xff\"\n"),
        Err(Error::NotUtf8 {
            line: 3,
            at: 32,
            byte: 0xff
        })
    );
    assert!(matches!(
        read(b"\0\0\0\0"),
        Err(Error::Syntax { line: 1, .. })
    ));
    let gguf = read(b"GGUF\x03\0\0\0").unwrap_err().to_string();
    assert!(gguf.starts_with("line 1, column "), "{gguf}");
    let large = vec![b'#'; FILE_BYTES_MAX + 1];
    assert_eq!(
        read(&large),
        Err(Error::TooLarge {
            max: FILE_BYTES_MAX
        })
    );
}

#[test]
fn deep_and_wide_files_end() {
    let deep = [
        format!("x = {}", "[".repeat(500_000)),
        format!("x = {}", "{ a = ".repeat(100_000)),
        format!("{} = 1", vec!["a"; 200_000].join(".")),
        format!("[{}]", vec!["a"; 200_000].join(".")),
        format!("x = {}{}", "[".repeat(200_000), "]".repeat(200_000)),
    ];
    for text in deep {
        let error = user(&text).unwrap_err();
        assert!(error.to_string().len() < 2000, "{:.80}", text);
    }
    let wide: String = (0..60_000).map(|n| format!("k{n} = 1\n")).collect();
    let Err(Error::Invalid { more, .. }) = user(&wide) else {
        panic!("unknown keys")
    };
    assert_eq!(more, 60_000 - PROBLEMS_MAX);
}

#[test]
fn built_in_findings_are_symmetric_as_they_are_written() {
    let text = include_bytes!("../../data/findings.toml");
    let document = read(text, Dialect::Findings, &Origin::BuiltIn).unwrap();
    let conflicts = |of: u32| {
        let (_, finding) = document.findings.iter().find(|(_, f)| f.id == of).unwrap();
        &finding.conflicts
    };
    for (_, finding) in &document.findings {
        assert!(finding.conflicts.is_sorted());
        for other in &finding.conflicts {
            assert!(
                conflicts(*other).contains(&finding.id),
                "{} and {other}",
                finding.id
            );
        }
        let named = document
            .topics
            .iter()
            .any(|(_, topic)| topic.name == finding.topic);
        assert!(named, "{}: {}", finding.id, finding.topic);
    }
}

#[test]
fn the_planners_file_names_findings_that_exist() {
    let read_as = |bytes: &[u8], dialect| read(bytes, dialect, &Origin::BuiltIn).unwrap();
    let findings = read_as(
        include_bytes!("../../data/findings.toml"),
        Dialect::Findings,
    );
    let planner = read_as(include_bytes!("../../data/planner.toml"), Dialect::Planner);
    let lists = planner.assumptions.iter().map(|a| &a.findings);
    for ids in lists.chain(planner.checks.iter().map(|c| &c.findings)) {
        assert!(!ids.is_empty());
        for id in ids {
            assert!(findings.findings.iter().any(|(_, f)| f.id == *id), "{id}");
        }
    }
    for check in &planner.checks {
        assert!(check.command.starts_with("paceline "), "{}", check.command);
    }
}

proptest::proptest! {
    #[test]
    fn any_bytes_end_in_an_answer(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..300)) {
        let _ = read(&bytes, Dialect::Findings, &Origin::BuiltIn);
    }

    #[test]
    fn a_file_cut_or_changed_anywhere_ends_in_an_answer(at in 0usize..48_000, byte in proptest::num::u8::ANY) {
        let mut bytes = include_bytes!("../../data/findings.toml").to_vec();
        let cut = read(&bytes[..at.min(bytes.len())], Dialect::Findings, &Origin::BuiltIn);
        if let Err(error) = cut {
            proptest::prop_assert!(error.to_string().contains("line "));
        }
        bytes[at] = byte;
        if let Err(error) = read(&bytes, Dialect::Findings, &Origin::BuiltIn) {
            proptest::prop_assert!(error.to_string().contains("line "));
        }
    }
}
