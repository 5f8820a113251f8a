//! Configurations of `mlx_lm.lora` 0.32: the YAML of `--config`, or the `adapter_config.json` that
//! it leaves. What is absent has mlx-lm's default.
//!
//! YAML is read as far as such files use it. That is maps by indentation, lists of values in a line
//! or by dashes, texts with and without quotes, numbers, and comments. JSON is YAML.

use serde_json::{Map, Value, json};

/// An option of `paceline train` for each entry, in an order that does not matter: the option's
/// name, and its value.
///
/// # Errors
/// The line, or the entry, that nothing can be done with.
pub fn options(text: &str) -> Result<Vec<(&'static str, String)>, String> {
    let config = match serde_json::from_str(text) {
        Ok(Value::Object(map)) => map,
        _ => yaml(text)?,
    };
    let mut out = Vec::new();
    for (entry, option) in [
        ("data", "--data"),
        ("adapter_path", "--output"),
        ("max_seq_length", "--max-tokens-per-row"),
        ("seed", "--seed"),
    ] {
        let value = config.get(entry).cloned().unwrap_or_else(|| default(entry));
        if !value.is_null() {
            out.push((option, plain(entry, &value)?));
        }
    }
    let get = |entry: &str| config.get(entry).cloned().unwrap_or_else(|| default(entry));
    if let Some(model) = config.get("model") {
        out.push(("MODEL", plain("model", model)?));
    }
    steps(&get, &mut out)?;
    out.push((
        "--method",
        one_of(
            &get,
            "fine_tune_type",
            &[("lora", "lora"), ("full", "full")],
        )?,
    ));
    let rules = [("adam", "adamw"), ("adamw", "adamw"), ("sgd", "sgd")];
    out.push(("--optimizer", one_of(&get, "optimizer", &rules)?));
    out.push(("--weight-decay", decay(&get)?));
    // It shortens no gradient.
    out.push(("--clip", "0".to_owned()));
    let last = get("mask_prompt") == Value::Bool(true);
    out.push(("--train-on", if last { "last" } else { "all" }.to_owned()));
    match get("num_layers").as_i64() {
        Some(-1) => {}
        Some(layers @ 1..) => out.push(("--layers", layers.to_string())),
        _ => {
            return Err(format!(
                "num_layers is {}, expected -1, or 1 or more",
                get("num_layers")
            ));
        }
    }
    schedule(&get, &mut out)?;
    lora(&get("lora_parameters"), &mut out)?;
    Ok(out)
}

/// mlx-lm's own values.
fn default(entry: &str) -> Value {
    match entry {
        "batch_size" => json!(4),
        "iters" => json!(1000),
        "grad_accumulation_steps" => json!(1),
        "fine_tune_type" => json!("lora"),
        "optimizer" => json!("adam"),
        "mask_prompt" => json!(false),
        "num_layers" => json!(16),
        "learning_rate" => json!(1e-5),
        "max_seq_length" => json!(2048),
        "steps_per_eval" => json!(200),
        "save_every" => json!(100),
        "seed" => json!(0),
        "lora_parameters" => json!({ "rank": 8, "dropout": 0.0, "scale": 20.0 }),
        _ => Value::Null,
    }
}

type Get<'a> = &'a dyn Fn(&str) -> Value;

fn plain(entry: &str, value: &Value) -> Result<String, String> {
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Number(number) => Ok(number.to_string()),
        other => Err(format!("{entry} is {other}, expected a text or a number")),
    }
}

fn whole(get: Get<'_>, entry: &str) -> Result<u64, String> {
    let value = get(entry);
    let number = value.as_u64();
    number.ok_or_else(|| format!("{entry} is {value}, expected a whole number"))
}

fn one_of(get: Get<'_>, entry: &str, known: &[(&str, &str)]) -> Result<String, String> {
    let value = get(entry);
    let found = known.iter().find(|(name, _)| value == *name);
    let names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
    let ours = found.map(|(_, ours)| (*ours).to_owned());
    ours.ok_or_else(|| format!("{entry} is {value}, expected one of {}", names.join(", ")))
}

/// Counts of iterations, of which some make an update: our step. Those behind the last update make
/// none.
fn steps(get: Get<'_>, out: &mut Vec<(&'static str, String)>) -> Result<(), String> {
    let gathered = whole(get, "grad_accumulation_steps")?.max(1);
    let batch = whole(get, "batch_size")?.saturating_mul(gathered);
    out.push(("--batch", batch.to_string()));
    out.push(("--steps", (whole(get, "iters")? / gathered).to_string()));
    for (entry, option) in [
        ("steps_per_eval", "--eval-every"),
        ("save_every", "--save-every"),
    ] {
        let every = (whole(get, entry)? / gathered).max(1);
        out.push((option, every.to_string()));
    }
    Ok(())
}

/// Decay of weights: in adamw MLX's, unless the optimizer's own entries say another one.
fn decay(get: Get<'_>) -> Result<String, String> {
    let rule = get("optimizer");
    let rule = rule.as_str().unwrap_or_default();
    let usual = if rule == "adamw" { 0.01 } else { 0.0 };
    let own = get("optimizer_config")[rule].clone();
    let own = own.as_object().cloned().unwrap_or_default();
    if let Some(other) = own.keys().find(|key| *key != "weight_decay") {
        return Err(format!(
            "optimizer_config.{rule}.{other} is {}, expected weight_decay alone",
            own[other]
        ));
    }
    let Some(value) = own.get("weight_decay") else {
        return Ok(usual.to_string());
    };
    let number = value.as_f64();
    let number = number.ok_or_else(|| format!("weight_decay is {value}, expected a number"))?;
    Ok(number.to_string())
}

/// The learning rate and how it goes on, update by update.
fn schedule(get: Get<'_>, out: &mut Vec<(&'static str, String)>) -> Result<(), String> {
    let (mut rate, schedule) = (get("learning_rate"), get("lr_schedule"));
    let (mut name, mut warmup) = ("constant", 0);
    if !schedule.is_null() {
        name = match schedule["name"].as_str() {
            Some("cosine_decay") => "cosine",
            Some("linear_schedule") => "linear",
            _ => {
                let got = &schedule["name"];
                let expected = "expected cosine_decay or linear_schedule";
                return Err(format!("lr_schedule.name is {got}, {expected}"));
            }
        };
        let arguments = &schedule["arguments"];
        rate = arguments[0].clone();
        // cosine_decay(init, decay_steps, end = 0), linear_schedule(init, end, steps).
        let (steps, end) = if name == "cosine" { (1, 2) } else { (2, 1) };
        let end = arguments[end].as_f64().unwrap_or(0.0);
        if end != 0.0 {
            return Err(format!("lr_schedule ends at {end}, expected 0"));
        }
        out.push(("--decay-steps", decay_steps(&arguments[steps])?));
        warmup = schedule["warmup"].as_u64().unwrap_or(0);
    }
    let number = rate.as_f64();
    let number = number.ok_or_else(|| format!("the learning rate is {rate}, expected a number"))?;
    out.push(("--lr", number.to_string()));
    out.push(("--schedule", name.to_owned()));
    out.push(("--warmup", warmup.to_string()));
    Ok(())
}

/// The number of updates over which a rate falls, which mlx-lm has no default for.
fn decay_steps(value: &Value) -> Result<String, String> {
    // YAML's 1e3 is a number with a fraction.
    let whole = value.as_f64().filter(|n| n.fract() == 0.0 && *n >= 1.0);
    let whole = whole.filter(|n| *n <= (1u64 << 32) as f64);
    let steps = whole.map(|n| (n as u64).to_string());
    steps
        .ok_or_else(|| format!("lr_schedule.arguments has {value} decay steps, expected 1 to 2^32"))
}

/// The size and the place of adapters.
fn lora(parameters: &Value, out: &mut Vec<(&'static str, String)>) -> Result<(), String> {
    let of = |entry: &str, usual: f64| {
        let value = &parameters[entry];
        let known = if value.is_null() {
            Some(usual)
        } else {
            value.as_f64()
        };
        known.ok_or_else(|| format!("lora_parameters.{entry} is {value}, expected a number"))
    };
    let (rank, scale) = (of("rank", 8.0)?, of("scale", 20.0)?);
    out.push(("--rank", rank.to_string()));
    out.push(("--alpha", (scale * rank).to_string()));
    out.push(("--dropout", of("dropout", 0.0)?.to_string()));
    if let Some(keys) = parameters["keys"].as_array() {
        let short = |key: &Value| {
            let name = key.as_str().and_then(|key| key.rsplit('.').next());
            name.map(str::to_owned)
                .ok_or_else(|| format!("lora_parameters.keys has {key}, expected a text"))
        };
        let names: Vec<String> = keys.iter().map(short).collect::<Result<_, _>>()?;
        out.push(("--targets", names.join(",")));
    }
    Ok(())
}

/// A line that says something: its number, its indentation, and the text.
type Line<'a> = (usize, usize, &'a str);

fn yaml(text: &str) -> Result<Map<String, Value>, String> {
    let lines = text.lines().enumerate().map(|(i, line)| {
        let said = without_comment(line).trim_end();
        let indent = said.len() - said.trim_start().len();
        (i + 1, indent, said.trim_start())
    });
    let lines: Vec<Line<'_>> = lines.filter(|(_, _, said)| !said.is_empty()).collect();
    let lines: Vec<Line<'_>> = lines
        .into_iter()
        .filter(|(_, _, said)| *said != "---")
        .collect();
    let (map, rest) = map(&lines, 0)?;
    match rest.first() {
        None => Ok(map),
        Some((line, _, said)) => Err(format!("line {line}: {said:?} is not understood")),
    }
}

/// A line up to its comment, if it has one.
fn without_comment(line: &str) -> &str {
    let mut quote = None;
    for (i, c) in line.char_indices() {
        match (quote, c) {
            (None, '"' | '\'') => quote = Some(c),
            (Some(open), c) if c == open => quote = None,
            (None, '#') if i == 0 || line[..i].ends_with([' ', '\t']) => return &line[..i],
            _ => {}
        }
    }
    line
}

/// A map of lines that are indented like the first, and the lines behind it.
fn map<'a, 'b>(
    mut lines: &'b [Line<'a>],
    indent: usize,
) -> Result<(Map<String, Value>, &'b [Line<'a>]), String> {
    let mut out = Map::new();
    while let Some(((number, at, said), rest)) = lines.split_first() {
        if *at != indent {
            break;
        }
        let wrong = || format!("line {number}: {said:?} is no entry of a map");
        let (key, value) = said.split_once(':').ok_or_else(wrong)?;
        let key = key.trim().trim_matches(['"', '\'']).to_owned();
        lines = rest;
        let value = match (value.trim(), rest.first()) {
            ("", Some((_, inner, said))) if said.starts_with("- ") && *inner >= indent => {
                let n = rest
                    .iter()
                    .take_while(|l| l.1 == *inner && l.2.starts_with("- "));
                let n = n.count();
                lines = &rest[n..];
                let items = rest[..n]
                    .iter()
                    .map(|(number, _, said)| scalar(&said[2..], *number));
                Value::Array(items.collect::<Result<_, _>>()?)
            }
            ("", Some((_, inner, _))) if *inner > indent => {
                let (inner, rest) = map(rest, *inner)?;
                lines = rest;
                Value::Object(inner)
            }
            (value, _) => scalar(value, *number)?,
        };
        out.insert(key, value);
    }
    Ok((out, lines))
}

/// A value in a line.
fn scalar(text: &str, line: usize) -> Result<Value, String> {
    let text = text.trim();
    if let Some(inner) = text.strip_prefix('[') {
        let inner = inner.strip_suffix(']');
        let inner = inner.ok_or_else(|| format!("line {line}: a list without an end"))?;
        let items = inner.split(',').filter(|item| !item.trim().is_empty());
        let items = items.map(|item| scalar(item, line));
        return Ok(Value::Array(items.collect::<Result<_, _>>()?));
    }
    for quote in ['"', '\''] {
        if let Some(inner) = text.strip_prefix(quote).and_then(|t| t.strip_suffix(quote)) {
            return Ok(Value::String(inner.to_owned()));
        }
    }
    Ok(match text {
        "" | "null" | "~" => Value::Null,
        "true" | "True" => Value::Bool(true),
        "false" | "False" => Value::Bool(false),
        text => match (text.parse::<i64>(), text.parse::<f64>()) {
            (Ok(whole), _) => json!(whole),
            (_, Ok(number)) => json!(number),
            _ => Value::String(text.to_owned()),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sample of mlx-lm's documentation, shortened.
    const SAMPLE: &str = r#"
# The path to the local model directory or Hugging Face repo.
model: "mlx-community/SmolLM2-135M"
train: true
data: "/path/to/training/data"   # a folder
seed: 7
lora_layers: 8
num_layers: 8
batch_size: 4
grad_accumulation_steps: 2
iters: 101
optimizer: adamw
optimizer_config:
  adamw:
    weight_decay: 0.05
learning_rate: 1e-4
mask_prompt: true
max_seq_length: 512
lora_parameters:
  # The layer keys to apply LoRA to.
  keys: ["self_attn.q_proj", "self_attn.v_proj"]
  rank: 8
  scale: 20.0
  dropout: 0.1
lr_schedule:
  name: cosine_decay
  warmup: 100
  warmup_init: 1e-7
  arguments:
    - 2e-5
    - 1000
"#;

    fn find(options: &[(&'static str, String)], name: &str) -> Option<String> {
        let found = options.iter().find(|(option, _)| *option == name);
        found.map(|(_, value)| value.clone())
    }

    #[test]
    fn the_sample_of_the_documentation_is_read() {
        let told = options(SAMPLE).unwrap();
        for (name, value) in [
            ("MODEL", "mlx-community/SmolLM2-135M"),
            ("--data", "/path/to/training/data"),
            ("--seed", "7"),
            ("--layers", "8"),
            ("--batch", "8"),
            ("--steps", "50"),
            ("--weight-decay", "0.05"),
            ("--lr", "0.00002"),
            ("--schedule", "cosine"),
            ("--warmup", "100"),
            ("--decay-steps", "1000"),
            ("--train-on", "last"),
            ("--max-tokens-per-row", "512"),
            ("--rank", "8"),
            ("--alpha", "160"),
            ("--dropout", "0.1"),
            ("--targets", "q_proj,v_proj"),
            ("--clip", "0"),
            ("--save-every", "50"),
            ("--eval-every", "100"),
        ] {
            assert_eq!(find(&told, name).as_deref(), Some(value), "{name}");
        }
    }

    #[test]
    fn json_and_defaults_are_read_and_what_we_have_not_is_named() {
        let told = options("{\"num_layers\": -1}").unwrap();
        assert_eq!(find(&told, "--layers"), None);
        assert_eq!(find(&told, "--steps").as_deref(), Some("1000"));
        assert_eq!(find(&told, "--lr").as_deref(), Some("0.00001"));
        assert_eq!(find(&told, "--data"), None);
        for (text, said) in [
            ("optimizer: muon", "optimizer is \"muon\""),
            ("fine_tune_type: dora", "fine_tune_type is \"dora\""),
            ("iters: many", "iters is \"many\""),
            ("a: 1\n  b: 2", "line 2"),
            ("keys: [1, 2", "line 1"),
            ("nothing", "line 1"),
            ("lr_schedule:\n  name: step_decay", "lr_schedule.name"),
            (
                "lr_schedule:\n  name: linear_schedule\n  arguments: [1e-4, 0.0]",
                "lr_schedule.arguments has null decay steps",
            ),
            ("num_layers: 0", "num_layers is 0"),
            (
                "optimizer_config:\n  adam:\n    eps: 1",
                "optimizer_config.adam.eps",
            ),
        ] {
            let error = options(text).unwrap_err();
            assert!(error.contains(said), "{text}: {error}");
        }
    }
}
