//! Placeholder of the text half.
