//! Traces of one answer of a loaded model: recorded by the owner, requested by any node.

use std::sync::Arc;
use std::time::Duration;

use paceline_base::CallbackError;
use paceline_engine::{GenerationRequest, SamplingParams};
use paceline_fleet::{InstanceId, InstanceSpec, specs};
use paceline_model::{Config, ModelSource};
use paceline_text::chat::{ChatMessage, ChatOptions};
use serde::{Deserialize, Serialize};

use super::hosts::NodeConnection;
use super::{Error, Inner, OWNER_LIMIT, owner};
use crate::Instance;
use crate::trace::{Recording, Stages};
use crate::workers::connection::{MessageConnection, receive_message, send_message};
use paceline_worker::interpreter::ChildProgram;
use paceline_worker::texts;

/// Longest wait for an owner's recording: its longest answer plus the transfer.
const RECORDING_LIMIT: Duration = Duration::from_secs(280);

/// Longest wait for an owner's sample: its longest duration plus the ranks' reports.
const STAGES_LIMIT: Duration = Duration::from_secs(29);

/// Longest wait for the request on an open channel.
const ASK_LIMIT: Duration = Duration::from_secs(5);

/// Request for a traced answer, decoded greedily.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TraceRequest {
    /// Name of the model, or id of the instance.
    pub model: String,
    /// The prompt; put into the model's chat template if it has one.
    pub prompt: String,
    /// Most tokens of the answer.
    pub max_tokens: usize,
}

/// Traces an answer on the node that owns the instance.
pub(super) fn trace(inner: &Arc<Inner>, ask: &TraceRequest) -> Result<Recording, Error> {
    let (id, wanted) = find(inner, &ask.model)?;
    let owner = wanted.nodes[0];
    if owner == inner.agent.id() {
        return record(inner, id, &wanted, ask);
    }
    let channel = inner.agent.open(owner, super::TRACE, OWNER_LIMIT);
    let line = NodeConnection(channel.map_err(Error::of(inner.name(owner)))?);
    send_message(&line, ask)?;
    let answer: Option<Result<Recording, String>> = receive_message(&line, RECORDING_LIMIT)?;
    line.close();
    let node = inner.name(owner);
    Ok(answer.ok_or(Error::Silent { node })??)
}

/// Serves another node's trace request.
pub(super) fn answer(inner: &Arc<Inner>, line: &dyn MessageConnection) {
    if let Ok(Some(ask)) = receive_message::<TraceRequest>(line, ASK_LIMIT) {
        let found = find(inner, &ask.model);
        let recorded = found.and_then(|(id, wanted)| record(inner, id, &wanted, &ask));
        // An ingress that left does not receive it.
        let _: Result<(), _> = send_message(line, &recorded.map_err(|error| error.to_string()));
    }
    line.close();
}

/// Samples the stages of an instance, on the node that owns it.
pub(super) fn stages(inner: &Arc<Inner>, name: &str) -> Result<Stages, Error> {
    let (id, wanted) = find(inner, name)?;
    let owner = wanted.nodes[0];
    if owner == inner.agent.id() {
        return look(inner, id, &wanted);
    }
    let channel = inner.agent.open(owner, super::STAGES, OWNER_LIMIT);
    let line = NodeConnection(channel.map_err(Error::of(inner.name(owner)))?);
    send_message(&line, &id.to_string())?;
    let answer: Option<Result<Stages, String>> = receive_message(&line, STAGES_LIMIT)?;
    line.close();
    let node = inner.name(owner);
    Ok(answer.ok_or(Error::Silent { node })??)
}

/// Serves another node's request for stages.
pub(super) fn answer_stages(inner: &Arc<Inner>, line: &dyn MessageConnection) {
    if let Ok(Some(name)) = receive_message::<String>(line, ASK_LIMIT) {
        let found = find(inner, &name);
        let looked = found.and_then(|(id, wanted)| look(inner, id, &wanted));
        // An ingress that left does not receive it.
        let _: Result<(), _> = send_message(line, &looked.map_err(|error| error.to_string()));
    }
    line.close();
}

fn look(inner: &Inner, id: InstanceId, wanted: &InstanceSpec) -> Result<Stages, Error> {
    Ok(Stages::look(&*ready(inner, id, wanted)?)?)
}

fn ready(inner: &Inner, id: InstanceId, wanted: &InstanceSpec) -> Result<Arc<Instance>, Error> {
    let model = wanted.model.clone();
    inner.ready_instance(id).ok_or(Error::NotReady { model })
}

fn find(inner: &Inner, name: &str) -> Result<(InstanceId, InstanceSpec), Error> {
    let map = inner.agent.map();
    let mut all = specs(&map);
    let found = all.find(|(id, _, wanted)| wanted.is_called(name) || id.to_string() == name);
    let (id, _, wanted) = found.ok_or_else(|| Error::UnknownInstance {
        name: name.to_owned(),
    })?;
    Ok((id, wanted))
}

/// Traces an answer of an instance of this node.
fn record(
    inner: &Inner,
    id: InstanceId,
    wanted: &InstanceSpec,
    ask: &TraceRequest,
) -> Result<Recording, Error> {
    let instance = ready(inner, id, wanted)?;
    let path = owner::path_of(inner, wanted)?;
    let source = ModelSource::open(&path).map_err(crate::Error::from)?;
    let config = Config::read(&source).map_err(crate::Error::from)?;
    let program = ChildProgram {
        path: inner.spec.program.0.clone(),
        args: vec!["template".into()],
        env: Vec::new(),
    };
    let request = GenerationRequest {
        prompt: encode(&source, &program, &ask.prompt)?,
        max_tokens: ask.max_tokens,
        sampling: SamplingParams {
            temperature: 0.0,
            ..SamplingParams::default()
        },
        ..GenerationRequest::default()
    };
    Ok(Recording::of(&instance, &config, request)?)
}

/// The tokens of a prompt, in the chat template if there is one.
fn encode(source: &ModelSource, program: &ChildProgram, prompt: &str) -> Result<Vec<u32>, Error> {
    let tokenizer = texts::tokenizer(source).map_err(crate::Error::from)?;
    let encoded = match texts::template(source, program) {
        Some(template) => {
            let template = template.map_err(CallbackError::from)?;
            let options = ChatOptions {
                add_generation_prompt: true,
                ..ChatOptions::default()
            };
            let messages = [ChatMessage::new("user", prompt)];
            let encoded = template.encode_chat(&tokenizer, &messages, &options);
            encoded.map_err(CallbackError::from)?
        }
        None => {
            let encoded = tokenizer.encode_prompt(prompt, usize::MAX);
            encoded.map_err(crate::Error::from)?
        }
    };
    Ok(encoded)
}
