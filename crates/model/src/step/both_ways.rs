//! Attention in both directions over whole texts, as in embedding models.
//!
//! The kernel is causal: a query sees a window that ends at its own position. Here each row is a
//! sequence of its own whose query stands at the last position that the row sees. The kernel has
//! one window for all of its rows, so rows of equal windows share a call.

use std::ops::Range;

use paceline_tensor::{AttentionRows, AttentionScratch, AttentionStep, Kernels};

/// As [`Kernels::attention`], where row i of a text sees the rows nearer than `step.window` on both
/// sides. Every sequence is a whole text.
///
/// Cost: a call for all rows with a whole window. In texts longer than the window also a call for
/// each row near the end.
///
/// # Panics
/// For a sequence that does not start at position 0.
pub(super) fn attention(
    kernels: &Kernels,
    step: &AttentionStep<'_>,
    query_len: usize,
    scratch: &mut AttentionScratch,
    out: &mut [f32],
) {
    let rows = seen_by_rows(step.sequences, step.window);
    let out_len = out.len() / rows.len().max(1);
    let mut first = 0;
    for run in rows.chunk_by(|(_, a), (_, b)| a == b) {
        let sequences: Vec<AttentionRows<'_>> = run.iter().map(|(row, _)| *row).collect();
        let rows = first..first + run.len();
        let of = |len: usize| -> Range<usize> { rows.start * len..rows.end * len };
        let part = AttentionStep {
            window: run[0].1,
            queries: &step.queries[of(query_len)],
            sequences: &sequences,
            ..*step
        };
        kernels.attention(&part, scratch, &mut out[of(out_len)]);
        first = rows.end;
    }
}

/// Each row as a sequence, and the window up to its last visible position.
fn seen_by_rows<'a>(
    sequences: &[AttentionRows<'a>],
    window: Option<usize>,
) -> Vec<(AttentionRows<'a>, Option<usize>)> {
    let mut all = Vec::new();
    for text in sequences {
        assert_eq!(text.position, 0, "a whole text");
        let near = window.unwrap_or(text.rows);
        all.extend((0..text.rows).map(|i| {
            let last = (i + near - 1).min(text.rows - 1);
            let row = AttentionRows {
                rows: 1,
                position: last,
                ..*text
            };
            (row, (i >= near).then(|| last + near - i))
        }));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Positions seen are `last + 1 - window ..= last`.
    #[test]
    fn rows_see_their_window_on_both_sides() {
        let text = AttentionRows {
            rows: 7,
            position: 0,
            pages: &[0],
            first_page: 0,
        };
        let seen = |window| {
            let rows = seen_by_rows(&[text], window);
            let seen = rows.iter().map(|(row, window)| {
                let first = window.map_or(0, |window| row.position + 1 - window);
                (first, row.position)
            });
            seen.collect::<Vec<_>>()
        };
        assert_eq!(seen(None), vec![(0, 6); 7]);
        assert_eq!(seen(Some(9)), vec![(0, 6); 7]);
        let near = [(0, 2), (0, 3), (0, 4), (1, 5), (2, 6), (3, 6), (4, 6)];
        assert_eq!(seen(Some(3)), near);
    }
}
