//! The integration tests of this crate: one program, so that they are linked once.

mod chat;
#[path = "../../weights/tests/hostile/counting.rs"]
mod counting;
mod encoders;
mod hostile;
mod pretokenizers;
mod support;
mod templates;
mod tokenizer;

#[global_allocator]
static COUNTING: counting::Counting = counting::Counting;
