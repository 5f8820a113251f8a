//! Markdown of models, as the dashboard shows it.
#![no_main]

libfuzzer_sys::fuzz_target!(|text: &str| paceline_serve::testing::parse_markdown(text));
