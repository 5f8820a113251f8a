//! API keys in the shared map and in the file of a node.

use super::*;

/// The node "one" of `home`, with API keys in `file`.
pub(super) fn with_keys(home: tempfile::TempDir, file: &Arc<MemoryKeyFile>) -> TestNode {
    let mut config = config(home.path(), "one", &[]);
    config.keys = Some(Arc::clone(file) as Arc<dyn KeyFile>);
    TestNode {
        agent: Agent::start(config).unwrap(),
        home,
    }
}

#[derive(Default)]
pub(super) struct MemoryKeyFile(pub(super) Mutex<BTreeMap<String, String>>);

impl KeyFile for MemoryKeyFile {
    fn read(&self) -> io::Result<BTreeMap<String, String>> {
        Ok(lock(&self.0).clone())
    }

    fn write(&self, entries: &BTreeMap<String, String>) -> io::Result<()> {
        *lock(&self.0) = entries.clone();
        Ok(())
    }

    fn restrict(&self, _: &str, entry: &str) -> Option<String> {
        Some(entry.replace("admin", "user"))
    }
}

#[test]
fn api_keys_are_adopted_and_revoked_everywhere() {
    let key = ClusterKey::random().unwrap();
    let files = [
        Arc::new(MemoryKeyFile::default()),
        Arc::new(MemoryKeyFile::default()),
    ];
    lock(&files[0].0).insert("k1".into(), "admin".into());
    let homes = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let mut agents: Vec<Agent> = Vec::new();
    for (home, file) in homes.iter().zip(&files) {
        join_at_rest(home.path(), &key).unwrap();
        let peers: Vec<u16> = agents.first().map(Agent::port).into_iter().collect();
        let mut config = config(home.path(), "n", &peers);
        config.keys = Some(Arc::clone(file) as Arc<dyn KeyFile>);
        agents.push(Agent::start(config).unwrap());
    }
    let has = |entry: &str| lock(&files[1].0).get("k1").is_some_and(|it| it == entry);
    until("it is adopted without its rights", || has("user"));
    lock(&files[1].0).insert("k1".into(), "admin".into());
    let acts = Mutex::new(Vec::new());
    until("its rights are allowed and kept", || {
        lock(&acts).extend(agents[1].acts());
        lock(&acts).contains(&ClusterAct::KeyAllowed("k1".into()))
    });
    assert!(has("admin"));
    lock(&files[1].0).remove("k1");
    until("it is revoked", || lock(&files[0].0).is_empty());
    agents.iter().for_each(Agent::stop);
}
