//! `paceline show`: what a model is, before it is run.

use std::path::Path;

use paceline_base::Bytes;
use paceline_model::{Config, Source};
use paceline_node::texts;
use paceline_plan::ModelShape;
use paceline_store::{
    Catalogue, Entry, Found, Kind, Resolved, State, list, quant_of_name, resolve, usual_name,
};
use serde_json::{Value, json};

use crate::home;
use crate::output::print;
use crate::plan::shape_of;

/// Arguments of `paceline show`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Alias (`smollm2`), usual name (`qwen3:8b`), GGUF file, folder of safetensors, or hub id
    model: String,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Describes a model of this machine, or says what would be fetched.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let home = home::home()?;
    let facts = match resolve(&home, &args.model)? {
        Resolved::Path(found) => {
            let entries = list(&home)?;
            let of_name = |entry: &&Entry| Some(&entry.name) == found.name.as_ref();
            here(&found, entries.iter().find(of_name))?
        }
        Resolved::NeedsDownload(plan) => {
            let mut facts = Facts::new(&plan.name());
            facts.add("state", "not pulled", json!("not pulled"));
            if let Some(bytes) = plan.bytes() {
                facts.bytes("file", bytes);
            }
            facts
        }
    };
    let facts = facts.with_names(&args.model);
    if args.json {
        return print(&Value::Object(facts.json).to_string());
    }
    print(&facts.text())
}

/// Facts in the order in which they are shown.
struct Facts {
    lines: Vec<(&'static str, String)>,
    json: serde_json::Map<String, Value>,
}

impl Facts {
    fn new(name: &str) -> Self {
        let mut facts = Self {
            lines: Vec::new(),
            json: serde_json::Map::new(),
        };
        facts.add("name", name, json!(name));
        facts
    }

    fn add(&mut self, name: &'static str, text: impl Into<String>, value: Value) {
        self.lines.push((name, text.into()));
        self.json.insert(name.replace(' ', "_"), value);
    }

    fn text_fact(&mut self, name: &'static str, text: impl Into<String>) {
        let text = text.into();
        self.add(name, text.clone(), json!(text));
    }

    /// The key of the JSON object says the unit.
    fn bytes(&mut self, name: &'static str, bytes: Bytes) {
        self.lines.push((name, bytes.to_string()));
        let key = format!("{}_bytes", name.replace(' ', "_"));
        self.json.insert(key, json!(bytes.0));
    }

    fn number(&mut self, name: &'static str, number: impl Into<u64>) {
        let number = number.into();
        self.add(name, number.to_string(), json!(number));
    }

    /// What the catalogues say about the name that was asked for.
    fn with_names(mut self, asked: &str) -> Self {
        if let Some(model) = Catalogue::BUILTIN.find(asked) {
            self.text_fact("about", model.about);
            self.text_fact(
                "licence",
                format!("{}, {}", model.licence, model.licence_url),
            );
        }
        if let Some(usual) = usual_name(asked) {
            let checked = usual.checked.is_some();
            let mark = if checked { "" } else { ", not verified here" };
            let mut hub = format!("{}{mark}", usual.hub);
            if let Some(architecture) = &usual.uncomputed {
                hub += &format!("; this version does not compute {architecture} models");
            }
            self.add("hub", hub, json!({ "id": usual.hub, "checked": checked }));
        }
        self
    }

    fn text(&self) -> String {
        let line = |(name, text): &(&str, String)| format!("{name:22} {text}");
        self.lines.iter().map(line).collect::<Vec<_>>().join("\n")
    }
}

/// A model whose files are here.
fn here(found: &Found, entry: Option<&Entry>) -> anyhow::Result<Facts> {
    let name = match &found.name {
        Some(name) => name.to_string(),
        None => found.path.display().to_string(),
    };
    let mut facts = Facts::new(&name);
    facts.text_fact("path", found.path.display().to_string());
    let file = found
        .path
        .file_name()
        .map(|name| name.to_string_lossy().into_owned());
    let quant = file
        .as_deref()
        .and_then(quant_of_name)
        .map(str::to_uppercase);
    let kind = match found.kind {
        Kind::Gguf => "GGUF",
        Kind::Safetensors => "safetensors",
    };
    let quant = quant.map_or(String::new(), |quant| format!(" {quant}"));
    facts.text_fact("type", format!("{kind}{quant}"));
    if let Some(State::Complete { source, .. }) = entry.map(|entry| &entry.state) {
        facts.text_fact("source", source.clone());
    }
    let source = crate::load::open(&found.path)?;
    facts.bytes("file", source.file_bytes());
    add_shape(&mut facts, &found.path)?;
    add_config(&mut facts, &source);
    let (text, value) = match texts::template(&source, &crate::process::template_program()?) {
        Some(Ok(_)) => ("yes".to_owned(), json!(true)),
        None => ("no: it completes text".to_owned(), json!(false)),
        Some(Err(error)) => (format!("cannot be used: {error}"), json!(false)),
    };
    facts.add("chats", text, value);
    Ok(facts)
}

fn add_shape(facts: &mut Facts, path: &Path) -> anyhow::Result<()> {
    let shape: ModelShape = shape_of(path)?;
    let (all, active) = (shape.params(), shape.active_params());
    let mut text = format!("{:.2} billion", all / 1e9);
    if shape.moe.is_some() {
        text += &format!(", {:.2} billion for a token", active / 1e9);
    }
    facts.add("parameters", text, json!(all as u64));
    facts.number("layers", shape.layers);
    facts.number("width", shape.width);
    facts.number("vocabulary", shape.vocab);
    let token = Bytes(shape.kv_bytes_per_token() as u64);
    facts.bytes("cache of a token", token);
    Ok(())
}

/// What the engine needs, where it can compute the model at all.
fn add_config(facts: &mut Facts, source: &Source) {
    match Config::read(source) {
        Ok(config) => {
            facts.text_fact("family", config.family.name());
            facts.number("trained context", config.context as u64);
            facts.add("computes here", "yes", json!(true));
        }
        Err(error) => facts.add("computes here", format!("no: {error}"), json!(false)),
    }
}
