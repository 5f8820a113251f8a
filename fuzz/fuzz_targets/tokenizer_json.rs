//! Any bytes as a `tokenizer.json`: an error, or a tokenizer that survives texts and all its ids.
#![no_main]

use libfuzzer_sys::fuzz_target;
use paceline_text::tokenizer::{Specials, Tokenizer};

/// Spaces, digits, letters beyond ASCII, a control token's name.
const TEXT: &str = "ab  <s>\n12 é 漢字 🙂 <|im_start|>";

// The reader turns panics of the tokenizers crate into errors, but libFuzzer's own hook would stop
// at them; without it only a panic that leaves the reader is a finding.
fuzz_target!(init: std::panic::set_hook(Box::new(|_| {})), |file: &[u8]| {
    let Ok(tokenizer) = Tokenizer::from_json_bytes(file) else { return };
    for specials in [Specials::AsText, Specials::Parse] {
        let Ok(ids) = tokenizer.encode(TEXT, specials, true) else { continue };
        let _ = tokenizer.decode_all(&ids);
    }
    let n = u32::try_from(tokenizer.vocab_size()).unwrap_or(u32::MAX);
    let _ = tokenizer.decode_all(&(0..n.min(1000)).collect::<Vec<_>>());
});
