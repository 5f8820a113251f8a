//! User files together with the built-in findings, and lookups.

use super::*;

fn file<'a>(name: &'a str, text: &'a str) -> UserFile<'a> {
    UserFile {
        name,
        bytes: text.as_bytes(),
    }
}

const OWN: &str = "[[finding]]\nid = 9001\nstatement = \"My quokka cluster answers in 4 µs.\"\n\
                   topic = \"RDMA Bandwidth & Latency\"\nconflicts = [306]\n\
                   [[finding]]\nid = 9002\nstatement = \"The garage is cold.\"\ntopic = \"Garage\"\n\
                   [[answer]]\nquestion = \"How cold is the garage?\"\nanswer = \"Very.\"\nfindings = [9002]\n";

#[test]
fn own_findings_are_found_beside_the_built_in_ones() {
    let (kb, refused) = KnowledgeBase::with_files(&[file("own.toml", OWN)]);
    assert_eq!(refused, []);
    assert_eq!(kb.search("quokka", 5).hits[0].id, 9001);
    assert_eq!(
        kb.finding(9002).unwrap().origin,
        Origin::File("own.toml".into())
    );
    assert_eq!(kb.topics_of(9001)[0].name, "RDMA Bandwidth & Latency");
    assert!(matches!(kb.area("garage"), Area::Topic(topic) if topic.also == [9002]));
    assert_eq!(
        kb.ask("is the garage cold?").unwrap().answer.answer,
        "Very."
    );
    let stats = kb.stats();
    assert_eq!(
        (stats.n_findings, stats.n_own, stats.n_answers),
        (54, 2, 14)
    );
    assert_eq!(stats.n_topics, 17);
}

#[test]
fn a_conflict_with_a_built_in_finding_goes_both_ways() {
    let (kb, _) = KnowledgeBase::with_files(&[file("own.toml", OWN)]);
    assert_eq!(
        kb.finding(306).unwrap().conflicts,
        [58, 322, 337, 417, 9001]
    );
    let conflict = Conflict {
        first: 306,
        second: 9001,
    };
    assert!(kb.conflicts().contains(&conflict));
    let assumptions = kb.assumptions_between(conflict);
    assert_eq!(assumptions, kb.assumptions_on(306));
    assert!(!assumptions.is_empty());
}

#[test]
fn checking_says_what_a_file_would_bring() {
    let kb = KnowledgeBase::built_in();
    let contents = kb.check(file("own.toml", OWN)).unwrap();
    assert_eq!(contents.findings, [9001, 9002]);
    assert_eq!(contents.topics, ["Garage"]);
    assert_eq!(contents.n_answers, 1);
}

#[test]
fn what_does_not_fit_is_told_with_line_and_key() {
    let (kb, _) = KnowledgeBase::with_files(&[file("own.toml", OWN)]);
    for (text, message) in [
        (
            "[[finding]]\nid = 415\nstatement = \"s\"\n",
            "line 2, [[finding]] 1 (id 415), key `id`: 415 is taken by a built-in finding",
        ),
        (
            "[[finding]]\nid = 9001\nstatement = \"s\"\n",
            "line 2, [[finding]] 1 (id 9001), key `id`: 9001 is taken by a finding of own.toml",
        ),
        (
            "[[finding]]\nid = 5\nstatement = \"s\"\n[[finding]]\nid = 5\nstatement = \"t\"\n",
            "line 5, [[finding]] 2 (id 5), key `id`: 5 is taken by another finding of this file",
        ),
        (
            "[[finding]]\nid = 5\nstatement = \"s\"\nconflicts = [5]\n",
            "line 4, [[finding]] 1 (id 5), key `conflicts`: finding 5 is in conflict with itself",
        ),
        (
            "[[finding]]\nid = 5\nstatement = \"s\"\nconflicts = [1]\n",
            "line 4, [[finding]] 1 (id 5), key `conflicts`: no finding has the id 1",
        ),
        (
            "[[finding]]\nid = 5\nstatement = \"s\"\ntopic = \"JACL Backend\"\n",
            "line 4, [[finding]] 1 (id 5), key `topic`: no topic is called \"JACL Backend\", did you mean \
             \"JACCL Backend\"?",
        ),
        (
            "[[answer]]\nquestion = \"q\"\nanswer = \"a\"\nfindings = [415, 77]\n",
            "line 4, [[answer]] 1, key `findings`: no finding has the id 77",
        ),
        (
            "[[topic]]\nname = \"Cost & power\"\n[[finding]]\nid = 5\nstatement = \"s\"\n",
            "line 2, [[topic]] 1, key `name`: topic \"Cost & power\" exists already, in a built-in topic",
        ),
        (
            "[[topic]]\nname = \"X\"\nids = [5, 6]\n[[finding]]\nid = 5\nstatement = \"s\"\n",
            "line 3, [[topic]] 1, key `ids`: no finding has the id 6",
        ),
    ] {
        let error = kb.check(file("new.toml", text)).unwrap_err();
        assert_eq!(error.to_string(), message);
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
    let places: Vec<usize> = refused.iter().map(|(place, _)| *place).collect();
    assert_eq!(places, [1, 2]);
    assert!(kb.finding(7).is_none() && kb.finding(8).is_some() && kb.finding(9001).is_some());
}

#[test]
fn files_may_need_each_other_in_any_order() {
    let needs = |id: u32, other: u32| {
        format!("[[finding]]\nid = {id}\nstatement = \"s\"\nconflicts = [{other}]\n")
    };
    let texts = [
        needs(1, 2),
        needs(2, 3),
        needs(3, 415),
        needs(4, 5),
        needs(5, 4),
    ];
    let files: Vec<UserFile<'_>> = texts.iter().map(|text| file("f", text)).collect();
    let (kb, refused) = KnowledgeBase::with_files(&files);
    assert!(kb.finding(1).is_some() && kb.finding(3).is_some());
    let places: Vec<usize> = refused.iter().map(|(place, _)| *place).collect();
    assert_eq!(places, [3, 4]);
}

#[test]
fn an_answer_comes_with_what_its_findings_disagree_about() {
    let kb = KnowledgeBase::built_in();
    let subjects = |question: &str| -> Vec<&str> {
        let answer = kb.ask(question).unwrap().answer;
        let assumptions = kb.assumptions_for(answer);
        assumptions.iter().map(|a| a.subject.as_str()).collect()
    };
    assert_eq!(
        subjects("how fast is the link?"),
        [
            "Latency of RDMA over Thunderbolt 5, and its gain over TCP",
            "Bandwidth of NVLink"
        ]
    );
    assert_eq!(
        subjects("which parallelism?"),
        ["Which parallelism sends least"]
    );
    assert_eq!(subjects("which operations are in mlx?"), [] as [&str; 0]);
}

#[test]
fn areas_go_by_any_form_of_their_name() {
    let kb = KnowledgeBase::built_in();
    let name = |typed: &str| match kb.area(typed) {
        Area::Skill(skill) => format!("skill {}", skill.name),
        Area::Topic(topic) => topic.name.clone(),
        Area::Ambiguous(topics) => format!("{} topics", topics.len()),
        Area::Unknown(near) => format!("like {}", near.join(", ")),
    };
    for (typed, area) in [
        ("gpu-distributed", "skill gpu-distributed"),
        ("GPU Distributed", "skill gpu-distributed"),
        ("JACCL Backend", "JACCL Backend"),
        ("jaccl-backend", "JACCL Backend"),
        ("jaccl", "JACCL Backend"),
        ("cost", "Cost & Power"),
        ("dnet", "dnet Framework"),
        ("rdma", "2 topics"),
        ("framework", "2 topics"),
        ("jacl", "like JACCL Backend"),
        ("gpu-distribted", "like gpu-distributed"),
        ("cooking", "like "),
        ("", "like "),
        ("&", "like "),
    ] {
        assert_eq!(name(typed), area, "{typed}");
    }
}

#[test]
fn ids_near_a_wrong_one() {
    let kb = KnowledgeBase::built_in();
    assert_eq!(kb.ids_near(418, 1), [418]);
    assert_eq!(kb.ids_near(451, 3), [415, 421, 431]);
    assert_eq!(kb.ids_near(u32::MAX, 3).len(), 3);
}

#[test]
fn searches_say_what_they_do_not_know() {
    let kb = KnowledgeBase::built_in();
    let found = kb.search("thunderbold zzyzx", 5);
    assert_eq!(found.n_words, 2);
    assert_eq!(found.unknown[0].word, "thunderbold");
    assert_eq!(found.unknown[0].nearest[0], "thunderbolt");
    assert_eq!(found.unknown[1].nearest, [] as [&str; 0]);
    assert!(found.hits.is_empty());
    assert_eq!(kb.search("the of", 5).n_words, 0);
    assert_eq!(kb.search("", 5), Found::default());
    // A prefix matches the words that it begins, unless it is a word itself.
    assert!(kb.search("thunderb", 5).n_found > 10);
    assert!(kb.search("rdma", 3).hits.len() == 3 && kb.search("rdma", 0).hits.is_empty());
}

#[test]
fn hits_are_ranked_and_marked() {
    let kb = KnowledgeBase::built_in();
    let found = kb.search("SIGBUS", 5);
    assert_eq!(found.hits[0].id, 415);
    let snippet = &found.hits[0].snippet;
    assert_eq!(&snippet.text[snippet.marks[0].clone()], "SIGBUS");
    let found = kb.search("RDMA Thunderbolt", 50);
    assert!(
        found
            .hits
            .windows(2)
            .all(|pair| pair[0].score >= pair[1].score)
    );
    assert_eq!(found, kb.search("rdma   THUNDERBOLT?", 50));
    let long = "rdma thunderbolt ".repeat(100_000);
    assert_eq!(kb.search(&long, 50).hits, found.hits);
}
