//! A group that runs each call in registered memory, by copying the caller's buffers.

use paceline_base::Rank;

use crate::testing::Ranks;
use crate::{
    Collective, CopyStats, Data, DataMut, Deadline, Dtype, Error, Group, RegisteredMemory, Site,
    Traffic, Tuning,
};

#[derive(Debug)]
struct RegisteredGroup(Box<dyn Group>);

/// The same ranks, with their buffers moved.
pub(super) fn of(ranks: Ranks) -> Ranks {
    let wrap = |group| Box::new(RegisteredGroup(group)) as Box<dyn Group>;
    ranks.into_iter().map(wrap).collect()
}

/// A caller's buffer type and its registered substitute.
struct RegisteredBuffer {
    dtype: Dtype,
    memory: RegisteredMemory<u8>,
}

impl RegisteredBuffer {
    fn new(group: &dyn Group, dtype: Dtype, bytes: &[u8]) -> Self {
        let mut memory = RegisteredMemory::new(Some(group), bytes.len());
        memory.copy_from_slice(bytes);
        Self { dtype, memory }
    }

    fn read(&self) -> Data<'_> {
        Data::of_bytes(self.dtype, &self.memory)
    }

    fn write(&mut self) -> DataMut<'_> {
        DataMut::of_bytes(self.dtype, &mut self.memory)
    }
}

impl RegisteredGroup {
    fn moved(&self, data: &Data<'_>) -> RegisteredBuffer {
        RegisteredBuffer::new(&*self.0, data.dtype(), data.bytes())
    }

    /// Runs `call` on registered memory with the bytes of `data`, and copies the result back.
    fn on<R>(&self, data: &mut DataMut<'_>, call: impl FnOnce(DataMut<'_>) -> R) -> R {
        let mut moved = RegisteredBuffer::new(&*self.0, data.dtype(), data.bytes());
        let result = call(moved.write());
        data.copy_from_bytes(&moved.memory);
        result
    }
}

impl Group for RegisteredGroup {
    fn rank(&self) -> Rank {
        self.0.rank()
    }

    fn size(&self) -> u32 {
        self.0.size()
    }

    fn run(&self, collective: Collective<'_>, deadline: Deadline) -> Result<(), Error> {
        self.run_at(Site::NONE, collective, deadline)
    }

    fn run_at(
        &self,
        site: Site,
        collective: Collective<'_>,
        deadline: Deadline,
    ) -> Result<(), Error> {
        let run = |collective: Collective<'_>| self.0.run_at(site, collective, deadline);
        match collective {
            Collective::Barrier => run(Collective::Barrier),
            Collective::AllGather {
                input,
                mut output,
                counts,
            } => {
                let input = input.map(|input| self.moved(&input));
                self.on(&mut output, |output| {
                    let input = input.as_ref().map(RegisteredBuffer::read);
                    run(Collective::AllGather {
                        input,
                        output,
                        counts,
                    })
                })
            }
            Collective::AllReduce { mut data, op } => {
                self.on(&mut data, |data| run(Collective::AllReduce { data, op }))
            }
            Collective::ReduceScatter {
                input,
                mut output,
                counts,
                op,
            } => {
                let input = self.moved(&input);
                self.on(&mut output, |output| {
                    run(Collective::ReduceScatter {
                        input: input.read(),
                        output,
                        counts,
                        op,
                    })
                })
            }
            Collective::AllToAll {
                input,
                mut output,
                sends,
                receives,
            } => {
                let input = self.moved(&input);
                self.on(&mut output, |output| {
                    run(Collective::AllToAll {
                        input: input.read(),
                        output,
                        sends,
                        receives,
                    })
                })
            }
            Collective::Broadcast { mut data, root } => {
                self.on(&mut data, |data| run(Collective::Broadcast { data, root }))
            }
        }
    }

    fn mark(&self, number: u64) {
        self.0.mark(number);
    }

    fn send_data(
        &self,
        message: Data<'_>,
        to: Rank,
        tag: u32,
        deadline: Deadline,
    ) -> Result<(), Error> {
        let moved = self.moved(&message);
        self.0.send_data(moved.read(), to, tag, deadline)
    }

    fn recv_data(
        &self,
        mut into: DataMut<'_>,
        from: Rank,
        tag: u32,
        deadline: Deadline,
    ) -> Result<(), Error> {
        let receive = |into: DataMut<'_>| self.0.recv_data(into, from, tag, deadline);
        self.on(&mut into, receive)
    }

    fn traffic(&self) -> Traffic {
        self.0.traffic()
    }

    fn copies(&self) -> CopyStats {
        self.0.copies()
    }

    fn tuning(&self) -> Tuning {
        self.0.tuning()
    }

    fn split(&self, color: u32, key: u32, deadline: Deadline) -> Result<Box<dyn Group>, Error> {
        let part = self.0.split(color, key, deadline)?;
        Ok(Box::new(Self(part)))
    }
}
