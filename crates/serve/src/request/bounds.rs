//! Limits of request fields, shared by parsers and schemas.

/// Maximum stop texts. OpenAI has 4; the engine matches all at once, and clients of llama-server
/// send a dozen.
pub(crate) const MAX_STOPS: usize = 64;

/// Maximum characters of a stop text; the engine holds back that much output. Longer than any known
/// use.
pub(crate) const MAX_STOP_CHARS: usize = 1024;

/// Maximum entries of `metadata`, and characters of name and value: OpenAI's specification.
pub(crate) const MAX_NOTES: usize = 16;
pub(crate) const MAX_NOTE_NAME: usize = 64;
pub(crate) const MAX_NOTE: usize = 512;

/// Maximum texts to embed: OpenAI's limit.
pub(crate) const MAX_INPUTS: usize = 2048;

pub(crate) const MAX_EXTRA: usize = 64;

/// Maximum parts of a message: above any known use.
pub(crate) const MAX_PARTS: usize = 256;

/// Maximum calls of a message: OpenAI's limit for tools.
pub(crate) const MAX_TOOL_CALLS: usize = 128;

/// Maximum tools of a request: OpenAI's limit.
pub(crate) const MAX_TOOLS: usize = 128;

pub(crate) const MAX_ITEM_PARTS: usize = 1024;
pub(crate) const MAX_ITEM_TOOLS: usize = 512;

/// Types of these parts; all are text.
pub(crate) const ITEM_PART_KINDS: [&str; 6] = [
    "input_text",
    "output_text",
    "text",
    "summary_text",
    "reasoning_text",
    "refusal",
];

/// Maximum count where the model's context is the real bound: 2^31 - 1, which all clients can
/// write.
pub(crate) const MAX_COUNT: i64 = i32::MAX as i64;

/// Maximum characters of a text in the body: the default body limit.
pub(crate) const MAX_TEXT: usize = 8 << 20;

/// Items of the Responses API of tools that a provider runs.
pub(crate) const HOSTED_ITEMS: [&str; 7] = [
    "web_search_call",
    "file_search_call",
    "code_interpreter_call",
    "image_generation_call",
    "mcp_list_tools",
    "mcp_call",
    "tool_search_call",
];
