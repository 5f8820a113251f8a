//! Integer programs, solved through good_lp.
//!
//! Two problems are solved this way. The first is the number of nodes of each kind, where there are
//! too many for the exact programme. The second is the layers to stream from disk. Each has a fixed
//! fallback for when the solver runs out of time, so that the same input gives the same plan.

use good_lp::{Expression, Solution, SolverModel, Variable, constraint, variable, variables};

use super::program::program as integer_program;
use crate::Error;

/// Seconds that a program may take. Those here take milliseconds; the limit is for the unforeseen.
const SECONDS: f64 = 2.0;

/// Seconds that a streamed layer counts for where time does not decide. It is far below any token,
/// and ten times HiGHS's tolerance on reduced costs, 1e-7.
const TIE: f64 = 1e-6;

/// Equivalent nodes in the selection.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Kind {
    pub count: u32,
    /// Layers that one of them can hold.
    pub layers: u32,
    /// Seconds that a layer costs there.
    pub seconds: f64,
}

/// The number of nodes of each kind to use, and of the layers that they get together. Minimises the
/// sum of layers' seconds, and a hop per node after the first:
///
/// minimise sum_c (t_c X_c + h n_c) subject to sum X = L, n_c <= X_c <= cap_c n_c, n_c <= count_c.
///
/// # Errors
/// [`Error::Program`] when nothing is feasible or the time is up.
pub fn select(kinds: &[Kind], n_layers: u32, hop: f64) -> Result<Vec<(u32, u32)>, Error> {
    let mut vars = variables!();
    let whole = |max: u32| variable().integer().min(0).max(f64::from(max));
    let pairs: Vec<(Variable, Variable)> = kinds
        .iter()
        .map(|kind| (vars.add(whole(kind.count)), vars.add(whole(n_layers))))
        .collect();
    // A hop of nothing would leave the number of nodes open.
    let hop = hop.max(1e-9);
    let cost: Expression = pairs
        .iter()
        .zip(kinds)
        .map(|(&(n, x), kind)| kind.seconds * x + hop * n)
        .sum();
    let mut program = integer_program(vars.minimise(cost), SECONDS);
    let total: Expression = pairs.iter().map(|&(_, x)| Expression::from(x)).sum();
    program = program.with(constraint!(total == f64::from(n_layers)));
    for (&(n, x), kind) in pairs.iter().zip(kinds) {
        program = program.with(constraint!(x <= f64::from(kind.layers) * n));
        program = program.with(constraint!(x >= n));
    }
    let found = finish(program, 1 + 2 * kinds.len(), 2 * kinds.len())?;
    let read = |v: Variable| found.value(v).round().max(0.0) as u32;
    Ok(pairs.iter().map(|&(n, x)| (read(n), read(x))).collect())
}

/// The same by filling the fastest first: exact without hops, and never far from it.
pub fn select_greedy(kinds: &[Kind], n_layers: u32) -> Option<Vec<(u32, u32)>> {
    let mut order: Vec<usize> = (0..kinds.len()).collect();
    order.sort_by(|&a, &b| {
        kinds[a]
            .seconds
            .total_cmp(&kinds[b].seconds)
            .then(a.cmp(&b))
    });
    let mut left = n_layers;
    let mut chosen = vec![(0, 0); kinds.len()];
    for i in order {
        let kind = kinds[i];
        let layers = left.min(kind.count.saturating_mul(kind.layers));
        if layers > 0 {
            chosen[i] = (layers.div_ceil(kind.layers), layers);
            left -= layers;
        }
    }
    (left == 0).then_some(chosen)
}

/// A node that may keep layers in memory and stream others from disk.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Streamer {
    /// Seconds that a layer costs besides reading.
    pub seconds: f64,
    /// Bytes for weights, cache and buffers.
    pub memory: f64,
    /// Bytes of cache that a layer needs, streamed or not.
    pub cache: f64,
    /// Bytes that using the node costs.
    pub fixed: f64,
    /// Bytes a second from disk, 0 for none.
    pub disk: f64,
}

/// Layers of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Streamed {
    /// All that it computes.
    pub layers: u32,
    /// Layers kept in memory, among `layers`.
    pub resident: u32,
}

/// Assigns layers to nodes that cannot hold them all in memory: the least T with
///
/// - T >= sum_m c_m x_m + h sum_m y_m, one token's compute and hops,
/// - T >= (x_m - r_m) b / s_m for every m: disk reads overlap with everything else,
/// - r_m b + 2 b w_m + cache x_m + fixed y_m <= memory_m. The variable w_m is 1 where anything is
///   streamed, through a window of two layers,
/// - sum x = L, r_m <= x_m <= L y_m, x_m - r_m <= L w_m.
///
/// `bytes` is b, a layer as stored. Returns T and the layers of each node.
///
/// # Errors
/// [`Error::Program`] when nothing is feasible or the time is up.
pub fn stream(
    nodes: &[Streamer],
    n_layers: u32,
    bytes: f64,
    hop: f64,
) -> Result<(f64, Vec<Streamed>), Error> {
    let all = f64::from(n_layers);
    let mut vars = variables!();
    let time = vars.add(variable().min(0));
    let columns: Vec<[Variable; 4]> = nodes
        .iter()
        .map(|node| {
            let streams = if node.disk > 0.0 { 1.0 } else { 0.0 };
            let layers = variable().integer().min(0).max(all);
            let used = variable().integer().min(0).max(1);
            let window = variable().integer().min(0).max(streams);
            [
                vars.add(layers.clone()),
                vars.add(layers),
                vars.add(used),
                vars.add(window),
            ]
        })
        .collect();
    // Prefer memory where a disk keeps up with everything else.
    let streamed: Expression = columns.iter().map(|v| TIE * (v[0] - v[1])).sum();
    let mut program = integer_program(vars.minimise(time + streamed), SECONDS);
    let total: Expression = columns.iter().map(|v| Expression::from(v[0])).sum();
    let compute: Expression = columns
        .iter()
        .zip(nodes)
        .map(|(v, node)| node.seconds * v[0] + hop * v[2])
        .sum();
    program = program.with(constraint!(total == all));
    program = program.with(constraint!(time >= compute));
    for (&[x, r, y, w], node) in columns.iter().zip(nodes) {
        // In units of a layer's bytes, which keeps the numbers near one.
        let need = r + 2.0 * w + node.cache / bytes * x + node.fixed / bytes * y;
        program = program.with(constraint!(need <= node.memory / bytes));
        program = program.with(constraint!(r <= x));
        program = program.with(constraint!(x <= all * y));
        program = program.with(constraint!(x - r <= all * w));
        if node.disk > 0.0 {
            let each = bytes / node.disk;
            program = program.with(constraint!(time >= each * x - each * r));
        }
    }
    let found = finish(program, 2 + 5 * nodes.len(), 1 + 4 * nodes.len())?;
    let read = |v: Variable| found.value(v).round().max(0.0) as u32;
    let layers = columns.iter().map(|v| Streamed {
        layers: read(v[0]),
        resident: read(v[1]),
    });
    Ok((found.value(time), layers.collect()))
}

/// Solves; an incumbent that time cut short is no answer, since it would depend on the machine.
fn finish<M>(program: M, rows: usize, columns: usize) -> Result<M::Solution, Error>
where
    M: SolverModel,
    M::Error: std::fmt::Display,
{
    let failed = |reason: String| Error::Program {
        rows,
        columns,
        reason,
    };
    let solution = program.solve().map_err(|error| failed(error.to_string()))?;
    match solution.status() {
        good_lp::solvers::SolutionStatus::Optimal => Ok(solution),
        other => Err(failed(format!("stopped with {other:?}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The two Macs of distilp's test profile, Llama 70B in 4 bits, cache in 8. Memory fits 13 and
    /// 36 layers; a streamed one takes 136 and 117 ms.
    fn online() -> ([Streamer; 2], f64) {
        let mac = |seconds, layers: f64, ms: f64| Streamer {
            seconds,
            memory: layers,
            cache: 0.0,
            fixed: 0.0,
            disk: 1000.0 / ms,
        };
        (
            [
                mac(0.0050427, 13.0 + 2.0, 136.0),
                mac(0.001758, 36.0 + 2.0, 117.0),
            ],
            0.0632,
        )
    }

    #[test]
    fn streaming_beats_the_split_of_distilp_under_the_same_physics() {
        let (macs, hop) = online();
        let (seconds, layers) = stream(&macs, 80, 1.0, hop).unwrap();
        assert_eq!(layers[0].layers, 27);
        assert_eq!(
            layers[1],
            Streamed {
                layers: 53,
                resident: 36
            }
        );
        assert!((seconds - 17.0 * 0.117).abs() < 1e-6, "{seconds}");
        // distilp puts 26 and 54 there: 18 layers streamed by the second Mac.
        assert!(seconds < 18.0 * 0.117);
    }

    #[test]
    fn what_fits_is_not_streamed_and_slow_nodes_stay_out() {
        let node = |seconds, memory| Streamer {
            seconds,
            memory,
            cache: 0.0,
            fixed: 0.0,
            disk: 1.0,
        };
        let (seconds, layers) = stream(&[node(1.0, 8.0), node(3.0, 8.0)], 8, 1.0, 0.5).unwrap();
        assert_eq!(
            layers,
            [
                Streamed {
                    layers: 8,
                    resident: 8
                },
                Streamed::default()
            ]
        );
        assert!((seconds - 8.5).abs() < 1e-9);
    }

    #[test]
    fn without_disk_or_memory_there_is_no_answer() {
        let node = Streamer {
            seconds: 1.0,
            memory: 3.0,
            cache: 0.0,
            fixed: 0.0,
            disk: 0.0,
        };
        assert!(matches!(
            stream(&[node], 8, 1.0, 0.0),
            Err(Error::Program { .. })
        ));
    }

    #[test]
    fn selection_fills_fast_nodes_first_unless_hops_cost_more() {
        let kinds = [
            Kind {
                count: 2,
                layers: 4,
                seconds: 1.0,
            },
            Kind {
                count: 1,
                layers: 8,
                seconds: 1.5,
            },
        ];
        assert_eq!(select(&kinds, 8, 0.1).unwrap(), [(2, 8), (0, 0)]);
        assert_eq!(select(&kinds, 8, 10.0).unwrap(), [(0, 0), (1, 8)]);
        assert_eq!(select_greedy(&kinds, 8).unwrap(), [(2, 8), (0, 0)]);
        assert!(select(&kinds, 17, 0.1).is_err());
        assert!(select_greedy(&kinds, 17).is_none());
    }
}
