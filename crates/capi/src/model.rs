//! Inference in the caller's process: a model on this machine's processors.
//!
//! Several machines, failover and batches of many clients need a node, whose HTTP API any language
//! can call. This is for programs that need a model's text without a server.

use std::ffi::{CString, c_char, c_void};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use paceline_base::KernelClass;
use paceline_engine::{
    Engine, EngineConfig, GenerationRequest, Reply, Runner, SamplingParams, Service,
};
use paceline_model::{LoadOptions, Model, ModelSource};
use paceline_tensor::Kernels;
use paceline_text::chat::{ChatMessage, ChatOptions, ChatTemplate, Error as ChatError};
use paceline_text::tokenizer::Tokenizer;
use paceline_worker::open_checked;

use crate::status::{PacelineStatus, StatusError, guarded, text};

/// Default number of positions of a conversation.
const CONTEXT: u32 = 4096;

/// Most replies queued for the callback. An answer's tokens arrive one at a time, and the engine
/// does not stop for a slow reader until its answer is complete. So this only bounds memory.
const REPLIES: usize = 1 << 16;

/// A loaded model.
#[derive(Debug)]
pub struct PacelineModel {
    runner: Runner,
    tokenizer: Arc<Tokenizer>,
    template: Option<ChatTemplate>,
}

/// How text is generated. All zeros: greedy, up to 256 tokens, no deadline.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PacelineOptions {
    /// Maximum number of tokens; 0 for 256.
    pub max_tokens: u32,
    /// Sampling temperature; 0 for the likeliest token each time.
    pub temperature: f32,
    /// Nucleus sampling: probability mass to sample from, in (0, 1]; 0 for all of it.
    pub top_p: f32,
    /// Seed of the sampler.
    pub seed: u64,
    /// Whether the prompt is text to continue; else it is a user's message to a chat model.
    pub raw: bool,
    /// Longest wait for the whole answer in seconds; 0 for none.
    pub seconds: f64,
}

/// Receives each fragment of text as soon as it is final; returns false to stop the generation.
/// `user` is the pointer that the caller passed. It may not call functions of the same model.
pub type PacelineTextCallback =
    Option<unsafe extern "C" fn(text: *const c_char, user: *mut c_void) -> bool>;

/// Loads the model at `path`: a GGUF file, or a folder in Hugging Face's format. `threads` 0 uses
/// all cores, `context` 0 uses 4096 positions. Blocks while weights are read.
///
/// # Safety
/// `path` is a string, `out` a writable pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn paceline_model_open(
    path: *const c_char,
    threads: u32,
    context: u32,
    out: *mut *mut PacelineModel,
) -> PacelineStatus {
    guarded(|| {
        // SAFETY: the caller's promise.
        let path = unsafe { text(path, "path") }?;
        if out.is_null() {
            return Err(StatusError::invalid("out is null"));
        }
        let model = open(Path::new(path), threads, context)?;
        // SAFETY: not null, and the caller's promise.
        unsafe { *out = Box::into_raw(Box::new(model)) };
        Ok(())
    })
}

fn open(path: &Path, threads: u32, context: u32) -> Result<PacelineModel, StatusError> {
    let in_model =
        |error: &dyn std::fmt::Display| StatusError::other(format!("{}: {error}", path.display()));
    let source = open_checked(path).map_err(|error| in_model(&error))?;
    let cores = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let threads = if threads == 0 {
        cores()
    } else {
        threads as usize
    };
    let kernels = Arc::new(Kernels::new(threads).map_err(StatusError::other)?);
    let options = LoadOptions {
        class: KernelClass::Cpu,
    };
    let model = Model::load(&source, options, kernels, |_, _| {});
    let model = model.map_err(|error| in_model(&error))?;
    let tokenizer = paceline_worker::texts::tokenizer(&source).map_err(|error| in_model(&error))?;
    let tokenizer = Arc::new(tokenizer);
    let context = if context == 0 { CONTEXT } else { context } as usize;
    let config = EngineConfig::single("model", context);
    let engine = Engine::new(Arc::new(model), Arc::clone(&tokenizer), config);
    Ok(PacelineModel {
        runner: Runner::start(engine.map_err(|error| in_model(&error))?, Instant::now),
        tokenizer,
        // A model without a usable template still continues text.
        template: template(&source).ok(),
    })
}

/// The model's chat template. It runs in this process, as its owner chose the model.
fn template(source: &ModelSource) -> Result<ChatTemplate, ChatError> {
    match source {
        ModelSource::Gguf(file) => ChatTemplate::from_gguf(file.metadata()),
        ModelSource::Hf(folder) => ChatTemplate::from_hf_dir(folder.path()),
    }
}

/// Unloads a model and frees its memory. Null is allowed.
///
/// # Safety
/// `model` is null or a model that was not freed and that no other thread uses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn paceline_model_free(model: *mut PacelineModel) {
    if !model.is_null() {
        // SAFETY: the caller's promise; it came from a box.
        let model = unsafe { Box::from_raw(model) };
        guarded(|| {
            drop(model);
            Ok(())
        });
    }
}

/// Generates text after `prompt` and passes it to `callback` in fragments, on the calling thread.
/// Returns when the answer is complete, the callback returned false (`PACELINE_STATUS_CANCELLED`)
/// or the deadline passed. Several threads may generate at once: their steps are batched.
///
/// # Safety
/// `model` is a model that was not freed, `prompt` a string, `options` null or valid options.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn paceline_generate(
    model: *const PacelineModel,
    prompt: *const c_char,
    options: *const PacelineOptions,
    callback: PacelineTextCallback,
    user: *mut c_void,
) -> PacelineStatus {
    guarded(|| {
        // SAFETY: the caller's promise.
        let model =
            unsafe { model.as_ref() }.ok_or_else(|| StatusError::invalid("the model is null"))?;
        // SAFETY: the caller's promise.
        let prompt = unsafe { text(prompt, "prompt") }?;
        let callback = callback.ok_or_else(|| StatusError::invalid("the callback is null"))?;
        // SAFETY: the caller's promise.
        let options = unsafe { options.as_ref() }.copied().unwrap_or(DEFAULTS);
        let request = model.request(prompt, options)?;
        model.answer(request, options.seconds, |piece| {
            // In C a text ends at its first zero byte.
            let piece = CString::new(piece.replace('\0', "\u{fffd}")).unwrap_or_default();
            // SAFETY: the caller gave a function of this type, and `user` for it.
            unsafe { callback(piece.as_ptr(), user) }
        })
    })
}

const DEFAULTS: PacelineOptions = PacelineOptions {
    max_tokens: 0,
    temperature: 0.0,
    top_p: 0.0,
    seed: 0,
    raw: false,
    seconds: 0.0,
};

impl PacelineModel {
    fn request(
        &self,
        prompt: &str,
        options: PacelineOptions,
    ) -> Result<GenerationRequest, StatusError> {
        let prompt = match (&self.template, options.raw) {
            (Some(template), false) => {
                let chat = ChatOptions {
                    add_generation_prompt: true,
                    ..ChatOptions::default()
                };
                let messages = [ChatMessage::new("user", prompt)];
                let prompt = template.encode_chat(&self.tokenizer, &messages, &chat);
                prompt.map_err(StatusError::other)?
            }
            _ => self
                .tokenizer
                .encode_prompt(prompt, usize::MAX)
                .map_err(StatusError::other)?,
        };
        Ok(GenerationRequest {
            prompt,
            max_tokens: if options.max_tokens == 0 {
                256
            } else {
                options.max_tokens as usize
            },
            sampling: SamplingParams {
                temperature: options.temperature,
                top_p: if options.top_p == 0.0 {
                    1.0
                } else {
                    options.top_p
                },
                seed: options.seed,
                ..SamplingParams::default()
            },
            ..GenerationRequest::default()
        })
    }

    fn answer(
        &self,
        request: GenerationRequest,
        seconds: f64,
        mut show: impl FnMut(&str) -> bool,
    ) -> Result<(), StatusError> {
        let by = Instant::now()
            + Duration::from_secs_f64(if seconds > 0.0 {
                seconds.min(3.2e7)
            } else {
                3.2e7
            });
        let (sender, replies) = sync_channel(REPLIES);
        let sink = Box::new(move |reply| {
            // The receiver is dropped once the call has returned.
            let _ = sender.try_send(reply);
        });
        let ticket = self
            .runner
            .submit(request, sink)
            .map_err(StatusError::other)?;
        let ended = loop {
            let (piece, last) =
                match replies.recv_timeout(by.saturating_duration_since(Instant::now())) {
                    Ok(Reply::PromptRead { .. } | Reply::Continued) => continue,
                    Ok(Reply::Token { text, .. }) => (text, false),
                    Ok(Reply::Finished { text, .. }) => (text, true),
                    Ok(Reply::Failed(failure)) => break Err(StatusError::other(failure)),
                    Err(RecvTimeoutError::Timeout) => break Err(late(seconds)),
                    Err(RecvTimeoutError::Disconnected) => {
                        break Err(StatusError::other("the engine is gone"));
                    }
                };
            if !piece.is_empty() && !show(&piece) {
                break Err(StatusError {
                    status: PacelineStatus::Cancelled,
                    text: "the callback ended it".to_owned(),
                });
            }
            if last {
                return Ok(());
            }
        };
        self.runner.cancel(ticket);
        ended
    }
}

fn late(seconds: f64) -> StatusError {
    StatusError {
        status: PacelineStatus::Timeout,
        text: format!("the answer was not complete after {seconds} s"),
    }
}
