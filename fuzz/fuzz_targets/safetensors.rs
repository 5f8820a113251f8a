//! Any bytes as a safetensors file: an error or a header whose tensors lie in the file.
#![no_main]

use libfuzzer_sys::fuzz_target;
use paceline_weights::safetensors::Header;

fuzz_target!(|file: &[u8]| {
    let Ok(header) = Header::parse(file) else {
        return;
    };
    let bytes: usize = header.tensors().iter().map(|t| file[t.range()].len()).sum();
    assert!(
        bytes < file.len(),
        "{bytes} bytes of tensors in a file of {}",
        file.len()
    );
});
