//! The constants are fitted to the `fit` rows alone, and the held-out rows stay within the bars.

use paceline_plan::publications::{BUILTIN, Published};
use paceline_plan::validate::{Report, validate};
use paceline_plan::{Calibration, fit::fit};

fn published() -> Published {
    Published::from_toml(BUILTIN, "published.toml").expect("the rows in the tree read")
}

fn report() -> Report {
    let constants = Calibration::builtin().expect("the constants in the tree read");
    validate(&published(), &constants).expect("the catalogue in the tree reads")
}

#[test]
fn the_constants_in_the_tree_are_those_that_the_fit_rows_give() {
    let kept = Calibration::builtin().unwrap();
    // Held-out rows are thrown away before the fit, so that they cannot have a say.
    let mut rows = published();
    rows.rows.retain(|row| row.split == "fit");
    let fitted = fit(&rows, &kept).unwrap();
    for (kept, fitted) in kept.parameters().zip(fitted.parameters()) {
        let ratio = kept.value / fitted.value;
        assert!(
            (0.995..1.005).contains(&ratio),
            "{}: {} {}",
            kept.name,
            kept.value,
            fitted.value
        );
    }
}

#[test]
fn complete_held_out_rows_of_high_confidence_keep_the_bars() {
    let report = report();
    let set = report
        .sets
        .iter()
        .find(|set| set.name == "held_out, high")
        .unwrap();
    assert_eq!((set.rows, set.skipped), (27, 0));
    assert!(set.median <= 0.10, "median {}", set.median);
    assert!(set.worst <= 2.0, "worst ratio {}", set.worst);
}

/// Decode of gpt-oss on machines of 2026, under llama.cpp and vLLM, on one machine and a pair. Its
/// files have experts in 4.25 bits, and the rest in 8.5 or 4.25, not in 16.
#[test]
fn gpt_oss_of_2026_decodes_as_published() {
    let report = report();
    let rows = report.rows.iter().filter(|scored| {
        let row = &scored.row;
        let held = row.complete && row.split == "held_out" && row.metric == "decode_tok_s";
        held && row.model.starts_with("gpt-oss")
    });
    let errors: Vec<(&str, f64)> = rows
        .map(|scored| (scored.row.id.as_str(), scored.error().unwrap()))
        .collect();
    assert_eq!(errors.len(), 4);
    for (id, error) in errors {
        assert!(error.abs() < 0.12, "{id}: {error}");
    }
}

/// Parameters of models whose sizes were read from configurations, against their names'.
#[test]
fn models_of_2026_have_their_published_sizes() {
    let catalogue = paceline_plan::Catalogue::builtin().unwrap();
    for (name, total, active) in [
        ("GLM-4.6-357B-A32B", 355.0, 32.0),
        ("Kimi-K2.5-1T-A32B", 1027.0, 32.0),
        ("Qwen3.5-35B-A3B", 35.0, 3.0),
        ("Qwen3.5-397B-A17B", 397.0, 17.0),
        ("DeepSeek-V4-Flash-284B-A13B", 284.0, 13.0),
    ] {
        let shape = catalogue.model(name).unwrap().shape(8.0).unwrap();
        let [all, used] = [shape.params(), shape.active_params()].map(|n| n / 1e9);
        assert!((all / total - 1.0).abs() < 0.02, "{name}: {all}");
        assert!((used / active - 1.0).abs() < 0.1, "{name}: {used}");
    }
    // DeepSeek V4 keeps a sixth of the positions, and a key of 512 numbers for each.
    let v4 = catalogue.model("DeepSeek-V4-Flash").unwrap();
    let bytes = v4.shape(8.0).unwrap().kv_bytes_per_token();
    assert!((6.8e3..7.0e3).contains(&bytes), "{bytes}");
}

#[test]
fn every_complete_row_is_predicted() {
    for scored in report().rows.iter().filter(|scored| scored.row.complete) {
        assert!(scored.said.is_ok(), "{}: {:?}", scored.row.id, scored.said);
    }
}

#[test]
fn published_orders_are_mostly_kept() {
    let report = report();
    let kept = report
        .orderings
        .iter()
        .filter(|o| o.predicted > 1.0)
        .count();
    assert!(
        kept * 10 >= report.orderings.len() * 7,
        "{kept} of {}",
        report.orderings.len()
    );
}

/// Rows that are in no file here, from reports (docs/planner.md names them): no fit used them.
#[test]
fn rows_from_elsewhere_are_met() {
    let text = r#"
        [[measurement]] # b4rtaz/distributed-llama PR 64
        id = "pi5-4n"
        model = "Llama-3.1-8B"
        bits = 4.5
        hardware = [{ kind = "raspberry-pi-5-8", count = 4 }]
        n_nodes = 4
        interconnect = "1gbe"
        strategy = "tensor"
        framework = "distributed-llama"
        concurrency = 1
        metric = "decode_tok_s"
        value = 4.08
        complete = true
        confidence = "high"
        [[measurement]] # geerlingguy/beowulf-ai-cluster issue 17
        id = "r1"
        model = "DeepSeek-V3.1-671B"
        bits = 4.82
        hardware = [{ kind = "mac-studio-m3-ultra-512", count = 1 }]
        strategy = "single"
        framework = "llama.cpp"
        metric = "decode_tok_s"
        value = 20.2
        complete = true
        confidence = "high"
        [[measurement]] # exo-explore/exo issue 1826
        id = "kimi-pp"
        model = "Kimi-K2-1T-A32B"
        quantization = "4-bit (native)"
        bits = 4.6
        hardware = [{ kind = "mac-studio-m3-ultra-512", count = 2 }]
        n_nodes = 2
        interconnect = "tb5-rdma"
        strategy = "pipeline"
        framework = "exo 1.0"
        metric = "decode_tok_s"
        value = 12.6
        complete = true
        confidence = "medium"
    "#;
    let rows = Published::from_toml(text, "elsewhere").unwrap();
    let report = validate(&rows, &Calibration::builtin().unwrap()).unwrap();
    for scored in &report.rows {
        let error = scored.error().unwrap();
        assert!(error.abs() < 0.2, "{}: {error}", scored.row.id);
    }
}

/// The row names a machine that the catalogue has with other memory, or a prompt of no stated
/// length. Or its model's file has no expert groups. Facts of similar ones are used instead.
#[test]
fn what_a_row_leaves_out_is_taken_from_its_like() {
    let row = |id: &str, kind: &str, memory: &str, metric: &str| {
        format!(
            "[[measurement]]\nid = \"{id}\"\nmodel = \"Llama-3.1-8B\"\nbits = 4.5\n\
             hardware = [{{ kind = \"{kind}\", count = 1{memory} }}]\nstrategy = \"single\"\n\
             framework = \"llama.cpp\"\nmetric = \"{metric}\"\nvalue = 100.0\ncomplete = true\n"
        )
    };
    let known = "mac-studio-m3-ultra-256";
    let text = [
        row("known", known, "", "decode_tok_s"),
        row("named", "mac-studio-m3-ultra-96", "", "decode_tok_s"),
        row(
            "stated",
            "mac-studio-m3-ultra-x",
            ", memory_gb = 96",
            "decode_tok_s",
        ),
        row("short", known, "", "prefill"),
        row("long", known, "", "prefill").replace("value", "prompt_tokens = 512\nvalue"),
    ];
    let rows = Published::from_toml(&text.concat(), "rows").unwrap();
    let report = validate(&rows, &Calibration::builtin().unwrap()).unwrap();
    let said = |i: usize| report.rows[i].said.as_ref().map(|said| said.value);
    assert_eq!(said(0), said(1));
    assert!(said(2).is_err(), "no family has this name");
    assert_eq!(said(3), said(4));

    let own = "[[model]]\nname = \"DeepSeek-V3.1-671B\"\nlayers = 61\nhidden = 7168\nheads = 128\n\
               kv_heads = 128\nhead_dim = 192\nffn = 18432\nvocab = 129280\n";
    let catalogue = Published::from_toml(own, "own")
        .unwrap()
        .catalogue()
        .unwrap();
    let model = catalogue.model("DeepSeek-V3.1-671B").unwrap();
    assert_eq!(
        (model.experts, model.expert_groups),
        (0, Some(8)),
        "the file's, and the tree's"
    );
}
