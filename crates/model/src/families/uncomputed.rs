//! Families that are known and not computed, with the reasons that errors and the table give.

/// A family whose definition is public and which is not computed.
#[derive(Clone, Copy, Debug)]
pub struct UncomputedFamily {
    /// `model_type` in folders, of the whole or of the text part.
    pub names: &'static [&'static str],
    /// Published models.
    pub models: &'static str,
    /// The parts that are missing to compute them.
    pub lacks: &'static str,
}

/// Families that are refused with a reason.
pub const UNCOMPUTED: &[UncomputedFamily] = &[UncomputedFamily {
    names: &["deepseek_v41"],
    models: "DeepSeek V4.1",
    lacks: "attention to compressed keys",
}];
