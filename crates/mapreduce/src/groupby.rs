//! A reduction for each key.
//!
//! A group's sum is exact like a column's, in a compact form: a window of five 32-bit slices about
//! the group's first value. Values whose bits lie elsewhere go to a full sum in a side map, which
//! is rare; nothing is ever dropped. So sums have the same bits for any order of rows.

use std::collections::BTreeMap;

use paceline_base::exact::{ExactSum, Ratio};
use serde::{Deserialize, Serialize};

use crate::order::{order, ordered, whole_order};
use crate::reduce::Op;
use crate::value::{sum_of, text_of};
use crate::{Dtype, ResultValue, Values};

const WINDOW: usize = 5;

/// Exponent of the unit of slice 0, negated: below it there is no f64.
const BIAS: i32 = 1088;

/// Additions to a window before it is emptied into the side map: an `i64` takes 2^31.
const ADDITIONS_MAX: u32 = 1 << 30;

/// Most groups of a message: at most 1.3 kB of text each, of values from both ends of f64's range;
/// usually 60 bytes.
const PIECE_MAX: usize = 1 << 15;

/// Groups of an empty table.
const CAPACITY_MIN: usize = 64;

/// A group: 88 bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
struct GroupSums {
    key: i64,
    rows: u64,
    /// Number of the window's first slice, or [`UNSET`].
    base: i32,
    additions: u32,
    window: [i64; WINDOW],
    /// The extreme value so far, as a number that orders.
    extreme: i64,
    has_nan: bool,
}

const UNSET: i32 = i32::MIN;

/// Groups by key.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "GroupMessage", into = "GroupMessage")]
pub struct GroupTable {
    grouping: Grouping,
    groups: Vec<GroupSums>,
    /// Numbers of groups by hash, open addressing; 0 is free, else one more than the number.
    table: Vec<u32>,
    side: BTreeMap<u32, ExactSum>,
}

/// The reduction that is computed for each key, and its inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grouping {
    /// The reduction: sum, mean, min, max or count.
    pub op: Op,
    /// Type of the keys, integers.
    pub keys: Dtype,
    /// Type of the values.
    pub values: Dtype,
}

impl Grouping {
    /// Whether it is one that is computed.
    pub const fn is_known(&self) -> bool {
        let op = matches!(self.op, Op::Sum | Op::Mean | Op::Min | Op::Max | Op::Count);
        op && self.keys.is_integer()
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct GroupMessage {
    grouping: Grouping,
    /// Group after group: key and rows; of sums base, additions and window; else the extreme and
    /// whether there is a NaN.
    numbers: Vec<i64>,
    side: Vec<(u32, String)>,
}

impl Grouping {
    const fn numbers(&self) -> usize {
        if self.sums() { 4 + WINDOW } else { 4 }
    }

    const fn sums(&self) -> bool {
        matches!(self.op, Op::Sum | Op::Mean)
    }
}

/// Whether a window can begin there: values have slices from 0 to 64.
const fn is_base(base: i32) -> bool {
    base == UNSET || -1 <= base && base <= 63
}

impl GroupSums {
    fn append_to(&self, numbers: &mut Vec<i64>, sums: bool) {
        numbers.extend([self.key, self.rows as i64]);
        if sums {
            numbers.extend([i64::from(self.base), i64::from(self.additions)]);
            numbers.extend(self.window);
        } else {
            numbers.extend([self.extreme, i64::from(self.has_nan)]);
        }
    }

    fn of(numbers: &[i64], op: Op) -> Option<Self> {
        let mut group = Self::new(numbers[0], op);
        group.rows = u64::try_from(numbers[1]).ok()?;
        if numbers.len() > 4 {
            group.base = i32::try_from(numbers[2]).ok().filter(|b| is_base(*b))?;
            group.additions = numbers[3].try_into().ok()?;
            group.window = numbers[4..].try_into().ok()?;
        } else {
            (group.extreme, group.has_nan) = (numbers[2], numbers[3] != 0);
        }
        Some(group)
    }
}

impl From<GroupTable> for GroupMessage {
    fn from(of: GroupTable) -> Self {
        let sums = of.grouping.sums();
        let mut numbers = Vec::with_capacity(of.groups.len() * of.grouping.numbers());
        for group in &of.groups {
            group.append_to(&mut numbers, sums);
        }
        Self {
            grouping: of.grouping,
            numbers,
            side: of
                .side
                .iter()
                .map(|(group, sum)| (*group, text_of(sum)))
                .collect(),
        }
    }
}

impl TryFrom<GroupMessage> for GroupTable {
    type Error = String;

    fn try_from(wire: GroupMessage) -> Result<Self, String> {
        let mut all = Self::new(wire.grouping);
        let (groups, op) = (
            wire.numbers.chunks(wire.grouping.numbers()),
            wire.grouping.op,
        );
        for numbers in groups {
            let whole = numbers.len() == wire.grouping.numbers();
            let group = whole.then(|| GroupSums::of(numbers, op)).flatten();
            let group = group.ok_or_else(|| format!("no group is {numbers:?}"))?;
            let number = all.number(group.key);
            all.groups[number as usize] = group;
        }
        for (group, text) in wire.side {
            if group as usize >= all.groups.len() {
                return Err(format!("a sum of group {group} of {}", all.groups.len()));
            }
            all.side.insert(group, sum_of(&text)?);
        }
        Ok(all)
    }
}

impl GroupTable {
    pub fn new(grouping: Grouping) -> Self {
        Self {
            grouping,
            groups: Vec::new(),
            table: vec![0; CAPACITY_MIN],
            side: BTreeMap::new(),
        }
    }

    /// Number of groups.
    pub const fn len(&self) -> usize {
        self.groups.len()
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// Values that the groups count together. `None` for groups of another kind, for one without
    /// values, and for more values than a count holds: another machine sent no result then.
    pub(crate) fn values_of(&self, grouping: &Grouping) -> Option<u64> {
        let mut counts = self.groups.iter().map(|group| group.rows);
        let add = |sum: u64, count: u64| sum.checked_add(count).filter(|_| count > 0);
        let all = counts.try_fold(0, add);
        all.filter(|_| self.grouping == *grouping)
    }

    /// Adds a block of keys, integers, and values.
    pub fn take(&mut self, keys: &Values<'_>, values: &Values<'_>) {
        let key = |row: usize| match keys {
            Values::Floats(keys) => keys[row] as i64,
            Values::Wide(keys) => keys[row] as i64, // keys of u64 keep their bits
        };
        match values {
            Values::Floats(values) if self.sums() => {
                for (row, value) in values.iter().enumerate() {
                    let number = self.count(key(row));
                    if !self.groups[number as usize].add(*value) {
                        self.aside(number).add(*value);
                    }
                }
            }
            Values::Wide(values) if self.sums() => {
                for (row, value) in values.iter().enumerate() {
                    let number = self.count(key(row));
                    let sum = self.aside(number);
                    sum.add_scaled(*value as i64 & 0xffff_ffff, 0);
                    sum.add_scaled((*value >> 32) as i64, 32);
                }
            }
            Values::Floats(values) => {
                for (row, value) in values.iter().enumerate() {
                    let order = order(self.grouping.values, *value);
                    self.note(key(row), order, value.is_nan());
                }
            }
            Values::Wide(values) => {
                for (row, value) in values.iter().enumerate() {
                    self.note(key(row), whole_order(self.grouping.values, *value), false);
                }
            }
        }
    }

    const fn sums(&self) -> bool {
        self.grouping.sums()
    }

    #[inline(always)]
    fn count(&mut self, key: i64) -> u32 {
        let number = self.number(key);
        self.groups[number as usize].rows += 1;
        number
    }

    fn note(&mut self, key: i64, order: i64, is_nan: bool) {
        let number = self.count(key);
        let op = self.grouping.op;
        let group = &mut self.groups[number as usize];
        group.has_nan |= is_nan;
        if !is_nan {
            group.widen(order, op);
        }
    }

    /// The exact sum of a group, outside its window.
    fn aside(&mut self, number: u32) -> &mut ExactSum {
        let group = &mut self.groups[number as usize];
        let sum = self.side.entry(number).or_default();
        if group.additions >= ADDITIONS_MAX {
            group.empty_into(sum);
        }
        sum
    }

    /// The number of a key's group, which is made if there is none.
    #[inline]
    fn number(&mut self, key: i64) -> u32 {
        let mask = self.table.len() - 1;
        let mut at = hash(key) & mask;
        loop {
            match self.table[at] {
                0 => break,
                number if self.groups[number as usize - 1].key == key => return number - 1,
                _ => at = (at + 1) & mask,
            }
        }
        self.groups.push(GroupSums::new(key, self.grouping.op));
        let number = self.groups.len() as u32;
        self.table[at] = number;
        if 2 * self.groups.len() > self.table.len() {
            self.grow();
        }
        number - 1
    }

    fn grow(&mut self) {
        let mask = 4 * self.table.len() - 1;
        self.table = vec![0; mask + 1];
        for (group, number) in self.groups.iter().zip(1..) {
            let mut at = hash(group.key) & mask;
            while self.table[at] != 0 {
                at = (at + 1) & mask;
            }
            self.table[at] = number;
        }
    }

    /// Cuts them into groups that fit a message each: some, and the rest.
    pub(crate) fn into_pieces(mut self) -> (Vec<Self>, Self) {
        let mut pieces = Vec::new();
        while self.groups.len() > PIECE_MAX {
            let at = self.groups.len() - PIECE_MAX;
            let groups = self.groups.split_off(at);
            let side = self.side.split_off(&(at as u32));
            pieces.push(Self {
                grouping: self.grouping,
                groups,
                table: Vec::new(),
                side: side
                    .into_iter()
                    .map(|(i, sum)| (i - at as u32, sum))
                    .collect(),
            });
        }
        self.table = Vec::new();
        (pieces, self)
    }

    /// Adds the groups of other rows.
    pub fn merge(&mut self, other: Self) {
        let op = self.grouping.op;
        for (mut theirs, from) in other.groups.into_iter().zip(0..) {
            let number = self.number(theirs.key);
            let own = &mut self.groups[number as usize];
            own.rows += theirs.rows;
            own.has_nan |= theirs.has_nan;
            own.widen(theirs.extreme, op);
            if !own.join(&theirs) {
                theirs.empty_into(self.aside(number));
            }
            if let Some(sum) = other.side.get(&from) {
                self.aside(number).merge(sum);
            }
        }
    }

    fn sum(&self, number: u32) -> ExactSum {
        let mut sum = self.side.get(&number).cloned().unwrap_or_default();
        let mut group = self.groups[number as usize];
        group.empty_into(&mut sum);
        sum
    }

    /// Keys in ascending order, and the values of their groups; of integers they are integers.
    pub fn values(&self) -> Vec<(i128, ResultValue)> {
        let Grouping { op, keys, values } = self.grouping;
        let value = |number: u32| {
            let group = &self.groups[number as usize];
            match op {
                Op::Sum | Op::Mean => self.sum_value(number, group.rows),
                Op::Min | Op::Max if group.has_nan => ResultValue::Float(f64::NAN),
                Op::Min | Op::Max => ordered(values, group.extreme),
                _ => ResultValue::Int(group.rows.into()),
            }
        };
        let key = |key: i64| match keys {
            Dtype::U64 => i128::from(key as u64),
            _ => i128::from(key),
        };
        let groups = self.groups.iter().zip(0..);
        let mut rows: Vec<_> = groups
            .map(|(group, i)| (key(group.key), value(i)))
            .collect();
        rows.sort_unstable_by_key(|row| row.0);
        rows
    }

    fn sum_value(&self, number: u32, rows: u64) -> ResultValue {
        let sum = self.sum(number);
        match sum.special() {
            Some(special) => ResultValue::Float(special),
            None if self.grouping.op == Op::Mean => {
                ResultValue::Float(Ratio::of(&sum).over(rows).value())
            }
            None => match sum.to_i128() {
                Some(whole) if self.grouping.values.is_integer() => ResultValue::Int(whole),
                _ => ResultValue::Float(sum.value()),
            },
        }
    }
}

/// The largest and smallest number that orders, for a group without values.
const fn extreme_of_none(op: Op) -> i64 {
    match op {
        Op::Min => i64::MAX,
        _ => i64::MIN,
    }
}

/// Multiplies by 2^64 over the golden ratio and uses the high bits.
#[inline(always)]
pub(crate) const fn hash(key: i64) -> usize {
    let mixed = (key as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (mixed ^ mixed >> 32) as usize
}

impl GroupSums {
    const fn new(key: i64, op: Op) -> Self {
        Self {
            key,
            rows: 0,
            base: UNSET,
            additions: 0,
            window: [0; WINDOW],
            extreme: extreme_of_none(op),
            has_nan: false,
        }
    }

    /// Adds a value, if the window holds it.
    #[inline(always)]
    fn add(&mut self, value: f64) -> bool {
        let bits = value.to_bits();
        let exponent = (bits >> 52 & 0x7ff) as i32;
        if exponent == 0x7ff || self.additions >= ADDITIONS_MAX || bits == 1 << 63 {
            return false; // also -0, whose sign a full sum knows
        }
        let hidden = u64::from(exponent > 0) << 52;
        let mantissa = bits & ((1 << 52) - 1) | hidden;
        let at = exponent.max(1) - 1075 + BIAS;
        let slice = at >> 5;
        if self.base == UNSET {
            self.base = slice - 1;
        }
        let first = slice - self.base;
        if !(0..=WINDOW as i32 - 3).contains(&first) {
            return false;
        }
        let units = u128::from(mantissa) << (at & 31);
        let sign = 1 - 2 * (bits >> 63) as i64;
        let window = &mut self.window[first as usize..first as usize + 3];
        window[0] += sign * i64::from(units as u32);
        window[1] += sign * i64::from((units >> 32) as u32);
        window[2] += sign * i64::from((units >> 64) as u32);
        self.additions += 1;
        true
    }

    /// Adds another window, if it lies in the same place and there is room.
    fn join(&mut self, other: &Self) -> bool {
        if self.base == UNSET {
            self.base = other.base;
        }
        let additions = self.additions.saturating_add(other.additions);
        if self.base != other.base && other.base != UNSET || additions >= ADDITIONS_MAX {
            return false;
        }
        for (own, other) in self.window.iter_mut().zip(other.window) {
            *own = own.wrapping_add(other); // garbage of a peer must not panic
        }
        self.additions = additions;
        true
    }

    fn empty_into(&mut self, sum: &mut ExactSum) {
        if self.base == UNSET || self.additions == 0 {
            return;
        }
        for (units, slice) in std::mem::take(&mut self.window)
            .into_iter()
            .zip(self.base..)
        {
            sum.add_scaled(units, 32 * slice - BIAS);
        }
        self.additions = 0;
    }

    const fn widen(&mut self, order: i64, op: Op) {
        let is_better = match op {
            Op::Min => order < self.extreme,
            _ => order > self.extreme,
        };
        if is_better {
            self.extreme = order;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::philox::Philox;

    const SUM: Grouping = Grouping {
        op: Op::Sum,
        keys: Dtype::I32,
        values: Dtype::F64,
    };

    fn rows(n: u64) -> (Vec<f64>, Vec<f64>) {
        let random = Philox::new(12);
        let keys = (0..n).map(|i| (random.uniform(i, 0) * 500.0).floor() - 250.0);
        let value = |i| match i % 50 {
            0 => 1e300 * random.uniform(i, 1),
            1 => f64::from_bits(random.word(i, 1) >> 12),
            2 => -0.0,
            3 if i == 2003 => f64::INFINITY,
            _ => (random.uniform(i, 1) - 0.5) * 2f64.powi((random.uniform(i, 2) * 60.0) as i32),
        };
        (keys.collect(), (0..n).map(value).collect())
    }

    #[test]
    fn groups_have_the_sums_of_their_columns_in_any_order() {
        let (keys, values) = rows(20_000);
        let mut defined: BTreeMap<i128, ExactSum> = BTreeMap::new();
        for (key, value) in keys.iter().zip(&values) {
            defined.entry(*key as i128).or_default().add(*value);
        }
        for (op, cut, reversed) in [
            (Op::Sum, 20_000, false),
            (Op::Sum, 333, true),
            (Op::Mean, 4000, false),
            (Op::Count, 777, true),
        ] {
            let grouping = Grouping { op, ..SUM };
            let mut all = GroupTable::new(grouping);
            let mut parts: Vec<_> = keys.chunks(cut).zip(values.chunks(cut)).collect();
            if reversed {
                parts.reverse();
            }
            for (keys, values) in parts {
                let mut part = GroupTable::new(grouping);
                part.take(&Values::Floats(keys), &Values::Floats(values));
                let text = serde_json::to_string(&part).unwrap();
                all.merge(serde_json::from_str(&text).unwrap());
            }
            let got = all.values();
            assert_eq!(got.len(), defined.len());
            for ((key, value), (same, sum)) in got.iter().zip(&defined) {
                assert_eq!(key, same);
                let rows = keys.iter().filter(|k| **k as i128 == *key).count();
                let expected = match op {
                    Op::Sum => sum.value(),
                    Op::Count => rows as f64,
                    _ => sum
                        .special()
                        .unwrap_or_else(|| Ratio::of(sum).over(rows as u64).value()),
                };
                assert_eq!(
                    value.as_f64().to_bits(),
                    expected.to_bits(),
                    "{op} of {key}"
                );
            }
        }
    }

    #[test]
    fn pieces_merge_to_the_whole_and_garbage_is_refused() {
        let n = 3 * PIECE_MAX as u64 + 5;
        let keys: Vec<f64> = (0..n).map(|i| (i % (n - 3)) as f64).collect();
        let values: Vec<f64> = (0..n).map(|i| 1e300 / (i as f64).exp2().max(1.0)).collect();
        for op in [Op::Sum, Op::Min] {
            let mut whole = GroupTable::new(Grouping { op, ..SUM });
            whole.take(&Values::Floats(&keys), &Values::Floats(&values));
            let (pieces, rest) = whole.clone().into_pieces();
            assert_eq!(pieces.len(), 3);
            let mut merged = GroupTable::new(Grouping { op, ..SUM });
            for piece in pieces.into_iter().chain([rest]) {
                let text = serde_json::to_string(&piece).unwrap();
                assert!(text.len() < 8 << 20);
                merged.merge(serde_json::from_str(&text).unwrap());
            }
            assert_eq!(merged.values(), whole.values());
        }
        let mut one = GroupTable::new(SUM);
        one.take(&Values::Floats(&[1.0]), &Values::Floats(&[2.0]));
        let text = serde_json::to_string(&one).unwrap();
        assert!(serde_json::from_str::<GroupTable>(&text).is_ok());
        for (right, wrong) in [
            ("[1,1,", "[1,"),
            ("[1,1,", "[1,-1,"),
            ("[1,1,", "[1,1,9e9,"),
        ] {
            let text = text.replace(right, wrong);
            assert!(serde_json::from_str::<GroupTable>(&text).is_err(), "{text}");
        }
        for base in [-2, 64, i64::MAX] {
            assert_eq!(
                GroupSums::of(&[1, 1, base, 1, 0, 0, 0, 0, 0], Op::Sum),
                None
            );
        }
    }

    #[test]
    fn extremes_and_wide_integers() {
        let keys = [u64::MAX.into(), 0, u64::MAX.into(), 0];
        let values = [i64::MIN.into(), 5, i64::MAX.into(), i128::from(i64::MAX)];
        for (op, expected) in [
            (Op::Min, [5, i64::MIN.into()]),
            (Op::Max, [i64::MAX.into(), i64::MAX.into()]),
            (Op::Sum, [5 + i128::from(i64::MAX), -1]),
        ] {
            let mut groups = GroupTable::new(Grouping {
                op,
                keys: Dtype::U64,
                values: Dtype::I64,
            });
            groups.take(&Values::Wide(&keys), &Values::Wide(&values));
            let expected = [(0, expected[0]), (u64::MAX.into(), expected[1])];
            assert_eq!(
                groups.values(),
                expected.map(|(key, value)| (key, ResultValue::Int(value)))
            );
        }
        let mut groups = GroupTable::new(Grouping { op: Op::Max, ..SUM });
        let (keys, values) = ([1.0, 1.0, 2.0], [f64::NAN, 7.0, -0.0]);
        groups.take(&Values::Floats(&keys), &Values::Floats(&values));
        let got = groups.values();
        assert!(got[0].1.as_f64().is_nan());
        assert_eq!(got[1].1.as_f64().to_bits(), (-0.0f64).to_bits());
    }
}
