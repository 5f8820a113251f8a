//! Frames, keys, and what they ask for.

use super::rows::short;
use super::*;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use serde_json::json;

fn status() -> Value {
    json!({
        "name": "mini", "cluster": "blue-otter-31",
        "nodes": [
            {"name": "mini", "state": "alive", "telemetry": {
                "cpu_busy": 0.83, "cpu_mhz": 3400.0, "memory_bytes": 68_719_476_736_u64,
                "memory_available_bytes": 17_179_869_184_u64, "temperature_c": 71.4,
                "package_watts": 64.2, "networks": [
                    {"name": "eth0", "received_bytes_s": 1048576.0, "sent_bytes_s": 512.0}]}},
            {"name": "studio", "state": "alive", "telemetry": {"cpu_busy": 0.91}},
            {"name": "tower", "state": "dead"},
        ],
        "links": [
            {"from": "mini", "to": "studio", "interface": "eth0", "latency_s": 0.000_12,
             "bytes_per_s": 940_000_000, "sent_bytes_s": 47_000_000.0,
             "model_bytes_s": 41_000_000.0},
            {"from": "studio", "to": "mini", "interface": "en5", "latency_s": 0.000_35},
        ],
        "energy": {"watts": 64.2, "joules_per_token": 4.52},
        "instances": [
            {"id": "1", "model": "qwen3:8b", "state": "ready", "split": "auto",
             "nodes": ["mini", "studio"], "progress": null, "portrait": {
                "split": "pipeline", "measured_tok_s": 14.2, "predicted_tok_s": 14.9}},
            {"id": "2", "model": "smollm2", "state": "fetching", "split": "tensor",
             "nodes": ["mini"], "progress": [25, 100]},
            {"id": "3", "model": "broken", "state": "failed", "split": "auto",
             "nodes": ["mini"], "reason": "no tensor blk.3.attn_q.weight"},
        ],
        "requests": [
            {"request": 21, "model": "qwen3:8b", "prompt_tokens": 812, "tokens": 71,
             "tok_s": 14.9, "ttft_s": 1.31, "age_s": 6.0, "node": "mini"},
            {"request": 22, "model": "qwen3:8b", "prompt_tokens": 12, "tokens": 0,
             "age_s": 2.0, "node": null},
        ],
    })
}

fn view() -> TopView {
    let mut view = TopView::default();
    view.update(Ok(status()));
    view
}

#[test]
fn a_frame_of_80_by_24() {
    let expected = "\
paceline  mini · blue-otter-31 · 2 of 3 machines · 2 requests · 14.9 tokens/s
█
█
█
MACHINE         STATE   CPU   GHZ  MEMORY           TEMP  POWER  IN/S    OUT/S
mini            alive   83 %  3.4  75 % of 64 GiB   71 C  64 W   1.0 MiB 512 B
studio          alive   91 %  -    -                -     -      -       -
tower           dead    -     -    -                -     -      -       -

MODEL              STATE           SPLIT     TOK/S (PREDICTED)  ON
qwen3:8b           ready           pipeline  14.2 (14.9)        mini, studio
smollm2            fetching 25 %   tensor    - (-)              mini
broken             failed          auto      - (-)              no tensor blk.3.

LINK FROM       TO              BY       LATENCY  BANDWIDTH MODELS    SENDS
mini            studio          eth0     0.12 ms  940 MB/s  39 MiB/s  45 MiB/s
studio          mini            en5      0.35 ms  -         -         -

REQUEST  MODEL                  PROMPT  TOKENS  TOK/S   FIRST    AT
21       qwen3:8b               812     71      14.9    1.31 s   mini
22       qwen3:8b               12      0       -       (2 s)    here


q end  c chat  l load  u unload  s sort (name)  / filter  ? keys";
    assert_eq!(plain(&mut view(), (80, 24)), expected);
}

#[test]
fn every_size_is_drawn_without_a_panic() {
    for width in [0, 1, 3, 20, 79, 200, 500] {
        for height in [0, 1, 2, 7, 19, 60, 200] {
            plain(&mut view(), (width, height));
            plain(&mut TopView::default(), (width, height));
        }
    }
    let empty = plain(&mut TopView::default(), (80, 24));
    assert!(empty.contains("0 requests · 0.0 tokens/s"), "{empty}");
}

/// The expected screen is in this folder; it is that of `paceline top` in a terminal.
#[test]
fn a_frame_of_200_by_60() {
    let expected = include_str!("../200x60.txt").trim_end();
    assert_eq!(plain(&mut view(), (200, 60)), expected);
}

#[test]
fn a_terminal_that_is_resized_shows_each_size_whole() {
    let mut terminal = Terminal::new(TestBackend::new(80, 24)).unwrap();
    let mut resized = view();
    for (width, height) in [(80, 24), (20, 5), (200, 60), (1, 1), (80, 24)] {
        terminal.backend_mut().resize(width, height);
        terminal
            .draw(|frame| super::frame(&mut resized, frame))
            .unwrap();
        let shown = written(terminal.backend().buffer());
        assert_eq!(
            shown,
            plain(&mut view(), (width, height)),
            "{width} x {height}"
        );
    }
}

#[test]
fn a_small_terminal_keeps_the_first_line_and_the_keys() {
    let small = plain(&mut view(), (20, 5));
    let lines: Vec<&str> = small.lines().collect();
    assert_eq!(lines.len(), 5, "{small}");
    assert!(lines[0].starts_with("paceline  mini"), "{small}");
    assert_eq!(lines[4], "q end  c chat  l loa");
}

#[test]
fn a_narrow_terminal_has_fewer_columns_and_no_cut_ones() {
    let narrow = plain(&mut view(), (60, 24));
    let heading = |name: &str| narrow.lines().find(|line| line.starts_with(name)).unwrap();
    assert_eq!(
        heading("MACHINE"),
        "MACHINE         STATE   CPU   MEMORY           IN/S"
    );
    assert_eq!(heading("MODEL"), "MODEL              STATE           ON");
    assert_eq!(
        heading("LINK FROM"),
        "LINK FROM       TO              BY       LATENCY  BANDWIDTH"
    );
    assert_eq!(
        heading("REQUEST"),
        "REQUEST  MODEL                  TOKENS  TOK/S   AT"
    );
}

#[test]
fn every_table_can_be_scrolled_to_its_end_and_keys_are_told() {
    let mut view = view();
    let size = (80, 16);
    assert!(!plain(&mut view, size).contains("\n22 "));
    press(&mut view, KeyCode::End);
    let end = plain(&mut view, size);
    assert!(end.contains("\n22 "), "{end}");
    press(&mut view, KeyCode::Home);
    press(&mut view, KeyCode::Char('?'));
    let keys = plain(&mut view, size);
    assert!(keys.contains("PgUp, PgDn"), "{keys}");
    press(&mut view, KeyCode::Char('x'));
    assert!(plain(&mut view, size).starts_with("paceline  mini"));
}

#[test]
fn the_widest_values_have_room_at_80_columns() {
    let mut status = status();
    status["nodes"][0]["telemetry"] = json!({
        "cpu_busy": 1.0, "cpu_mhz": 3400.0, "memory_bytes": 1_099_511_627_776_u64,
        "memory_available_bytes": 0, "temperature_c": 101.0, "package_watts": 1200.0,
        "networks": [{"received_bytes_s": 999.0 * 1024.0, "sent_bytes_s": 1e9}],
    });
    let mut view = TopView::default();
    view.update(Ok(status));
    let text = plain(&mut view, (80, 24));
    let expected =
        "mini            alive   100 % 3.4  100 % of 1.0 TiB 101 C 1200 W 999 KiB 954 MiB";
    assert_eq!(text.lines().nth(5), Some(expected), "{text}");
}

#[test]
fn bytes_have_three_digits_at_most() {
    let told = [0.0, 999.4, 999.5, 1e4, 10.2e3, 1023.9 * 1024.0, 2e6, 1e18].map(short);
    let expected = [
        "0 B",
        "999 B",
        "1.0 KiB",
        "9.8 KiB",
        "10 KiB",
        "1.0 MiB",
        "1.9 MiB",
        "909495 TiB",
    ];
    assert_eq!(told, expected);
}

#[test]
fn a_machine_alone_has_no_row_of_links() {
    let mut status = status();
    status["links"] = json!([]);
    let mut view = TopView::default();
    view.update(Ok(status));
    assert!(!plain(&mut view, (200, 60)).contains("LINK"));
}

#[test]
fn sorting_filtering_and_scrolling() {
    let mut view = view();
    let first = |view: &mut TopView| {
        let text = plain(view, (80, 24));
        text.lines()
            .nth(5)
            .unwrap()
            .split(' ')
            .next()
            .unwrap()
            .to_owned()
    };
    view.sort = view.sort.next();
    assert_eq!(first(&mut view), "studio");
    view.sort = MachineSort::Name;
    view.filter = Some("tower".into());
    assert_eq!(first(&mut view), "tower");
    assert!(!plain(&mut view, (80, 24)).contains("qwen3"));
    view.clear_filter();
    view.scroll = usize::MAX;
    assert_eq!(first(&mut view), "mini", "there is room for all");
    view.scroll = 2;
    plain(&mut view, (80, 8));
    assert!(view.scroll <= 2);
}

#[test]
fn names_from_other_machines_cannot_drive_the_terminal() {
    let mut view = TopView::default();
    view.update(Ok(
        json!({"nodes": [{"name": "a\u{1b}[2Jb", "state": "alive"}]}),
    ));
    assert!(!plain(&mut view, (80, 24)).contains('\u{1b}'));
    view.update(Err("gone\u{7}".into()));
    let text = plain(&mut view, (80, 24));
    assert!(text.contains("does not answer") && !text.contains('\u{7}'));
}

fn press(view: &mut TopView, code: KeyCode) -> Option<TopAction> {
    view.handle_key(KeyEvent::from(code))
}

fn write(view: &mut TopView, words: &str) {
    for c in words.chars() {
        assert_eq!(press(view, KeyCode::Char(c)), None);
    }
}

#[test]
fn models_are_loaded_and_unloaded_by_name() {
    let mut view = view();
    write(&mut view, "lqwen3:4x");
    press(&mut view, KeyCode::Backspace);
    let shown = plain(&mut view, (80, 24));
    assert!(shown.contains("load: qwen3:4_"), "{shown}");
    let action = press(&mut view, KeyCode::Enter);
    assert_eq!(action, Some(TopAction::Load("qwen3:4".to_owned())));
    view.say("asked for qwen3:4".to_owned());
    assert!(plain(&mut view, (80, 24)).ends_with("asked for qwen3:4"));
    write(&mut view, "u");
    press(&mut view, KeyCode::Tab);
    let action = press(&mut view, KeyCode::Enter);
    assert_eq!(action, Some(TopAction::Unload("smollm2".to_owned())));
    write(&mut view, "l");
    assert_eq!(press(&mut view, KeyCode::Enter), None, "no name");
    assert_eq!(press(&mut view, KeyCode::Char('q')), Some(TopAction::End));
}

#[test]
fn a_chat_sends_its_conversation_and_shows_the_answer() {
    let mut view = view();
    write(&mut view, "cWhy q?");
    let Some(TopAction::Ask(body)) = press(&mut view, KeyCode::Enter) else {
        panic!("nothing is asked");
    };
    assert_eq!(body["model"], "qwen3:8b", "the one that is ready");
    assert_eq!(
        body["messages"],
        json!([{ "role": "user", "content": "Why q?" }])
    );
    view.hear("Because \u{1b}[2J");
    view.hear("q.\nIt is.");
    view.end_answer(Ok(()));
    assert!(plain(&mut view, (9, 12)).contains("\nBecause\n"));
    let shown = plain(&mut view, (40, 8));
    assert!(
        shown.contains("Why q?\n\nBecause") && !shown.contains('\u{1b}'),
        "{shown}"
    );
    assert!(shown.contains("q.\nIt is."), "{shown}");
    write(&mut view, "Go on");
    let Some(TopAction::Ask(body)) = press(&mut view, KeyCode::Enter) else {
        panic!("nothing is asked");
    };
    assert_eq!(body["messages"].as_array().unwrap().len(), 3);
    view.end_answer(Err("the node is stopping".into()));
    let shown = plain(&mut view, (80, 8));
    assert!(
        shown.contains("> Go on_\nqwen3:8b: the node is stopping"),
        "{shown}"
    );
    for (width, height) in [(0, 0), (1, 1), (3, 2), (200, 60)] {
        plain(&mut view, (width, height));
    }
    press(&mut view, KeyCode::Esc);
    assert!(plain(&mut view, (80, 24)).starts_with("paceline  mini"));
}
