//! Messages from the leader of a split model to the other ranks before each step.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let words = bytes
        .as_chunks()
        .0
        .iter()
        .map(|word| u32::from_le_bytes(*word));
    let mut words: Vec<u32> = words.collect();
    // The shortest message; what is missing is zero, as a leader pads it.
    words.resize(words.len().max(256), 0);
    paceline_model::testing::parse_plan(&words);
});
