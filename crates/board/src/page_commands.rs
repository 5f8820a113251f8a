//! Commands of the dashboard that need no fleet: models to find, fetch and remove, health, lines.
//!
//! ```text
//! catalogue --> names with size, fit and predicted speed on the cluster's machines
//! search    --> repositories of the hub          describe --> one model, or the choices of it
//! pull, cancel_pull, remove --> this node's store
//! doctor, logs              --> HostProbes
//! ```

use paceline_plan::solver::{Options, solve};
use paceline_plan::{Calibration, Catalogue, Cluster, Costs, ModelShape, Workload};
use paceline_store::{
    Cancel, Error as StoreError, Home, PullOptions, Resolution, free_space, preview, resolve,
};
use serde::Serialize;
use serde_json::{Value, json};

use crate::own_cluster::{own_cluster, this_machine};
use crate::{CommandError, Dashboard, fits, host, lookup, model_users};

impl Dashboard {
    /// Runs a command of the page.
    pub(crate) fn command(&self, command: &str, arguments: &Value) -> Result<Value, CommandError> {
        let inner = &self.0;
        let text = |name: &str| arguments[name].as_str().unwrap_or_default();
        match command {
            "pull" => inner.downloads.start(text("model")).map(|()| json!({})),
            "cancel_pull" => {
                inner.downloads.end(text("model"));
                Ok(json!({}))
            }
            "catalogue" => self.catalogue(),
            "search" => {
                let (_, options) = inner.downloads.store()?;
                let found = paceline_store::search(text("query"), &options, &Cancel::default());
                let found = found.map_err(CommandError::Store)?;
                Ok(json!({ "models": found }))
            }
            "describe" => describe(text("model"), &inner.downloads.store()?, &self.cluster()?),
            "remove" => self.remove(text("model")),
            "doctor" => Ok(json!({ "checks": self.host()?.health()? })),
            "logs" => self.lines(text("node")),
            _ => match inner.manage.get() {
                Some(manage) => Ok(manage(command, arguments)?),
                None => Err(CommandError::Starting),
            },
        }
    }

    fn host(&self) -> Result<&host::HostProbes, CommandError> {
        let host = self.0.host.get();
        host.ok_or(CommandError::Starting)
    }

    /// The cluster's live machines for the planner. Measures this machine the first time.
    fn cluster(&self) -> Result<Cluster, CommandError> {
        let rates = match self.0.rates.get() {
            Some(rates) => *rates,
            None => {
                let measured = self.host()?.rates()?;
                *self.0.rates.get_or_init(|| measured)
            }
        };
        let cluster = match self.0.agent.get() {
            Some(agent) => own_cluster(&json!(agent.nodes_and_ways()), None, rates),
            None => this_machine(rates),
        };
        cluster.map_err(CommandError::other)
    }

    /// The known models with their fit, the free disk space, and the machines that it is for.
    fn catalogue(&self) -> Result<Value, CommandError> {
        let (home, _) = self.0.downloads.store()?;
        let cluster = self.cluster()?;
        let (catalogue, calibration) = planner().map_err(CommandError::other)?;
        let rows = fits::rows(&cluster, &catalogue, &calibration).map_err(CommandError::other)?;
        let mut told = fits::json(&cluster, &rows);
        for (model, of) in fits::recommended(&rows) {
            let name = json!(model);
            let all = told["models"].as_array_mut().into_iter().flatten();
            for it in all.filter(|it| it["name"] == name) {
                it["recommended_for"] = of.into();
            }
        }
        told["free_bytes"] = json!(free_space(home.root()).ok());
        Ok(told)
    }

    /// Removes a model from this node's store, unless an instance computes with it.
    fn remove(&self, model: &str) -> Result<Value, CommandError> {
        let (home, _) = self.0.downloads.store()?;
        let (instances, _) = self.0.instances();
        let users = model_users(&home, model, &instances.into());
        if !users.is_empty() {
            let model = model.to_owned();
            return Err(CommandError::Loaded { model, users });
        }
        let removed = paceline_store::remove(&home, model).map_err(CommandError::Store)?;
        Ok(json!({ "name": removed.name.as_str(), "freed_bytes": removed.bytes.0 }))
    }

    /// The printed lines of the node with this id; of this one without.
    fn lines(&self, node: &str) -> Result<Value, CommandError> {
        let agent = self.0.agent.get().filter(|_| !node.is_empty());
        let lines = match agent {
            None => self.host()?.lines(),
            Some(agent) => {
                let all = agent.nodes().into_iter();
                let found = all.map(|it| it.id).find(|id| id.to_string() == node);
                let id = found.ok_or_else(|| CommandError::UnknownNode {
                    id: node.to_owned(),
                })?;
                match id == agent.id() {
                    true => self.host()?.lines(),
                    false => host::lines_of(agent, id)?,
                }
            }
        };
        Ok(json!({ "lines": lines }))
    }
}

fn planner() -> Result<(Catalogue, Calibration), paceline_plan::Error> {
    Ok((Catalogue::builtin()?, Calibration::builtin()?))
}

/// How a model of some size fits the machines.
#[derive(Debug, Serialize)]
struct SizeFit {
    fits: bool,
    /// By the planner for a known shape, else from the size: all of the weights are read for each
    /// token.
    predicted_decode_tok_s: Option<f64>,
    is_of_known_shape: bool,
}

impl SizeFit {
    /// From the model's shape.
    fn of_shape(shape: &ModelShape, cluster: &Cluster) -> Option<Self> {
        let calibration = Calibration::builtin().ok()?;
        let costs = Costs::new(cluster, shape, Workload::ONE, &calibration).ok()?;
        let solved = solve(&costs, &Options::default()).ok();
        Some(Self {
            fits: solved.is_some(),
            predicted_decode_tok_s: solved.map(|it| it.best.prediction.decode_tok_s),
            is_of_known_shape: true,
        })
    }

    /// From the bytes of its weights alone: on the fastest machine that holds them, else over all.
    fn of_bytes(bytes: u64, cluster: &Cluster) -> Self {
        let bytes = bytes.max(1) as f64;
        let holders = cluster.nodes.iter().filter(|node| node.budget() >= bytes);
        let alone = holders.map(|node| node.bandwidth / bytes);
        let total: f64 = cluster.nodes.iter().map(|node| node.budget()).sum();
        let part = |node: &paceline_plan::ClusterNode| node.budget() / total / node.bandwidth;
        let over_all = (total >= bytes).then(|| {
            let seconds: f64 = cluster.nodes.iter().map(part).sum();
            1.0 / (bytes * seconds)
        });
        let predicted = alone.max_by(f64::total_cmp).or(over_all);
        Self {
            fits: predicted.is_some(),
            predicted_decode_tok_s: predicted,
            is_of_known_shape: false,
        }
    }
}

/// A model before its download: size, licence and fit, or the choices of a repository.
fn describe(
    model: &str,
    (home, options): &(Home, PullOptions),
    cluster: &Cluster,
) -> Result<Value, CommandError> {
    let plan = match resolve(home, model).map_err(CommandError::Store)? {
        Resolution::Path(found) => {
            return Ok(json!({ "name": model, "is_here": true, "path": found.path }));
        }
        Resolution::NeedsDownload(plan) => plan,
    };
    match preview(&plan, options, &Cancel::default()) {
        Ok(told) => {
            let bytes = told.bytes().map(|bytes| bytes.0);
            let shape = Catalogue::builtin().ok();
            let shape = shape.and_then(|it| lookup::model(None, model, None, &it).ok());
            let fit = shape.and_then(|shape| SizeFit::of_shape(&shape, cluster));
            let fit = fit.or_else(|| bytes.map(|bytes| SizeFit::of_bytes(bytes, cluster)));
            Ok(json!({
                "name": told.name.as_str(),
                "is_here": false,
                "bytes": bytes,
                "file_count": told.files.len(),
                "licence": told.licence,
                "source": told.source,
                "fit": fit,
            }))
        }
        Err(
            StoreError::AmbiguousGguf { repo, choices }
            | StoreError::NoMatchingGguf { repo, choices, .. },
        ) => {
            let choices = choices.iter().map(|it| {
                let bytes = it.bytes.map(|bytes| bytes.0);
                let fit = bytes.map(|bytes| SizeFit::of_bytes(bytes, cluster));
                let name = format!("{repo}:{}", it.selector);
                json!({ "model": name, "bytes": bytes, "file_count": it.files, "fit": fit })
            });
            Ok(json!({ "name": repo, "choices": choices.collect::<Vec<_>>() }))
        }
        Err(error) => Err(CommandError::Store(error)),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use paceline_plan::catalogue::short_cluster;
    use paceline_serve::events::EventLog;
    use paceline_serve::{LiveRequests, TimeSource};

    use super::*;
    use crate::host::{HostProbes, LogLines};

    static LINES: LogLines = LogLines::new();

    /// A node's dashboard with a store in `folder` and a hub that nobody reaches.
    fn dashboard(folder: &std::path::Path) -> Dashboard {
        let home = Home::new(folder);
        let mut options = PullOptions::default();
        options.hub.endpoint = "http://127.0.0.1:1".to_owned();
        let downloads = Arc::new(move || Ok((home.clone(), options.clone())));
        let clock = TimeSource {
            now: std::time::Instant::now,
            unix_s: || 0,
        };
        let board = Dashboard::new(LiveRequests::new(EventLog::new(clock)), downloads);
        let rates = || Ok((100e9, 10e12));
        board.set_host(HostProbes::new(rates, || Ok(Vec::new()), &LINES));
        board
    }

    #[test]
    fn the_catalogue_tells_size_fit_and_speed_before_a_download() {
        let folder = tempfile::tempdir().unwrap();
        let board = dashboard(folder.path());
        let told = board.command("catalogue", &json!({})).unwrap();
        let all = told["models"].as_array().unwrap();
        let small = all.iter().find(|it| it["name"] == "smollm2").unwrap();
        assert_eq!(small["fits"], true);
        assert!(
            small["predicted_decode_tok_s"].as_f64().unwrap() > 10.0,
            "{small}"
        );
        assert!(
            all.iter().any(|it| it["recommended_for"] == "chat"),
            "{told}"
        );
        let told = board
            .command("describe", &json!({ "model": "smollm2" }))
            .unwrap();
        assert_eq!(
            (&told["is_here"], &told["file_count"]),
            (&json!(false), &json!(1))
        );
        assert_eq!(told["fit"]["is_of_known_shape"], true, "{told}");
        let unknown = board
            .command("describe", &json!({ "model": "smolm2" }))
            .unwrap_err()
            .to_string();
        assert!(unknown.contains("did you mean smollm2"), "{unknown}");
        let unreached = board
            .command("search", &json!({ "query": "a/b" }))
            .unwrap_err()
            .to_string();
        assert!(unreached.contains("127.0.0.1:1"), "{unreached}");
    }

    #[test]
    fn a_model_is_removed_unless_it_is_loaded() {
        let folder = tempfile::tempdir().unwrap();
        let board = dashboard(folder.path());
        let at = Home::new(folder.path()).models_dir().join("mine");
        std::fs::create_dir_all(&at).unwrap();
        std::fs::write(at.join("m.gguf"), b"GGUFdata").unwrap();
        let instance = json!({ "id": "7", "model": "mine", "nodes": ["mini"] });
        let _ = board.0.instances.set(Box::new(move || {
            (vec![instance.clone()], Default::default())
        }));
        let loaded = board
            .command("remove", &json!({ "model": "mine" }))
            .unwrap_err()
            .to_string();
        assert!(loaded.starts_with("mine is loaded"), "{loaded}");
        assert!(at.exists());
        let other = dashboard(folder.path());
        let removed = other
            .command("remove", &json!({ "model": "mine" }))
            .unwrap();
        assert_eq!(removed, json!({ "name": "mine", "freed_bytes": 8 }));
        assert!(!at.exists());
    }

    #[test]
    fn a_size_alone_predicts_the_time_to_read_the_weights() {
        let catalogue = Catalogue::builtin().unwrap();
        let two = short_cluster("2 x mac-studio-m3-ultra-512 @ 10gbe", &catalogue).unwrap();
        let (budget, bandwidth) = (two.nodes[0].budget(), two.nodes[0].bandwidth);
        let of = |bytes: f64| SizeFit::of_bytes(bytes as u64, &two);
        let speed = |fit: SizeFit| fit.predicted_decode_tok_s.unwrap();
        assert!((speed(of(1e9)) / (bandwidth / 1e9) - 1.0).abs() < 1e-9);
        let large = budget * 1.5;
        assert!((speed(of(large)) / (bandwidth / large) - 1.0).abs() < 1e-6);
        assert!(!of(budget * 2.1).fits);
    }

    #[test]
    fn lines_are_told() {
        let folder = tempfile::tempdir().unwrap();
        LINES.put("listening on x");
        let told = dashboard(folder.path())
            .command("logs", &json!({}))
            .unwrap();
        assert_eq!(told["lines"][0]["text"], "listening on x");
    }
}
