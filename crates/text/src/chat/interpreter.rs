//! Execution of templates: in this process ([`Here`]) or by another [`Interpreter`].
//!
//! Both get the same [`RenderInput`], which is plain JSON, so that it can be sent to another
//! process. [`Here`] bounds steps and output. It bounds neither the memory of values that are never
//! printed nor the time of one step. Servers that run untrusted templates run them in a child
//! process with limits (`paceline_worker::interpreter`).

use std::collections::BTreeMap;
use std::fmt;

use minijinja::value::Serde;
use minijinja::{Environment, Value};
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use super::{clock, template};

/// Runs one template.
pub trait Interpreter: fmt::Debug + Send + Sync {
    /// The text that the template writes.
    ///
    /// # Errors
    /// The template's failure, or the limit that it reached. The next job can be rendered after it.
    fn render(&self, job: RenderInput) -> Result<String, TemplateError>;
}

/// Input of a rendering: the template's variables, its clock and its output limit.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RenderInput {
    pub variables: serde_json::Map<String, Json>,
    /// Seconds since 1970 (UTC) for `strftime_now`; the function is not there without it.
    pub now_unix_s: Option<i64>,
    /// Longest text that the template may write, in bytes; never more than 16 MiB.
    pub output_bytes_max: usize,
}

/// Why a template cannot be used, or did not render.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum TemplateError {
    /// The template is longer than any real one.
    #[error("chat template has {size} bytes, expected at most {limit}")]
    TooLong {
        /// Its size in bytes.
        size: usize,
        /// The limit in bytes.
        limit: usize,
    },
    /// The template nests deeper than any real one: its parser is recursive.
    #[error("chat template, line {line}: more than {limit} {what}")]
    TooDeep {
        /// 1-based.
        line: usize,
        /// The counted items, such as "tokens in a tag".
        what: String,
        limit: usize,
    },
    #[error("chat template, line {line}: {reason}")]
    Syntax {
        /// 1-based; 0 if not known.
        line: usize,
        /// The parser's message.
        reason: String,
    },
    #[error("chat template failed in line {line}: {reason}")]
    Render {
        /// 1-based; 0 if not known.
        line: usize,
        /// The interpreter's message.
        reason: String,
    },
    /// The template refuses the conversation (`raise_exception`), such as two turns of one role.
    #[error("the chat template refuses the conversation: {message}")]
    Raised {
        /// The template's message, given to `raise_exception`.
        message: String,
    },
    #[error("chat template takes more than {limit} steps")]
    TooManySteps { limit: u64 },
    #[error("chat template writes more than {limit} bytes")]
    OutputTooLong {
        /// The limit in bytes.
        limit: usize,
    },
    #[error("chat template takes more than {limit_ms} ms")]
    TooSlow { limit_ms: u64 },
    #[error("chat template takes more than {limit} bytes of memory")]
    TooLarge {
        /// The limit in bytes.
        limit: u64,
    },
    #[error("chat template makes its interpreter panic: {message}")]
    Panicked {
        /// The panic's message.
        message: String,
    },
    /// The process that runs the template ended, or cannot be started.
    #[error("the process of the chat template {reason}")]
    Ended {
        /// The rest of the sentence.
        reason: String,
    },
    /// Other conversations were being rendered for longer than a request waits.
    #[error("the chat template is busy with other conversations")]
    Busy,
}

impl TemplateError {
    /// Whether the template used up its limits, or broke its interpreter or process. No
    /// conversation should do that, so it is the model's fault and not the client's.
    pub const fn is_of_model(&self) -> bool {
        matches!(
            self,
            Self::TooManySteps { .. }
                | Self::TooSlow { .. }
                | Self::TooLarge { .. }
                | Self::Panicked { .. }
                | Self::Ended { .. }
        )
    }
}

/// The interpreter of this process.
#[derive(Debug)]
pub struct Here {
    env: Environment<'static>,
}

impl Here {
    /// Compiles `source`.
    ///
    /// # Errors
    /// [`TemplateError::TooLong`], [`TemplateError::TooDeep`], [`TemplateError::Syntax`].
    pub fn compile(source: &str) -> Result<Self, TemplateError> {
        let env = template::compile(source)?;
        Ok(Self { env })
    }
}

impl Interpreter for Here {
    fn render(&self, job: RenderInput) -> Result<String, TemplateError> {
        let given = job.variables.iter();
        let mut context: BTreeMap<&str, Value> = given
            .map(|(name, value)| (name.as_str(), Value::from(Serde(value))))
            .collect();
        if let Some(unix_s) = job.now_unix_s {
            let now = move |format: String| clock::strftime(unix_s, &format);
            context.insert("strftime_now", Value::from_function(now));
        }
        template::render(&self.env, context.into(), job.output_bytes_max)
    }
}
