//! Bounds of what requests hold, for readers and schemas alike.

/// Most stop texts. OpenAI has 4; the engine looks for all at once, and clients of llama-server
/// send a dozen.
pub(crate) const MAX_STOPS: usize = 64;

/// Longest stop text; the engine holds as much of an answer back. Longer than any known use.
pub(crate) const MAX_STOP_CHARS: usize = 1024;

/// Entries of `metadata`, and longest name and value: OpenAI's specification.
pub(crate) const MAX_NOTES: usize = 16;
pub(crate) const MAX_NOTE_NAME: usize = 64;
pub(crate) const MAX_NOTE: usize = 512;

/// Most texts of a request: OpenAI's bound.
pub(crate) const MAX_INPUTS: usize = 2048;

/// Most other files.
pub(crate) const MAX_EXTRA: usize = 64;

/// Most parts of a message: longer than any known use.
pub(crate) const MAX_PARTS: usize = 256;

/// Most calls of a message: OpenAI's bound for the tools themselves.
pub(crate) const MAX_TOOL_CALLS: usize = 128;

/// Most tools of a request: OpenAI's bound.
pub(crate) const MAX_TOOLS: usize = 128;

/// Most parts of an item of the Responses API, and most tools.
pub(crate) const MAX_ITEM_PARTS: usize = 1024;
pub(crate) const MAX_ITEM_TOOLS: usize = 512;

/// Kinds of these parts, all of which are text.
pub(crate) const ITEM_PART_KINDS: [&str; 6] = [
    "input_text",
    "output_text",
    "text",
    "summary_text",
    "reasoning_text",
    "refusal",
];
