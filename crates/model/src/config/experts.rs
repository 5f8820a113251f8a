//! Mixtures of experts: sizes, and how router scores become weights.

/// Maximum experts per row: several times those of published models (at most 10).
pub(crate) const MAX_USED: usize = 32;

/// Maximum groups of experts: several times those of published models (at most 8).
pub(crate) const MAX_GROUPS: usize = 64;

/// Lower bound of the sum that expert weights are divided by: what `transformers` and mlx-lm add to
/// it. llama.cpp's 2^-14 changes rows whose gates are all nearly closed.
pub const LEAST_SUM: f32 = 1e-20;

/// Slope of the clamped gate of gpt-oss.
pub const CLAMP_SLOPE: f32 = 1.702;

/// How router scores become expert weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gating {
    /// Softmax over all experts.
    Softmax,
    Sigmoid,
    /// Softmax over the chosen experts.
    OfChosen,
    /// `sqrt(ln(1 + exp(score)))`
    SqrtSoftplus,
    /// As `SqrtSoftplus`, of experts that the token chooses.
    OfToken,
}

/// A mixture of experts in place of a feed-forward.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Experts {
    /// Number of routed experts.
    pub count: usize,
    /// Experts per row (top-k).
    pub used: usize,
    /// Feed-forward width of each expert.
    pub width: usize,
    pub gating: Gating,
    /// Whether the weights of the chosen experts are divided by their sum.
    pub normalised: bool,
    /// Factor of the weights of the chosen experts.
    pub scale: f32,
    /// Whether the router adds a bias to each weight for the choice only.
    pub corrected: bool,
    /// Width of the shared expert; 0 for none.
    pub shared: usize,
    /// Whether the shared expert has a gate; otherwise its weight is 1.
    pub shared_gate: bool,
    /// Clamp of gpt-oss's gate, in place of the model's activation.
    pub clamp: Option<f32>,
    /// Group-limited routing: the router first chooses among these groups; `None` without.
    pub groups: Option<ExpertGroups>,
    /// Whether the router has its own norm, and each expert a weight factor (Gemma 4).
    pub scaled: bool,
    /// Routed experts read and write compressed rows (Kimi K3). The shared expert is then a dense
    /// feed-forward in parallel, and `shared` is 0.
    pub compressed: Option<CompressedExperts>,
}

/// Rows that routed experts read and write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompressedExperts {
    /// Elements of a row (L), a multiple of 32 and at most the model's width.
    pub width: usize,
    /// Whether the sum over experts has a norm.
    pub normed: bool,
}

/// Equally large groups of consecutive experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertGroups {
    /// Number of groups; divides the experts.
    pub count: usize,
    /// Groups the router chooses for a row; the row's experts come from these.
    pub used: usize,
    /// A group's score is the sum of its `largest` best experts: 2 for DeepSeek V3, 1 for V2.
    pub largest: usize,
}

impl ExpertGroups {
    /// Whether the groups divide `experts` evenly and hold enough for a row.
    pub(super) fn fit(self, experts: Experts) -> bool {
        let Self {
            count,
            used,
            largest,
        } = self;
        if count == 0 || count > MAX_GROUPS || !experts.count.is_multiple_of(count) {
            return false;
        }
        let each = experts.count / count;
        (1..=count).contains(&used) && (1..=each).contains(&largest) && experts.used <= used * each
    }
}

impl Experts {
    /// Elements of the rows that routed experts read and write, in a model of this width.
    pub const fn row_width(&self, width: usize) -> usize {
        match self.compressed {
            Some(of) => of.width,
            None => width,
        }
    }

    /// Leaves of the sum: the experts, and behind them the shared one.
    pub(crate) fn leaves(&self) -> usize {
        self.count + usize::from(self.shared > 0)
    }
}
