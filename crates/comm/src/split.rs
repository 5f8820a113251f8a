//! Splits of a group: which rank belongs to which part.

use paceline_base::Rank;

use crate::{Call, Data, DataMut, Deadline, Dtype, ElementCounts, Error, Group, Kind};

/// This rank's place in the group that is split off.
#[derive(Clone, Debug)]
pub struct SplitMember {
    /// The call that exchanged colors and keys, for errors.
    pub call: Call,
    /// This rank in the new group.
    pub rank: Rank,
    /// The old ranks of the new group's members, in their new order.
    pub ranks: Vec<Rank>,
}

/// Exchanges colors and keys. Collective; one gather of 8 bytes per rank.
pub fn members(
    group: &dyn Group,
    color: u32,
    key: u32,
    deadline: Deadline,
) -> Result<SplitMember, Error> {
    let mut input = [0_u8; 8];
    input[..4].copy_from_slice(&color.to_le_bytes());
    input[4..].copy_from_slice(&key.to_le_bytes());
    let mut all = vec![0_u8; 8 * group.size() as usize];
    group.run(
        crate::Collective::AllGather {
            input: Some(Data::new(&input)),
            output: DataMut::new(&mut all),
            counts: ElementCounts::Even(8),
        },
        deadline,
    )?;
    let word = |bytes: &[u8]| {
        bytes
            .first_chunk()
            .map_or(0, |word| u32::from_le_bytes(*word))
    };
    let told = (0..).map(Rank).zip(all.as_chunks::<8>().0);
    let mut order: Vec<(u32, Rank)> = told
        .filter(|(_, bytes)| word(&bytes[..4]) == color)
        .map(|(rank, bytes)| (word(&bytes[4..]), rank))
        .collect();
    order.sort_unstable();
    let ranks: Vec<Rank> = order.into_iter().map(|(_, rank)| rank).collect();
    let own = (0..).zip(&ranks).find(|(_, rank)| **rank == group.rank());
    let call = Call::plain(0, Kind::AllGather, Dtype::U8, all.len());
    Ok(SplitMember {
        call,
        rank: Rank(own.map_or(0, |(new, _)| new)),
        ranks,
    })
}
