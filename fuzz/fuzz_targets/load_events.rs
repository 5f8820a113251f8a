//! Streams of server-sent events, as the load generator reads them from any server.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    paceline_load_generator::parse(bytes, std::time::Instant::now);
});
