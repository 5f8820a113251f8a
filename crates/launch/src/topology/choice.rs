//! Chooses a backend for the cables, and makes its hostfile.

use super::{Addresses, Error, Graph, ProbedMachine, Ring, best_ring, missing_for_ring};
use crate::hostfile::{Devices, Host, Hostfile};
use crate::launch::Backend;

/// The best backend for the cables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopologyChoice {
    pub backend: Backend,
    pub hostfile: Hostfile,
}

/// Chooses a backend, or checks the requested one, and makes its hostfile.
///
/// The default is jaccl if all have RDMA and a cable to all others. It is jaccl-ring if all have
/// RDMA and there is a ring, else ring. `hosts` are as the user named them, with addresses from
/// those names.
///
/// # Errors
/// The missing requirement of the backend, or of any: [`Error::NoMesh`], [`Error::NoRing`],
/// [`Error::NoRdma`], [`Error::OneHost`], [`Error::SearchTooLong`].
pub fn choose(
    wish: Option<Backend>,
    graph: &Graph,
    addresses: &Addresses,
    machines: &[ProbedMachine],
    hosts: &[Host],
    envs: &[String],
) -> Result<TopologyChoice, Error> {
    if hosts.len() < 2 {
        return Err(Error::OneHost);
    }
    let plan = TopologySolver {
        graph,
        addresses,
        machines,
        hosts,
    };
    let (backend, hosts) = match wish {
        Some(Backend::Jaccl) => (Backend::Jaccl, plan.mesh()?),
        Some(Backend::JacclRing) => (Backend::JacclRing, plan.jaccl_ring()?),
        Some(_) => (Backend::Ring, plan.ring()?),
        None => plan.best()?,
    };
    Ok(TopologyChoice {
        backend,
        hostfile: Hostfile {
            backend: backend.to_string(),
            envs: envs.to_vec(),
            hosts,
        },
    })
}

/// The hostfile for hosts on an ordinary network; the backend is unspecified.
pub fn ethernet(machines: &[ProbedMachine], hosts: &[Host], envs: &[String]) -> Hostfile {
    let host = |(host, machine): (&Host, &ProbedMachine)| Host {
        ssh: host.ssh.clone(),
        ips: with_address(host, machine),
        ..Host::default()
    };
    Hostfile {
        backend: String::new(),
        envs: envs.to_vec(),
        hosts: hosts.iter().zip(machines).map(host).collect(),
    }
}

/// The addresses that the user gave, else the machine's own. MLX appends the second to the first,
/// so that a host named by its address has it twice, or two of different networks.
fn with_address(host: &Host, machine: &ProbedMachine) -> Vec<String> {
    if host.ips.is_empty() {
        machine.address.clone().into_iter().collect()
    } else {
        host.ips.clone()
    }
}

struct TopologySolver<'a> {
    graph: &'a Graph,
    addresses: &'a Addresses,
    machines: &'a [ProbedMachine],
    hosts: &'a [Host],
}

impl TopologySolver<'_> {
    fn best(&self) -> Result<(Backend, Vec<Host>), Error> {
        let has_rdma = self.check_rdma().is_ok();
        if has_rdma && self.graph.missing_for_mesh().is_empty() {
            return Ok((Backend::Jaccl, self.mesh()?));
        }
        if has_rdma {
            return Ok((Backend::JacclRing, self.jaccl_ring()?));
        }
        Ok((Backend::Ring, self.ring()?))
    }

    fn check_rdma(&self) -> Result<(), Error> {
        let all = self.hosts.iter().zip(self.machines);
        let without = all.filter(|(_, machine)| !machine.has_rdma);
        let hosts: Vec<String> = without.map(|(host, _)| host.ssh.clone()).collect();
        if hosts.is_empty() {
            Ok(())
        } else {
            Err(Error::NoRdma { hosts })
        }
    }

    fn find_ring(&self) -> Result<Ring, Error> {
        best_ring(self.graph)?.ok_or_else(|| {
            let missing = missing_for_ring(self.graph);
            let pairs = missing.into_iter().map(|pair| self.graph.pair(pair));
            Error::NoRing {
                missing: pairs.collect(),
            }
        })
    }

    /// Rank i gets its addresses towards rank i - 1.
    fn ring(&self) -> Result<Vec<Host>, Error> {
        let ring = self.find_ring()?;
        let count = ring.order.len();
        let host = |rank: usize| {
            let left = ring.order[(rank + count - 1) % count];
            let cables = self.addresses.between(ring.order[rank], left);
            let own = cables.iter().map(|(_, own, _)| own.to_string());
            Host {
                ssh: self.hosts[ring.order[rank]].ssh.clone(),
                ips: own.take(ring.cables as usize).collect(),
                ..Host::default()
            }
        };
        Ok((0..count).map(host).collect())
    }

    fn mesh(&self) -> Result<Vec<Host>, Error> {
        let missing = self.graph.missing_for_mesh();
        if !missing.is_empty() {
            let pairs = missing.into_iter().map(|pair| self.graph.pair(pair));
            return Err(Error::NoMesh {
                missing: pairs.collect(),
            });
        }
        self.check_rdma()?;
        let counts = self.graph.counts();
        let pairs = counts.iter().flatten().copied().filter(|count| *count > 0);
        let cables = pairs.min().unwrap_or(1);
        let order: Vec<usize> = (0..self.hosts.len()).collect();
        Ok(self.with_devices(&order, cables, &|_, _| true))
    }

    fn jaccl_ring(&self) -> Result<Vec<Host>, Error> {
        let ring = self.find_ring()?;
        self.check_rdma()?;
        let count = ring.order.len();
        let are_neighbours = |a: usize, b: usize| (a + 1) % count == b || (b + 1) % count == a;
        Ok(self.with_devices(&ring.order, ring.cables, &are_neighbours))
    }

    fn with_devices(
        &self,
        order: &[usize],
        cables: u32,
        wants: &dyn Fn(usize, usize) -> bool,
    ) -> Vec<Host> {
        let devices = |from: usize, to: usize| {
            if from == to || !wants(from, to) {
                return Devices::None;
            }
            let ends = self.addresses.between(order[from], order[to]);
            let names = ends
                .iter()
                .map(|(end, ..)| format!("rdma_{}", self.graph.interface(*end)));
            let mut names: Vec<String> = names.take(cables as usize).collect();
            match names.pop() {
                Some(only) if names.is_empty() => Devices::One(only),
                last => {
                    names.extend(last);
                    Devices::Many(names)
                }
            }
        };
        let host = |rank: usize| {
            let (host, machine) = (&self.hosts[order[rank]], &self.machines[order[rank]]);
            Host {
                ssh: host.ssh.clone(),
                ips: with_address(host, machine),
                rdma: (0..order.len()).map(|to| devices(rank, to)).collect(),
                ..Host::default()
            }
        };
        (0..order.len()).map(host).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::graph::tests::graph;
    use super::*;

    fn chosen(
        wish: Option<Backend>,
        hosts: usize,
        cables: &[(usize, usize)],
        has_rdma: bool,
    ) -> Result<TopologyChoice, String> {
        let graph = graph(hosts, cables);
        let machine = |host| ProbedMachine {
            has_rdma,
            address: Some(format!("10.0.0.{host}")),
            ..ProbedMachine::default()
        };
        let machines: Vec<_> = (0..hosts).map(machine).collect();
        let names = graph.hosts.join(",");
        let named = Hostfile::from_names(&names, 1).unwrap().hosts;
        let addresses = Addresses::assign(&graph, &machines).unwrap();
        choose(wish, &graph, &addresses, &machines, &named, &[]).map_err(|e| e.to_string())
    }

    const SQUARE: [(usize, usize); 4] = [(0, 1), (1, 2), (2, 3), (3, 0)];

    #[test]
    fn the_best_backend_is_chosen() {
        let backend = |hosts, cables: &[_], has_rdma| {
            chosen(None, hosts, cables, has_rdma).map(|choice| choice.backend)
        };
        let triangle = [(0, 1), (1, 2), (2, 0)];
        assert_eq!(backend(3, &triangle, true), Ok(Backend::Jaccl));
        assert_eq!(backend(3, &triangle, false), Ok(Backend::Ring));
        assert_eq!(backend(4, &SQUARE, true), Ok(Backend::JacclRing));
        let error = backend(4, &SQUARE[..3], true).unwrap_err();
        assert_eq!(
            error,
            "no ring through all hosts: h0 is not connected to h3"
        );
        let error = backend(1, &[(0, 0)], true).unwrap_err();
        assert_eq!(error, "one host has nobody to be connected to");
    }

    #[test]
    fn wishes_are_checked() {
        let error = |wish, cables: &[_], rdma| chosen(Some(wish), 4, cables, rdma).unwrap_err();
        assert_eq!(
            error(Backend::Jaccl, &SQUARE, true),
            "no mesh: h0 is not connected to h2, h1 is not connected to h3"
        );
        assert_eq!(
            error(Backend::JacclRing, &SQUARE, false),
            "no RDMA on h0, h1, h2, h3"
        );
        let star = [(0, 1), (0, 2), (0, 3)];
        let text = error(Backend::Ring, &star, true);
        assert!(text.starts_with("no ring through all hosts: h"), "{text}");
    }

    #[test]
    fn a_ring_has_the_addresses_towards_the_left() {
        let twice = [SQUARE, SQUARE].concat();
        let choice = chosen(Some(Backend::Ring), 4, &twice, false).unwrap();
        let ips: Vec<_> = choice
            .hostfile
            .hosts
            .iter()
            .map(|host| host.ips.join(" "))
            .collect();
        // Host 0 lists cables to 1, 3, 1, 3 and so has networks 0 to 3.
        assert_eq!(ips[0], "192.168.0.5 192.168.0.13");
        assert_eq!(ips[1], "192.168.0.2 192.168.0.10");
        let choice = chosen(Some(Backend::JacclRing), 4, &twice, true).unwrap();
        let rdma = &choice.hostfile.hosts[0].rdma;
        let many = |a: &str, b: &str| Devices::Many(vec![a.to_owned(), b.to_owned()]);
        let expected = [
            Devices::None,
            many("rdma_en2", "rdma_en4"),
            Devices::None,
            many("rdma_en3", "rdma_en5"),
        ];
        assert_eq!(rdma, &expected);
        assert_eq!(choice.hostfile.hosts[0].ips, ["10.0.0.0"]);
    }

    #[test]
    fn an_address_is_not_repeated() {
        let machine = ProbedMachine {
            address: Some("10.0.0.9".to_owned()),
            ..ProbedMachine::default()
        };
        let machines = [machine.clone(), machine];
        let hosts = Hostfile::from_names("192.0.2.1,studio", 1).unwrap().hosts;
        let file = ethernet(&machines, &hosts, &["A=1".to_owned()]);
        assert_eq!(file.hosts[0].ips, ["192.0.2.1"]);
        assert_eq!(file.hosts[1].ips, ["10.0.0.9"]);
    }
}
