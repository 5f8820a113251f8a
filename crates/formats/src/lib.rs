//! Model files: weights, tokenizers and chat templates, read without trusting a byte.
//!
//! Two layouts hold a model:
//!
//! - a GGUF file ([`gguf::Gguf`]), possibly in several parts: metadata, vocabulary and weights in
//!   one;
//! - a Hugging Face folder ([`hf::HfFolder`]): `config.json`, `tokenizer.json` and weights as
//!   [`safetensors`]. Its matrices may be quantised as MLX does it ([`mlx`]), or have separate
//!   scales, as those in FP8 ([`scaled`]).
//!
//! Both give weights as a [`tensor::Tensor`]: name, storage type, shape and the mapped bytes. From
//! either, [`tokenizer`] turns text into ids, [`chat`] turns a conversation into a prompt, and
//! [`text`] turns generated ids back into text piece by piece.
//!
//! ```no_run
//! let model = paceline_formats::gguf::Gguf::open("model.gguf")?;
//! let layers = model.metadata().u32("llama.block_count")?;
//! let embedding = model.tensor("token_embd.weight")?;
//! println!("{layers} layers, {} tokens as {}", embedding.rows(), embedding.block_type);
//! # Ok::<(), paceline_formats::gguf::Error>(())
//! ```
//!
//! Invariants:
//!
//! - Every count, length and offset of a file is checked against the bytes that are there before
//!   anything is allocated for it.
//! - Bad input is an error that names the place and the values, never a panic.
//! - Nothing that comes with a model is executed. Chat templates run in a sandboxed interpreter
//!   with a limit on steps and output.

pub mod chat;
pub mod gguf;
pub mod grammar;
pub mod hf;
pub mod mlx;
pub mod panics;
pub mod safetensors;
pub mod scaled;
mod surrogates;
pub mod tensor;
pub mod text;
pub mod tokenizer;
pub mod tools;

mod limited_read;
mod name_index;
mod sniff;

pub use sniff::LooksLike;
pub use surrogates::replace_lone_surrogates;
