//! Hints for errors of model files, tokenizers, chat templates and the engine.

use std::error::Error as StdError;
use std::io::{ErrorKind, Read};
use std::path::Path;

use paceline_model::split;
use paceline_text::{chat, tokenizer};
use paceline_weights::tensor::OpenError;
use paceline_weights::{LooksLike, gguf, hf, safetensors};

/// For a truncated file.
const INCOMPLETE: &str = "the file is incomplete: fetch it again (`paceline pull MODEL` checks a \
                          model of the store)";
/// For a file that contradicts itself or its family.
const STRANGE: &str = "the file may be damaged or its maker at fault: fetch it again, or take \
                       another conversion of the model";
/// For a value that also occurs in valid files of unsupported models.
const UNUSUAL: &str = "paceline cannot compute with that (yet): take another model, or another \
                       conversion of it";
const OTHER_QUANTISATION: &str = "take a file in another quantisation, such as Q8_0 or Q4_K_M";
const ACCESS: &str = "give yourself read access to it";
/// For missing or damaged bytes.
const ABSENT: &str = "`paceline pull MODEL` checks and mends a model of the store; `paceline models \
                      --nodes` shows which machine has what";
const LESS_MEMORY: &str = "take less memory: a smaller --context, or the model in a smaller \
                           quantisation";
const WITHOUT_TEMPLATE: &str = "--raw gives a prompt to the model without its chat template";

pub(super) fn hint(cause: &(dyn StdError + 'static)) -> Option<&'static str> {
    if let Some(error) = cause.downcast_ref() {
        return of_engine(error);
    }
    if let Some(error) = cause.downcast_ref() {
        return of_model(error);
    }
    if let Some(error) = cause.downcast_ref() {
        return of_tokenizer(error);
    }
    if let Some(error) = cause.downcast_ref() {
        return of_template(error);
    }
    if let Some(error) = cause.downcast_ref() {
        return of_gguf(error);
    }
    cause.downcast_ref().map(of_split)
}

const fn of_split(error: &split::Error) -> &'static str {
    match error {
        split::Error::Stages { .. } => {
            "take fewer --nodes, or have them share layers with --split auto"
        }
        split::Error::NoExperts { .. } => "take --split tensor or pipeline",
        split::Error::NothingLeft { .. } => {
            "take fewer --nodes, --shares that differ less, or --split pipeline"
        }
        _ => "--nodes, --split and --shares have to fit each other",
    }
}

fn of_engine(error: &paceline_engine::Error) -> Option<&'static str> {
    use paceline_engine::Error;
    match error {
        Error::EmptyPrompt => Some("the prompt needs at least one character"),
        Error::DraftVocabulary { .. } => {
            Some("choose a small model of the same family, or leave out --draft")
        }
        Error::Model(error) => of_model(error),
        _ => None,
    }
}

fn of_model(error: &paceline_model::Error) -> Option<&'static str> {
    use paceline_model::Error;
    match error {
        Error::Gguf(error) => of_gguf(error),
        Error::Hf(error) => of_folder(error),
        Error::Architecture { architecture, .. }
            if matches!(architecture.as_str(), "bert" | "roberta" | "xlm-roberta") =>
        {
            Some("it makes embeddings: serve it with `paceline up`")
        }
        Error::Architecture { .. } => Some("take a model of one of these families"),
        Error::Value { .. } | Error::UnknownKey { .. } => Some(UNUSUAL),
        Error::Pack { source, .. } | Error::Cache(source) => Some(of_memory(source)),
        Error::Mlx(error) => of_mlx(error),
        Error::DevicePositions { .. } => Some(LESS_MEMORY),
        Error::Class { .. } | Error::FamilyClass { .. } => {
            Some("--engine and --class have to fit each other")
        }
        Error::Ngrams { .. } => Some("take --engine cpu"),
        Error::NotHanded { .. } => {
            Some("take one node for prompts and --split pipeline, or as many of both")
        }
        Error::CutGroup { .. } => Some("take fewer --nodes, or --split pipeline"),
        Error::PackedEngine { .. } => {
            Some("leave out --packed: with --memory it keeps what does not fit by itself")
        }
        Error::StreamMemory { .. } => Some("give more --memory, or a smaller --context"),
        Error::KvEngine { .. } => Some("leave out --kv, or take --engine cpu"),
        Error::Packed(_) => Some("free room on that disk, or move PACELINE_HOME to another"),
        Error::Streaming { .. } => Some("start it again: its weights are packed once more"),
        Error::NoForm { .. } => Some("--method lora unpacks the base"),
        Error::Hung { .. } => Some("the device or its driver hangs: end other users of it"),
        Error::Absent(_) => Some(ABSENT),
        Error::Adapter { .. } => Some("`paceline adapter show` tells which model it is for"),
        Error::Thread(_) | Error::Gone | Error::HalfLate { .. } | Error::StreamPlace => None,
        // The rest are contradictions within the file.
        _ => Some(STRANGE),
    }
}

const fn of_mlx(error: &paceline_mlx::Error) -> Option<&'static str> {
    use paceline_mlx::Error;
    Some(match error {
        Error::NotFound { .. } => "install it with `paceline engines install mlx`",
        Error::Read { .. }
        | Error::Truncated { .. }
        | Error::NotALibrary { .. }
        | Error::Load { .. }
        | Error::Symbol { .. }
        | Error::Version { .. }
        | Error::NoneFits { .. } => {
            "`paceline engines install mlx` installs one that fits; PACELINE_MLXC names another"
        }
        Error::OutOfMemory { .. } => LESS_MEMORY,
        _ => return None,
    })
}

const fn of_memory(error: &paceline_tensor::Error) -> &'static str {
    match error {
        paceline_tensor::Error::Size { .. } => STRANGE,
        paceline_tensor::Error::Memory { .. } => LESS_MEMORY,
    }
}

fn of_gguf(error: &gguf::Error) -> Option<&'static str> {
    use gguf::Error;
    Some(match error {
        Error::InFile { error, .. } => return of_gguf(error),
        Error::Open(error) => return of_opening(error),
        Error::NotGguf { looks_like } => return of_kind(*looks_like),
        Error::BigEndian { .. } => "take the little-endian file of the model",
        Error::Version { .. } => "take a newer conversion of the model",
        Error::HeaderPastEnd { .. } | Error::Truncated { .. } => INCOMPLETE,
        Error::Unsupported { .. } => OTHER_QUANTISATION,
        Error::SplitName { .. } | Error::SplitMismatch { .. } | Error::SplitTensors { .. } => {
            "all parts must lie in one folder, under the names they were published with"
        }
        _ => STRANGE,
    })
}

fn of_folder(error: &hf::Error) -> Option<&'static str> {
    use hf::Error;
    Some(match error {
        Error::Io { error, .. } if error.kind() == ErrorKind::PermissionDenied => ACCESS,
        Error::Io { error, .. } if error.kind() == ErrorKind::NotFound => {
            "the folder lacks a file: fetch the whole repository"
        }
        Error::NoWeights { .. } => {
            "paceline reads .safetensors; a repository with .bin files only cannot be used"
        }
        Error::Weights(error) => return of_safetensors(error),
        Error::Quantization { .. } | Error::QuantisedDtype { .. } => UNUSUAL,
        Error::Memory { .. } => LESS_MEMORY,
        _ => STRANGE,
    })
}

fn of_safetensors(error: &safetensors::Error) -> Option<&'static str> {
    use safetensors::Error;
    Some(match error {
        Error::InFile { error, .. } => return of_safetensors(error),
        Error::Open(error) => return of_opening(error),
        Error::NotSafetensors { looks_like } => return of_kind(*looks_like),
        Error::Dtype { .. } => "take the model in BF16, or as a quantised GGUF file",
        Error::Length { .. } => INCOMPLETE,
        _ => STRANGE,
    })
}

fn of_opening(error: &OpenError) -> Option<&'static str> {
    match error {
        OpenError::Io(error) if error.kind() == ErrorKind::PermissionDenied => Some(ACCESS),
        _ => None,
    }
}

fn of_tokenizer(error: &tokenizer::Error) -> Option<&'static str> {
    use tokenizer::Error;
    match error {
        Error::UnknownModel { .. } | Error::UnknownPre { .. } | Error::UnknownDecoder { .. } => {
            Some("a guess would give wrong words: take a model with another tokenizer")
        }
        Error::Read { source, .. } if source.kind() == ErrorKind::NotFound => {
            Some("the folder needs a tokenizer.json")
        }
        Error::TextTooLong { .. } | Error::NoByteToken { .. } | Error::Encode { .. } => None,
        _ => Some(STRANGE),
    }
}

fn of_template(error: &chat::Error) -> Option<&'static str> {
    use chat::{Error, TemplateError};
    match error {
        Error::Template(TemplateError::Raised { .. }) => {
            Some("some templates refuse a system message: leave out --system")
        }
        Error::Tokenizer(error) => of_tokenizer(error),
        Error::Metadata(error) => of_gguf(error),
        _ => Some(WITHOUT_TEMPLATE),
    }
}

/// The hint for a file that is not a model; `None` for unknown files.
pub(super) fn other_file(path: &Path) -> Option<&'static str> {
    // Opening a pipe without a writer blocks.
    if !std::fs::metadata(path).ok()?.is_file() {
        return None;
    }
    let file = std::fs::File::open(path).ok()?;
    let mut start = Vec::new();
    file.take(512).read_to_end(&mut start).ok()?;
    of_kind(LooksLike::of(&start))
}

const fn of_kind(kind: LooksLike) -> Option<&'static str> {
    Some(match kind {
        LooksLike::Empty | LooksLike::Zeros => {
            "the file holds no data, as after a download that failed: fetch it again"
        }
        LooksLike::OldGgml => "it is in a format from before GGUF: take a newer conversion",
        LooksLike::Safetensors => "it is a safetensors file: give the folder it lies in",
        LooksLike::Zip | LooksLike::Pickle => {
            "it looks like a PyTorch checkpoint: take the model as GGUF or safetensors"
        }
        LooksLike::Compressed => "it is compressed: unpack it first",
        LooksLike::GitLfsPointer => {
            "it only points to the real file: `git lfs pull` in its folder fetches that"
        }
        LooksLike::Html => "it is a web page: download the file itself",
        LooksLike::Json => "it is JSON, such as a server's error message: fetch it again",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pipe_without_a_writer_is_not_opened() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status();
        if !made.is_ok_and(|status| status.success()) {
            eprintln!("SKIPPED a_pipe_without_a_writer_is_not_opened: there is no mkfifo");
            return;
        }
        assert_eq!(other_file(&pipe), None);
    }

    /// More of them: `tests/run/errors.rs`.
    #[test]
    fn errors_inside_of_others_are_advised_on() {
        let file = |error| gguf::Error::InFile {
            path: "x.gguf".into(),
            error: Box::new(error),
        };
        let io = |kind| std::io::Error::from(kind);
        let memory = || paceline_tensor::Error::Memory {
            bytes: paceline_base::Bytes(1),
            reason: String::new(),
        };
        let engine = |error| paceline_engine::Error::Model(error);
        let cases: [(Box<dyn StdError>, &str); 3] = [
            (
                Box::new(engine(paceline_model::Error::Cache(memory()))),
                "--context",
            ),
            (
                Box::new(tokenizer::Error::UnknownPre { name: "x".into() }),
                "another tokenizer",
            ),
            (Box::new(file(gguf::Error::Version { version: 1 })), "newer"),
        ];
        for (error, part) in cases {
            let advice = hint(&*error).unwrap_or_default();
            assert!(advice.contains(part), "{error}: {advice:?}");
        }
        assert_eq!(hint(&io(ErrorKind::Other)), None);
    }
}
