//! Hostfiles: reading of both formats, writing of all, errors with their position.

use proptest::prelude::*;

use super::*;

const FULL: &str = r#"{"backend": "jaccl", "envs": ["A=1"], "hosts": [
    {"ssh": "a", "ips": ["10.0.0.1"], "rdma": [null, ["rdma_en5", "rdma_en6"]]},
    {"ssh": "b", "ips": ["10.0.0.2"], "rdma": ["rdma_en4", null], "comment": 7}]}"#;

#[test]
fn the_launchers_format_is_read_and_written() {
    let file = Hostfile::parse(FULL).unwrap();
    assert_eq!(
        (file.backend.as_str(), &file.envs[..]),
        ("jaccl", &["A=1".to_owned()][..])
    );
    assert_eq!(file.hosts[1].ips, ["10.0.0.2"]);
    assert_eq!(
        file.hosts[1].rdma,
        [Devices::One("rdma_en4".into()), Devices::None]
    );
    assert_eq!(
        file.devices_json(),
        r#"[[null, ["rdma_en5", "rdma_en6"]], ["rdma_en4", null]]"#
    );
    assert_eq!(Hostfile::parse(&file.to_json()).unwrap(), file);
    let bare = Hostfile::parse(r#"[{"ssh": "a"}]"#).unwrap();
    assert_eq!(bare.hosts[0].ssh, "a");
    let expected = "{\n    \"backend\": \"\",\n    \"envs\": [],\n    \"hosts\": [\n        {\n            \
                    \"ssh\": \"a\",\n            \"ips\": [],\n            \"rdma\": []\n        }\n    ]\n}";
    assert_eq!(bare.to_json(), expected);
}

#[test]
fn the_rings_format_is_read_and_written() {
    let text = r#"[["10.0.0.1:5000", "10.0.0.1:5001"], ["10.0.0.2:5000", "10.0.1.2:5000"]]"#;
    let file = Hostfile::parse(text).unwrap();
    assert_eq!(file.hosts[0].ssh, "10.0.0.1");
    assert_eq!(file.hosts[0].ips, ["10.0.0.1"]);
    assert_eq!(file.hosts[1].ips, ["10.0.0.2", "10.0.1.2"]);
    let addresses: Vec<_> = file.hosts.into_iter().map(|host| host.addresses).collect();
    assert_eq!(ring_json(&addresses), text);
}

#[test]
fn names_become_hosts() {
    let file = Hostfile::from_names("10.0.0.1,fe80::1,studio,localhost", 2).unwrap();
    let hosts: Vec<_> = file
        .hosts
        .iter()
        .map(|h| (h.ssh.as_str(), h.ips.join(" ")))
        .collect();
    let expected = [
        ("10.0.0.1", "10.0.0.1"),
        ("10.0.0.1", "10.0.0.1"),
        ("fe80::1", "fe80::1"),
        ("fe80::1", "fe80::1"),
        ("studio", ""),
        ("studio", ""),
        ("localhost", "127.0.0.1"),
        ("localhost", "127.0.0.1"),
    ];
    assert_eq!(hosts, expected.map(|(name, ip)| (name, ip.to_owned())));
    for (names, message) in [
        ("", "host name \"\" is empty"),
        ("a,,b", "host name \"\" is empty"),
        (
            "-oProxyCommand=x",
            "host name \"-oProxyCommand=x\" starts with a hyphen",
        ),
        ("a b", "host name \"a b\" has a blank in it"),
    ] {
        let error = Hostfile::from_names(names, 1).unwrap_err();
        assert_eq!(error.to_string(), message);
    }
    let error = Hostfile::from_names("a", usize::MAX).unwrap_err();
    assert!(matches!(error, Error::TooManyHosts { .. }), "{error}");
}

#[test]
fn what_is_no_hostfile_says_where() {
    for (text, message) in [
        (
            "",
            "hostfile is not JSON: EOF while parsing a value at line 1 column 0",
        ),
        ("[]", "hostfile names no host"),
        (
            "7",
            "hostfile: the list of hosts is the number 7, expected a list",
        ),
        (
            "{}",
            "hostfile: the list of hosts is missing, expected a list",
        ),
        (
            "[7]",
            "hostfile: host 0 is the number 7, expected an object or a list",
        ),
        (
            "[{}]",
            "hostfile: \"ssh\" of host 0 is missing, expected a string",
        ),
        (
            r#"[{"ssh": "-x"}]"#,
            "host name \"-x\" starts with a hyphen",
        ),
        (
            r#"[{"ssh": "a", "ips": "10.0.0.1"}]"#,
            "hostfile: \"ips\" of host 0 is \"10.0.0.1\", expected a list",
        ),
        (
            r#"[{"ssh": "a", "ips": [null]}]"#,
            "hostfile: an entry in \"ips\" of host 0 is missing, expected a string",
        ),
        (
            r#"[{"ssh": "a", "rdma": [true]}]"#,
            "hostfile: an entry in \"rdma\" of host 0 is a truth value, expected null, a device or \
             a list",
        ),
        (
            r#"{"hosts": [{"ssh": "a"}], "envs": {}}"#,
            "hostfile: \"envs\" is an object, expected a list",
        ),
        (
            r#"[["10.0.0.1"]]"#,
            "hostfile: an address of host 0 is \"10.0.0.1\", expected ADDRESS:PORT",
        ),
        (
            r#"[["10.0.0.1:99999"]]"#,
            "hostfile: an address of host 0 is \"10.0.0.1:99999\", expected ADDRESS:PORT",
        ),
        (
            "[[]]",
            "hostfile: an address of host 0 is an empty list, expected ADDRESS:PORT",
        ),
    ] {
        assert_eq!(
            Hostfile::parse(text).unwrap_err().to_string(),
            message,
            "{text}"
        );
    }
    let error = Hostfile::read(Path::new("/nonexistent/hosts.json")).unwrap_err();
    assert!(matches!(error, Error::Read { .. }), "{error}");
}

proptest! {
    #[test]
    fn any_text_is_read_or_refused(text in "[\\[\\]{}\":,a-z0-9 ]{0,80}") {
        let _ = Hostfile::parse(&text);
    }

    #[test]
    fn what_is_written_is_read_again(
        names in prop::collection::vec("[a-z\u{e9}.]{1,8}", 1..5),
        ips in prop::collection::vec("[0-9.]{0,8}", 0..3),
    ) {
        let rdma = vec![Devices::None, Devices::One("\u{1f600}".into()), Devices::Many(vec![])];
        let host = |ssh| Host { ssh, ips: ips.clone(), rdma: rdma.clone(), ..Host::default() };
        let file = Hostfile { hosts: names.into_iter().map(host).collect(), ..Hostfile::default() };
        prop_assert_eq!(Hostfile::parse(&file.to_json()).unwrap(), file);
    }
}
