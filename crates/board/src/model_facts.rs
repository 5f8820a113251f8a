//! Facts about one model, as text and JSON.

use paceline_base::Bytes;
use paceline_formats::chat::{ChatTemplate, Error as ChatError};
use paceline_model::{Config, ModelSource};
use paceline_plan::ModelShape;
use paceline_store::{
    Catalogue, Kind, ResolvedModel, State, StoreEntry, quant_of_name, usual_name,
};
use serde_json::{Value, json};

/// Facts in display order.
#[derive(Clone, Debug)]
pub struct ModelFacts {
    lines: Vec<(&'static str, String)>,
    json: serde_json::Map<String, Value>,
}

impl ModelFacts {
    /// Facts of the model `name`.
    pub fn new(name: &str) -> Self {
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

    /// The JSON key has the unit.
    fn bytes(&mut self, name: &'static str, bytes: Bytes) {
        self.lines.push((name, bytes.to_string()));
        let key = format!("{}_bytes", name.replace(' ', "_"));
        self.json.insert(key, json!(bytes.0));
    }

    fn number(&mut self, name: &'static str, number: impl Into<u64>) {
        let number = number.into();
        self.add(name, number.to_string(), json!(number));
    }

    /// Adds the catalogues' facts about the name `asked`.
    #[must_use]
    pub fn with_names(mut self, asked: &str) -> Self {
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

    /// A line per fact.
    pub fn text(&self) -> String {
        let line = |(name, text): &(&str, String)| format!("{name:22} {text}");
        self.lines.iter().map(line).collect::<Vec<_>>().join("\n")
    }

    /// All facts as a JSON object.
    pub fn json(self) -> Value {
        Value::Object(self.json)
    }

    /// Adds the download size of a missing model, if known.
    pub fn add_download(&mut self, bytes: Option<Bytes>) {
        self.add("state", "not pulled", json!("not pulled"));
        if let Some(bytes) = bytes {
            self.bytes("file", bytes);
        }
    }

    /// Adds the paths of its files, and their source.
    pub fn add_files(&mut self, found: &ResolvedModel, entry: Option<&StoreEntry>) {
        self.text_fact("path", found.path.display().to_string());
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
        self.text_fact("type", format!("{kind}{quant}"));
        if let Some(State::Complete { source, .. }) = entry.map(|entry| &entry.state) {
            self.text_fact("source", source.clone());
        }
    }

    /// Adds the size of its files.
    pub fn add_size(&mut self, bytes: Bytes) {
        self.bytes("file", bytes);
    }

    /// Adds whether it has a chat template.
    pub fn add_template(&mut self, template: Option<Result<ChatTemplate, ChatError>>) {
        let (text, value) = match template {
            Some(Ok(_)) => ("yes".to_owned(), json!(true)),
            None => ("no: it completes text".to_owned(), json!(false)),
            Some(Err(error)) => (format!("cannot be used: {error}"), json!(false)),
        };
        self.add("chats", text, value);
    }

    pub fn add_shape(&mut self, shape: &ModelShape) {
        let (all, active) = (shape.params(), shape.active_params());
        let mut text = format!("{:.2} billion", all / 1e9);
        if shape.moe.is_some() {
            text += &format!(", {:.2} billion for a token", active / 1e9);
        }
        self.add("parameters", text, json!(all as u64));
        self.number("layers", shape.layers);
        self.number("width", shape.width);
        self.number("vocabulary", shape.vocab);
        let token = Bytes(shape.kv_bytes_per_token() as u64);
        self.bytes("cache of a token", token);
    }

    /// Adds family and trained context, or why the engine does not support it.
    pub fn add_config(&mut self, source: &ModelSource) {
        match Config::read(source) {
            Ok(config) => {
                self.text_fact("family", config.family.name());
                self.number("trained context", config.context as u64);
                self.add("computes here", "yes", json!(true));
            }
            Err(error) => self.add("computes here", format!("no: {error}"), json!(false)),
        }
    }
}
