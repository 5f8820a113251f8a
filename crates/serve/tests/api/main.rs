//! The API over real sockets: a scripted service where its replies matter, a tiny model where its
//! text does.

#![allow(
    clippy::unwrap_used,
    reason = "a helper of a test fails as the test does"
)]

mod access;
mod agents;
mod answers;
mod board;
mod client;
mod connections;
mod dialects;
mod embeddings;
mod endings;
mod fields;
mod load;
mod manners;
mod openapi;
mod real;
mod refusals;
mod resuming;
mod rig;
mod scripted;
mod several;
mod tiny;
mod tls;
mod tools;
mod upstreams;
