//! Forecast of a split over several machines. It takes this machine's measured kernels, scaled by
//! how fast the others read memory and compute, and the measured ways between them.

use paceline_model::{Config, Split};
use paceline_plan::{
    Calibration, Cluster, Costs, Link, Node, Placement, Prediction, Transport, Workload, predict,
};

use super::{Forecast, KEYS, Result, pipeline};

/// Tokens of the answer that a prediction is for.
const ANSWER: u32 = 128;

/// A machine beside this one.
#[derive(Clone, Debug, PartialEq)]
pub struct Machine {
    /// Its name.
    pub name: String,
    /// Bytes that a model may use.
    pub memory: paceline_base::Bytes,
    /// How fast it reads memory, as a multiple of this machine.
    pub reads: f64,
    /// How fast it computes, as a multiple of this machine.
    pub computes: f64,
}

/// A way between two of the machines.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Way {
    /// Index of the machine at one end.
    pub a: usize,
    /// The other end.
    pub b: usize,
    /// Seconds of a round trip.
    pub round_trip: f64,
    /// Bytes a second.
    pub bytes_per_s: f64,
}

impl Forecast {
    /// Predicts `split` with rank i on `machines[i]`. Every two of them need a way.
    ///
    /// # Errors
    /// [`Error::Plan`](crate::Error::Plan): the planner refuses the split, a machine or a way.
    pub fn across(
        &self,
        config: &Config,
        split: &Split,
        machines: &[Machine],
        ways: &[Way],
    ) -> Result<Prediction> {
        let cluster = Cluster {
            name: "machines".to_owned(),
            nodes: machines.iter().map(|it| self.machine(it)).collect(),
            links: ways.iter().map(link).collect(),
        };
        let mut calibration = Calibration::builtin()?;
        calibration.set("op.paceline-cpu", self.op().max(1e-9));
        let workload = Workload {
            prompt: KEYS,
            output: ANSWER,
            concurrency: 1,
            context: config.context.try_into().unwrap_or(u32::MAX),
        };
        let costs = Costs::new(&cluster, &self.shape, workload, &calibration)?;
        let mut said = predict(&costs, &Placement::single(pipeline(config, split)))?;
        // Each step also costs the leader the last norm and the choice of the token.
        said.decode_tok_s = 1.0 / (1.0 / said.decode_tok_s + self.measured.step);
        Ok(said)
    }

    fn machine(&self, machine: &Machine) -> Node {
        let own = self.node(0, (1.0, 1.0), self.prompt_row());
        let rates = own.rates.map(|mut rates| {
            rates.matmul *= machine.computes;
            rates.expert *= machine.computes;
            rates.attention *= machine.computes;
            rates
        });
        Node {
            name: machine.name.clone(),
            memory: machine.memory,
            bandwidth: own.bandwidth * machine.reads,
            rates,
            ..own
        }
    }
}

fn link(way: &Way) -> Link {
    Link {
        a: way.a,
        b: way.b,
        kind: "measured".to_owned(),
        transport: Transport::Tcp,
        alpha: way.round_trip / 2.0,
        beta: way.bytes_per_s,
        shared: false,
    }
}
