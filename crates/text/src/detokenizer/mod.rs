//! From generated tokens to text for the client, in fragments.
//!
//! ```text
//! token bytes --> StreamDecoder --> whole characters --> StopMatcher --> text that is safe to show
//! ```
//!
//! Tokens cut text anywhere, also inside a character and inside a stop string. Both stages hold
//! back exactly what could still change its meaning, and what comes out does not depend on where
//! the tokens were cut. Both can be serialised, so that a sequence can move to another engine in
//! the middle of a character or of a stop string.

mod decoder;
mod stop;

pub use decoder::StreamDecoder;
pub use stop::{Error, StopMatcher, StopOutput};
