//! A model that recites the alphabet.
//!
//! Its layer adds nothing, its embedding is the unit matrix, and row `next(t)` of its output picks
//! token `t`. After each token comes the one that [`TinyChatModel::next`] says, after any other
//! text, and by far unless the temperature is high. So tests know every answer. A run takes
//! milliseconds or, with a large context, as long as the test wants.

use std::path::Path;

use paceline_weights::gguf::testing::GgufWriter;

use crate::common::vocabulary::{self, FIRST_BYTE, VOCAB};

pub(crate) const IM_END: u32 = 2;
/// A column per token, in whole runs of 32.
const WIDTH: usize = VOCAB.next_multiple_of(32);
const HEAD: usize = 16;
const FFN: usize = 32;

/// The text that the endless model says again and again. The accent takes two tokens.
pub(crate) const ALPHABET: &str = "abcdefghijklm\u{e9}nopqrstuvwxyz";

#[derive(Clone, Copy, Debug)]
pub(crate) struct TinyChatModel {
    pub(crate) architecture: &'static str,
    /// Whether it has a chat template.
    pub(crate) chats: bool,
    /// Whether it ends its answer after the `z`, instead of beginning again.
    pub(crate) ends: bool,
    /// Subtracted from the bytes that it says.
    pub(crate) shift: u8,
    /// Positions it was "trained" for.
    pub(crate) context: u32,
}

impl Default for TinyChatModel {
    fn default() -> Self {
        Self {
            architecture: "llama",
            chats: true,
            ends: true,
            shift: 0,
            context: 512,
        }
    }
}

impl TinyChatModel {
    fn next(self, token: u32) -> u32 {
        let said: Vec<u32> = ALPHABET.bytes().map(|b| id(b - self.shift)).collect();
        match said.iter().position(|t| *t == token) {
            Some(at) if at + 1 < said.len() => said[at + 1],
            Some(_) if self.ends => IM_END,
            _ => said[0],
        }
    }

    pub(crate) fn write(self, path: &Path) {
        self.writer().write(path);
    }

    /// The file, to be changed before it is written.
    pub(crate) fn writer(self) -> GgufWriter {
        let mut output = vec![0.0; VOCAB * WIDTH];
        for token in 0..VOCAB {
            output[self.next(token as u32) as usize * WIDTH + token] = 1.0;
        }
        let mut unit = vec![0.0; VOCAB * WIDTH];
        (0..VOCAB).for_each(|token| unit[token * WIDTH + token] = 1.0);
        let file = self.metadata();
        let file = file.f32s("token_embd.weight", &[VOCAB, WIDTH], &unit);
        let file = file.f32s("output.weight", &[VOCAB, WIDTH], &output);
        let mut file = file.f32s("output_norm.weight", &[WIDTH], &[1.0; WIDTH]);
        for norm in ["attn_norm", "ffn_norm"] {
            file = file.f32s(&format!("blk.0.{norm}.weight"), &[WIDTH], &[1.0; WIDTH]);
        }
        for (name, rows, cols) in [
            ("attn_q", HEAD, WIDTH),
            ("attn_k", HEAD, WIDTH),
            ("attn_v", HEAD, WIDTH),
            ("attn_output", WIDTH, HEAD),
            ("ffn_gate", FFN, WIDTH),
            ("ffn_up", FFN, WIDTH),
            ("ffn_down", WIDTH, FFN),
        ] {
            let zeros = vec![0.0; rows * cols];
            file = file.f32s(&format!("blk.0.{name}.weight"), &[rows, cols], &zeros);
        }
        file
    }

    fn metadata(self) -> GgufWriter {
        let name = self.architecture;
        let mut file = GgufWriter::new().meta("general.architecture", name);
        for (key, value) in [
            ("block_count", 1),
            ("embedding_length", WIDTH as u32),
            ("feed_forward_length", FFN as u32),
            ("context_length", self.context),
            ("attention.head_count", 1),
            ("attention.key_length", HEAD as u32),
            ("attention.value_length", HEAD as u32),
        ] {
            file = file.meta(&format!("{name}.{key}"), value);
        }
        file = file.meta(&format!("{name}.attention.layer_norm_rms_epsilon"), 1e-6f32);
        if self.chats {
            file = file.meta(
                "tokenizer.chat_template",
                "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n\
                 {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
            );
        }
        vocabulary::write(file, "<|im_start|>", "<|im_end|>")
            .meta("tokenizer.ggml.eos_token_id", IM_END)
    }
}

fn id(byte: u8) -> u32 {
    FIRST_BYTE as u32 + u32::from(byte)
}

/// The text of tokens, those that are no bytes left out.
pub(crate) fn decode(tokens: &[u64]) -> String {
    let first = FIRST_BYTE as u64;
    let bytes = tokens.iter().filter(|t| **t >= first);
    let bytes = bytes.map(|t| (t - first) as u8).collect();
    String::from_utf8(bytes).unwrap()
}
