//! Cutting text into words before byte-pair encoding, as the model was trained with.
//!
//! A GGUF names the way in `tokenizer.ggml.pre`; the patterns are those that llama.cpp gives the
//! name (`src/llama-vocab.cpp`), which stem from the models' own `tokenizer.json`.
//!
//! The patterns end in `\s+(?!\S)|\s+`: a run of white space leaves its last character to the word
//! that follows. That look-ahead is the only thing in them that needs a backtracking engine. The
//! steps of such an engine for a hostile text must be limited, with no good answer at the limit.
//! Here the rule is applied after the match, so that the `regex` crate's linear-time engine can do
//! the rest. See [`trim_run`].

use regex::Regex;

use super::Error;

/// Cuts text by patterns in turn: each cuts the pieces that the one before left, into its matches
/// and what is between them.
#[derive(Debug)]
pub(super) struct PreTokenizer {
    patterns: Vec<Regex>,
    /// Whether a run of white space with a line break ends at its last line break. Only the
    /// characters after it are then subject to [`trim_run`].
    line_breaks_end_runs: bool,
}

/// The rules of a name in `tokenizer.ggml.pre`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scheme {
    patterns: &'static [&'static str],
    line_breaks_end_runs: bool,
    /// A word that is a token is one token, without regard to the merges.
    pub(super) ignore_merges: bool,
    /// Whether a text begins with BOS when the file does not say.
    pub(super) add_bos: bool,
}

const DIGITS: &str = r"\p{N}";
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+";

/// `(?i:...)` of the models, in ASCII as in llama.cpp: Unicode would fold U+017F to `s`.
macro_rules! contraction {
    () => {
        r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
    };
}
macro_rules! tail {
    () => {
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
    };
}
const LLAMA3: &str = concat!(
    contraction!(),
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
    tail!()
);
const QWEN2: &str = concat!(contraction!(), r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}", tail!());
const QWEN35: &str = concat!(
    contraction!(),
    r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
);
/// From the models' `tokenizer.json`; llama.cpp's patterns approximate the cases of letters.
const TEKKEN: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+"
);
const GPT4O: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    contraction!(),
    r"?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    contraction!(),
    r"?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+"
);
const DEEPSEEK3: &[&str] = &[
    r"\p{N}{1,3}",
    "[\u{4e00}-\u{9fa5}\u{3040}-\u{309f}\u{30a0}-\u{30ff}]+",
    concat!(
        r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"##,
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+"
    ),
];

/// Letters with cases as DeepSeek LLM's `tokenizer.json` lists them.
macro_rules! cased_letters {
    () => {
        concat!(
            r"A-Za-z\u{b5}\u{c0}-\u{d6}\u{d8}-\u{f6}\u{f8}-\u{1ba}\u{1bc}-\u{1bf}\u{1c4}-\u{293}",
            r"\u{295}-\u{2af}\u{370}-\u{373}\u{376}\u{377}\u{37b}-\u{37d}\u{37f}\u{386}",
            r"\u{388}-\u{38a}\u{38c}\u{38e}-\u{3a1}\u{3a3}-\u{3f5}\u{3f7}-\u{481}\u{48a}-\u{52f}",
            r"\u{531}-\u{556}\u{10a0}-\u{10c5}\u{13a0}-\u{13f5}\u{13f8}-\u{13fd}\u{1c90}-\u{1cba}",
            r"\u{1cbd}-\u{1cbf}\u{1d00}-\u{1d2b}\u{1d6b}-\u{1d77}\u{1d79}-\u{1d9a}",
            r"\u{1e00}-\u{1f15}\u{1f18}-\u{1f1d}\u{1f20}-\u{1f45}\u{1f48}-\u{1f4d}",
            r"\u{1f50}-\u{1f57}\u{1f59}\u{1f5b}\u{1f5d}\u{1f5f}-\u{1f7d}\u{1f80}-\u{1fb4}",
            r"\u{1fb6}-\u{1fbc}\u{1fbe}\u{1fc2}-\u{1fc4}\u{1fc6}-\u{1fcc}\u{1fd0}-\u{1fd3}",
            r"\u{1fd6}-\u{1fdb}\u{1fe0}-\u{1fec}\u{1ff2}-\u{1ff4}\u{1ff6}-\u{1ffc}\u{2102}\u{2107}",
            r"\u{210a}-\u{2113}\u{2115}\u{2119}-\u{211d}\u{2124}\u{2126}\u{2128}\u{212a}-\u{212d}",
            r"\u{212f}-\u{2134}\u{2139}\u{213c}-\u{213f}\u{2145}-\u{2149}\u{214e}\u{2183}\u{2184}",
            r"\u{2c00}-\u{2c7b}\u{2c7e}-\u{2ce4}\u{2ceb}-\u{2cee}\u{2cf2}\u{2cf3}\u{a640}-\u{a66d}",
            r"\u{a680}-\u{a69b}\u{a722}-\u{a76f}\u{a771}-\u{a787}\u{a78b}-\u{a78e}",
            r"\u{ab70}-\u{abbf}\u{fb00}-\u{fb06}\u{fb13}-\u{fb17}\u{ff21}-\u{ff3a}",
            r"\u{ff41}-\u{ff5a}\u{10400}-\u{1044f}\u{104b0}-\u{104d3}\u{104d8}-\u{104fb}",
            r"\u{10c80}-\u{10cb2}\u{10cc0}-\u{10cf2}\u{118a0}-\u{118df}\u{1e900}-\u{1e943}",
        )
    };
}
/// From the model's `tokenizer.json`, but that white space is in neither of its classes, as in
/// llama.cpp.
const DEEPSEEK_LLM: &[&str] = &[
    r"[\r\n]",
    concat!(r"\s?[", cased_letters!(), "]+"),
    concat!(
        r"\s?[!-/:-~\u{ff01}-\u{ff0f}\u{ff1a}-\u{ff5e}",
        r"\u{2018}-\u{201f}\u{3001}-\u{3002}]+"
    ),
    r"\s+$",
    r"[\u{4e00}-\u{9fa5}\u{800}-\u{4e00}\u{ac00}-\u{d7ff}&&\S]+",
    r"\p{N}+",
];
/// Blocks of Chinese characters, as llama.cpp has them (`unicode_cpt_is_han` of its `unicode.cpp`).
macro_rules! han {
    () => {
        concat!(
            r"\u{4e00}-\u{9fff}\u{3400}-\u{4dbf}\u{20000}-\u{2a6df}\u{2a700}-\u{2ebef}",
            r"\u{f900}-\u{faff}\u{2f800}-\u{2fa1f}"
        )
    };
}
/// llama.cpp's cut (`unicode_regex_split_custom_kimi_k2`), which takes letters of both cases
/// together where the model's own pattern begins a word at a capital.
const KIMI_K2: &str = concat!(
    "[",
    han!(),
    r"]+|[^\r\n\p{L}\p{N}]?[\p{L}--[",
    han!(),
    "]]+",
    contraction!(),
    r"?|\p{N}{1,3}",
    tail!()
);

const fn scheme(patterns: &'static [&'static str], line_breaks_end_runs: bool) -> Scheme {
    Scheme {
        patterns,
        line_breaks_end_runs,
        ignore_merges: false,
        add_bos: false,
    }
}

impl Scheme {
    pub(super) fn by_name(name: &str) -> Result<Self, Error> {
        let whole_words = |s| Self {
            ignore_merges: true,
            add_bos: true,
            ..s
        };
        Ok(match name {
            "default" => scheme(
                &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
                false,
            ),
            "gpt-2" | "phi-2" | "mpt" | "olmo" | "exaone4" | "gigachat" | "mellum"
            | "modern-bert" | "trillion" | "granite-docling" => scheme(&[GPT2], false),
            "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" | "exaone"
            | "minerva-7b" => scheme(&[DIGITS, GPT2], false),
            "llama-bpe" | "llama3" | "llama-v3" | "falcon3" | "falcon-h1" | "pixtral" | "lfm2" => {
                whole_words(scheme(&[LLAMA3], true))
            }
            "dbrx" | "smaug-bpe" | "chatglm-bpe" => scheme(&[LLAMA3], true),
            "glm4" | "glm5" => Self {
                ignore_merges: true,
                ..scheme(&[LLAMA3], true)
            },
            "qwen2" | "deepseek-r1-qwen" | "megrez" | "stablelm2" | "hunyuan" | "grok-2" => {
                scheme(&[QWEN2], true)
            }
            "qwen35" => scheme(&[QWEN35], true),
            "tekken" => whole_words(scheme(&[TEKKEN], true)),
            "gpt-4o" | "llama4" | "minimax-m2" => scheme(&[GPT4O], true),
            "deepseek-v3" | "hunyuan-dense" => scheme(DEEPSEEK3, true),
            "deepseek-llm" => scheme(DEEPSEEK_LLM, true),
            "kimi-k2" => scheme(&[KIMI_K2], true),
            _ => {
                return Err(Error::UnknownPre {
                    name: name.to_owned(),
                });
            }
        })
    }
}

impl PreTokenizer {
    /// Compiles the patterns; takes 1 to 5 ms, most of it for the classes of letters.
    pub(super) fn new(scheme: Scheme) -> Self {
        let compile = |p: &&str| Regex::new(p).expect("the patterns of this file are valid");
        Self {
            patterns: scheme.patterns.iter().map(compile).collect(),
            line_breaks_end_runs: scheme.line_breaks_end_runs,
        }
    }

    /// Cuts `text`; the pieces joined are the text. Cost: linear for each pattern.
    pub(super) fn cut<'a>(&self, text: &'a str) -> Vec<&'a str> {
        let mut pieces = vec![text];
        for pattern in &self.patterns {
            let mut finer = Vec::with_capacity(pieces.len());
            for piece in pieces {
                self.cut_by(pattern, piece, &mut finer);
            }
            pieces = finer;
        }
        pieces
    }

    fn cut_by<'a>(&self, pattern: &Regex, text: &'a str, out: &mut Vec<&'a str>) {
        let mut from = 0;
        while let Some(found) = pattern.find_at(text, from) {
            if from < found.start() {
                out.push(&text[from..found.start()]);
            }
            let piece = self.trim_run(found.as_str(), found.end() == text.len());
            out.push(piece);
            from = found.start() + piece.len();
        }
        if from < text.len() {
            out.push(&text[from..]);
        }
    }

    /// Applies `\s+(?!\S)|\s+` to a match of `\s+`. Before other text a run of white space gives up
    /// its last character, unless that is all it has.
    ///
    /// Matches of other parts of the patterns are no white space only, except `\s*[\r\n]+`. That
    /// part goes first and so leaves `\s+` only runs without line breaks.
    fn trim_run<'a>(&self, piece: &'a str, at_end: bool) -> &'a str {
        let Some(last) = piece.chars().next_back().filter(|c| c.is_whitespace()) else {
            return piece;
        };
        let is_line_break = matches!(last, '\r' | '\n');
        if at_end || self.line_breaks_end_runs && is_line_break || !piece.trim().is_empty() {
            return piece;
        }
        match piece.len() - last.len_utf8() {
            0 => piece,
            len => &piece[..len],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut<'a>(name: &str, text: &'a str) -> Vec<&'a str> {
        PreTokenizer::new(Scheme::by_name(name).unwrap()).cut(text)
    }

    #[test]
    fn runs_of_white_space() {
        for (text, expected) in [
            ("", &[] as &[&str]),
            ("a  b", &["a", " ", " b"]),
            ("a b", &["a", " b"]),
            ("a   ", &["a", "   "]),
            ("a\t\tb", &["a", "\t", "\tb"]),
            ("a \n\n b", &["a", " \n\n", " b"]),
            ("a\n  b", &["a", "\n", " ", " b"]),
            ("!\n x", &["!\n", " x"]),
        ] {
            assert_eq!(cut("llama-bpe", text), expected, "{text:?}");
        }
        assert_eq!(cut("gpt-2", "a\n  b"), ["a", "\n ", " b"]);
        assert_eq!(cut("gpt-2", "a\n\nb"), ["a", "\n", "\n", "b"]);
        assert_eq!(cut("smollm", "a12  3"), ["a", "1", "2", "  ", "3"]);
    }

    /// The models' own patterns, with their look-ahead, run by a backtracking engine.
    #[test]
    fn segments_equal_the_recorded() {
        let read = |text: &str| -> serde_json::Value { serde_json::from_str(text).unwrap() };
        let strings = read(include_str!("../../tests/golden/strings.json"));
        let segments = read(include_str!("../../tests/golden/segments.json"));
        for name in ["llama-bpe", "qwen2", "gpt-2", "smollm", "gpt-4o", "default"] {
            let cutter = PreTokenizer::new(Scheme::by_name(name).unwrap());
            let rows = segments[name].as_array().unwrap();
            let texts = strings["strings"].as_array().unwrap();
            assert_eq!(rows.len(), texts.len());
            for (text, row) in texts.iter().zip(rows) {
                let pieces = cutter.cut(text.as_str().unwrap());
                assert_eq!(serde_json::json!(pieces), *row, "{name} {text}");
            }
        }
    }

    #[test]
    fn a_long_run_takes_linear_time() {
        let text = " ".repeat(4_000_000) + "x";
        for name in [
            "llama-bpe",
            "gpt-2",
            "default",
            "tekken",
            "gpt-4o",
            "deepseek-v3",
            "deepseek-llm",
            "kimi-k2",
        ] {
            let pieces = cut(name, &text);
            assert_eq!(pieces.last(), Some(&" x"), "{name}");
            assert_eq!(pieces.concat().len(), text.len());
        }
    }

    /// Names of families whose patterns are those of others.
    #[test]
    fn families_share_patterns() {
        let text = "It's ABCdef 12345, x/y\n\n z";
        for (name, of) in [
            ("minimax-m2", "gpt-4o"),
            ("glm4", "llama-bpe"),
            ("dbrx", "llama-bpe"),
        ] {
            assert_eq!(cut(name, text), cut(of, text), "{name}");
        }
        assert!(Scheme::by_name("glm4").unwrap().ignore_merges);
    }

    #[test]
    fn unknown_names_are_refused() {
        let error = Scheme::by_name("plamo").unwrap_err();
        assert_eq!(error.to_string(), "pre-tokenizer plamo is not supported");
    }
}
