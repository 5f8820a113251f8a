//! Tokens that end a response.
//!
//! Files name one EOS, but a chat response often ends with another token (`<|im_end|>`,
//! `<end_of_turn>`, `<|eot_id|>`). These are found by their names, as llama.cpp does
//! (`src/llama-vocab.cpp`). Unlike there, some names count only if the file calls the token a
//! control token. They are names that are also ordinary markup: `</s>` closes struck-out text in
//! Gemma's vocabulary.

use super::vocab::Kind;

/// Whether a token of this name ends a response, regardless of its kind in the file.
pub(super) fn is_end_name(text: &str) -> bool {
    matches!(
        text,
        "<|eot_id|>"
            | "<|im_end|>"
            | "<|end|>"
            | "<|return|>"
            | "<|call|>"
            | "<|calls|>"
            | "<|flush|>"
            | "<end_of_turn>"
            | "<|endoftext|>"
            | "<|eom_id|>"
            | "<EOT>"
            | "_<EOT>"
            | "<|end_of_text|>"
            | "<end_of_utterance>"
            | "<turn|>"
            | "<|tool_response>"
            | "<｜end▁of▁sentence｜>"
            | "[e~["
    ) || is_file_name(text)
}

/// Names of the tokens between the files of a repository: a code model that writes one has
/// finished this file.
fn is_file_name(text: &str) -> bool {
    matches!(
        text,
        "<|fim_pad|>"
            | "<fim-pad>"
            | "<fim_pad>"
            | "<|fim_repo|>"
            | "<|repo_name|>"
            | "<fim-repo>"
            | "<reponame>"
            | "<|file_sep|>"
    )
}

fn is_control_end_name(text: &str) -> bool {
    matches!(text, "</s>" | "<eos>" | "[EOS]" | "[EOT]")
}

/// Finds the tokens that end an answer among `tokens` (id, text, kind); `named_call` are ids that
/// the model's files name. Sorted.
pub(super) fn find<'a>(
    tokens: impl Iterator<Item = (u32, &'a str, Kind)>,
    named: impl IntoIterator<Item = u32>,
) -> Vec<u32> {
    let mut ends: Vec<u32> = named.into_iter().collect();
    let mut found = Vec::new();
    for (id, text, kind) in tokens {
        if is_end_name(text) || kind == Kind::Control && is_control_end_name(text) {
            found.push((id, text));
        }
    }
    let has = |name: &str| found.iter().any(|(_, text)| *text == name);
    // In these formats <|end|> ends a part of an answer, and another token the answer.
    let end_is_part = has("<|return|>") && has("<|call|>")
        || has("<|flush|>") && (has("<|call|>") || has("<|calls|>"));
    let keep = |text: &str| !(end_is_part && text == "<|end|>");
    ends.extend(found.iter().filter(|(_, t)| keep(t)).map(|(id, _)| *id));
    ends.sort_unstable();
    ends.dedup();
    ends
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_by_id_by_name_and_by_kind() {
        let gemma = [
            (1, "<eos>", Kind::Control),
            (106, "<end_of_turn>", Kind::Normal),
            (212, "</s>", Kind::UserDefined),
            (300, "end", Kind::Normal),
        ];
        assert_eq!(find(gemma.into_iter(), [1]), [1, 106]);
        assert_eq!(find(gemma.into_iter(), [300]), [1, 106, 300]);
        let harmony = [
            (7, "<|end|>", Kind::Control),
            (8, "<|return|>", Kind::Control),
            (9, "<|call|>", Kind::Control),
        ];
        assert_eq!(find(harmony.into_iter(), [8]), [8, 9]);
        assert_eq!(find(harmony.into_iter().take(2), []), [7, 8]);
        assert!(find(std::iter::empty(), []).is_empty());
    }
}
