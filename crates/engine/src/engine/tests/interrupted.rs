//! A device that interrupts long steps. Answers stay the same, in smaller steps.

use std::sync::Arc;

use paceline_model::{
    Batch, BatchSequence, Compute, Error, FollowOutcome, LoadedModel as _, WindowPool,
};

use super::in_flight::{CONTEXT, sizes};
use super::requests::mixed;
use super::rig::{Rig, alone};
use super::tiny::TinyModel;

/// Interrupts steps of more than `rows` rows; such a step leaves undefined rows.
#[derive(Debug)]
struct Interrupting {
    inner: Box<dyn Compute>,
    rows: usize,
}

fn interrupted() -> Error {
    let message = "Impacting Interactivity".to_owned();
    let call = "mlx_eval";
    paceline_mlx::Error::Interrupted { call, message }.into()
}

impl Compute for Interrupting {
    fn pages(&self) -> usize {
        self.inner.pages()
    }

    fn windows(&self) -> &[WindowPool] {
        self.inner.windows()
    }

    fn forward(&mut self, batch: &Batch<'_>) -> Result<usize, Error> {
        let rows = batch
            .sequences
            .iter()
            .map(|s| s.tokens.len())
            .sum::<usize>();
        if rows <= self.rows {
            return self.inner.forward(batch);
        }
        let others: Vec<Vec<u32>> = { batch.sequences.iter() }
            .map(|s| vec![1; s.tokens.len()])
            .collect();
        let wrong = batch.sequences.iter().zip(&others);
        let wrong: Vec<BatchSequence<'_>> = { wrong }
            .map(|(s, tokens)| BatchSequence { tokens, ..*s })
            .collect();
        self.inner.forward(&Batch::new(&wrong))?;
        Err(interrupted())
    }

    fn logits_mut(&mut self, i: usize) -> &mut [f32] {
        self.inner.logits_mut(i)
    }

    fn idle(&mut self) -> Result<(), Error> {
        self.inner.idle()
    }

    fn follow(&mut self) -> Result<FollowOutcome, Error> {
        self.inner.follow()
    }
}

fn rig(tiny: &TinyModel, rows: usize) -> Rig {
    let mut rig = Rig::new(tiny, sizes());
    let model = Arc::clone(&tiny.model);
    let inner = model.reserve(sizes().batch_size(), sizes().cache_positions);
    let inner = inner.unwrap();
    rig.engine.compute = Box::new(Interrupting { inner, rows });
    rig
}

#[test]
fn steps_shrink_and_answers_stay_the_same() {
    let tiny = TinyModel::new(1);
    let mut rig = rig(&tiny, 12);
    let requests: Vec<_> = mixed(&tiny).into_iter().take(6).collect();
    let ids: Vec<_> = requests.iter().map(|r| rig.submit(r)).collect();
    rig.drain();
    for (id, request) in ids.iter().zip(&requests) {
        assert_eq!(rig.outcomes[id], alone(&tiny, request, CONTEXT), "{id:?}");
    }
    // 40 rows, then 10.
    assert_eq!(rig.engine.n_interruptions(), 1);
    assert_eq!(rig.engine.config.max_rows, 10);
}

#[test]
fn a_device_that_always_interrupts_is_an_error() {
    let tiny = TinyModel::new(1);
    let mut rig = rig(&tiny, 0);
    rig.submit(&mixed(&tiny)[1]);
    let error = (0..3).find_map(|_| rig.engine.step().err()).unwrap();
    assert!(
        error.to_string().contains("Impacting Interactivity"),
        "{error}"
    );
    assert_eq!(rig.engine.n_interruptions(), 2, "40 rows, 10, 8");
}
