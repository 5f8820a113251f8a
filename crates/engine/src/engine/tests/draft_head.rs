//! A draft head changes the number of steps, not the answer, and reads the rows that it should.

use std::collections::BTreeMap;
use std::sync::Arc;

use paceline_base::Bytes;
use paceline_model::{
    DraftBlock, DraftHead, DraftHeadCompute, DraftPlace, Error, HeadRows, Model, PassKind,
};
use paceline_tensor::{Kernels, PAGE};

use super::draft_model::frozen;
use super::drafts::{CONTEXT, babble, eager, held, run, sizes};
use super::requests::mixed;
use super::rig::{SequenceOutcome, alone};
use super::tiny::TinyModel;
use crate::{Draft, DraftNetwork};

/// A head that reads the first layer's input, the embedding of each token. It guesses one of the
/// tokens that [`babble`] draws.
#[derive(Debug)]
struct BabblingHead(Arc<Model>, Option<DraftBlock>);

/// Checks what the head reads.
#[derive(Debug)]
struct BabblingCompute {
    width: usize,
    block: Option<DraftBlock>,
    pages: usize,
    /// The captured row of each token.
    rows: BTreeMap<u32, Vec<f32>>,
    /// Known positions by first page of a sequence.
    known: BTreeMap<u32, usize>,
    /// Last token of each sequence of the last pass.
    last: Vec<u32>,
    output: Vec<f32>,
}

impl DraftHead for BabblingHead {
    fn captures(&self) -> &[usize] {
        &[0]
    }

    fn width(&self) -> usize {
        self.0.config().width
    }

    fn block(&self) -> Option<DraftBlock> {
        self.1
    }

    fn kernels(&self) -> &Kernels {
        self.0.kernels()
    }

    fn weight_bytes(&self) -> Bytes {
        Bytes(0)
    }

    fn reserve(
        self: Arc<Self>,
        _: usize,
        _: usize,
        positions: usize,
    ) -> Result<Box<dyn DraftHeadCompute>, Error> {
        Ok(Box::new(BabblingCompute {
            width: self.width(),
            block: self.1,
            pages: positions / PAGE,
            rows: BTreeMap::new(),
            known: BTreeMap::new(),
            last: Vec::new(),
            output: vec![7.0; self.width()],
        }))
    }
}

impl BabblingCompute {
    fn check(&mut self, s: &HeadRows<'_>, pass: PassKind) {
        assert_eq!(s.features.len(), s.tokens.len() * self.width);
        let known = self.known.entry(s.pages[0]).or_default();
        assert!(s.position == 0 || s.position <= *known, "a gap");
        *known = s.position + s.tokens.len();
        let behind = match self.block {
            Some(block) if pass == PassKind::First => block.positions,
            _ => 0,
        };
        assert!(*known + behind <= s.pages.len() * PAGE);
        let last = s.position + s.tokens.len() - 1;
        if pass == PassKind::Next {
            assert_eq!(s.features, self.output);
            assert!(s.pending < last, "the draft follows the answer");
            return;
        }
        assert!(pass == PassKind::Read || s.pending == last);
        // The feature of a token is the captured row of the one before.
        for (token, row) in s.tokens.iter().zip(s.features.chunks(self.width).skip(1)) {
            let first = self.rows.entry(*token).or_insert_with(|| row.to_vec());
            assert_eq!(first, row, "token {token}");
        }
    }
}

impl DraftHeadCompute for BabblingCompute {
    fn pages(&self) -> usize {
        self.pages
    }

    fn forward(&mut self, sequences: &[HeadRows<'_>], pass: PassKind) -> Result<(), Error> {
        for sequence in sequences {
            self.check(sequence, pass);
        }
        self.last = sequences
            .iter()
            .map(|s| s.tokens[s.tokens.len() - 1])
            .collect();
        Ok(())
    }

    fn write_logits(&mut self, i: usize, place: DraftPlace, out: &mut [f32]) {
        assert!(place.nth == 0 || self.block.is_some_and(|block| place.nth < block.drafts));
        let last = if place.nth == 0 {
            self.last[i]
        } else {
            place.previous
        };
        out.fill(0.0);
        out[[2, 3, 14][last as usize % 3]] = 60.0;
    }

    fn output(&self, _: usize) -> &[f32] {
        &self.output
    }
}

/// A draft of tokens or blocks for a model that captures its first layer's input.
pub(super) fn babbling(model: &Arc<Model>, block: Option<DraftBlock>) -> Draft {
    let head = BabblingHead(Arc::clone(model), block);
    let network = DraftNetwork::Head(Arc::new(head));
    let now = frozen;
    Draft { network, now }
}

/// A model that captures its first layer's input, and a draft with its head.
fn with_head(block: Option<DraftBlock>) -> (TinyModel, Draft) {
    let mut tiny = TinyModel::new(1);
    let model = Arc::into_inner(tiny.model).unwrap();
    tiny.model = Arc::new(model.with_captures(&[0]));
    let draft = babbling(&tiny.model, block);
    (tiny, draft)
}

#[test]
fn a_head_changes_no_answer() {
    let (tiny, draft) = with_head(None);
    let block = DraftBlock {
        drafts: 4,
        positions: 5,
    };
    let blocks = babbling(&tiny.model, Some(block));
    let mut requests = mixed(&tiny);
    requests.extend((0..4).map(babble));
    requests.extend((0..3).map(held));
    let expected: Vec<SequenceOutcome> =
        requests.iter().map(|r| alone(&tiny, r, CONTEXT)).collect();
    for (drafts, draft) in [(1, &draft), (3, &draft), (8, &draft), (8, &blocks)] {
        let mut rig = eager(&tiny, drafts);
        rig.engine.set_draft_model(draft).unwrap();
        let (outcomes, checked, gained) = run(&mut rig, &requests);
        for (outcome, expected) in outcomes.iter().zip(&expected) {
            assert_eq!(outcome, expected, "{drafts} drafts");
        }
        assert!(0 < gained && gained < checked, "{gained} of {checked}");
    }
}

/// Answers under way go to another engine, as after the loss of the machine that drafted them.
#[test]
fn answers_that_move_between_heads_are_the_same() {
    let (tiny, draft) = with_head(None);
    let mut requests = mixed(&tiny);
    requests.extend((0..4).map(babble));
    let engines = [3, 8].map(|drafts| {
        let mut rig = eager(&tiny, drafts);
        rig.engine.set_draft_model(&draft).unwrap();
        rig
    });
    let [mut lost, mut left] = engines;
    for request in &requests {
        let expected = alone(&tiny, request, CONTEXT);
        let id = lost.submit(request);
        (0..12).for_each(|_| drop(lost.step()));
        if lost.outcomes[&id].finish.is_some() {
            assert_eq!(lost.outcomes[&id], expected);
            continue;
        }
        let (snapshot, past) = lost.take(id);
        let id = left.restore(&snapshot, past);
        while !left.engine.is_idle() {
            left.step();
        }
        assert_eq!(left.outcomes[&id], expected);
    }
    assert!(!left.engine.draft_counters().totals().is_none());
}

#[test]
fn a_head_needs_a_model_that_captures_its_layers() {
    let (_, draft) = with_head(None);
    let mut engine = TinyModel::new(1).engine(sizes(8));
    let error = engine.set_draft_model(&draft).unwrap_err().to_string();
    assert!(
        error.contains("reads the layers [0], the model captures []"),
        "{error}"
    );
}
