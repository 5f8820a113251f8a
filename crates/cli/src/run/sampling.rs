//! Sampling options of the command line.

use std::time::{SystemTime, UNIX_EPOCH};

use paceline_engine::SamplingParams;

use crate::error::Error;

/// How tokens are chosen; defaults suit small chat models.
#[derive(Clone, Copy, Debug, clap::Args)]
#[command(next_help_heading = "How tokens are chosen")]
pub(super) struct SamplingArgs {
    /// Higher is more varied; 0 always takes the most probable token
    #[arg(
        long,
        value_name = "F",
        default_value_t = 0.7,
        allow_negative_numbers = true
    )]
    temperature: f32,
    /// Keep the N most probable tokens; 0 keeps all
    #[arg(
        long,
        value_name = "N",
        default_value_t = 40,
        allow_negative_numbers = true
    )]
    top_k: usize,
    /// Keep the most probable tokens that together have this probability, above 0 to 1
    #[arg(
        long,
        value_name = "F",
        default_value_t = 0.95,
        allow_negative_numbers = true
    )]
    top_p: f32,
    /// Keep tokens at least this probable as a share of the most probable, 0 to 1
    #[arg(
        long,
        value_name = "F",
        default_value_t = 0.05,
        allow_negative_numbers = true
    )]
    min_p: f32,
    /// Above 1 makes the last 64 tokens less probable; 1 does nothing
    #[arg(
        long,
        value_name = "F",
        default_value_t = 1.0,
        allow_negative_numbers = true
    )]
    repetition_penalty: f32,
    /// Subtracted from the logits of tokens that the answer has, -2 to 2
    #[arg(
        long,
        value_name = "F",
        default_value_t = 0.0,
        allow_negative_numbers = true
    )]
    presence_penalty: f32,
    /// Subtracted once per occurrence in the answer, -2 to 2
    #[arg(
        long,
        value_name = "F",
        default_value_t = 0.0,
        allow_negative_numbers = true
    )]
    frequency_penalty: f32,
    /// The same seed gives the same answer [default: another each time]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    seed: Option<u64>,
}

impl SamplingArgs {
    /// Validates the options and adds a seed.
    pub(super) fn params(self) -> Result<SamplingParams, Error> {
        let params = SamplingParams {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            seed: self.seed.unwrap_or_else(arbitrary_seed),
            ..SamplingParams::default()
        };
        params.check().map_err(Error::Param)?;
        Ok(params)
    }
}

/// A seed from the clock, different each time. Below 2^53, so that all JSON readers keep it exact.
fn arbitrary_seed() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |since| since.as_nanos() as u64 & ((1 << 53) - 1))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct SamplingCommand {
        #[command(flatten)]
        sampling: SamplingArgs,
    }

    #[test]
    fn the_api_chooses_as_run_does() {
        let run = SamplingCommand::parse_from(["run"])
            .sampling
            .params()
            .unwrap();
        let api = SamplingParams {
            seed: run.seed,
            ..paceline_serve::default_sampling()
        };
        assert_eq!(run, api);
    }
}
