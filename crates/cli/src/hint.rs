//! Prints errors with hints.

mod command;
mod model;
mod server;
mod store;

use paceline_store::Error as StoreError;

use crate::error::Error;
use crate::output::print_err;

pub(crate) use command::of_usage;

/// Prints an error and its hints to stderr.
pub(crate) fn report(error: &anyhow::Error) {
    match error.downcast_ref::<StoreError>() {
        Some(all @ StoreError::AllSourcesFailed { name, .. }) if all.is_unreachable() => {
            print_err(format_args!(
                "error: cannot fetch {name}: neither the hub nor a package index answers"
            ));
        }
        Some(StoreError::AllSourcesFailed { name, failures }) => {
            print_err(format_args!("error: no source could deliver {name}"));
            for (source, error) in failures {
                print_err(format_args!("  {source}: {error}"));
            }
        }
        _ => print_err(format_args!("error: {}", message(error))),
    }
    for hint in hints(error) {
        print_err(format_args!("hint: {hint}"));
    }
}

/// The error with its causes, without causes that the text before them ends with: some errors print
/// their cause.
fn message(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for part in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = part;
        } else if !text.ends_with(&part) {
            text = format!("{text}: {part}");
        }
    }
    text
}

/// Hints for an error: those of the outermost cause that has any.
fn hints(error: &anyhow::Error) -> Vec<String> {
    let of_cause = |cause: &(dyn std::error::Error + 'static)| {
        if let Some(error) = cause.downcast_ref::<StoreError>() {
            return store::hints(error);
        }
        if let Some(error) = cause.downcast_ref::<Error>() {
            return error.hints();
        }
        if let Some(error) = cause.downcast_ref() {
            return server::hint(error).into_iter().collect();
        }
        if let Some(error) = cause.downcast_ref() {
            return server::hint_of_load(error).into_iter().collect();
        }
        if let Some(error) = cause.downcast_ref() {
            return server::hint_of_tls(error).into_iter().collect();
        }
        if let Some(hint) = crate::member::hint(cause) {
            return vec![hint];
        }
        if let Some(hint) = crate::upgrade::hint(cause) {
            return vec![hint];
        }
        if let Some(hint) = crate::plaintext::hint(cause) {
            return vec![hint];
        }
        if let Some(hint) = crate::mapreduce::hint(cause) {
            return vec![hint.to_owned()];
        }
        let of_plan = crate::plan::hints(cause);
        if !of_plan.is_empty() {
            return of_plan;
        }
        let of_machines = [crate::launch::hints(cause), crate::topology::hints(cause)].concat();
        if !of_machines.is_empty() {
            return of_machines;
        }
        if let Some(error) = cause.downcast_ref() {
            return crate::kb::hint(error).into_iter().collect();
        }
        model::hint(cause).map(str::to_owned).into_iter().collect()
    };
    let mut all = error.chain().map(of_cause);
    all.find(|hints| !hints.is_empty()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;

    #[test]
    fn a_cause_is_told_once() {
        #[derive(Debug, thiserror::Error)]
        #[error("tensor x: {source}")]
        struct Outer {
            source: std::io::Error,
        }
        let source = std::io::Error::other("no room");
        let error: anyhow::Result<()> = Err(Outer { source }.into());
        let error = error.context("cannot load f").unwrap_err();
        assert_eq!(message(&error), "cannot load f: tensor x: no room");
    }

    #[test]
    fn advice_is_found_below_context() {
        let error: anyhow::Result<()> = Err(StoreError::Cancelled.into());
        let error = error.context("cannot do it").unwrap_err();
        assert_eq!(hints(&error).len(), 1);
        assert!(hints(&anyhow::anyhow!("something else")).is_empty());
    }
}
