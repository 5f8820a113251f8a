//! Questions with the quick answer that they get, and questions without one.

use paceline_kb::KnowledgeBase;

/// Questions as people put them, with words of the collected question that they should lead to.
const ANSWERED: [(&str, &str); 32] = [
    ("which parallelism over 10 GbE?", "joined by Ethernet"),
    (
        "what split should I use over gigabit ethernet",
        "joined by Ethernet",
    ),
    (
        "pipeline or tensor parallelism over 25GbE?",
        "joined by Ethernet",
    ),
    ("which parallelism", "parallelism suits a cluster of Macs"),
    (
        "tensor or pipeline parallelism?",
        "parallelism suits a cluster of Macs",
    ),
    (
        "What split is best on a cluster of Macs?",
        "parallelism suits a cluster of Macs",
    ),
    ("how do I set up RDMA?", "set up"),
    ("how do I enable rdma over thunderbolt", "set up"),
    ("what is jaccl", "What is JACCL"),
    ("JACCL?", "What is JACCL"),
    ("which mlx operations exist", "Which distributed operations"),
    ("all_gather in mlx", "Which distributed operations"),
    ("how fast is RDMA?", "How fast"),
    ("what is the latency of thunderbolt", "How fast"),
    ("bandwidth of the link", "How fast"),
    ("how does exo work?", "How does Exo"),
    ("Exo inference speed", "How does Exo"),
    (
        "what does a mac cluster cost",
        "What does an actual Mac cluster",
    ),
    (
        "Show me a real Mac cluster",
        "What does an actual Mac cluster",
    ),
    (
        "price of the reference cluster",
        "What does an actual Mac cluster",
    ),
    ("can I train across Macs?", "How does one train"),
    ("training with MLX", "How does one train"),
    (
        "how to fine-tune on several Macs with MLX",
        "How does one train",
    ),
    ("what are the limits?", "Where are the limits"),
    ("limits of a mac cluster", "Where are the limits"),
    ("N(N-1)/2 cables of jaccl", "What is JACCL"),
    ("is RDMA zero-copy?", "avoid copies"),
    ("does it copy data?", "avoid copies"),
    (
        "how do I monitor performance and health?",
        "health and performance",
    ),
    ("watching the cluster's health", "health and performance"),
    ("GPU work beside machine learning", "not machine learning"),
    ("non-ML GPU work", "not machine learning"),
];

/// Questions that nothing was collected about.
const UNANSWERED: [&str; 24] = [
    "",
    "?",
    "which?",
    "how do I bake bread?",
    "what is the capital of France?",
    "who won the world cup in 1998?",
    "how do I install numpy on Windows?",
    "what is the airspeed of an unladen swallow?",
    "which GPU does a PlayStation have?",
    "how do I write a regular expression?",
    "is Rust faster than Go?",
    "what time is it in Tokyo?",
    "how do I reset my password?",
    "which vitamin is in oranges?",
    "how large is the moon",
    "zebra",
    "how do I quantise a model?",
    "which tokenizer does qwen use?",
    "how much memory does my phone have",
    "what does a car cost",
    "how do I train my dog",
    "how fast is a cheetah",
    "does paceline support Windows?",
    "where can I buy a bicycle in Berlin?",
];

#[test]
fn questions_lead_to_their_answer() {
    let kb = KnowledgeBase::built_in();
    let mut wrong = Vec::new();
    for (question, wanted) in ANSWERED {
        let fit = kb.ask(question);
        match fit {
            Some(fit) if fit.answer.question.contains(wanted) => {}
            other => wrong.push(format!(
                "{question}: {:?}",
                other.map(|f| (&f.answer.question, f.cover))
            )),
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn every_collected_question_gets_its_own_answer() {
    let kb = KnowledgeBase::built_in();
    for answer in kb.answers() {
        let fit = kb.ask(&answer.question).expect("its own question");
        assert_eq!(fit.answer, answer);
        assert!(fit.cover > 0.99, "{}", answer.question);
        assert!(!answer.findings.is_empty());
        assert!(answer.findings.iter().all(|id| kb.finding(*id).is_some()));
    }
}

#[test]
fn other_questions_get_none() {
    let kb = KnowledgeBase::built_in();
    for question in UNANSWERED {
        let fit = kb.ask(question);
        assert!(fit.is_none(), "{question}: {fit:?}");
    }
}
