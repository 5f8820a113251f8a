//! Several models behind one API: a request's `model` selects; the first answers unknown names.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use paceline_board::LocalInstances;
use paceline_engine::Service;
use paceline_model::Config;
use paceline_node::Instance;
use paceline_serve::{HttpServer, ModelRegistry, ProcessMetrics, StatusSource};
use paceline_store::{Cancel, Error as StoreError};
use serde_json::Value;

use super::{Args, HostedModel, encoder, ended, join_in, observer, tell_urls, wait};
use crate::error::Error;
use crate::interrupt::Signals;
use crate::local_model::LocalModel;
use crate::output::print_err;
use crate::{adapter, member, pull};

/// Serves the models of `each` until a signal.
///
/// # Errors
/// A model that cannot be found or loaded, an address that cannot be bound.
pub(super) fn run(args: &Args, each: &[Args], signals: &Signals) -> anyhow::Result<()> {
    check_names(each)?;
    let mut models = Vec::new();
    for one in each {
        let found = pull::ensure(one.model().unwrap_or_default(), signals)?;
        let tuned = one.tuned.as_ref().map(|tuned| tuned.path.as_path());
        models.push((one, adapter::applied(found.path, tuned)?));
    }
    let beside = args.beside(signals)?;
    ended(signals.orderly(|cancel| serve(args, &models, beside, cancel)))
}

/// Rejects equal names: the later model would replace the earlier.
///
/// # Errors
/// [`Error::SameName`].
fn check_names(each: &[Args]) -> Result<(), Error> {
    let mut known = BTreeSet::new();
    for one in each {
        let name = one.named(one.model().unwrap_or_default()).id;
        if !known.insert(name.clone()) {
            return Err(Error::SameName { name });
        }
    }
    Ok(())
}

fn serve(
    args: &Args,
    models: &[(&Args, PathBuf)],
    beside: Option<HostedModel>,
    cancel: &Cancel,
) -> anyhow::Result<()> {
    let node = join_in(args);
    let agent = node.as_ref().map(|node| node.0.clone());
    let tell_cluster = move || agent.as_ref().map_or(Value::Null, member::cluster);
    let status = StatusSource(Arc::new(tell_cluster));
    let (config, board) = args.set_up(ProcessMetrics::default(), false)?;
    let (server, doors) = HttpServer::bind_node(config, status)?;
    let urls = server.urls();
    if let Some(node) = &node {
        node.0.set_api(server.addresses().to_vec());
        board.set_agent(&node.0);
    }
    let shown = LocalInstances::on(&board);
    let _watching = board.watch(args.watch()?)?;
    let handle = server.handle();
    std::thread::scope(|scope| {
        let loading = scope.spawn(|| {
            let loaded = beside
                .map_or(Ok(()), |beside| open(&doors, beside))
                .and_then(|()| load_all(models, (&doors, &shown), cancel));
            if loaded.is_ok() {
                tell_urls(&urls);
                wait(cancel);
            }
            handle.shutdown();
            loaded.map(drop)
        });
        server.run();
        loading
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Loads the models in turn, so that each sees the memory that remains.
fn load_all(
    models: &[(&Args, PathBuf)],
    (doors, shown): (&ModelRegistry, &LocalInstances),
    cancel: &Cancel,
) -> anyhow::Result<Vec<Arc<Instance>>> {
    let mut instances = Vec::new();
    for (one, path) in models {
        if cancel.is_cancelled() {
            return Err(StoreError::Cancelled.into());
        }
        if let Some(source) = encoder::source(path) {
            let named = one.named(one.model().unwrap_or_default());
            open(doors, encoder::load(one, path, &source, named)?)?;
            continue;
        }
        let sizes = |config: &Config| one.engine(path, config);
        let mut opened = LocalModel::new(path, (one.compute, one.engine), &one.split, sizes)?;
        if one.follow {
            opened.follow_use();
        }
        opened.forecast();
        let model = one.served(&mut opened, path);
        let workers = (one.node.worker_args(), one.node.worker_folders()?);
        let instance = Arc::new(opened.start(workers, true, observer(&opened))?);
        shown.add(&model.id, &instance, opened.nodes());
        opened.ready(&instance)?;
        print_err(format_args!("{} is ready", model.id));
        let service = Arc::clone(&instance) as Arc<dyn Service>;
        open(doors, (model, service))?;
        instances.push(instance);
    }
    Ok(instances)
}

/// Registers a model at the HTTP API under its own name.
fn open(doors: &ModelRegistry, (model, service): HostedModel) -> anyhow::Result<()> {
    doors.register(&model.id.clone(), model, service)?;
    Ok(())
}
