//! Mixtures of experts: the router's choice, products with the chosen matrices, their weighed sum.
//!
//! ```text
//! x (T, C) -> scores (T, E) in f32 -> weights; the k largest, by index where equal
//! few: x (T, 1, 1, C) -> products with the matrices of chosen (T, k) -> y (T, k, C)
//! many: rows of the chosen experts (T k, C), by expert -> gathered products -> y (T, k, C)
//! y -> sum of weight * y
//! ```
//!
//! A rank that holds some of the experts computes with these: of a choice that it does not hold
//! the weight is 0. The sum over ranks is as of every other product.

use std::ops::Range;

use paceline_mlx::{Array, Dtype};
use paceline_model::backend::LEAST_SUM;
use paceline_model::{Error, ExpertGroups, Gating};

use super::Step;
use super::weights::{Experts, Routed, Shared, Slots, Stack};

/// Choices of a step from which rows are ordered by expert first. A matrix is then read for all of
/// its rows at once: mlx-lm's figure (`switch_layers.py`).
const ORDERED_FROM: usize = 64;

/// Taken from the weights of experts in groups that are closed: far more than any weight.
const CLOSED: f32 = 3e38;

impl Step<'_> {
    /// x (T, C) -> this rank's part of the sum over experts, (T, C) in f32; (T, L) of experts that
    /// write compressed rows.
    pub(super) fn expert_part(&self, own: &Experts) -> Result<Array, Error> {
        let holds = own.routed.is_some() || own.slots.is_some();
        let x = match &own.compression {
            Some(around) => around.down.apply(self.parts.stream, &self.x)?,
            None => self.x.clone(),
        };
        let routed = holds.then(|| self.routed(own, &x));
        let shared = own.shared.as_ref().map(|shared| self.shared(shared));
        let stream = self.parts.stream;
        Ok(match (routed.transpose()?, shared.transpose()?) {
            (Some(a), Some(b)) => stream.add(&a, &b)?,
            (Some(one), None) | (None, Some(one)) => one,
            (None, None) => stream.zeros(&x.shape(), Dtype::F32)?,
        })
    }

    /// The sum over experts of all ranks -> delta (T, C).
    pub(super) fn expanded(&self, own: &Experts, sum: Array) -> Result<Array, Error> {
        let Some(around) = &own.compression else {
            return Ok(sum);
        };
        let (stream, eps) = (self.parts.stream, self.parts.model.config.norm_eps);
        let sum = match &around.norm {
            Some(norm) => stream.rms_norm(&sum, norm, eps)?,
            None => sum,
        };
        around.up.apply(stream, &sum)
    }

    /// The experts of the layer, as the configuration has them.
    fn mixture(&self) -> paceline_model::Experts {
        self.layer().0.experts.expect("the layer has experts")
    }

    /// The experts of each row, `(T, k)`, and their weights in f32.
    fn choices(&self, own: &Experts) -> Result<[Array; 2], Error> {
        let (stream, of) = (self.parts.stream, self.mixture());
        let x = match &own.router_norm {
            Some(weight) => {
                let residual = stream.astype(&self.residual, Dtype::F32)?;
                stream.rms_norm(&residual, weight, self.parts.model.config.norm_eps)?
            }
            None => self.x.clone(),
        };
        let scores = own.router.apply(stream, &stream.astype(&x, Dtype::F32)?)?;
        let weights = match of.gating {
            Gating::OfChosen => scores,
            Gating::Sigmoid => stream.sigmoid(&scores)?,
            Gating::SqrtSoftplus | Gating::OfToken => {
                let [zero, half] = [0.0, 0.5].map(|x| stream.scalar(x, Dtype::F32));
                stream.power(&stream.log_add_exp(&scores, &zero?)?, &half?)?
            }
            Gating::Softmax => stream.softmax(&scores, 1)?,
        };
        if let Some(table) = &own.table {
            let chosen = stream.take(table, &self.tokens, 0)?;
            let weights = stream.take_along(&weights, &chosen, 1)?;
            let weights = self.finished(own, weights, &chosen)?;
            return Ok([chosen, weights]);
        }
        let mut ranks = weights.clone();
        if let Some(choice) = &own.choice {
            ranks = stream.add(&ranks, choice)?;
        }
        if let Some(groups) = of.groups {
            ranks = self.without_closed(&ranks, groups)?;
        }
        let chosen = self.largest(&ranks, of.used, 1)?;
        let weights = stream.take_along(&weights, &chosen, 1)?;
        let weights = self.finished(own, weights, &chosen)?;
        Ok([chosen, weights])
    }

    /// The places of the `n` largest values along the last axis, which is `axis`.
    fn largest(&self, values: &Array, n: usize, axis: i32) -> Result<Array, Error> {
        let stream = self.parts.stream;
        let order = stream.argsort(&stream.negative(values)?, axis)?;
        let mut stop = order.shape();
        let start = vec![0; stop.len()];
        stop[axis as usize] = n as i32;
        Ok(stream.slice(&order, &start, &stop)?)
    }

    /// `ranks (T, E)`, those of experts in groups that the router does not choose far below.
    fn without_closed(&self, ranks: &Array, groups: ExpertGroups) -> Result<Array, Error> {
        let stream = self.parts.stream;
        let (shape, count) = (ranks.shape(), groups.count as i32);
        let grouped = stream.reshape(ranks, &[shape[0], count, -1])?;
        let best = self.largest(&grouped, groups.largest, 2)?;
        let scores = stream.sum_along(&stream.take_along(&grouped, &best, 2)?, 2)?;
        let scores = stream.reshape(&scores, &[shape[0], count])?;
        // The place of a group in the order of scores.
        let order = stream.argsort(&stream.negative(&scores)?, 1)?;
        let places = stream.argsort(&order, 1)?;
        let used = stream.scalar(groups.used as f32, Dtype::U32)?;
        let open = stream.astype(&stream.less(&places, &used)?, Dtype::F32)?;
        let one = stream.scalar(1.0, Dtype::F32)?;
        let below = stream.subtract(&open, &one)?;
        let below = stream.multiply(&below, &stream.scalar(CLOSED, Dtype::F32)?)?;
        let below = stream.reshape(&below, &[shape[0], count, 1])?;
        Ok(stream.reshape(&stream.add(&grouped, &below)?, &shape)?)
    }

    /// Weights `(T, k)` of the chosen experts, as the family finishes them.
    fn finished(&self, own: &Experts, weights: Array, chosen: &Array) -> Result<Array, Error> {
        let (stream, of) = (self.parts.stream, self.mixture());
        let mut weights = match of.gating {
            Gating::OfChosen => stream.softmax(&weights, 1)?,
            _ => weights,
        };
        if of.normalised {
            let least = stream.scalar(LEAST_SUM, Dtype::F32)?;
            let sum = stream.maximum(&stream.sum_along(&weights, 1)?, &least)?;
            weights = stream.divide(&weights, &sum)?;
        }
        if of.scale != 1.0 {
            weights = stream.multiply(&weights, &stream.scalar(of.scale, Dtype::F32)?)?;
        }
        if let Some(scales) = &own.scales {
            weights = stream.multiply(&weights, &stream.take(scales, chosen, 0)?)?;
        }
        Ok(weights)
    }

    /// Rows `x` that experts read -> the weighed sum over the chosen experts that this rank holds.
    fn routed(&self, own: &Experts, x: &Array) -> Result<Array, Error> {
        let stream = self.parts.stream;
        let [all, weights] = self.choices(own)?;
        let [chosen, weights] = self.held_choices(own, all.clone(), weights)?;
        let sizes = chosen.shape();
        let (rows, each) = (sizes[0], sizes[1]);
        let y = match (&own.routed, &own.slots) {
            (_, Some(slots)) => self.by_slot(&mut slots.borrow_mut(), (x, &own.held), &all)?,
            (Some(routed), None) => self.chosen_rows(routed, x, &chosen)?,
            (None, None) => unreachable!("the caller looked"),
        };
        let weights = stream.reshape(&weights, &[rows, each, 1])?;
        let sum = stream.sum_along(&stream.multiply(&y, &weights)?, 1)?;
        Ok(stream.reshape(&sum, &[rows, -1])?)
    }

    /// x (T, C) -> the rows of the `chosen (T, k)` matrices of stacks, (T, k, C) in f32.
    fn chosen_rows(&self, routed: &Routed, x: &Array, chosen: &Array) -> Result<Array, Error> {
        let (stream, sizes) = (self.parts.stream, chosen.shape());
        let (rows, each) = (sizes[0], sizes[1]);
        let y = match (rows * each) as usize >= ORDERED_FROM {
            true => self.by_expert(routed, (x, each as u32), &stream.reshape(chosen, &[-1])?)?,
            false => {
                let x = stream.reshape(x, &[rows, 1, 1, -1])?;
                self.expert_rows(routed, &x, (chosen, false))?
            }
        };
        let y = stream.reshape(&y, &[rows, each, -1])?;
        Ok(stream.astype(&y, Dtype::F32)?)
    }

    /// As [`chosen_rows`](Self::chosen_rows), of experts in slots, chosen among those of all ranks.
    /// Waits for the choice, and reads each missing expert once. More experts than slots take
    /// turns, each with its own choices.
    fn by_slot(
        &self,
        slots: &mut Slots,
        (x, held): (&Array, &Range<usize>),
        chosen: &Array,
    ) -> Result<Array, Error> {
        let (stream, sizes) = (self.parts.stream, chosen.shape());
        let place = |number: usize| held.contains(&number).then(|| number - held.start);
        let numbers = self.numbers(chosen)?.into_iter().map(place);
        let numbers: Vec<Option<usize>> = numbers.collect();
        // An expert of another rank has the weight 0: any that is in memory stands for it.
        let any = numbers.iter().flatten().next().copied();
        let any = any.unwrap_or_else(|| slots.any());
        let numbers: Vec<usize> = numbers.iter().map(|place| place.unwrap_or(any)).collect();
        let mut experts = numbers.clone();
        // Experts in memory come first, before others take their slots.
        experts.sort_unstable_by_key(|expert| (slots.slot(*expert).is_none(), *expert));
        experts.dedup();
        let (mut parts, mut places) = (Vec::new(), vec![0; numbers.len()]);
        let mut done = 0;
        for turn in experts.chunks(slots.count()) {
            let reads = slots.bring(stream, turn)?;
            self.parts.model.counters.expert_reads.add(reads);
            let slot = |expert: &usize| slots.slot(*expert).filter(|_| turn.contains(expert));
            let own = numbers.iter().enumerate();
            let own = own.filter_map(|(at, expert)| Some((slot(expert)? as u32, at)));
            let mut own: Vec<(u32, usize)> = own.collect();
            if turn.len() == experts.len() {
                let all: Vec<u32> = own.iter().map(|(slot, _)| *slot).collect();
                return self.chosen_rows(&slots.routed, x, &stream.array_u32(&all, &sizes)?);
            }
            own.sort_unstable();
            for (_, at) in &own {
                places[*at] = done;
                done += 1;
            }
            parts.push(self.turn_rows(&slots.routed, &own, (x, sizes[1] as usize))?);
        }
        let all = stream.concatenate(&parts.iter().collect::<Vec<_>>(), 0)?;
        let places = stream.array_u32(&places, &[places.len() as i32])?;
        Ok(stream.reshape(&stream.take(&all, &places, 0)?, &[sizes[0], sizes[1], -1])?)
    }

    /// Waits for chosen experts, and returns their numbers.
    fn numbers(&self, chosen: &Array) -> Result<Vec<usize>, Error> {
        let stream = self.parts.stream;
        let chosen = stream.contiguous(&stream.astype(chosen, Dtype::U32)?)?;
        let wait = || stream.eval([&chosen, &self.x]);
        self.parts.watch.during(self.batch.rows(), wait)?;
        let numbers = chosen.as_bytes()?.chunks_exact(4);
        let number = |bytes: &[u8]| bytes.try_into().map_or(0, u32::from_ne_bytes) as usize;
        Ok(numbers.map(number).collect())
    }

    /// The rows of some choices of `each` of a row, (n, C) in f32: their slots, which do not fall,
    /// and their places among all. Waits, so that others can take the slots.
    fn turn_rows(
        &self,
        routed: &Routed,
        choices: &[(u32, usize)],
        (x, each): (&Array, usize),
    ) -> Result<Array, Error> {
        let (stream, n) = (self.parts.stream, choices.len() as i32);
        let rows: Vec<u32> = choices.iter().map(|(_, at)| (at / each) as u32).collect();
        let slots: Vec<u32> = choices.iter().map(|(slot, _)| *slot).collect();
        let x = stream.take(x, &stream.array_u32(&rows, &[n])?, 0)?;
        let x = stream.reshape(&x, &[n, 1, -1])?;
        let y = self.expert_rows(routed, &x, (&stream.array_u32(&slots, &[n])?, true))?;
        let y = stream.astype(&stream.reshape(&y, &[n, -1])?, Dtype::F32)?;
        self.parts
            .watch
            .during_part(self.batch.rows(), || stream.eval([&y]))?;
        Ok(y)
    }

    /// Choices as places among the experts that this rank holds; of others the weight is 0.
    fn held_choices(
        &self,
        own: &Experts,
        chosen: Array,
        weights: Array,
    ) -> Result<[Array; 2], Error> {
        let stream = self.parts.stream;
        let held = &own.held;
        if *held == (0..self.mixture().count) {
            return Ok([chosen, weights]);
        }
        let number = |n: usize| stream.scalar(n as f32, Dtype::U32);
        // Of experts before the first it wraps around, to more than there are.
        let places = stream.subtract(&chosen, &number(held.start)?)?;
        let mine = stream.less(&places, &number(held.len())?)?;
        let places = stream.minimum(&places, &number(held.len() - 1)?)?;
        let weights = stream.multiply(&weights, &stream.astype(&mine, Dtype::F32)?)?;
        Ok([places, weights])
    }

    /// The rows of x, each by `each` of the `chosen (T k,)` experts: (T k, 1, C). The products are
    /// in the order of experts.
    fn by_expert(
        &self,
        routed: &Routed,
        (x, each): (&Array, u32),
        chosen: &Array,
    ) -> Result<Array, Error> {
        let stream = self.parts.stream;
        let n = chosen.shape()[0];
        let rows: Vec<u32> = (0..n as u32).map(|i| i / each).collect();
        let rows = stream.array_u32(&rows, &[n])?;
        let order = stream.argsort(chosen, 0)?;
        let x = stream.take(x, &stream.take(&rows, &order, 0)?, 0)?;
        let x = stream.reshape(&x, &[n, 1, -1])?;
        let sorted = stream.take(chosen, &order, 0)?;
        let y = self.expert_rows(routed, &x, (&sorted, true))?;
        Ok(stream.take(&y, &stream.argsort(&order, 0)?, 0)?)
    }

    /// x (.., 1, C) -> (.., 1, C), by the `chosen (..)` experts. Sizes of 1 are repeated.
    fn expert_rows(
        &self,
        routed: &Routed,
        x: &Array,
        chosen: (&Array, bool),
    ) -> Result<Array, Error> {
        let gate = self.stacked(&routed.gate, x, chosen)?;
        let up = routed.up.as_ref().map(|up| self.stacked(up, x, chosen));
        let hidden = self.hidden_of(&gate, up.transpose()?)?;
        self.stacked(&routed.down, &hidden, chosen)
    }

    /// x (.., 1, in) -> (.., 1, out), by a matrix and a bias of the stack each.
    fn stacked(&self, stack: &Stack, x: &Array, chosen: (&Array, bool)) -> Result<Array, Error> {
        let stream = self.parts.stream;
        let product = stack.matrices.gather(stream, x, chosen)?;
        let Some(biases) = &stack.biases else {
            return Ok(product);
        };
        let biases = stream.take(biases, chosen.0, 0)?;
        let biases = stream.reshape(&biases, &product.shape())?;
        Ok(stream.add(&product, &biases)?)
    }

    /// Input of the down projection of an expert.
    fn hidden_of(&self, gate: &Array, up: Option<Array>) -> Result<Array, Error> {
        let (gates, stream) = (&self.parts.constants.gates, self.parts.stream);
        gates.of_expert(stream, gate, up.as_ref())
    }

    /// x (T, C) -> what the expert of every row gives, (T, C) in f32.
    fn shared(&self, own: &Shared) -> Result<Array, Error> {
        let stream = self.parts.stream;
        let gate = own.gate.apply(stream, &self.x)?;
        let up = own.up.as_ref().map(|up| up.apply(stream, &self.x));
        let hidden = self.hidden_of(&gate, up.transpose()?)?;
        let y = own.down.apply(stream, &hidden)?;
        let y = stream.astype(&y, Dtype::F32)?;
        let Some(router) = &own.router else {
            return Ok(y);
        };
        let x = stream.astype(&self.x, Dtype::F32)?;
        let weight = stream.sigmoid(&stream.matmul(&x, router)?)?;
        Ok(stream.multiply(&y, &weight)?)
    }
}
