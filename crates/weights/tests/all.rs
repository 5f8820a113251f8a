//! The integration tests of this crate: one program, so that they are linked once.

mod arriving;
#[path = "hostile/counting.rs"]
mod counting;
mod gguf;
mod hf;
mod hostile;
mod mlx;
mod real;
mod scaled;

#[global_allocator]
static COUNTING: counting::Counting = counting::Counting;
