//! `paceline train MODEL --drafter`: trains a draft head from the model's own answers.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use paceline_train::drafter::{
    DrafterJob, DrafterProgress, DrafterReport, DrafterRun, JUDGED_DEPTH,
};
use paceline_train::{OptimiserOptions, RunFigures, RunOptions, TrainingWorkers};

use super::{Args, mlx_lm, placement, processes};
use crate::interrupt::Signals;
use crate::load;
use crate::output::{counted, print, print_err};

/// Steps between printed lines.
const LINES_EVERY: u64 = 10;

/// Trains a head for the model at `model`.
pub(super) fn run(
    args: &Args,
    (name, model): (&str, &Path),
    signals: &Signals,
) -> anyhow::Result<()> {
    let output = mlx_lm::needed(args.output.as_ref(), "--output")?;
    let data = std::path::absolute(mlx_lm::needed(args.data.as_ref(), "--data")?)?;
    let beside = Some(data.join("valid.jsonl")).filter(|path| path.is_file());
    let job = DrafterJob {
        model: std::path::absolute(model)?,
        valid: args
            .valid
            .as_ref()
            .map(std::path::absolute)
            .transpose()?
            .or(beside),
        data,
        tokens_max: args.max_tokens_per_row,
        batch: args.batch,
        seed: args.seed,
        draft_vocab: args.draft_vocab,
        optimiser: OptimiserOptions {
            rule: args.optimizer,
            lr: args.lr,
            warmup: args.warmup,
            schedule: args.schedule,
            steps: args.steps,
            decay_steps: args.decay_steps,
            decay: args.weight_decay,
            clip: args.clip,
        },
    };
    let report = signals.orderly(|cancel| {
        let posts = placement::posts(args, name)?;
        let here = posts.iter().filter(|post| post.place.is_empty()).count();
        let kernels = Arc::new(load::free_kernels(args.threads(here.max(1)))?);
        let run = DrafterRun::open(&job, kernels)?;
        let mut crew = match posts.is_empty() {
            true => TrainingWorkers::here(),
            false => TrainingWorkers::start_drafter(processes(args, posts, output)?, &run)?,
        };
        let start = Instant::now();
        let clock = || start.elapsed().as_secs_f64();
        let options = RunOptions {
            output,
            resume: args.resume,
            save_every: args.save_every,
            eval_every: args.eval_every,
            clock: &clock,
            stop: &|| cancel.is_cancelled(),
            figures: RunFigures::UNKNOWN,
        };
        Ok::<_, anyhow::Error>(run.train(&mut crew, options, &mut |progress| {
            line(&progress).iter().for_each(print_err);
        })?)
    })?;
    tell(args, output, &report)
}

fn tell(args: &Args, output: &Path, report: &DrafterReport) -> anyhow::Result<()> {
    if args.json {
        return print(&serde_json::to_string(report)?);
    }
    print(&format!(
        "{}: {:.2} of {JUDGED_DEPTH} draft tokens accepted on held-out answers, after {}; try it \
         with --drafter {}",
        output.display(),
        report.accepted,
        counted(report.steps as usize, "step"),
        output.display()
    ))
}

/// A line about an event; none for most steps.
fn line(progress: &DrafterProgress) -> Option<String> {
    match *progress {
        DrafterProgress::Answers { done, of, tokens } => {
            Some(format!("answered {done} of {of} prompts, {tokens} tokens"))
        }
        DrafterProgress::Begun {
            step,
            steps,
            draft_vocab,
            covered,
            numbers,
        } => Some(format!(
            "train {numbers} numbers from step {} of {steps}; {draft_vocab} draft tokens are \
             {:.1} % of held-out answers",
            step + 1,
            100.0 * covered
        )),
        DrafterProgress::Step { step, loss, tok_s } => (step % LINES_EVERY == 1)
            .then(|| format!("step {step}: loss {loss:.4}, {tok_s:.0} tokens/s")),
        DrafterProgress::Lost { ref why } => Some(format!("{why}; others do its work")),
        DrafterProgress::Accepted { step, accepted } => Some(format!(
            "step {step}: {accepted:.2} of {JUDGED_DEPTH} draft tokens accepted"
        )),
    }
}
