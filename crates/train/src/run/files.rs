//! Files of a run's folder: its description, and its result.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use paceline_model::adapter::files::{Adapter, Form, base_name, tensors};
use serde_json::{Value, json};

use super::TrainingRun;
use crate::checkpoint::named;
use crate::class::TrainingClass;
use crate::error::Error;
use crate::fuse;
use crate::weights::Method;

impl TrainingRun {
    /// Writes the run's description to the folder, or checks that the folder has the same.
    pub(super) fn claim(&self, output: &Path, resume: bool) -> Result<(), Error> {
        let path = output.join("run.json");
        let mut here = serde_json::to_value(&self.job).unwrap_or_default();
        here["data_sha256"] = json!(self.examples.digest);
        here["leaves"] = json!(self.order.leaves());
        match std::fs::read(&path) {
            Ok(_) if !resume => Err(Error::RunThere {
                path: output.to_owned(),
            }),
            Ok(there) => {
                let there: Value =
                    serde_json::from_slice(&there).map_err(|e| Error::malformed(&path, e))?;
                // Through text, as what is there: reading a number may round it.
                let here = serde_json::from_str(&here.to_string()).unwrap_or_default();
                let (mut there, here) = (flat(&there), flat(&here));
                // Runs of versions before there were classes.
                let class = there.entry("trained.class".to_owned());
                class.or_insert_with(|| json!(TrainingClass::Cpu));
                let differs = here
                    .iter()
                    .find(|(field, value)| there.get(*field) != Some(value));
                match differs {
                    None => Ok(()),
                    Some((field, value)) => Err(Error::OtherRun {
                        path: output.to_owned(),
                        there: there
                            .get(field)
                            .map_or("nothing".to_owned(), Value::to_string),
                        field: field.clone(),
                        here: value.to_string(),
                    }),
                }
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let text = serde_json::to_string_pretty(&here).unwrap_or_default();
                Ok(tensors::replace(&path, |file| {
                    file.write_all(text.as_bytes())
                })?)
            }
            Err(error) => Err(Error::file("read", &path)(error)),
        }
    }

    /// Writes the adapter, or the model.
    pub(super) fn write(&self, output: &Path, params: &[f32]) -> Result<Vec<PathBuf>, Error> {
        let trained = &self.job.trained;
        let found = named(self.net.layout(), params);
        if trained.method == Method::Full {
            return fuse::write_model(&trained.model, output, &found);
        }
        let owned = found
            .into_iter()
            .map(|(name, shape, v)| (name, shape.to_vec(), v.to_vec()));
        let base = match &self.base {
            Some(base) => Some(base.clone()),
            None => base_name(&trained.model)?,
        };
        let lora = trained.lora;
        let mut adapter = Adapter::new(lora.rank, f64::from(lora.alpha), base, owned.collect());
        adapter.dropout = f64::from(trained.dropout);
        adapter.write(output, Form::Peft)?;
        let files = ["adapter_model.safetensors", "adapter_config.json"];
        Ok(files.map(|name| output.join(name)).to_vec())
    }
}

/// A JSON value's leaves by their paths.
fn flat(value: &Value) -> BTreeMap<String, Value> {
    let mut out = BTreeMap::new();
    let mut waiting = vec![(String::new(), value)];
    while let Some((path, value)) = waiting.pop() {
        match value.as_object() {
            Some(object) => waiting.extend(object.iter().map(|(key, value)| {
                let path = if path.is_empty() {
                    key.clone()
                } else {
                    format!("{path}.{key}")
                };
                (path, value)
            })),
            None => drop(out.insert(path, value.clone())),
        }
    }
    out
}
