//! Signs the roots of models that this node answers with, once it is not alone. Other nodes then
//! fetch the beginning of the file to answer with it.

use std::time::Duration;

use super::{Action, Round};

/// Interval between attempts to sign a model's file, or to fetch its beginning, 4 MB and more. The
/// root of a large file is signed some time after it was loaded.
pub const ATTEMPT_EVERY: Duration = Duration::from_secs(5);

pub(super) fn rule(round: &mut Round<'_>) -> Vec<Action> {
    let observed = round.observed;
    if observed.nodes.len() < 2 {
        return Vec::new();
    }
    let owned = observed.owned.iter();
    let owned = owned.filter(|(_, it)| it.answers && !observed.rooted.contains(&it.spec.sha256));
    let is_early = |at| round.now.saturating_duration_since(at) < ATTEMPT_EVERY;
    let due = owned.filter(|(id, _)| !observed.tried.get(id).is_some_and(|(at, _)| is_early(*at)));
    due.map(|(id, it)| Action::Sign {
        id: *id,
        spec: it.spec.clone(),
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::super::testing::*;
    use super::*;
    use crate::{InstanceId, Observed};

    /// A change of what is observed, and the signatures that follow.
    type Case<'a> = (&'a dyn Fn(&mut Observed), usize);

    #[test]
    fn the_file_of_an_instance_that_answers_is_signed_for_others() {
        let now = Instant::now() + 2 * ATTEMPT_EVERY;
        let tried = |before| {
            move |it: &mut Observed| {
                it.tried.insert(InstanceId(5), (now - before, 1));
            }
        };
        let cases: [Case<'_>; 6] = [
            (&|_| (), 1),
            (&|it| it.nodes.truncate(1), 0),
            (
                &|it| it.owned.get_mut(&InstanceId(5)).unwrap().answers = false,
                0,
            ),
            (&|it| it.rooted = [String::new()].into(), 0),
            (&tried(ATTEMPT_EVERY / 2), 0),
            (&tried(ATTEMPT_EVERY), 1),
        ];
        for (number, (case, expected)) in cases.into_iter().enumerate() {
            let mut observed = Observed::new(node(1));
            lives(&mut observed, 1, 0);
            lives(&mut observed, 2, 0);
            runs(&mut observed, 5, 3, &[1]);
            case(&mut observed);
            assert_eq!(
                run_at(rule, &observed, vec![], now).len(),
                expected,
                "case {number}"
            );
        }
    }
}
