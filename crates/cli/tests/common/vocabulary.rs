//! The vocabulary of models that tests write: three tokens of their own, then one for each byte.

use paceline_model::testing::spell;
use paceline_weights::gguf::testing::GgufWriter;

/// Tokens before those of the 256 bytes: unknown, start and end of a message.
pub(crate) const FIRST_BYTE: usize = 3;
pub(crate) const VOCAB: usize = FIRST_BYTE + 256;

/// Adds it to a file, where start and end of a message are spelt like this.
pub(crate) fn write(file: GgufWriter, start: &str, end: &str) -> GgufWriter {
    let mut tokens = ["<unk>", start, end].map(String::from).to_vec();
    tokens.extend((0..=255).map(|byte| spell(&[byte])));
    let mut kinds = vec![1; VOCAB]; // ordinary
    kinds[0] = 2; // unknown
    kinds[1..FIRST_BYTE].fill(3); // control
    file.meta("tokenizer.ggml.model", "gpt2")
        .meta("tokenizer.ggml.pre", "default")
        .meta("tokenizer.ggml.tokens", tokens)
        .meta("tokenizer.ggml.token_type", kinds)
        .meta("tokenizer.ggml.merges", Vec::<String>::new())
}
