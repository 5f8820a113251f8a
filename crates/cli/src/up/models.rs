//! The models of `up`'s command line as load requests. Files and options are checked before the
//! node starts.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::anyhow;
use paceline_base::KernelClass;
use paceline_engine::{EngineConfig, StepTimeTarget};
use paceline_fleet::{AdapterNaming, InstanceOptions, MachineOptions};
use paceline_model::ModelSource;
use paceline_model::encoder::EncoderConfig;
use paceline_node::fleet::LoadRequest;

use super::{AdapterArg, Args};
use crate::error::{Error, failed, misused};
use crate::interrupt::Signals;
use crate::local_model::{LocalModel, NodeTransport};
use crate::output::print_err;
use crate::{adapter, load, pull};

/// A model of the command line.
struct NamedModel<'a> {
    /// The argument.
    given: &'a str,
    /// Adapter that is fused into it.
    fused: Option<&'a Path>,
    /// Names for clients if they are not the argument alone: its id, then aliases.
    names: Vec<String>,
}

impl Args {
    /// Checks the options that concern models, before a node starts.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        self.split.check()?;
        if self.model().is_none() && !self.adapter.is_empty() {
            let hint = "name its model: paceline up MODEL --adapter FILE";
            return Err(misused("--adapter is for a model, and there is none", hint).into());
        }
        let each = self.each(self.fuses()?);
        self.check_draft(each.len())?;
        let models = each.iter().map(|one| one.given);
        let is_one = models.clone().all(|given| Some(given) == self.model());
        if !is_one && !self.adapter.is_empty() {
            let text = "--adapter is for one model, and there are several";
            let hint = "`paceline adapter fuse` writes a model with its adapter in it, to serve \
                        beside others";
            return Err(misused(text, hint).into());
        }
        Ok(check_names(&each)?)
    }

    /// Whether the command line names a model or an encoder.
    pub(super) fn has_models(&self) -> bool {
        self.model().is_some() || self.embed.is_some()
    }

    /// Requests to load, in the order of the command line: models, then the encoder of `--embed`.
    /// Fetches what this machine does not have.
    pub(super) fn requests(&self, signals: &Signals) -> anyhow::Result<Vec<LoadRequest>> {
        let each = self.each(self.fuses()?);
        let is_alone = each.len() <= 1;
        let requests = each.iter().map(|one| self.request(one, is_alone, signals));
        let mut requests = requests.collect::<anyhow::Result<Vec<_>>>()?;
        requests.extend(self.encoder_beside(signals)?);
        Ok(requests)
    }

    fn model(&self) -> Option<&str> {
        self.models().next()
    }

    fn models(&self) -> impl Iterator<Item = &str> {
        self.model.iter().chain(&self.option).map(String::as_str)
    }

    /// Each distinct model; aliases belong to the first. Fused adapters are models of their own.
    fn each(&self, fuses: bool) -> Vec<NamedModel<'_>> {
        let only = self.only_adapter().filter(|_| fuses);
        let mut each: Vec<NamedModel<'_>> = Vec::new();
        for given in self.models() {
            if each.iter().all(|one| one.given != given) {
                let aliases = if each.is_empty() { &*self.alias } else { &[] };
                each.push(NamedModel {
                    given,
                    fused: only,
                    names: names(given, aliases),
                });
            }
        }
        if let (true, None, Some(given)) = (fuses, self.only_adapter(), self.model()) {
            each.extend(self.adapter.iter().map(|tuned| NamedModel {
                given,
                fused: Some(&tuned.path),
                names: vec![tuned.id()],
            }));
        }
        each
    }

    /// The only adapter, which replaces the model.
    fn only_adapter(&self) -> Option<&Path> {
        match self.adapter.as_slice() {
            [AdapterArg { name: None, path }] => Some(path.as_path()),
            _ => None,
        }
    }

    /// Whether adapters are fused into a copy of the model, as MLX requires.
    fn fuses(&self) -> Result<bool, Error> {
        if self.adapter.is_empty() {
            return Ok(false);
        }
        let (engine, class) = (self.engine, self.compute.class);
        adapter::beside((engine, class), self.split.nodes).map(|beside| !beside)
    }

    /// Request to load a model. `is_alone`: it is the only one, so that every option is for it.
    fn request(
        &self,
        one: &NamedModel<'_>,
        is_alone: bool,
        signals: &Signals,
    ) -> anyhow::Result<LoadRequest> {
        let found = pull::ensure(one.given, signals)?;
        if let Some(source) = encoder(&found.path) {
            if is_alone {
                self.check_encoder()?;
            }
            return self.encoder_request(one.given, (&found.path, &source), one.names.clone());
        }
        let path = adapter::applied(found.path, one.fused)?;
        let sizes = |_: &_| EngineConfig {
            strict: self.engine.strict,
            ..EngineConfig::single(one.given.to_owned(), 1)
        };
        let mut opened = LocalModel::new(&path, (self.compute, self.engine), &self.split, sizes)?;
        opened.check_engine()?;
        match &self.draft {
            Some(draft) => opened.set_draft(&pull::ensure(draft, signals)?.path)?,
            None => opened.set_own_draft()?,
        }
        let adapters = match one.fused {
            None => self.adapters(&mut opened, &one.names)?,
            Some(_) => Vec::new(),
        };
        if let Some(Err(error)) = &opened.template {
            print_err(format_args!(
                "warning: no chat, the model's template cannot be used: {error}"
            ));
        }
        let memory = self.node.limit_of(&path);
        if self.node.keeps_packed() && memory.is_none() {
            opened.keep_packed()?;
        }
        let is_file = one.fused.is_some() || Path::new(one.given).exists();
        let first = opened.options().classes.first();
        Ok(LoadRequest {
            model: if is_file {
                text(&path)?
            } else {
                one.given.to_owned()
            },
            names: one.names.clone(),
            adapter_naming: match self.only_adapter() {
                _ if adapters.is_empty() => AdapterNaming::Qualified,
                Some(_) => AdapterNaming::Model,
                None => AdapterNaming::Bare,
            },
            adapters,
            split: self.split.split,
            engine: Some(if first.is_mlx() { "mlx" } else { "cpu" }.parse()?),
            class: Some(first.name().to_owned()),
            threads: u16::try_from(opened.options().threads).ok(),
            options: InstanceOptions {
                context: self.context,
                parallel: self.parallel,
                drafts: self.drafts(opened.has_draft()),
                follow: self.follow,
                memory,
                strict: self.engine.strict,
                ..InstanceOptions::default()
            },
            draft: self.draft.as_deref().map(name_or_path).transpose()?,
            machine: Some(self.machine_options(opened.options().classes.each())),
            ..LoadRequest::default()
        })
    }

    /// Options of the workers, whose ranks compute in these classes.
    fn machine_options(&self, classes: &[KernelClass]) -> MachineOptions {
        let split = &self.split;
        let is_mixed = classes.iter().any(|class| *class != classes[0]);
        let names = classes.iter().map(|class| class.name().to_owned());
        MachineOptions {
            ranks: split.nodes,
            shares: split.shares.clone(),
            classes: names.filter(|_| is_mixed).collect(),
            transport: match split.transport {
                NodeTransport::Any => String::new(),
                other => other.backend().name().to_owned(),
            },
            prefill_ranks: split.prefill_nodes,
            prefill_from: split.prefill_from,
            prefill_class: split.prefill_class.map(|class| class.name().to_owned()),
            kv: self.compute.kv.map(|kv| kv.name().to_owned()),
            pace: match self.pace {
                StepTimeTarget::Auto => String::new(),
                other => other.to_string(),
            },
            pin: self.compute.pin,
        }
    }

    /// Adds all adapters to the model; their names and absolute paths.
    fn adapters(
        &self,
        opened: &mut LocalModel,
        names: &[String],
    ) -> anyhow::Result<Vec<(String, PathBuf)>> {
        let mut adapters: Vec<(String, PathBuf)> = Vec::new();
        for tuned in &self.adapter {
            let name = tuned.id();
            let is_known = adapters.iter().any(|(known, _)| *known == name);
            // A single adapter without a name replaces the model.
            let is_model = self.only_adapter().is_none()
                && (names.contains(&name) || self.model() == Some(&name));
            if is_known || is_model {
                return Err(same_name(&name).into());
            }
            opened.add_adapter(&name, &tuned.path)?;
            adapters.push((name, std::path::absolute(&tuned.path)?));
        }
        Ok(adapters)
    }

    /// Maximum draft tokens; `None` for the default. On several nodes the measured speed of answers
    /// selects the split, and drafts from the text would distort it.
    fn drafts(&self, has_draft: bool) -> Option<u8> {
        let is_default = self.split.nodes == 1 || has_draft;
        self.drafts.0.or((!is_default).then_some(0))
    }

    /// Rejects a draft model unless there is one model with drafts.
    fn check_draft(&self, models: usize) -> Result<(), Error> {
        let wrong = match models {
            _ if self.draft.is_none() => None,
            1 if self.drafts.0 == Some(0) => Some("--drafts 0, which is for no guesses"),
            1 => None,
            0 => Some("no model"),
            _ => Some("several models"),
        };
        let hint = "give one MODEL, and leave out --drafts 0 or --draft";
        wrong.map_or(Ok(()), |with| {
            let text = format!("--draft is for one model that has guesses, and there is {with}");
            Err(misused(text, hint))
        })
    }

    /// Request to load the encoder of `--embed`.
    fn encoder_beside(&self, signals: &Signals) -> anyhow::Result<Option<LoadRequest>> {
        let Some(given) = self.embed.as_deref() else {
            return Ok(None);
        };
        let found = pull::ensure(given, signals)?;
        let no_encoder = || {
            failed(
                format!(
                    "{given} makes no embeddings: expected a folder of bert, roberta or \
                     xlm-roberta"
                ),
                "all-MiniLM-L6-v2 is one",
            )
        };
        let source = encoder(&found.path).ok_or_else(no_encoder)?;
        if self.model().is_none() {
            self.check_encoder()?;
        }
        let files = (found.path.as_path(), &source);
        self.encoder_request(given, files, names(given, &[]))
            .map(Some)
    }

    fn encoder_request(
        &self,
        given: &str,
        (path, source): (&Path, &ModelSource),
        names: Vec<String>,
    ) -> anyhow::Result<LoadRequest> {
        let config = EncoderConfig::read(source).map_err(|error| load::in_model(path, error))?;
        print_err(format_args!(
            "{}: embeddings of {} numbers, texts of at most {} tokens",
            names.first().map_or(given, String::as_str),
            config.width,
            config.context,
        ));
        Ok(LoadRequest {
            model: name_or_path(given)?,
            names,
            engine: Some("cpu".parse()?),
            class: Some(KernelClass::CpuF32.name().to_owned()),
            threads: u16::try_from(load::threads(self.compute, 1)).ok(),
            machine: Some(MachineOptions {
                pin: self.compute.pin,
                ..MachineOptions::default()
            }),
            ..LoadRequest::default()
        })
    }

    /// Rejects options that encoders do not support.
    fn check_encoder(&self) -> Result<(), Error> {
        let class = self.compute.class;
        let given = [
            ("--nodes", self.split.nodes != 1),
            ("--shares", !self.split.shares.is_empty()),
            ("--prefill-nodes", self.split.prefill_nodes != 0),
            ("--context", self.context.is_some()),
            ("--engine", self.engine.engine.is_some()),
            (
                "--class",
                class.is_some_and(|class| class != KernelClass::CpuF32),
            ),
            ("--kv", self.compute.kv.is_some()),
            ("--draft", self.draft.is_some()),
            ("--adapter", !self.adapter.is_empty()),
        ];
        match given.into_iter().find(|(_, is_given)| *is_given) {
            Some((option, _)) => Err(failed(
                format!(
                    "{option} has no effect: the model makes embeddings, on one node and in f32"
                ),
                format!("leave out {option}"),
            )),
            None => Ok(()),
        }
    }
}

/// Rejects equal names: the later model would replace the earlier.
fn check_names(each: &[NamedModel<'_>]) -> Result<(), Error> {
    let mut known = BTreeSet::new();
    for one in each {
        let name = one.names.first().map_or(one.given, String::as_str);
        if !known.insert(name) {
            return Err(same_name(name));
        }
    }
    Ok(())
}

fn same_name(name: &str) -> Error {
    misused(
        format!("two models would answer by the name {name}"),
        "give an adapter a name of its own: --adapter NAME=FILE",
    )
}

/// A model's names for clients, if they are not `given` alone: of a file or folder its stem, then
/// `given`; then the aliases.
fn names(given: &str, aliases: &[String]) -> Vec<String> {
    let path = Path::new(given);
    let stem = path.file_stem().filter(|_| path.exists());
    let stem = stem.map(|stem| stem.to_string_lossy().into_owned());
    if stem.is_none() && aliases.is_empty() {
        return Vec::new();
    }
    let names = stem.into_iter().chain([given.to_owned()]);
    names.chain(aliases.iter().cloned()).collect()
}

/// The encoder at `path`, if it is one. Errors of other models are not reported here.
fn encoder(path: &Path) -> Option<ModelSource> {
    let source = ModelSource::open(path).ok();
    source.filter(EncoderConfig::is_encoder)
}

/// A model's argument for the node: an absolute path if it is one.
fn name_or_path(given: &str) -> anyhow::Result<String> {
    match Path::new(given).exists() {
        true => text(Path::new(given)),
        false => Ok(given.to_owned()),
    }
}

fn text(path: &Path) -> anyhow::Result<String> {
    let text = std::path::absolute(path)?.into_os_string().into_string();
    text.map_err(|path| anyhow!("{}: the path is not UTF-8", path.display()))
}
