use std::sync::Arc;
use std::thread;

use serde_json::json;

use super::*;

/// Set for a process that is to be the child of a test.
const IS_CHILD: &str = "PACELINE_TEMPLATE_CHILD";

/// The child of the other tests: this program, of which only this test runs.
#[test]
fn child() {
    if std::env::var_os(IS_CHILD).is_some() {
        let Err(error) = run();
        panic!("{error}");
    }
}

fn program() -> Program {
    let args = ["--exact", "interpreter::tests::child", "--nocapture"];
    Program {
        path: std::env::current_exe().unwrap(),
        args: args.map(OsString::from).to_vec(),
        env: vec![(IS_CHILD.into(), "1".into())],
    }
}

fn job(content: &str) -> Job {
    let variables = json!({"messages": [{"role": "user", "content": content}]});
    let serde_json::Value::Object(variables) = variables else {
        unreachable!("it is written as one");
    };
    Job {
        variables,
        now_unix_s: None,
        output_bytes_max: 1 << 20,
    }
}

/// A template that attacks when the message says so.
fn attacking(attack: &str) -> Apart {
    let source = "{% set word = messages[0].content %}{% if word == 'attack' %}ATTACK{% else %}\
                  {{ word }}{% endif %}";
    Apart::start(program(), &source.replace("ATTACK", attack)).unwrap()
}

/// Runs the attack, which must end as `is_expected` has it; the next conversation is answered.
fn check(attack: &str, is_expected: impl Fn(&Failure) -> bool) {
    let template = attacking(attack);
    let failure = template.render(job("attack")).unwrap_err();
    assert!(is_expected(&failure), "{attack}: {failure}");
    let text = template.render(job("hello"));
    assert_eq!(text.as_deref(), Ok("hello"), "after {attack}");
}

fn is_too_large(failure: &Failure) -> bool {
    matches!(failure, Failure::TooLarge { .. })
}

fn is_too_slow(failure: &Failure) -> bool {
    matches!(failure, Failure::TooSlow { .. })
}

/// Whether the limits that need Linux are there.
fn has_limits(test: &str) -> bool {
    if !cfg!(target_os = "linux") {
        eprintln!("SKIPPED {test}: this system does not limit a process's memory");
    }
    cfg!(target_os = "linux")
}

#[test]
fn memory_that_doubles_ends_the_child() {
    if has_limits("memory_that_doubles_ends_the_child") {
        let doubling = "{% set n = namespace(x='aaaaaaaaaaaaaaaa') %}\
            {% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x | length }}";
        check(doubling, is_too_large);
    }
}

#[test]
fn texts_that_a_filter_makes_end_the_child() {
    if !has_limits("texts_that_a_filter_makes_end_the_child") {
        return;
    }
    for attack in [
        "{% set x = 'a' * 100000 %}{{ x | replace('a', x) | length }}",
        "{% set x = 'a' * 1000000 %}{{ range(10000) | join(x) | length }}",
        "{{ 'a\nb' | indent(4000000000) | length }}",
    ] {
        check(attack, is_too_large);
    }
}

#[test]
fn computing_outside_of_steps_ends_the_child() {
    for attack in [
        "{% set x = 'ab' * 5000000 %}{% set y = 'ab' * 500 ~ 'c' %}\
         {% for i in range(10000) %}{{ y in x }}{% endfor %}",
        "{% set x = ('ab' * 100000) | list %}\
         {% for i in range(10000) %}{{ (x | sort) | length }}{% endfor %}",
    ] {
        check(attack, is_too_slow);
    }
}

#[test]
fn deep_values_end_the_child_alone() {
    let deep = "{% set n = namespace(x=[]) %}{% for i in range(10000) %}{% for j in range(20) %}\
        {% set n.x = [n.x] %}{% endfor %}{% endfor %}{{ n.x | tojson }}";
    check(deep, |failure| matches!(failure, Failure::Ended { .. }));
}

#[test]
fn output_ends_at_what_the_context_holds() {
    let long = "{% for i in range(10000) %}{{ 'x' * 100000 }}{% endfor %}";
    let limit = 1 << 20;
    check(long, |failure| *failure == Failure::OutputTooLong { limit });
}

#[test]
fn nesting_and_length_are_refused_at_load() {
    let nested = format!("{{{{ {}1 }}}}", "-".repeat(60_000));
    for source in [nested.as_str(), &"x".repeat(70_000), "{% if %}"] {
        let failure = Apart::start(program(), source).unwrap_err();
        assert!(
            matches!(
                failure,
                Failure::TooDeep { .. } | Failure::TooLong { .. } | Failure::Syntax { .. }
            ),
            "{failure}"
        );
    }
}

#[test]
fn a_child_that_was_killed_is_replaced() {
    let template = attacking("");
    let id = i32::try_from(template.id().unwrap()).unwrap();
    let pid = rustix::process::Pid::from_raw(id).unwrap();
    rustix::process::kill_process(pid, Signal::KILL).unwrap();
    let start = Instant::now();
    while lock(&template.seat.room)
        .child
        .as_ref()
        .is_some_and(Child::lives)
    {
        assert!(start.elapsed() < Duration::from_secs(60));
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(template.render(job("hello")).as_deref(), Ok("hello"));
    assert_ne!(template.id(), u32::try_from(id).ok());
}

#[test]
fn conversations_take_turns() {
    let template = Arc::new(attacking(""));
    let ask = |i: usize| {
        let template = Arc::clone(&template);
        thread::spawn(move || {
            (0..20).all(|_| template.render(job(&i.to_string())) == Ok(i.to_string()))
        })
    };
    let threads: Vec<_> = (0..4).map(ask).collect();
    assert!(threads.into_iter().all(|thread| thread.join().unwrap()));
}

#[test]
fn a_rendering_costs_little() {
    let template = attacking("");
    let long = "word ".repeat(400);
    let cost = |_| {
        let start = Instant::now();
        template.render(job(&long)).unwrap();
        start.elapsed()
    };
    let mut costs: Vec<Duration> = (0..200).map(cost).collect();
    costs.sort();
    let (least, median) = (costs[0], costs[100]);
    eprintln!("rendering 2 KB in a child: {least:?} at least, median {median:?}");
    assert!(least < Duration::from_millis(1), "{least:?}");
}
