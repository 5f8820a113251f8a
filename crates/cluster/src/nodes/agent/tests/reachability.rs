//! Measured paths, clocks and open ports.

use super::*;

#[test]
fn ways_are_measured_told_and_used() {
    let nodes = cluster(&["one", "two"]);
    let (one, two) = (&nodes[0].agent, &nodes[1].agent);
    let is_known = |path: &crate::nodes::paths::Path| path.up && path.bytes_per_s.is_some();
    until("both have measured", || {
        one.paths(one.id()).iter().any(is_known) && two.paths(two.id()).iter().any(is_known)
    });
    until("each knows what the other measured", || {
        one.paths(two.id()).iter().any(is_known) && two.paths(one.id()).iter().any(is_known)
    });
    let told = one.nodes_and_ways();
    let ways: Vec<&str> = told[1]
        .paths
        .iter()
        .map(|way| way.to_name.as_str())
        .collect();
    assert!(ways.contains(&"one"), "{told:?}");
    let used = one.paths(one.id());
    assert_eq!(
        used.iter().filter(|path| path.preferred).count(),
        1,
        "{used:?}"
    );
    for (from, to, port) in [(one, two, two.port()), (two, one, one.port())] {
        for knower in [one, two] {
            let route = knower.route(from.id(), to.id()).unwrap();
            assert_eq!(route.port(), port);
        }
    }
    let wanted = crate::nodes::paths::PathProbe::Bandwidth;
    one.measure(&[one.id(), two.id(), NodeId([9; 16])], wanted);
    assert_eq!(one.route(one.id(), NodeId([9; 16])), None);
}

#[test]
fn a_clock_that_is_off_is_refused_by_name_and_examined() {
    let key = ClusterKey::random().unwrap();
    let (one, home) = (node("one", &key, &[]), tempfile::tempdir().unwrap());
    join_at_rest(home.path(), &key).unwrap();
    let mut late = config(home.path(), "late", &[one.agent.port()]);
    late.clock_ahead_ms = 90_000;
    let late = Agent::start(late).unwrap();
    until("both are reported", || {
        let told = |agent: &Agent| {
            agent
                .problems()
                .join(" ")
                .contains(" s apart, allowed are 60 s")
        };
        told(&late) && told(&one.agent)
    });
    let mut found = Vec::new();
    let host = format!("127.0.0.1:{}", late.port());
    one.agent.examine(&host, |finding| found.push(finding));
    let wrong: Vec<_> = found.iter().filter(|finding| !finding.ok).collect();
    assert_eq!(wrong.len(), 1, "{found:?}");
    assert_eq!(wrong[0].test, Test::Clock);
    assert!(wrong[0].found.contains("late is 90 s ahead"), "{wrong:?}");
    late.stop();
}

#[test]
fn two_nodes_that_reach_each_other_have_open_ports() {
    let nodes = cluster(&["one", "two"]);
    let mut found = Vec::new();
    let host = format!("127.0.0.1:{}", nodes[1].agent.port());
    nodes[0].agent.examine(&host, |finding| found.push(finding));
    for test in [
        Test::Control,
        Test::Clock,
        Test::Membership,
        Test::ControlBack,
        Test::Data,
        Test::DataBack,
        Test::Mtu,
    ] {
        let finding = found.iter().find(|finding| finding.test == test);
        assert!(
            finding.is_some_and(|finding| finding.ok),
            "{test:?}: {found:?}"
        );
    }
    let tests: Vec<Test> = found.iter().map(|finding| finding.test).collect();
    assert!(tests.contains(&Test::Multicast) && tests.contains(&Test::MulticastBack));
    let mut found = Vec::new();
    nodes[0]
        .agent
        .examine("127.0.0.1:1", |finding| found.push(finding));
    assert_eq!(
        (found.len(), found[0].test, found[0].ok),
        (1, Test::Control, false)
    );
    assert!(found[0].found.contains("refuses"), "{found:?}");
    let mut found = Vec::new();
    nodes[0]
        .agent
        .examine("no.such.host.invalid", |finding| found.push(finding));
    assert_eq!((found.len(), found[0].test), (1, Test::Address));
}

/// The loopback interface acts as the data interface. Data ports use its first address; the control
/// ports are reached at another address.
#[test]
fn data_ports_are_tested_at_the_interface_for_data() {
    if !cfg!(target_os = "linux") {
        eprintln!(
            "SKIPPED data_ports_are_tested_at_the_interface_for_data: 127.0.0.2 is no address here"
        );
        return;
    }
    let key = ClusterKey::random().unwrap();
    let kept_apart = |name: &str, peers: &[u16]| {
        let home = tempfile::tempdir().unwrap();
        join_at_rest(home.path(), &key).unwrap();
        let mut config = config(home.path(), name, peers);
        config.data_interface = Some("lo".to_owned());
        let agent = Agent::start(config).unwrap();
        TestNode { agent, home }
    };
    let one = kept_apart("one", &[]);
    let two = kept_apart("two", &[one.agent.port()]);
    until("they meet", || {
        lives(&one.agent).len() == 2 && lives(&two.agent).len() == 2
    });
    let mut found = Vec::new();
    let host = format!("127.0.0.2:{}", two.agent.port());
    one.agent.examine(&host, |finding| found.push(finding));
    for test in [Test::Control, Test::Data, Test::DataBack] {
        let finding = found.iter().find(|finding| finding.test == test);
        assert!(
            finding.is_some_and(|finding| finding.ok),
            "{test:?}: {found:?}"
        );
    }
}
