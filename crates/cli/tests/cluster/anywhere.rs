//! A machine that computes nothing of a model and lacks its file answers with it all the same.

use super::shared::{MODEL, up};
use super::until;

#[test]
fn a_machine_without_the_file_asks_the_one_that_has_it() {
    let one = up("one", None);
    let two = up("two", Some(&one));
    std::fs::remove_file(two.home.path().join(MODEL)).unwrap();
    one.told(&["load", MODEL, "--nodes", "one", "--threads", "1"]);
    let (here, _) = one.answer(MODEL, &[]);
    until("it has what it takes to tell tokens", || {
        let log = std::fs::read_to_string(two.home.path().join("log")).unwrap();
        log.contains(&format!("answering as {MODEL}"))
    });
    let (there, line) = two.answer(MODEL, &[]);
    assert!(line.contains("asking the instance on one"), "{line}");
    assert_eq!(there["tokens"], here["tokens"]);
}
