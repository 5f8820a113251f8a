//! Log levels and formats for all crates.
//!
//! Lines for people ([`tell`](crate::output::tell)) are printed unchanged. With `--log-format json`
//! they become events too, so that standard error has one JSON object per line. Worker processes
//! get the same levels; their parent prints their output.

use std::ffi::OsString;
use std::io::IsTerminal;
use std::sync::OnceLock;

use anyhow::Context;
use paceline_serve::PROMPTS;
use tracing::level_filters::LevelFilter;
use tracing::{error, info, warn};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, fmt};

/// Log target of lines for people. Levels match by prefix, so no crate's name begins with it.
const LINES: &str = "cli";

/// The format and levels of the command line, for workers.
static CHOSEN: OnceLock<(LogFormat, Option<String>)> = OnceLock::new();

/// How much is logged, and how.
#[derive(Debug, clap::Args)]
pub(crate) struct LogArgs {
    /// Least severe events to log: `info`, or by module, such as `warn,paceline_node=debug`; text
    /// of prompts for `prompts=trace` only [default: PACELINE_LOG, else error]
    #[arg(long, global = true, value_name = "LEVELS")]
    log: Option<String>,
    /// How logs are written to standard error: human, or json for an object a line
    #[arg(
        long,
        global = true,
        value_name = "FORMAT",
        value_enum,
        default_value_t,
        hide_possible_values = true
    )]
    log_format: LogFormat,
}

/// How logs are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum LogFormat {
    /// Lines for people
    #[default]
    Human,
    /// A JSON object a line
    Json,
}

/// Starts logging; once.
pub(crate) fn start(args: &LogArgs) -> anyhow::Result<()> {
    let of_environment = std::env::var("PACELINE_LOG").ok();
    let levels = args.log.clone().or(of_environment);
    let levels = levels.filter(|levels| !levels.trim().is_empty());
    let filter = filter(levels.as_deref(), args.log_format)?;
    let _ = CHOSEN.set((args.log_format, args.log.clone())); // the first one stays
    let layer = fmt::layer().with_writer(std::io::stderr);
    let layer = match args.log_format {
        LogFormat::Json => layer.json().flatten_event(true).with_filter(filter).boxed(),
        LogFormat::Human => {
            let colours = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
            layer.with_ansi(colours).with_filter(filter).boxed()
        }
    };
    // Fails if a test has started logging already.
    let _ = tracing_subscriber::registry().with(layer).try_init();
    Ok(())
}

fn filter(levels: Option<&str>, format: LogFormat) -> anyhow::Result<Targets> {
    let levels = levels.unwrap_or("error");
    let asked: Targets = levels.parse().with_context(|| {
        format!("--log {levels:?}: expected levels such as `info` or `a=debug,warn`")
    })?;
    let names = |target: &str| asked.iter().any(|(name, _)| name == target);
    let mut all = asked.clone();
    if !names(PROMPTS) {
        all = all.with_target(PROMPTS, LevelFilter::OFF);
    }
    if format == LogFormat::Json && !names(LINES) {
        all = all.with_target(LINES, LevelFilter::INFO);
    }
    Ok(all)
}

/// Logs a line for people as an event, if the format is JSON; whether it did.
pub(crate) fn line(text: &str) -> bool {
    if !matches!(CHOSEN.get(), Some((LogFormat::Json, _))) {
        return false;
    }
    match text.split_once(": ") {
        Some(("error", rest)) => error!(target: LINES, "{rest}"),
        Some(("warning", rest)) => warn!(target: LINES, "{rest}"),
        _ => info!(target: LINES, "{text}"),
    }
    true
}

/// Arguments for a worker with the same log levels; it inherits `PACELINE_LOG` anyway.
pub(crate) fn worker_args() -> Vec<OsString> {
    let mut args = vec![OsString::from("worker")];
    if let Some((_, Some(levels))) = CHOSEN.get() {
        args.extend(["--log".into(), OsString::from(levels)]);
    }
    args
}

#[cfg(test)]
mod tests {
    use super::*;
    use tracing::Level;

    #[test]
    fn prompts_are_logged_only_when_they_are_named() {
        for (levels, logged) in [
            ("trace", false),
            ("paceline_serve=trace", false),
            ("warn,prompts=trace", true),
        ] {
            let filter = filter(Some(levels), LogFormat::Human).unwrap();
            assert_eq!(
                filter.would_enable(PROMPTS, &Level::TRACE),
                logged,
                "{levels}"
            );
        }
    }

    #[test]
    fn levels_are_by_module_and_lines_are_events_of_json() {
        let human = filter(Some("warn,paceline_node=debug"), LogFormat::Human).unwrap();
        assert!(human.would_enable("paceline_node::instance", &Level::DEBUG));
        assert!(!human.would_enable("paceline_serve", &Level::INFO));
        assert!(!human.would_enable(LINES, &Level::INFO));
        let json = filter(None, LogFormat::Json).unwrap();
        assert!(json.would_enable(LINES, &Level::INFO));
        let quiet = filter(Some("off,cli=error"), LogFormat::Json).unwrap();
        assert!(!quiet.would_enable(LINES, &Level::INFO));
        let error = filter(Some("paceline_node=loud"), LogFormat::Human).unwrap_err();
        assert!(error.to_string().contains("loud"), "{error}");
    }
}
