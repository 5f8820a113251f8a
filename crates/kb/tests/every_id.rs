//! The bar of the built-in findings: each is reached by its id, by its topic and by its own words.
#![allow(clippy::unwrap_used, reason = "test code outside of test functions")]

use paceline_kb::{Area, Finding, KnowledgeBase};

/// Place of `finding` among the hits for `query`, from 1.
fn place(kb: &KnowledgeBase, finding: &Finding, query: &str) -> Option<usize> {
    let hits = kb.search(query, 1000).hits;
    hits.iter()
        .position(|hit| hit.id == finding.id)
        .map(|place| place + 1)
}

/// Every query by which a user might look for a finding in its own words.
fn own_words(finding: &Finding) -> Vec<(&'static str, String)> {
    let words: Vec<&str> = finding.statement.split_whitespace().collect();
    let part = |range: std::ops::Range<usize>| words[range].join(" ");
    let half = words.len() / 2;
    let mut queries = vec![
        ("statement", finding.statement.clone()),
        ("first half", part(0..half)),
        ("second half", part(half..words.len())),
        ("evidence", finding.evidence.clone()),
        ("tags", finding.tags.join(" ")),
        ("id", finding.id.to_string()),
    ];
    if !finding.conflict_note.is_empty() {
        queries.push(("conflict note", finding.conflict_note.clone()));
    }
    queries
}

#[test]
fn all_52_are_there() {
    let kb = KnowledgeBase::built_in();
    assert_eq!(kb.findings().count(), 52);
    assert_eq!(kb.topics().len(), 16);
    assert_eq!(kb.answers().len(), 13);
    assert_eq!(kb.skills().len(), 1);
}

#[test]
fn every_id_is_reached_by_detail_and_by_its_topic() {
    let kb = KnowledgeBase::built_in();
    for finding in kb.findings() {
        let id = finding.id;
        assert_eq!(kb.finding(id).unwrap().id, id);
        let topics = kb.topics_of(id);
        assert_eq!(topics[0].name, finding.topic, "{id}");
        for name in [
            finding.topic.clone(),
            topics[0].slug(),
            finding.topic.to_uppercase(),
        ] {
            let Area::Topic(topic) = kb.area(&name) else {
                panic!("{name}")
            };
            assert!(
                topic.findings().any(|listed| listed == id),
                "{id} in {name}"
            );
        }
    }
    for topic in kb.topics() {
        assert!(topic.findings().count() > 0, "{}", topic.name);
        assert!(
            topic.findings().all(|id| kb.finding(id).is_some()),
            "{}",
            topic.name
        );
    }
}

#[test]
fn every_id_is_among_the_first_five_hits_for_its_own_words() {
    let kb = KnowledgeBase::built_in();
    let mut late = Vec::new();
    for finding in kb.findings() {
        for (what, query) in own_words(finding) {
            let place = place(&kb, finding, &query);
            if place.is_none_or(|place| place > 5) {
                late.push(format!("{} by its {what}: {place:?}", finding.id));
            }
        }
    }
    assert!(late.is_empty(), "{late:#?}");
}

#[test]
fn every_conflict_is_symmetric_and_has_one_assumption_of_the_planner() {
    let kb = KnowledgeBase::built_in();
    let conflicts = kb.conflicts();
    assert_eq!(conflicts.len(), 32);
    for conflict in conflicts {
        let first = kb.finding(conflict.first).unwrap();
        assert!(first.conflicts.contains(&conflict.second), "{conflict:?}");
        let assumptions = kb.assumptions_between(conflict);
        assert_eq!(assumptions.len(), 1, "{conflict:?}: {assumptions:?}");
        let said = |id: u32| !kb.finding(id).unwrap().conflict_note.is_empty();
        assert!(
            said(conflict.first) && said(conflict.second),
            "{conflict:?}"
        );
    }
}

/// RDMA was switched on in recovery mode alone, until macOS had a switch for it.
#[test]
fn the_switch_for_rdma_corrects_the_finding_on_recovery_mode() {
    let kb = KnowledgeBase::built_in();
    let old = kb.finding(413).unwrap();
    assert_eq!(old.conflicts, [550]);
    assert!(
        kb.finding(550)
            .unwrap()
            .statement
            .contains("System Settings")
    );
    let asked = kb.search("enable RDMA in System Settings", 3);
    assert_eq!(asked.hits[0].id, 550);
}
