//! Model files: weights and what a file says of them, read without trusting a byte.
//!
//! Two layouts hold a model:
//!
//! - a GGUF file ([`gguf::Gguf`]), possibly in several parts: metadata, vocabulary and weights in
//!   one;
//! - a Hugging Face folder ([`hf::HfFolder`]): `config.json`, `tokenizer.json` and weights as
//!   [`safetensors`]. Its matrices may be quantised as MLX does it ([`mlx`]), or have separate
//!   scales, as those in FP8 ([`scaled`]).
//!
//! Both give weights as a [`tensor::Tensor`]: name, storage type, shape and the mapped bytes.
//! `paceline_text` reads tokenizers and chat templates from the same files.
//!
//! ```no_run
//! let model = paceline_weights::gguf::Gguf::open("model.gguf")?;
//! let layers = model.metadata().u32("llama.block_count")?;
//! let embedding = model.tensor("token_embd.weight")?;
//! println!("{layers} layers, {} tokens as {}", embedding.rows(), embedding.block_type);
//! # Ok::<(), paceline_weights::gguf::Error>(())
//! ```
//!
//! Invariants:
//!
//! - Every count, length and offset of a file is checked against the bytes that are there before
//!   anything is allocated for it.
//! - Bad input is an error that names the place and the values, never a panic.

pub mod gguf;
pub mod hf;
pub mod mlx;
pub mod safetensors;
pub mod scaled;
pub mod tensor;

mod name_index;
mod sniff;

pub use sniff::LooksLike;
