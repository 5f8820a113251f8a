//! Periodic work, some times a second: beacons, multicast DNS, changed addresses, and saved files.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use paceline_base::lock;

use super::super::ClusterKey;
use super::super::discovery::{Beacons, DiscoveredNode};
use super::super::mdns::Mdns;
use super::super::member::{DialTarget, Event};
use super::{Discovery, Inner, random};

const ROUND: Duration = Duration::from_millis(200);

/// Least interval between saves of the map.
const SAVE_EVERY: Duration = Duration::from_secs(1);

/// Poll interval of addresses and of the API key file.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Retry interval on a machine without a network.
const REOPEN_AFTER: Duration = Duration::from_secs(5);

/// How long a flooded multicast DNS stays closed: a flood then costs a twentieth of its time.
const FLOOD_PAUSE: Duration = Duration::from_secs(60);

impl Inner {
    pub(super) fn run_upkeep(self: &Arc<Self>) {
        let (mut beacons, mut mdns) = (None, None);
        let (mut tried, mut era) = (None::<Instant>, 0);
        let (mut tried_mdns, discovery) = (None::<Instant>, self.config.discovery);
        let (mut saved, mut looked) = (Instant::now(), None::<Instant>);
        let mut synced = self.known_keys();
        let mut generation = lock(&self.state).generation;
        while !self.is_stopped() {
            self.cover_revocations();
            self.hand_keys();
            let wants = matches!(discovery, Discovery::All | Discovery::Beacons);
            let wants = wants && beacons.is_none();
            if wants && tried.is_none_or(|at| at.elapsed() >= REOPEN_AFTER) {
                tried = Some(Instant::now());
                beacons = self.open_beacons();
            }
            let wants = matches!(discovery, Discovery::All | Discovery::Mdns);
            let is_time = tried_mdns.is_none_or(|at| at.elapsed() >= REOPEN_AFTER);
            if wants && mdns.is_none() && is_time {
                tried_mdns = Some(Instant::now());
                mdns = self.open_mdns();
            }
            let now_era = lock(&self.state).era;
            if now_era != era {
                // Keys of an earlier cluster are new to this one.
                synced.clear();
                era = now_era;
                if let Some(beacons) = &mut beacons {
                    beacons.restart();
                }
                // Opened again with the key of this cluster.
                (mdns, tried_mdns) = (None, None);
                continue;
            }
            let now_generation = lock(&self.state).generation;
            if now_generation != generation {
                generation = now_generation;
                (mdns, tried_mdns) = (None, None);
            }
            match &mut beacons {
                Some(beacons) => self.turn(beacons),
                None => thread::sleep(ROUND),
            }
            if let Some(open) = &mdns {
                self.hear_mdns(open);
                if open.is_flooded() {
                    let problem = "too many services are announced, closed for a minute".to_owned();
                    lock(&self.state).note("multicast DNS", Some(problem));
                    (mdns, tried_mdns) = (None, Some(Instant::now() + FLOOD_PAUSE));
                }
            }
            if looked.is_none_or(|at| at.elapsed() >= LOOK_EVERY) {
                looked = Some(Instant::now());
                self.write_facts();
                self.sign_revocations();
                self.share_keys(&mut synced);
            }
            if saved.elapsed() >= SAVE_EVERY {
                saved = Instant::now();
                self.save();
            }
        }
    }

    fn open_beacons(&self) -> Option<Beacons> {
        let opened = Beacons::open(self.identity.id(), self.port, random());
        if let Err(error) = &opened {
            let problem = format!("no beacons: {error}; name other nodes by --peer");
            lock(&self.state).blocked = vec![problem];
        }
        opened.ok()
    }

    fn open_mdns(&self) -> Option<Mdns> {
        let key = lock(&self.state).key.clone();
        let opened = Mdns::open(&key, random(), self.identity.id(), self.port);
        let problem = opened.as_ref().err().map(ToString::to_string);
        lock(&self.state).note("multicast DNS", problem);
        opened.ok()
    }

    fn hear_mdns(self: &Arc<Self>, mdns: &Mdns) {
        let key = lock(&self.state).key.clone();
        for heard in mdns.heard(&key) {
            self.handle_discovered(heard, &key);
        }
    }

    fn turn(self: &Arc<Self>, beacons: &mut Beacons) {
        let (key, invites) = {
            let mut state = lock(&self.state);
            let now = Instant::now();
            let invitation = state
                .invitation
                .take_if(|invitation| !invitation.is_open(now));
            drop(invitation);
            (state.key.clone(), state.invitation.is_some())
        };
        if invites {
            beacons.invite();
        }
        if let Some(heard) = beacons.poll(&key, ROUND)
            && self.handle_discovered(heard, &key)
        {
            beacons.say(&key, false);
        }
        lock(&self.state).blocked = beacons.blocked();
    }

    /// Passes a node that was discovered by `key` to the member; true if that node does not know
    /// this one yet. This node may have left that cluster since.
    pub(super) fn handle_discovered(
        self: &Arc<Self>,
        heard: DiscoveredNode,
        key: &ClusterKey,
    ) -> bool {
        let mut state = lock(&self.state);
        if state.key != *key {
            return false;
        }
        state.book.add(heard.id, heard.addr, heard.how);
        self.step(&mut state, Event::Found(DialTarget::Node(heard.id)));
        heard.asks && !state.links.contains_key(&heard.id)
    }

    /// Saves the map if it has changed.
    pub(super) fn save(&self) {
        let _turn = self.files.turn();
        let map = {
            let mut state = lock(&self.state);
            let map = state
                .is_dirty
                .then(|| (state.member.map().clone(), state.known_names.clone()));
            state.is_dirty = false;
            map
        };
        let failed = map.and_then(|(map, names)| self.files.save_map(&map, names).err());
        if let Some(error) = failed {
            let mut state = lock(&self.state);
            state.is_dirty = true;
            if state.note("files", Some(error.to_string())) {
                drop(state);
                self.tell(&format!("warning: {error}"));
            }
        }
    }
}
