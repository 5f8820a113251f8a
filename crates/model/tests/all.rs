//! The integration tests of this crate: one program, so that they are linked once.
//! `allocations` stands apart because it counts those of all threads.

mod block_types;
mod common;
mod configurations;
mod encoder;
mod gemma3n_gguf;
mod golden_hf;
mod golden_mlx;
mod hostile_models;
mod llama_cpp;
mod llama_cpp_tiny;
mod numerics_rule;
mod packed;
mod quant_models;
mod scaled;
mod splits;
mod streaming;
