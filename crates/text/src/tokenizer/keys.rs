//! Keys of tokens: tokens whose texts differ in case, accents or white space have one key.
//!
//! Memories of n-grams (DeepSeek V4.1) are of keys. Source: `build_compressed_token_map` in
//! `modeling_deepseek_v41.py` of transformers.

use std::collections::HashMap;

use tokenizers::NormalizedString;
use tokenizers::normalizers::StripAccents;
use tokenizers::tokenizer::Normalizer as _;

use super::{Error, Tokenizer};

/// A character for private use: the definition has it in place of a lone space.
const LONE_SPACE: char = '\u{e000}';

impl Tokenizer {
    /// The key of each token, from 0 on in the order of their first tokens. A token that is no
    /// whole character is a key of its own.
    ///
    /// Cost: some seconds for 129,280 tokens at most.
    ///
    /// # Errors
    /// [`Error::Encode`] if a text cannot be normalised.
    pub fn token_keys(&self) -> Result<Vec<u32>, Error> {
        let mut keys: HashMap<String, u32> = HashMap::new();
        let of = |id: u32| {
            let name = self.token_text(id).unwrap_or_default();
            let bytes = match self.token_bytes(id) {
                Some([]) | None => name.as_bytes(), // names of control tokens are their texts
                Some(bytes) => bytes,
            };
            let key = match std::str::from_utf8(bytes) {
                Ok(text) if !text.contains(char::REPLACEMENT_CHARACTER) => simplified(text)?,
                _ => name.to_owned(),
            };
            let next = keys.len() as u32;
            Ok(*keys.entry(key).or_insert(next))
        };
        (0..self.vocab_size() as u32).map(of).collect()
    }
}

/// The text without case, accents and the white space around it; as it is if nothing remains.
fn simplified(text: &str) -> Result<String, Error> {
    let mut normal = NormalizedString::from(text);
    normal.nfkc();
    normal.nfd();
    let plain = StripAccents.normalize(&mut normal);
    plain.map_err(|why| Error::Encode {
        reason: why.to_string(),
    })?;
    normal.lowercase();
    let is_blank = |c: char| matches!(c, ' ' | '\t' | '\r' | '\n');
    let (mut joined, mut was_blank) = (String::new(), false);
    for c in normal.get().chars() {
        if !(is_blank(c) && was_blank) {
            joined.push(if is_blank(c) { ' ' } else { c });
        }
        was_blank = is_blank(c);
    }
    if joined == " " {
        return Ok(joined);
    }
    let simple = joined.trim().replace(LONE_SPACE, " ");
    Ok(if simple.is_empty() {
        text.to_owned()
    } else {
        simple
    })
}

#[cfg(test)]
mod tests {
    use super::{Tokenizer, simplified};

    #[test]
    fn texts_that_differ_in_case_accents_or_space_have_one_key() {
        let cases = [
            (" The", "the"),
            ("THE", "the"),
            ("Café", "cafe"),
            ("ﬁne", "fine"),
            (" ", " "),
            ("\n\t", " "),
            ("a \r\n b", "a b"),
            ("\u{b}", "\u{b}"),
        ];
        for (text, expected) in cases {
            assert_eq!(simplified(text).unwrap(), expected, "{text:?}");
        }
    }

    /// As sglang 0.5.23 gives them, for tokens of bytes, words and names.
    #[test]
    fn keys_of_a_folder_are_those_of_the_definition() {
        const FOLDERS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests-data/golden/hf");
        let folder = format!("{FOLDERS}/deepseek-v41-ngrams-bf16");
        let golden = std::fs::read(format!("{folder}.golden.json")).unwrap();
        let golden: serde_json::Value = serde_json::from_slice(&golden).unwrap();
        let keys = Tokenizer::from_hf_dir(folder.as_ref())
            .unwrap()
            .token_keys();
        assert_eq!(serde_json::json!(keys.unwrap()), golden["token_keys"]);
    }
}
