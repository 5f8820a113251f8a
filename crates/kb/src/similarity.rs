//! Names that look like what was typed.

use strsim::damerau_levenshtein;

/// The entries of `names` within an edit distance of a third of `typed`'s length, nearest first, at
/// most `max`. Names that begin with `typed` count as near, the shortest first.
///
/// A third lets a swapped pair pass in a word of six and keeps three-letter words apart.
pub(crate) fn nearest<'a>(
    typed: &str,
    names: impl IntoIterator<Item = &'a str>,
    max: usize,
) -> Vec<&'a str> {
    let typed = typed.to_lowercase();
    let length = typed.chars().count();
    let allowed = (length / 3).clamp(1, 4);
    let distance = |name: &str| {
        let lower = name.to_lowercase();
        if length >= 3 && lower.starts_with(&typed) {
            return 0;
        }
        // The distance is at least the difference in length; its cost is the product.
        if length == 0 || lower.chars().count().abs_diff(length) > allowed {
            return usize::MAX;
        }
        damerau_levenshtein(&typed, &lower)
    };
    let names = names.into_iter();
    let mut near: Vec<(usize, usize, &str)> = names
        .map(|name| (distance(name), name.chars().count(), name))
        .filter(|(distance, ..)| *distance <= allowed)
        .collect();
    near.sort_unstable();
    near.dedup();
    near.into_iter().take(max).map(|(.., name)| name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slips_are_forgiven_and_other_words_are_not() {
        let names = ["thunderbolt", "latency", "jaccl", "mesh", "JACCL Backend"];
        for (typed, near) in [
            ("THUNDREBOLT", &["thunderbolt"][..]),
            ("lat", &["latency"]),
            ("jaccl", &["jaccl", "JACCL Backend"]),
            ("mash", &["mesh"]),
            ("bread", &[]),
            ("", &[]),
            ("ml", &[]),
        ] {
            assert_eq!(nearest(typed, names, 3), near, "{typed}");
        }
    }
}
