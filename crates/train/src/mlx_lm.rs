//! Configurations of `mlx_lm.lora` 0.32: the YAML of `--config`, or the `adapter_config.json` that
//! it leaves.
//!
//! An entry that is absent or null has mlx-lm's default. Each entry becomes an option, or is
//! ignored with a reason, or is an error with its line.

mod entries;
mod yaml;

use std::fmt;

use entries::Entries;
use yaml::{YamlNode, YamlValue};

/// Entries that become options, and those that must have one value.
const KNOWN: [&str; 19] = [
    "adapter_path",
    "batch_size",
    "data",
    "fine_tune_type",
    "grad_accumulation_steps",
    "iters",
    "learning_rate",
    "lora_parameters",
    "lr_schedule",
    "mask_prompt",
    "max_seq_length",
    "model",
    "num_layers",
    "optimizer",
    "optimizer_config",
    "resume_adapter_file",
    "save_every",
    "seed",
    "steps_per_eval",
];

/// Entries that `paceline train` answers by itself: it always trains, and the file was named.
const ANSWERED: [&str; 2] = ["config", "train"];

/// mlx-lm's optimizers, each with an entry in `optimizer_config`.
const OPTIMIZERS: [&str; 5] = ["adafactor", "adam", "adamw", "muon", "sgd"];

/// Most updates over which a rate falls: the bound of `--decay-steps`.
const DECAY_STEPS_MAX: f64 = (1u64 << 32) as f64;

/// Why a configuration cannot be used.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Error {
    #[error("line {line}: {reason}")]
    Syntax {
        /// The line, from 1.
        line: usize,
        /// The parser's reason.
        reason: String,
    },
    /// A form that YAML has and this reader does not take.
    #[error("line {line}: {form} is not supported")]
    Form {
        /// The line, from 1.
        line: usize,
        form: &'static str,
    },
    #[error("line {line}: the entry {name} is unknown")]
    Unknown {
        /// The line, from 1.
        line: usize,
        /// The name, with those of the maps around it.
        name: String,
    },
    /// Two entries of a map have the same name.
    #[error("line {line}: the entry {name} is there twice")]
    Twice {
        /// The second one's line, from 1.
        line: usize,
        name: String,
    },
    /// An entry has a value that cannot be used.
    #[error("line {line}: {name} is {value}, expected {expected}")]
    Value {
        /// The value's line, from 1.
        line: usize,
        /// The entry's name, with those of the maps around it.
        name: String,
        value: String,
        /// The values that can be used.
        expected: String,
    },
}

/// An entry that has another value than mlx-lm's default and changes nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ignored {
    /// Its line, from 1.
    pub line: usize,
    pub name: String,
    /// Why it changes nothing.
    pub reason: &'static str,
}

impl fmt::Display for Ignored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { line, name, reason } = self;
        write!(f, "line {line}: {name} is ignored: {reason}")
    }
}

/// Options and ignored entries of a configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Config {
    /// Options of `paceline train` and their values; the model is `MODEL`.
    pub options: Vec<(&'static str, String)>,
    /// Entries that change nothing.
    pub ignored: Vec<Ignored>,
}

impl Config {
    /// Reads the text of a configuration.
    ///
    /// # Errors
    /// [`Error`] with the line.
    pub fn read(text: &str) -> Result<Self, Error> {
        let entries = yaml::read(text)?;
        let entries = Entries::new(String::new(), 1, &entries);
        let mut config = Self {
            ignored: ignored(&entries)?,
            ..Self::default()
        };
        if let Some(node) = entries.get("resume_adapter_file") {
            return Err(entries.wrong("resume_adapter_file", node, "null"));
        }
        config.places(&entries)?;
        config.steps(&entries)?;
        config.method(&entries)?;
        config.schedule(&entries)?;
        config.lora(&entries)?;
        Ok(config)
    }

    fn push(&mut self, option: &'static str, value: impl ToString) {
        self.options.push((option, value.to_string()));
    }

    fn places(&mut self, entries: &Entries<'_>) -> Result<(), Error> {
        for (entry, option) in [
            ("data", "--data"),
            ("adapter_path", "--output"),
            ("model", "MODEL"),
        ] {
            if let Some(text) = entries.text(entry)? {
                self.push(option, text);
            }
        }
        self.push(
            "--max-tokens-per-row",
            entries.whole("max_seq_length", 2048)?,
        );
        self.push("--seed", entries.whole("seed", 0)?);
        Ok(())
    }

    /// Converts counts of iterations to steps. A step is an update, made of as many iterations as
    /// gradients are accumulated over. Iterations behind the last update are left out.
    fn steps(&mut self, entries: &Entries<'_>) -> Result<(), Error> {
        let gathered = entries.whole("grad_accumulation_steps", 1)?.max(1);
        let batch = entries.whole("batch_size", 4)?;
        self.push("--batch", batch.saturating_mul(gathered));
        self.push("--steps", entries.whole("iters", 1000)? / gathered);
        for (entry, option, usual) in [
            ("steps_per_eval", "--eval-every", 200),
            ("save_every", "--save-every", 100),
        ] {
            self.push(option, (entries.whole(entry, usual)? / gathered).max(1));
        }
        Ok(())
    }

    fn method(&mut self, entries: &Entries<'_>) -> Result<(), Error> {
        let methods = [("lora", "lora"), ("full", "full")];
        self.push(
            "--method",
            entries.one_of("fine_tune_type", "lora", &methods)?,
        );
        let rules = [("adam", "adamw"), ("adamw", "adamw"), ("sgd", "sgd")];
        self.push("--optimizer", entries.one_of("optimizer", "adam", &rules)?);
        self.push("--weight-decay", decay(entries)?);
        self.push("--clip", 0); // mlx-lm shortens no gradient
        let last = entries.flag("mask_prompt", false)?;
        self.push("--train-on", if last { "last" } else { "all" });
        match entries.get("num_layers").map(|node| (node, &node.value)) {
            None => self.push("--layers", 16),
            Some((_, YamlValue::Integer(-1))) => {}
            Some((_, YamlValue::Integer(layers @ 1..))) => self.push("--layers", layers),
            Some((node, _)) => return Err(entries.wrong("num_layers", node, "-1, or 1 or more")),
        }
        Ok(())
    }

    /// The learning rate and its schedule, update by update.
    fn schedule(&mut self, entries: &Entries<'_>) -> Result<(), Error> {
        let Some(schedule) = entries.map("lr_schedule")? else {
            self.push("--lr", entries.number("learning_rate", 1e-5)?);
            self.push("--schedule", "constant");
            self.push("--warmup", 0);
            return Ok(());
        };
        schedule.only(&["name", "arguments", "warmup", "warmup_init"])?;
        let names = [("cosine_decay", "cosine"), ("linear_schedule", "linear")];
        let name = schedule.one_of("name", "", &names)?;
        // cosine_decay(init, decay_steps, end = 0), linear_schedule(init, end, steps).
        let (steps, end, least) = if name == "cosine" {
            (1, 2, 2)
        } else {
            (2, 1, 3)
        };
        let arguments = schedule.numbers("arguments", least)?;
        let wrong = |which: usize, expected: String| Error::Value {
            line: schedule.node("arguments").line,
            name: format!("lr_schedule.arguments[{which}]"),
            value: arguments[which].to_string(),
            expected,
        };
        if arguments.get(end).is_some_and(|end| *end != 0.0) {
            return Err(wrong(end, "0, where every rate ends".to_owned()));
        }
        let n = arguments[steps];
        if n.fract() != 0.0 || !(1.0..=DECAY_STEPS_MAX).contains(&n) {
            return Err(wrong(steps, format!("1 to {DECAY_STEPS_MAX} decay steps")));
        }
        self.push("--decay-steps", n as u64);
        self.push("--lr", arguments[0]);
        self.push("--schedule", name);
        self.push("--warmup", schedule.whole("warmup", 0)?);
        if schedule.number("warmup_init", 0.0)? != 0.0 {
            self.ignored.push(Ignored {
                line: schedule.node("warmup_init").line,
                name: "lr_schedule.warmup_init".to_owned(),
                reason: "the warm-up begins at the rate divided by its steps",
            });
        }
        Ok(())
    }

    /// The size and the place of adapters.
    fn lora(&mut self, entries: &Entries<'_>) -> Result<(), Error> {
        let lora = entries.map("lora_parameters")?;
        let lora = lora.unwrap_or_else(|| Entries::new(String::new(), 1, &[]));
        lora.only(&["rank", "scale", "dropout", "keys"])?;
        let (rank, scale) = (lora.whole("rank", 8)?, lora.number("scale", 20.0)?);
        self.push("--rank", rank);
        self.push("--alpha", scale * rank as f64);
        self.push("--dropout", lora.number("dropout", 0.0)?);
        let Some(node) = lora.get("keys") else {
            return Ok(());
        };
        let wrong = |node: &YamlNode| lora.wrong("keys", node, "a list of texts");
        let YamlValue::List(keys) = &node.value else {
            return Err(wrong(node));
        };
        let short = |key: &YamlNode| match &key.value {
            YamlValue::Text(key) => Ok(key.rsplit('.').next().unwrap_or(key).to_owned()),
            _ => Err(wrong(key)),
        };
        let names: Vec<String> = keys.iter().map(short).collect::<Result<_, _>>()?;
        self.push("--targets", names.join(","));
        Ok(())
    }
}

/// Entries that change nothing here: mlx-lm's default, and the reason.
fn without_effect() -> [(&'static str, YamlValue, &'static str); 9] {
    use YamlValue::{Bool, Integer, Null};
    let (no_test, curves) = (
        "no test set is read; held-out data is --valid",
        "curves are written for TensorBoard",
    );
    let again = "activations beyond an eighth of the free memory are computed again";
    [
        ("clear_cache_threshold", Integer(0), "MLX's cache is kept"),
        ("grad_checkpoint", Bool(false), again),
        ("project_name", Null, curves),
        ("report_to", Null, curves),
        ("steps_per_report", Integer(10), "every step is in metrics"),
        ("test", Bool(false), no_test),
        ("test_batches", Integer(500), no_test),
        ("trust_remote_code", Bool(false), "no model's code is run"),
        ("val_batches", Integer(25), "all held-out rows are judged"),
    ]
}

/// The entries without effect that have another value than mlx-lm's default.
fn ignored(entries: &Entries<'_>) -> Result<Vec<Ignored>, Error> {
    let table = without_effect();
    let names = table.iter().map(|(name, _, _)| *name);
    let known: Vec<&str> = names.chain(KNOWN).chain(ANSWERED).collect();
    entries.only(&known)?;
    let told = table.into_iter().filter_map(|(name, usual, reason)| {
        let node = entries.get(name)?;
        (node.value != usual).then(|| Ignored {
            line: node.line,
            name: name.to_owned(),
            reason,
        })
    });
    Ok(told.collect())
}

/// Decay of weights: in adamw MLX's, unless the optimizer's own entries say another one.
fn decay(entries: &Entries<'_>) -> Result<f64, Error> {
    let rule = entries.text("optimizer")?.unwrap_or("adam");
    let usual = if rule == "adamw" { 0.01 } else { 0.0 };
    let Some(all) = entries.map("optimizer_config")? else {
        return Ok(usual);
    };
    all.only(&OPTIMIZERS)?;
    let Some(own) = all.map(rule)? else {
        return Ok(usual);
    };
    own.only(&["weight_decay"])?;
    own.number("weight_decay", usual)
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
        let told = Config::read(SAMPLE).unwrap().options;
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
    fn json_and_defaults_are_read() {
        let told = Config::read("{\"num_layers\": -1}").unwrap().options;
        assert_eq!(find(&told, "--layers"), None);
        assert_eq!(find(&told, "--steps").as_deref(), Some("1000"));
        assert_eq!(find(&told, "--lr").as_deref(), Some("0.00001"));
        assert_eq!(find(&told, "--data"), None);
    }

    /// Values of mlx-lm 0.32.2's loader. Before, braces were a text, and the defaults were trained.
    #[test]
    fn maps_in_braces_have_their_numbers() {
        let config = Config::read(
            "lora_parameters: {rank: 4, dropout: 0.1, scale: 10.0}\n\
             lr_schedule: {name: cosine_decay, warmup: 100, arguments: [1e-5, 1000]}\n\
             optimizer: adamw\noptimizer_config: {adamw: {weight_decay: 0.5}}\n\
             grad_checkpoint: true\nval_batches: 25\n",
        );
        let Config { options, ignored } = config.unwrap();
        for (name, value) in [
            ("--rank", "4"),
            ("--alpha", "40"),
            ("--dropout", "0.1"),
            ("--lr", "0.00001"),
            ("--warmup", "100"),
            ("--decay-steps", "1000"),
            ("--weight-decay", "0.5"),
        ] {
            assert_eq!(find(&options, name).as_deref(), Some(value), "{name}");
        }
        let told: Vec<String> = ignored.iter().map(ToString::to_string).collect();
        let reason = "activations beyond an eighth of the free memory are computed again";
        assert_eq!(
            told,
            [format!("line 5: grad_checkpoint is ignored: {reason}")]
        );
    }

    #[test]
    fn what_is_not_understood_ends_with_its_line() {
        for (text, said) in [
            ("optimizer: muon", "optimizer is \"muon\""),
            ("fine_tune_type: dora", "fine_tune_type is \"dora\""),
            ("a: 1\n  b: 2", "line 2"),
            ("keys: [1, 2", "line 1"),
            ("lr_schedule:\n  name: step_decay", "lr_schedule.name"),
            (
                "lr_schedule: {name: linear_schedule, arguments: [1e-4, 0.0]}",
                "lr_schedule.arguments is a list of 2, expected 3 numbers",
            ),
            ("num_layers: 0", "num_layers is 0"),
            (
                "optimizer_config: {adam: {eps: 1}}",
                "optimizer_config.adam.eps",
            ),
            (
                "seed: 1\nlora_layers: 8",
                "line 2: the entry lora_layers is unknown",
            ),
            (
                "lora_parameters:\n  rank: 8\n  alpha: 16",
                "line 3: the entry lora_parameters.alpha is unknown",
            ),
            (
                "lora_parameters: rank 8",
                "line 1: lora_parameters is \"rank 8\", expected a map",
            ),
            (
                "lora_parameters: {rank: \"4\"}",
                "lora_parameters.rank is \"4\"",
            ),
            (
                "lora_parameters: {scale: .inf}",
                "lora_parameters.scale is inf",
            ),
            (
                "lora_parameters: {keys: q_proj}",
                "lora_parameters.keys is \"q_proj\"",
            ),
            ("mask_prompt: 1", "mask_prompt is 1, expected true or false"),
            ("iters: 1e3", "iters is 1000.0, expected a whole number"),
            (
                "learning_rate: \"1e-4\"",
                "learning_rate is \"1e-4\", expected a number",
            ),
            ("seed: 1\nseed: 2", "line 2: the entry seed is there twice"),
            ("resume_adapter_file: a.safetensors", "expected null"),
            (
                "lr_schedule: {name: cosine_decay, arguments: [1e-5, 1000, 1e-7]}",
                "lr_schedule.arguments[2] is 0.0000001, expected 0",
            ),
            (
                "lr_schedule: {name: cosine_decay, arguments: [1e-5, 1000], warmup: many}",
                "lr_schedule.warmup is \"many\"",
            ),
            (
                "lr_schedule: {arguments: [1e-5, 9]}",
                "lr_schedule.name is null",
            ),
            (
                "lr_schedule: {name: cosine_decay, arguments: [1e-5, 0.5]}",
                "[1] is 0.5",
            ),
        ] {
            let error = Config::read(text).unwrap_err().to_string();
            assert!(
                error.starts_with("line ") && error.contains(said),
                "{text}: {error}"
            );
        }
    }
}
