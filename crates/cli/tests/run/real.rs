//! Behaviour that only a real model shows.

use super::{TestHome, test_model};

/// Peak resident memory stays within file, keys and values, 15 % of the file and 128 MiB (256 MiB
/// for a vocabulary of 262k). It is never less than the proportional share.
#[test]
#[cfg(target_os = "linux")]
fn memory_stays_near_the_file() {
    const TEST: &str = "memory_stays_near_the_file";
    // Bytes of a position: layers * KV heads * head size, keys and values, f16.
    for (file, position_bytes, spare_mib) in [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", 30 * 3 * 64 * 4, 128),
        ("gemma-3-270m-q4_k_m.gguf", 18 * 256 * 4, 256),
    ] {
        let Some(model) = test_model(TEST, file) else {
            continue;
        };
        let prompt = "one two three four five six seven ".repeat(24);
        let args = ["--raw", &prompt, "--max-tokens", "8", "--context", "1024"];
        let json = TestHome::new().json(&model, &args);
        let peak = json["peak_memory_bytes"].as_u64().unwrap();
        let bytes = std::fs::metadata(&model).unwrap().len();
        let cache = 1024 * position_bytes;
        let limit = bytes + cache + bytes * 15 / 100 + (spare_mib << 20);
        assert!(peak <= limit, "{file}: {peak} bytes at most, limit {limit}");
    }
}
