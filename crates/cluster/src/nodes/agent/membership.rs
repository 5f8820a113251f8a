//! Cluster membership commands: invite, join, leave, revoke and forget, on a running or a stopped
//! node.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use paceline_base::lock;
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use super::super::member::{DialTarget, Event, Life};
use super::super::pairing::{self, Code, Invitation};
use super::super::{ClusterKey, NodeId, Register, RegisterKey, Registers, discovery};
use super::facts::NodeView;
use super::files::{NodeFolder, NodeNames};
use super::{Agent, ClusterAct, Error, HANDSHAKE_LIMIT, Inner, dial, facts, paths, rekey};

/// How long a newcomer listens for a machine that displays a code, which sends a beacon once a
/// second.
const LISTEN: Duration = Duration::from_secs(6);

/// How long a node that joined waits for the first session with another, and for its name.
const MEET: Duration = Duration::from_secs(5);

/// How long a leaving node waits until its last messages are sent.
const LAST_WORDS: Duration = Duration::from_millis(300);

/// Outcome of joining a cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Joined {
    /// Short public name of the cluster.
    pub cluster: String,
    /// Whether the node was in it already.
    pub already: bool,
    /// Names of the other nodes connected so far.
    pub met: Vec<String>,
    /// Everything that prevents connections to others.
    pub problems: Vec<String>,
}

/// Effects of a revocation, and what the revoked node may have done before.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Revocation {
    pub id: NodeId,
    /// Whether another member has to revoke the node, too: this one has revoked another node, and
    /// no second member has confirmed that.
    pub needs_second: bool,
    /// Ids of API keys that were written since this node first saw the revoked one.
    pub keys: Vec<String>,
    /// Names of nodes that this node first saw after the revoked one.
    pub nodes: Vec<String>,
}

impl Revocation {
    const fn of(id: NodeId) -> Self {
        Self {
            id,
            needs_second: false,
            keys: Vec::new(),
            nodes: Vec::new(),
        }
    }
}

impl Agent {
    /// The cluster's token. Secret: it admits any machine.
    pub fn token(&self) -> Zeroizing<String> {
        lock(&self.inner.state).key.token()
    }

    /// A code that admits one machine, within five minutes and three attempts. Replaces an earlier
    /// code.
    pub fn invite(&self) -> Result<Code, Error> {
        let code = Code::random().map_err(pairing::Error::Broken)?;
        let invitation = Invitation::new(code.clone(), Instant::now());
        let mut state = lock(&self.inner.state);
        state.invitation = Some(invitation);
        state.record(ClusterAct::Invited);
        Ok(code)
    }

    /// Moves this node with its records out of its cluster of one into the cluster of `key`.
    /// Waits some seconds for a node of it.
    ///
    /// # Errors
    /// [`Error::HasMembers`]: nothing has changed.
    pub fn join(&self, key: &ClusterKey) -> Result<Joined, Error> {
        self.join_at(key, None)
    }

    /// As [`join`](Self::join), with the address of a member if known.
    fn join_at(&self, key: &ClusterKey, at: Option<SocketAddr>) -> Result<Joined, Error> {
        let already = lock(&self.inner.state).key == *key;
        if !already {
            self.check_alone()?;
            self.enter(key, self.map().records())?;
        }
        if let Some(addr) = at {
            let found = Event::Found(DialTarget::Peer(addr.to_string()));
            self.inner.step(&mut lock(&self.inner.state), found);
        }
        let deadline = Instant::now() + MEET;
        let mut watch = self.watch();
        let mut met = self.met();
        // A session exists before the facts of its node, which contain the name.
        while (met.is_empty() || !met.iter().all(NodeView::has_told)) && Instant::now() < deadline {
            watch.wait(Duration::from_millis(50));
            met = self.met();
        }
        Ok(Joined {
            cluster: key.name(),
            already,
            met: met.into_iter().map(|node| node.facts.name).collect(),
            problems: self.problems(),
        })
    }

    /// Joins the cluster of a machine that displays `code`: the one at `peer`, or the first one
    /// discovered.
    ///
    /// # Errors
    /// [`Error::Pairing`], [`Error::NobodyInvites`], and as [`join`](Self::join).
    pub fn join_by_code(&self, code: &Code, peer: Option<&str>) -> Result<Joined, Error> {
        self.check_alone()?;
        let (key, addr) = pair(code, peer)?;
        self.join_at(&key, Some(addr))
    }

    /// Leaves the cluster for good and makes a new cluster of one.
    ///
    /// # Errors
    /// [`Error::HasWork`]; files that cannot be written.
    pub fn leave(&self) -> Result<(), Error> {
        self.check_idle()?;
        let key = ClusterKey::random()?;
        let inner = &self.inner;
        {
            let mut state = lock(&inner.state);
            inner.step(&mut state, Event::Leave);
        }
        std::thread::sleep(LAST_WORDS);
        self.enter(&key, Registers::default())
    }

    /// Revokes a node for good: every node ends its sessions with it and refuses it from now on.
    /// The cluster gets a new key, so that the node's key admits no other identity.
    ///
    /// # Errors
    /// [`Error::NoNode`], [`Error::Ambiguous`], [`Error::Itself`]. Files that cannot be written: it
    /// is revoked, and the key stays.
    pub fn revoke(&self, name: &str) -> Result<Revocation, Error> {
        let node = self.find(name)?;
        if node.id == self.id() {
            return Err(Error::Itself);
        }
        let mut told = Revocation::of(node.id);
        {
            let mut state = lock(&self.inner.state);
            let since = state.member.map().met_ms(node.id).unwrap_or(0);
            self.inner.step(&mut state, rekey::revocation(node.id));
            let map = state.member.map();
            told.needs_second = map.needs_second(node.id);
            told.keys = api_keys_since(map, since);
            let others = map.iter().filter_map(|(key, _)| match key {
                RegisterKey::Node(id) if *id != self.id() => Some(*id),
                _ => None,
            });
            let later = others.filter(|id| map.met_ms(*id).is_some_and(|met| met > since));
            told.nodes = later.map(|id| state.name(id)).collect();
        }
        lock(&self.inner.state).record(ClusterAct::Revoked(node.facts.name));
        self.inner.renew_key()?;
        Ok(told)
    }

    /// Forgets a dead node. A revoked one is forgotten already.
    ///
    /// # Errors
    /// [`Error::NoNode`], [`Error::Ambiguous`], [`Error::Lives`].
    pub fn forget(&self, name: &str) -> Result<NodeId, Error> {
        let node = self.find(name)?;
        let state = match node.state {
            _ if node.id == self.id() => "this node",
            _ if self.map().revoked().contains(&node.id) => return Ok(node.id),
            Life::Alive => "alive",
            Life::Suspect => "suspect",
            Life::Dead | Life::Left => {
                self.write(RegisterKey::Node(node.id), 0, None)?;
                // Removes its measured paths too, if it published any.
                let _: Result<(), _> = self.write(paths::key_of(node.id), 0, None);
                return Ok(node.id);
            }
        };
        let name = node.facts.name;
        Err(Error::Lives { name, state })
    }

    /// The other nodes with a session to this node.
    fn met(&self) -> Vec<NodeView> {
        let nodes = self.nodes().into_iter();
        let met = nodes.filter(|node| node.id != self.id() && node.linked);
        met.collect()
    }

    fn check_alone(&self) -> Result<(), Error> {
        let others = self.nodes().into_iter();
        let others = others.filter(|node| node.id != self.id() && node.state != Life::Left);
        let others: Vec<String> = others.map(|node| node.facts.name).collect();
        is_alone(&others)
    }

    fn check_idle(&self) -> Result<(), Error> {
        match (self.inner.config.work)(&self.map(), self.id()) {
            None => Ok(()),
            Some(work) => Err(Error::HasWork { work }),
        }
    }

    /// Changes the cluster, on disk first. The map begins with `kept`.
    fn enter(&self, key: &ClusterKey, kept: Registers) -> Result<(), Error> {
        let inner = &self.inner;
        {
            let _turn = inner.files.turn();
            inner.files.save_key(key)?;
            inner.files.save_map(&kept, NodeNames::new())?;
            let mut state = lock(&inner.state);
            state.enter((key.clone(), kept), inner.config.pace, inner.now());
        }
        inner.changed.notify_all();
        inner.timer.notify_all();
        inner.know_peers();
        inner.write_facts();
        Ok(())
    }
}

/// Ids of live API keys written at this time or later, in milliseconds since 1970.
fn api_keys_since(map: &Registers, since_ms: u64) -> Vec<String> {
    let keys = map
        .iter()
        .filter(|(_, register)| register.value.is_some() && register.stamp.ms >= since_ms);
    let ids = keys.filter_map(|(key, _)| key.as_api_key());
    ids.map(|(_, id)| id.to_owned()).collect()
}

impl Inner {
    /// Signs the entries of a saved map of the first form that only this node has: all revocations,
    /// and its own entries. Others come from their nodes. API keys come from this node's file. Keys
    /// of other nodes lose the rights of admins there.
    pub(super) fn adopt(self: &Arc<Self>, former: &[(RegisterKey, Register)]) {
        if former.is_empty() {
            return;
        }
        let own = self.identity.id();
        let mut foreign = Vec::new();
        {
            let mut state = lock(&self.state);
            let facts = self.facts(&state);
            self.step(&mut state, facts);
            for (
                key,
                Register {
                    epoch,
                    stamp,
                    value,
                },
            ) in former
            {
                let (key, value) = (key.clone(), value.clone());
                match key {
                    RegisterKey::Revoked(id) => self.step(&mut state, rekey::revocation(id)),
                    RegisterKey::ApiKey(id) if stamp.node != own => foreign.push(id),
                    RegisterKey::ApiKey(_) | RegisterKey::Node(_) => {}
                    _ if stamp.node != own => {}
                    RegisterKey::Named(_) => {
                        let epoch = 0;
                        self.step(&mut state, Event::Write { key, epoch, value });
                    }
                    RegisterKey::Record(_) | RegisterKey::Report(_) => {
                        let epoch = *epoch;
                        self.step(&mut state, Event::Write { key, epoch, value });
                    }
                }
            }
        }
        self.restrict_keys(&foreign);
        self.tell(
            "the saved map had the form of an earlier version: revocations and this node's own \
             entries are kept, and the others come from their nodes",
        );
    }
}

fn is_alone(others: &[String]) -> Result<(), Error> {
    match others.is_empty() {
        true => Ok(()),
        false => Err(Error::HasMembers {
            others: others.join(", "),
        }),
    }
}

/// Gets a cluster's key from a machine that displays `code`, and the address of its control port.
fn pair(code: &Code, peer: Option<&str>) -> Result<(ClusterKey, SocketAddr), Error> {
    let addrs: Vec<SocketAddr> = match peer {
        Some(peer) => dial::resolve(peer)?,
        None => {
            let heard = discovery::find_inviting(LISTEN);
            heard.map_err(pairing::Error::Broken)?.into_iter().collect()
        }
    };
    let mut last = Error::NobodyInvites { limit: LISTEN };
    for addr in addrs {
        match pairing::guest(addr, code, HANDSHAKE_LIMIT) {
            Ok(key) => return Ok((key, addr)),
            // A second address of the same machine would use up another attempt.
            Err(error @ pairing::Error::WrongCode) => return Err(error.into()),
            Err(error) => last = error.into(),
        }
    }
    Err(last)
}

/// The token of the cluster of a home whose node does not run. Makes a cluster if there is none.
///
/// # Errors
/// [`Error::Running`], files that cannot be used.
pub fn token_at_rest(home: &Path) -> Result<Zeroizing<String>, Error> {
    let files = NodeFolder::new(home);
    files.claim()?;
    Ok(files.key()?.token())
}

/// Joins a cluster with a home whose node does not run; it connects to the others when it starts.
///
/// # Errors
/// [`Error::Running`], [`Error::HasMembers`].
pub fn join_at_rest(home: &Path, key: &ClusterKey) -> Result<Joined, Error> {
    let files = NodeFolder::new(home);
    files.claim()?;
    let already = files.key()? == *key;
    if !already {
        check_at_rest(&files)?;
        // In this order: a map without its cluster is useless, a foreign one does harm.
        files.save_map(&files.map().map.records(), NodeNames::new())?;
        files.save_key(key)?;
    }
    Ok(Joined {
        cluster: key.name(),
        already,
        met: Vec::new(),
        problems: Vec::new(),
    })
}

/// As [`Agent::join_by_code`] with a home whose node does not run.
///
/// # Errors
/// As [`Agent::join_by_code`], and [`Error::Running`].
pub fn join_by_code_at_rest(home: &Path, code: &Code, peer: Option<&str>) -> Result<Joined, Error> {
    {
        let files = NodeFolder::new(home);
        files.claim()?;
        check_at_rest(&files)?;
    }
    join_at_rest(home, &pair(code, peer)?.0)
}

fn check_at_rest(files: &NodeFolder) -> Result<(), Error> {
    let (own, saved) = (files.identity()?.id(), files.map());
    let map = match saved.former.is_empty() {
        true => saved.map,
        false => Registers::from_entries(saved.former),
    };
    let mut facts = facts::all(&map);
    facts.remove(&own);
    let others: Vec<String> = facts::names(&facts).into_values().collect();
    is_alone(&others)
}
