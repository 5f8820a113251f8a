//! What nodes moved between MLX's arrays, in words.

use paceline_node::Moved;
use serde_json::{Value, json};

/// How values got out of arrays and into them; empty where no node computes on MLX.
pub(crate) fn arrays(moved: Moved) -> String {
    if !moved.has_arrays() {
        return String::new();
    }
    let (in_place, converted, staged) = (moved.in_place, moved.converted, moved.staged);
    format!(" (MLX's arrays: {in_place} in place, {converted} converted, {staged} staged)")
}

/// The same for scripts.
pub(crate) fn arrays_json(moved: Option<Moved>) -> Value {
    let arrays = moved.filter(|moved| moved.has_arrays()).map(|moved| {
        json!({
            "in_place": moved.in_place.0,
            "converted": moved.converted.0,
            "staged": moved.staged.0,
        })
    });
    arrays.into()
}
