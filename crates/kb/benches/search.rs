//! Time of a search, a question and a start: `cargo bench -p paceline-kb --bench search`.
//!
//! Prints the median of each with the 10th and 90th percentile in microseconds. It does so for the
//! built-in findings alone, and with a user file of nearly the largest size. Written by hand, as
//! `comm`'s bench is: criterion brings forty crates for one loop here.

#![allow(clippy::print_stdout, reason = "a bench reports on standard output")]

use std::hint::black_box;
use std::time::Instant;

use paceline_kb::{FILE_BYTES_MAX, KnowledgeBase, UserFile};

const ROUNDS: usize = 201;

const QUERIES: [&str; 4] = [
    "SIGBUS",
    "RDMA Thunderbolt",
    "which parallelism over 10 GbE?",
    "tensor parallelism cuts each layer over all machines and joins the partial results",
];

fn main() {
    println!(
        "{:<64}{:>10}{:>10}{:>10}",
        "us per call", "p10", "p50", "p90"
    );
    let large = own_findings();
    let file = UserFile {
        name: "own.toml",
        bytes: large.as_bytes(),
    };
    for (what, files) in [("built in", &[][..]), ("and 1 MiB of one's own", &[file])] {
        let (kb, refused) = KnowledgeBase::with_files(files);
        assert!(refused.is_empty(), "{refused:?}");
        println!("{} findings, {what}", kb.findings().count());
        report("start: read and index all", || {
            black_box(KnowledgeBase::with_files(files));
        });
        for query in QUERIES {
            let name: String = query.chars().take(40).collect();
            report(&format!("search {name}"), || {
                black_box(kb.search(black_box(query), 10));
            });
        }
        report("ask which parallelism over 10 GbE?", || {
            black_box(kb.ask(black_box("which parallelism over 10 GbE?")));
        });
    }
}

fn report(name: &str, mut call: impl FnMut()) {
    let mut us: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let start = Instant::now();
            call();
            start.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    us.sort_by(f64::total_cmp);
    let [p10, p50, p90] = [10, 50, 90].map(|p| us[us.len() * p / 100]);
    println!("  {name:<62}{p10:>10.1}{p50:>10.1}{p90:>10.1}");
}

/// Nearly as much as a file may have, in the words of the built-in findings, shuffled.
fn own_findings() -> String {
    let kb = KnowledgeBase::built_in();
    let texts: Vec<&str> = kb
        .findings()
        .flat_map(|f| [f.statement.as_str(), &f.evidence])
        .collect();
    let text = texts.join(" ").replace(['"', '\\'], " ");
    let words: Vec<&str> = text.split_whitespace().collect();
    let mut file = String::new();
    let mut id = 10_000;
    while file.len() + 1000 < FILE_BYTES_MAX {
        // 7919 is a prime, so each statement has another order of words.
        let statement: Vec<&str> = (0..60)
            .map(|i| words[(id * 31 + i * 7919) % words.len()])
            .collect();
        file += &format!(
            "[[finding]]\nid = {id}\nstatement = \"{}\"\n",
            statement.join(" ")
        );
        id += 1;
    }
    file
}
