//! The integration tests of this crate: one program, so that they are linked once.

#[path = "hostile/counting.rs"]
mod counting;
mod files_arriving;
mod files_gguf;
mod files_hf;
mod files_hostile;
mod files_mlx;
mod files_real;
mod files_scaled;
mod text_chat;
mod text_hostile;
mod text_pretokenizers;
mod text_support;
mod text_templates;
mod text_tokenizer;

#[global_allocator]
static COUNTING: counting::Counting = counting::Counting;
