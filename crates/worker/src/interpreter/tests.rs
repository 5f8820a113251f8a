//! Tests of the child that renders templates and matches grammars: its answers, exits and limits.

use std::sync::Arc;
use std::thread;

use paceline_base::SplitMix64;
use paceline_base::testing::{Stopwatch, long, mutations};
use serde_json::json;

use super::*;

/// Set in a process that acts as the child of a test.
const IS_CHILD: &str = "PACELINE_TEMPLATE_CHILD";

/// The child of the other tests: this test program, run with this test alone.
#[test]
fn child() {
    if std::env::var_os(IS_CHILD).is_some() {
        let Err(error) = run();
        panic!("{error}");
    }
}

fn program() -> ChildProgram {
    let args = ["--exact", "interpreter::tests::child", "--nocapture"];
    ChildProgram {
        path: std::env::current_exe().unwrap(),
        args: args.map(OsString::from).to_vec(),
        env: vec![(IS_CHILD.into(), "1".into())],
    }
}

fn job(content: &str) -> RenderInput {
    let variables = json!({"messages": [{"role": "user", "content": content}]});
    let serde_json::Value::Object(variables) = variables else {
        unreachable!("it is written as one");
    };
    RenderInput {
        variables,
        now_unix_s: None,
        output_bytes_max: 1 << 20,
    }
}

/// A template that attacks if the message requests it.
fn attacking(attack: &str) -> SandboxedTemplate {
    let source = "{% set word = messages[0].content %}{% if word == 'attack' %}ATTACK{% else %}\
                  {{ word }}{% endif %}";
    SandboxedTemplate::start(program(), &source.replace("ATTACK", attack)).unwrap()
}

/// Runs the attack, which must fail as `is_expected` checks; the next conversation is answered.
fn check(attack: &str, is_expected: impl Fn(&TemplateError) -> bool) {
    let template = attacking(attack);
    let failure = template.render(job("attack")).unwrap_err();
    assert!(is_expected(&failure), "{attack}: {failure}");
    let text = template.render(job("hello"));
    assert_eq!(text.as_deref(), Ok("hello"), "after {attack}");
}

fn is_too_large(failure: &TemplateError) -> bool {
    matches!(failure, TemplateError::TooLarge { .. })
}

fn is_too_slow(failure: &TemplateError) -> bool {
    matches!(failure, TemplateError::TooSlow { .. })
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
fn texts_that_one_step_makes_end_the_child() {
    if !has_limits("texts_that_a_filter_makes_end_the_child") {
        return;
    }
    for attack in [
        "{% set x = 'a' * 100000 %}{{ x.replace('a', x) | length }}",
        "{% set x = 'a' * 1000000 %}{{ range(10000) | join(x) | length }}",
    ] {
        check(attack, is_too_large);
    }
}

#[test]
fn computing_outside_of_steps_ends_the_child() {
    for attack in ["{{ x == y }}", "{{ x < y }}"] {
        let twins = "{% set x = 'ab' * 5000000 %}{% set y = 'ab' * 5000000 %}";
        let attack = format!("{twins}{{% for i in range(10000) %}}{attack}{{% endfor %}}");
        check(&attack, is_too_slow);
    }
}

/// A step costs more if a filter or an operator reads or produces much.
#[test]
fn work_of_filters_counts_as_steps() {
    for attack in [
        "{% set x = 'a' * 100000 %}{{ x | replace('a', x) | length }}",
        "{{ 'a\nb' | indent(4000000000) | length }}",
        "{% set x = ('ab' * 100000) | list %}\
         {% for i in range(10000) %}{{ (x | sort) | length }}{% endfor %}",
    ] {
        check(attack, |failure| {
            matches!(failure, TemplateError::TooManySteps { .. })
        });
    }
    // The limit on steps is near that on time here.
    let search = "{% set x = 'ab' * 5000000 %}{% set y = 'ab' * 500 ~ 'c' %}\
         {% for i in range(10000) %}{{ y in x }}{% endfor %}";
    check(search, |failure| {
        is_too_slow(failure) || matches!(failure, TemplateError::TooManySteps { .. })
    });
}

#[test]
fn deep_values_end_the_child_alone() {
    let deep = "{% set n = namespace(x=[]) %}{% for i in range(10000) %}{% for j in range(20) %}\
        {% set n.x = [n.x] %}{% endfor %}{% endfor %}{{ n.x | tojson }}";
    check(deep, |failure| {
        matches!(failure, TemplateError::Ended { .. })
    });
}

#[test]
fn output_ends_at_what_the_context_holds() {
    let long = "{% for i in range(10000) %}{{ 'x' * 100000 }}{% endfor %}";
    let limit = 1 << 20;
    check(long, |failure| {
        *failure == TemplateError::OutputTooLong { limit }
    });
}

#[test]
fn last_words_are_those_of_the_panic() {
    let tail = ["it fell", "note: run with `RUST_BACKTRACE=1` to see where"].map(str::to_owned);
    let reason = format!("{}: it fell", Ending::Code(101));
    assert_eq!(
        cause(Ending::Code(101), &tail),
        TemplateError::Ended { reason }
    );
}

#[test]
fn nesting_and_length_are_refused_at_load() {
    let nested = format!("{{{{ {}1 }}}}", "-".repeat(60_000));
    for source in [nested.as_str(), &"x".repeat(70_000), "{% if %}"] {
        let failure = SandboxedTemplate::start(program(), source).unwrap_err();
        assert!(
            matches!(
                failure,
                TemplateError::TooDeep { .. }
                    | TemplateError::TooLong { .. }
                    | TemplateError::Syntax { .. }
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
    while rustix::process::test_kill_process(pid).is_ok() {
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "it is not reaped"
        );
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

/// Templates that mutations begin with.
const SEEDS: [&str; 4] = [
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m.content | trim }}\n{% endfor %}\
     {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "{%- set ns = namespace(x='', n=0) -%}{%- for m in messages -%}{%- if m.role == 'user' -%}\
     {%- set ns.x = ns.x ~ m.content -%}{%- elif loop.last -%}{%- set ns.n = ns.n + 1 -%}\
     {%- endif -%}{%- endfor -%}{{ ns.x }}{{ ns.n }}",
    "{% macro show(x, deep=true) %}{{ x | tojson(indent=2) }}{% endmacro %}\
     {% for m in messages[::-1] %}{{ show(m) }}{{ m.content.split(' ') | join(', ') }}{% endfor %}",
    "{{ messages | map(attribute='content') | list | sort | join('|') | upper | replace('A', 'b') }}",
];

/// Filters and operators that a hostile model would add to a value.
const TAILS: [&str; 12] = [
    " * 100000",
    " * 1000000000",
    " ** 99",
    " ~ (range(10000) | list)",
    " | replace('', 'aaaaaaaa')",
    " | indent(4000000000)",
    " | join('aaaaaaaaaaaaaaaa')",
    " | sort",
    " | list",
    " | batch(1000000000) | list",
    " | tojson | tojson",
    "[::-1]",
];

/// Statements that it would add between others.
const STATEMENTS: [&str; 8] = [
    "{% for i in range(10000) %}{{ i }}{% endfor %}",
    "{% set ns = namespace(x='a') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}\
     {% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=[]) %}{% for i in range(10000) %}{% set ns.x = [ns.x, i] %}\
     {% endfor %}{{ ns.x }}",
    "{% set x = ('ab' * 100000) | list %}{% for i in range(10000) %}{{ (x | sort)[0] }}{% endfor %}",
    "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "{{ '-' * 100000000 }}",
    "{{",
    "{% if true %}",
];

/// Adds to a value, adds a statement, or cuts or repeats a piece.
fn mutate(source: &mut String, random: &mut SplitMix64) {
    let (ends, starts): (Vec<_>, Vec<_>) = (
        source.match_indices(" }}").map(|(at, _)| at).collect(),
        source.match_indices("{{").map(|(at, _)| at).collect(),
    );
    let at = source.floor_char_boundary(random.below(source.len() + 1));
    match random.below(8) {
        0..4 if !ends.is_empty() => {
            let tail = TAILS[random.below(TAILS.len())];
            source.insert_str(ends[random.below(ends.len())], tail);
        }
        4..6 if !starts.is_empty() => {
            let statement = STATEMENTS[random.below(STATEMENTS.len())];
            source.insert_str(starts[random.below(starts.len())], statement);
        }
        6 => {
            let end = source.floor_char_boundary(at + random.below(10)).max(at);
            source.drain(at..end);
        }
        _ => source.insert_str(at, STATEMENTS[random.below(STATEMENTS.len())]),
    }
}

/// Peak memory of a process in bytes; `None` after its exit.
#[cfg(target_os = "linux")]
fn peak_bytes(id: u32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{id}/status")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib << 10)
}

/// The outcome of a template, and its cost.
#[cfg(target_os = "linux")]
#[derive(Default)]
struct Trial {
    /// The child, if it survived.
    child: Option<Child>,
    /// Time of the slower of load and rendering.
    slowest: Duration,
    /// Most memory of the child in bytes.
    largest: u64,
    endings: Vec<String>,
}

/// Longest time for a template on an idle machine. Next to other tests the child shares the cores,
/// so that only its own limits hold.
#[cfg(target_os = "linux")]
fn time_max() -> Duration {
    if long() {
        Duration::from_secs(2)
    } else {
        DEADLINE + Duration::from_secs(4)
    }
}

/// Most memory of a template's process: its limit, and the program itself.
#[cfg(target_os = "linux")]
const LARGEST_MAX: u64 = 256 << 20;

/// Sends a request to the child, and samples its memory every millisecond meanwhile.
#[cfg(target_os = "linux")]
fn asked(
    child: &Child,
    ask: &ChildRequest,
    trial: &mut Trial,
) -> Result<ChildResponse, TemplateError> {
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
    let id = child.workers.ids()[0];
    let (is_over, largest) = (AtomicBool::new(false), AtomicU64::new(0));
    let look = || {
        while !is_over.load(SeqCst) {
            largest.fetch_max(peak_bytes(id).unwrap_or(0), SeqCst);
            thread::sleep(Duration::from_millis(1));
        }
    };
    let watch = Stopwatch::start();
    let answer = thread::scope(|scope| {
        scope.spawn(look);
        let answer = child.ask(ask);
        is_over.store(true, SeqCst);
        answer
    });
    trial.slowest = trial.slowest.max(watch.elapsed());
    trial.largest = trial.largest.max(largest.into_inner());
    answer
}

/// Compiles and renders a template. A failure other than a limit fails the test.
#[cfg(target_os = "linux")]
fn try_template(child: Option<Child>, source: &str, seed: u64) -> Trial {
    let child = child.unwrap_or_else(|| Child::start(&program(), "").unwrap());
    let (mut trial, mut is_whole) = (Trial::default(), true);
    for ask in [
        ChildRequest::Load(source.to_owned()),
        ChildRequest::Render(job("a b")),
    ] {
        let answer = asked(&child, &ask, &mut trial);
        trial.endings.push(match &answer {
            Ok(Ok(_)) => "text".to_owned(),
            Ok(Err(failure)) | Err(failure) => {
                let name = format!("{failure:?}");
                name.split([' ', '{']).next().unwrap().to_owned()
            }
        });
        is_whole = answer.is_ok();
        match answer {
            Ok(Ok(_)) => {}
            Ok(Err(_)) => break,
            Err(
                TemplateError::TooSlow {
                    limit_ms: 2000 | 6000,
                }
                | TemplateError::TooLarge { .. },
            ) => break,
            // A deep value overflows the stack when it is dropped.
            Err(TemplateError::Ended { reason }) if reason.contains("stack") => break,
            Err(failure) => panic!("seed {seed}: {failure}: {source}"),
        }
    }
    // A broken child has reported its end and is not used again.
    trial.child = is_whole.then_some(child);
    trial
}

/// With the slow proofs on a machine that does nothing else: `PACELINE_TEST_LONG=1 cargo test
/// --release -p paceline-node --lib mutated_templates -- --nocapture`.
#[cfg(target_os = "linux")]
#[test]
fn mutated_templates_end_within_their_limits() {
    let (mut kept, mut slowest, mut largest) = (None, Duration::ZERO, 0);
    let (mut endings, count) = (std::collections::BTreeMap::new(), mutations(60));
    for seed in 0..count {
        let mut random = SplitMix64::new(seed);
        let mut source = SEEDS[random.below(SEEDS.len())].to_owned();
        for _ in 0..=random.below(3) {
            mutate(&mut source, &mut random);
        }
        let mut trial = try_template(kept.take(), &source, seed);
        // A hanging template hangs every time; a busy machine does not.
        for _ in 0..2 {
            if trial.slowest > time_max() {
                trial = try_template(None, &source, seed);
            }
        }
        assert!(
            trial.slowest <= time_max(),
            "{seed}: {:?}: {source}",
            trial.slowest
        );
        assert!(
            trial.largest <= LARGEST_MAX,
            "{seed}: {} bytes: {source}",
            trial.largest
        );
        (slowest, largest) = (slowest.max(trial.slowest), largest.max(trial.largest));
        for ending in trial.endings {
            *endings.entry(ending).or_insert(0) += 1;
        }
        kept = trial.child;
    }
    eprintln!(
        "{count} mutated templates: slowest {slowest:?}, largest {largest} bytes, {endings:?}"
    );
}
