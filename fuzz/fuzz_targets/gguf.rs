//! Any bytes as a GGUF file: an error or a header whose tensors lie in the file.
#![no_main]

use libfuzzer_sys::fuzz_target;
use paceline_weights::gguf::Header;

fuzz_target!(|file: &[u8]| {
    let Ok(header) = Header::parse(file) else {
        return;
    };
    for tensor in header.tensors() {
        if let Some(range) = tensor.range() {
            assert!(!file[range].is_empty(), "{tensor:?}");
        }
    }
});
