//! placeholder

pub mod stored;
