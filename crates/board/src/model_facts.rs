//! Facts about one model, as text and JSON.

use paceline_base::{Bytes, printable};
use paceline_cluster::machine::MainMemory;
use paceline_model::{Config, ModelSource};
use paceline_plan::ModelShape;
use paceline_store::{
    Catalogue, Kind, PullPreview, ResolvedModel, State, StoreEntry, quant_of_name, usual_name,
};
use paceline_text::chat::{ChatTemplate, Error as ChatError};
use serde_json::{Value, json};

use crate::previews::misfit;

/// Maximum files that text lists: more scroll the other facts away.
const LISTED_MAX: usize = 12;

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

    /// Adds the files of a download, whether they fit into `memory`, and their source.
    pub fn add_preview(&mut self, model: &PullPreview, memory: Option<MainMemory>) {
        self.add_download(model.bytes());
        let kind = match model.files.first() {
            Some((file, _)) if file.ends_with(".gguf") => gguf_type(file),
            _ => "safetensors".to_owned(),
        };
        self.text_fact("type", kind);
        self.text_fact("source", model.source.clone());
        // The catalogue's licences come with its names.
        if Catalogue::BUILTIN.find(model.name.as_str()).is_none() {
            let licence = model.licence.as_deref().unwrap_or("unknown");
            self.text_fact("licence", printable(licence).into_owned());
        }
        let each = model.files.iter();
        let each = each.map(|(path, bytes)| (path.as_str(), bytes.map(|bytes| bytes.0)));
        self.add_file_list(each);
        let misfit = misfit(model.bytes(), memory);
        let fits = memory.and(model.bytes()).map(|_| misfit.is_none());
        let text = match fits {
            Some(true) => "yes".to_owned(),
            _ => misfit.unwrap_or_else(|| "unknown".to_owned()),
        };
        self.add("fits this machine", text, json!(fits));
    }

    /// Adds the number of files, and in JSON all of them. Text lists a few.
    fn add_file_list<'a>(&mut self, files: impl Iterator<Item = (&'a str, Option<u64>)>) {
        let files: Vec<_> = files.collect();
        let object = |(path, bytes): &(&str, Option<u64>)| json!({ "path": path, "bytes": bytes });
        let objects = files.iter().map(object).collect();
        self.add("files", files.len().to_string(), objects);
        if !(2..=LISTED_MAX).contains(&files.len()) {
            return;
        }
        for (path, bytes) in &files {
            let size = bytes.map_or(String::new(), |bytes| format!(", {}", Bytes(bytes)));
            self.lines.push(("", format!("{path}{size}")));
        }
    }

    /// Adds the paths of its files, and their source.
    pub fn add_files(&mut self, found: &ResolvedModel, entry: Option<&StoreEntry>) {
        self.text_fact("path", found.path.display().to_string());
        let kind = match found.kind {
            Kind::Gguf => gguf_type(&found.path.to_string_lossy()),
            Kind::Safetensors => "safetensors".to_owned(),
        };
        self.text_fact("type", kind);
        if let Some(State::Complete { source, files, .. }) = entry.map(|entry| &entry.state) {
            let each = files
                .iter()
                .map(|file| (file.path.as_str(), Some(file.bytes)));
            self.add_file_list(each);
            self.text_fact("source", source.clone());
        }
    }

    /// Adds what each machine of the cluster has of it, by the node's inventory. Copies have the
    /// name that their user `asked` for.
    pub fn add_machines(&mut self, inventory: &Value, asked: &str) {
        let mut machines = Vec::new();
        for store in inventory["nodes"].as_array().into_iter().flatten() {
            let models = store["models"].as_array().into_iter().flatten();
            let is_it = |it: &&Value| it["name"] == self.json["name"] || it["name"] == asked;
            let of_name = models.filter(is_it);
            machines.extend(of_name.map(|it| {
                json!({ "node": store["node"], "here_bytes": it["here_bytes"], "bytes": it["bytes"] })
            }));
        }
        if !machines.is_empty() {
            let lines: Vec<String> = machines.iter().map(share).collect();
            self.add("machines", lines.join(", "), json!(machines));
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

    /// Adds family, trained context and unknown fields of `config.json`, or why the engine does not
    /// support the model.
    pub fn add_config(&mut self, source: &ModelSource) {
        match Config::read(source) {
            Ok(config) => {
                self.text_fact("family", config.family.name());
                self.number("trained context", config.context as u64);
                self.add("computes here", "yes", json!(true));
                let unknown = config.unknown_fields;
                if !unknown.is_empty() {
                    self.add("unknown fields", unknown.join(", "), json!(unknown));
                }
            }
            Err(error) => self.add("computes here", format!("no: {error}"), json!(false)),
        }
    }
}

/// Form and quantisation of a GGUF model, by its (first) file.
fn gguf_type(file: &str) -> String {
    match quant_of_name(file) {
        Some(quant) => format!("GGUF {}", quant.to_uppercase()),
        None => "GGUF".to_owned(),
    }
}

/// A machine's share of a model, as text.
fn share(machine: &Value) -> String {
    let number = |key: &str| machine[key].as_u64().unwrap_or(0);
    let (here, all) = (number("here_bytes"), number("bytes"));
    let node = printable(machine["node"].as_str().unwrap_or_default());
    match here >= all {
        true => format!("{node} all"),
        false => format!("{node} {} %", here * 100 / all.max(1)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_are_told_with_their_shares() {
        let mut facts = ModelFacts::new("qwen");
        facts.add_machines(&json!({ "nodes": [
            { "node": "mini", "models": [{ "name": "o/qwen:Q8_0", "bytes": 300, "here_bytes": 100 }] },
            { "node": "mac", "models": [{ "name": "ada", "bytes": 7, "here_bytes": 7 },
                                        { "name": "qwen", "bytes": 300, "here_bytes": 305 }] },
            { "node": "old", "models": [] } ] }), "o/qwen:Q8_0");
        let text = facts.text();
        assert!(
            text.ends_with("machines               mini 33 %, mac all"),
            "{text}"
        );
        assert_eq!(facts.json()["machines"][1]["node"], "mac");
        let mut none = ModelFacts::new("qwen");
        none.add_machines(&json!({ "nodes": [] }), "qwen");
        assert!(!none.text().contains("machines"));
    }
}
