//! Decides whether this machine's node answers instead of this process: by a loaded instance, or by
//! one leased until this command ends.

use std::sync::mpsc::Receiver;

use anyhow::{Context, anyhow, bail};
use paceline_base::KernelClass;
pub(crate) use paceline_board::lease::NodeInstance;
use paceline_board::lease::{InstanceLease, LeaseReport, alive};
use paceline_fleet::InstanceOptions;
use paceline_model::SplitKind;
use paceline_node::fleet::LoadRequest;
use serde_json::{Value, json};

use crate::instances::LoadProgress;
use crate::interrupt::Signals;
use crate::output::print_err;
use crate::{home, member, pull};

/// The model and options that decide whether this machine's node is used.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InstanceRequest<'a> {
    /// The user's name for the model.
    pub(crate) model: &'a str,
    /// More than one lease an instance.
    pub(crate) nodes: u32,
    pub(crate) split: SplitKind,
    pub(crate) context: Option<u32>,
    /// Kernel class of a leased instance, if not the default of its nodes.
    pub(crate) class: Option<KernelClass>,
    /// Whether to skip the node.
    pub(crate) never: bool,
    /// An option that only this process supports.
    pub(crate) only_here: Option<&'static str>,
}

/// The instance that answers, if any. Prints what computes, if a running node could.
pub(crate) fn instance(
    wish: &InstanceRequest<'_>,
    signals: &Signals,
) -> anyhow::Result<Option<NodeInstance>> {
    if wish.never {
        return Ok(None);
    }
    // A node that cannot be asked does not compute.
    let Ok(Some(using)) = member::ask_if_up("using", json!({ "model": wish.model })) else {
        return Ok(None);
    };
    if let Some(option) = wish.only_here {
        print_err(format_args!(
            "computing here: {option} is about this process, not the cluster"
        ));
        return Ok(None);
    }
    if wish.nodes > 1 {
        return borrowed(wish, signals);
    }
    if using.is_null() {
        let model = wish.model;
        print_err(format_args!(
            "computing here: no instance of {model} is loaded"
        ));
        return Ok(None);
    }
    let instance = of(&using, None)?;
    print_err(format_args!(
        "asking the instance on {}; --local computes here",
        instance.on
    ));
    Ok(Some(instance))
}

pub(crate) fn loaded(model: &str) -> anyhow::Result<NodeInstance> {
    let using = member::ask("using", json!({ "model": model }))?;
    if using.is_null() {
        bail!("no instance of {model} answers: `paceline ps` shows what is loaded");
    }
    of(&using, None)
}

fn of(using: &Value, borrowed: Option<InstanceLease>) -> anyhow::Result<NodeInstance> {
    Ok(NodeInstance::of(&home::folder()?, using, borrowed))
}

/// Leases an instance over nodes of the cluster; `None` without enough nodes.
fn borrowed(wish: &InstanceRequest<'_>, signals: &Signals) -> anyhow::Result<Option<NodeInstance>> {
    let wanted = wish.nodes;
    let answer = member::ask("nodes", json!({}))?;
    let alive = alive(&answer);
    if alive < wanted {
        print_err(format_args!(
            "computing here on {wanted} local nodes: the cluster has {alive}"
        ));
        return Ok(None);
    }
    pull::ensure_within(wish.model, || None, signals)?;
    let request = LoadRequest {
        model: wish.model.to_owned(),
        count: Some(wanted as usize),
        split: wish.split,
        class: wish.class.map(|class| class.name().to_owned()),
        options: InstanceOptions {
            context: wish.context,
            parallel: 1, // the command waits for each answer
            ..InstanceOptions::default()
        },
        ..LoadRequest::default()
    };
    let (told, borrowed) =
        InstanceLease::new(home::folder()?, &request).context("cannot start a thread")?;
    let id = ready(&told)?;
    let using = member::ask("using", json!({ "model": id }))?;
    let instance = of(&using, Some(borrowed))?;
    print_err(format_args!(
        "loaded over {} for this command; --local computes here",
        instance.on
    ));
    Ok(Some(instance))
}

fn ready(told: &Receiver<LeaseReport>) -> anyhow::Result<String> {
    let mut bar = LoadProgress::new();
    while let Ok(view) = told.recv() {
        let view = view?;
        if bar.done(&view)? {
            return Ok(view["id"].as_str().unwrap_or_default().to_owned());
        }
    }
    Err(anyhow!("the node says no more of the model"))
}
