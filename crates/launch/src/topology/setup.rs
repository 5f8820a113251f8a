//! Commands that assign the addresses of cables, and those that remove them.

use super::{Addresses, Graph};

/// Commands for `host`, in order; they need an administrator. As of `mlx.distributed_config`.
pub fn commands(graph: &Graph, addresses: &Addresses, host: usize) -> Vec<String> {
    let mut all = vec!["sudo ifconfig bridge0 down".to_owned()];
    for peer in (0..graph.hosts.len()).filter(|peer| *peer != host) {
        for (end, own, other) in addresses.between(host, peer) {
            let interface = graph.interface(end);
            all.push(format!(
                "sudo ifconfig {interface} inet {own} netmask 255.255.255.252"
            ));
            all.push(format!("sudo route change {other} -interface {interface}"));
        }
    }
    all
}

/// Commands for `host` that undo [`commands`].
pub fn undo(graph: &Graph, addresses: &Addresses, host: usize) -> Vec<String> {
    let mut all = Vec::new();
    for peer in (0..graph.hosts.len()).filter(|peer| *peer != host) {
        for (end, own, other) in addresses.between(host, peer) {
            let interface = graph.interface(end);
            all.push(format!("sudo route delete {other}"));
            all.push(format!("sudo ifconfig {interface} inet {own} delete"));
        }
    }
    all.push("sudo ifconfig bridge0 up".to_owned());
    all
}

/// A script that runs `commands` and shows their output. It fails when a command other than a
/// `route` does. A `route` fails if the system has made the route by itself.
pub fn script(commands: &[String]) -> String {
    let mut text = String::from("{\nexec </dev/null\nfailed=0\n");
    for command in commands {
        // A password prompt would block for ever.
        let quiet = command.replacen("sudo ", "sudo -n ", 1);
        text += &match command.contains(" route ") {
            true => format!("{quiet} || :\n"),
            false => format!("{quiet} || failed=1\n"),
        };
    }
    text + "exit $failed\n}\n"
}

#[cfg(test)]
mod tests {
    use super::super::graph::tests::graph;
    use super::*;

    #[test]
    fn both_ends_are_set_up_and_undone() {
        let graph = graph(3, &[(0, 1), (1, 2), (0, 1)]);
        let addresses = Addresses::assign(&graph, &[]).unwrap();
        assert_eq!(
            commands(&graph, &addresses, 1),
            [
                "sudo ifconfig bridge0 down",
                "sudo ifconfig en2 inet 192.168.0.2 netmask 255.255.255.252",
                "sudo route change 192.168.0.1 -interface en2",
                "sudo ifconfig en4 inet 192.168.0.6 netmask 255.255.255.252",
                "sudo route change 192.168.0.5 -interface en4",
                "sudo ifconfig en3 inet 192.168.0.9 netmask 255.255.255.252",
                "sudo route change 192.168.0.10 -interface en3",
            ]
        );
        assert_eq!(
            undo(&graph, &addresses, 2),
            [
                "sudo route delete 192.168.0.9",
                "sudo ifconfig en2 inet 192.168.0.10 delete",
                "sudo ifconfig bridge0 up",
            ]
        );
    }
}
