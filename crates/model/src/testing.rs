//! Parsers of what other ranks say, for fuzzing.

/// Reads `words` as a plan of the leader: whatever they are, this returns. A plan that is taken has
/// no more rows than this rank has room for.
pub fn parse_plan(words: &[u32]) {
    crate::plan::parse(words);
}
