//! The exchange of the map's entries between linked nodes, and what changed entries mean for
//! membership.
//!
//! Two nodes with different roots send marks, then the entries that differ. What arrives is checked
//! against the rules of the map before it is merged.

use std::collections::BTreeSet;
use std::time::Duration;

use super::super::clock::{HybridClock, Now};
use super::super::registers::{SignedEntry, TOMBSTONE_MS};
use super::super::{NodeId, Register, RegisterKey};
use super::messages::{ENTRIES_MAX, GossipMessage, Rumour};
use super::peers::Life;
use super::{Action, COMPARE_EVERY, Membership, RESTORE_EVERY};

impl Membership {
    pub(super) fn broadcast(&self, message: &GossipMessage, actions: &mut Vec<Action>) {
        for to in self.peers.linked() {
            let message = message.clone();
            actions.push(Action::Send { to, message });
        }
    }

    /// Starts an exchange of differing entries, unless one has just begun.
    pub(super) fn compare(&mut self, with: NodeId, root: u64, now: Now, actions: &mut Vec<Action>) {
        let soon = self
            .compared
            .get(&with)
            .map_or(Duration::ZERO, |at| *at + COMPARE_EVERY);
        if root == self.map.root() || now.since_start < soon {
            return;
        }
        self.compared.insert(with, now.since_start);
        let marks = self.map.marks();
        let message = GossipMessage::Marks {
            marks,
            answer: true,
        };
        actions.push(Action::Send { to: with, message });
    }

    pub(super) fn answer_marks(
        &self,
        to: NodeId,
        marks: &[u64],
        answer: bool,
        actions: &mut Vec<Action>,
    ) {
        let (beyond, missing) = self.map.beyond(marks);
        for entries in beyond.chunks(ENTRIES_MAX) {
            let entries = entries.to_vec();
            actions.push(Action::Send {
                to,
                message: GossipMessage::Entries { entries },
            });
        }
        if answer && missing > 0 {
            let marks = self.map.marks();
            let message = GossipMessage::Marks {
                marks,
                answer: false,
            };
            actions.push(Action::Send { to, message });
        }
    }

    /// Merges other nodes' entries that break no rule and that their writers have signed.
    pub(super) fn merge_entries(
        &mut self,
        entries: Vec<SignedEntry>,
        now: Now,
        actions: &mut Vec<Action>,
    ) {
        let revoked = self.map.revoked().clone();
        let (mut changed, mut lost) = (Vec::new(), Vec::new());
        for entry in entries.into_iter().take(ENTRIES_MAX) {
            if !self.is_valid(&entry, now) {
                continue;
            }
            self.clock.observe(entry.register.stamp, now.wall_ms);
            let key = entry.key.clone();
            match self.is_deletable(&entry, now) {
                false if key.subject() == Some(self.own) => lost.push((key, entry.register)),
                false => {}
                true if self.map.merge(entry, now.wall_ms) => changed.push(key),
                true => {}
            }
        }
        self.restore(lost, now, actions);
        if changed.is_empty() {
            return;
        }
        self.follow_map(&changed, now);
        self.enforce(&revoked, now, actions);
        if changed.contains(&RegisterKey::Node(self.own)) {
            // Facts of an earlier process of this node: the present ones are written again.
            actions.push(Action::Life(self.own, Life::Alive));
            self.next_ping = now.since_start;
        }
        actions.push(Action::Changed(changed));
    }

    /// Whether an entry of another node is news, breaks no rule, and has its writer's signature.
    fn is_valid(&self, entry: &SignedEntry, now: Now) -> bool {
        let SignedEntry {
            key,
            register,
            signature,
        } = entry;
        let writer = register.stamp.node;
        let oldest = now.wall_ms.saturating_sub(TOMBSTONE_MS);
        let is_over = register.value.is_none() && register.stamp.ms < oldest;
        // A revocation counts for as long as the map exists, so its signer has to be a node.
        let is_known = !matches!(key, RegisterKey::Revoked(_)) || self.map.has_met(writer);
        !is_over
            && is_known
            && HybridClock::is_near(register.stamp, now.wall_ms)
            && self.map.admits(key, register)
            && self
                .signer
                .is_of(signature, writer, &SignedEntry::message(key, register))
    }

    /// Whether the writer may delete an entry about a node, if it does so. A node deletes its own
    /// entries. Others delete those of a node that has been dead for as long as it may need to
    /// object. Entries of a revoked node are hidden, and needed if its revocation ends.
    fn is_deletable(&self, entry: &SignedEntry, now: Now) -> bool {
        let Some(subject) = entry.key.subject().filter(|_| entry.key.is_of_node()) else {
            return true;
        };
        let is_gone = || {
            let limit = self.pace.suspicion * 2;
            let is_kept = subject == self.own || self.is_revoked(subject);
            // Facts without a peer are those of a node whose revocation has just ended.
            let is_back = self.peers.life(subject).is_none()
                && self.map.get(&RegisterKey::Node(subject)).is_some();
            !is_kept && !is_back && self.peers.is_gone(subject, now.since_start, limit)
        };
        subject == entry.register.stamp.node || is_gone()
    }

    /// Writes own entries again that another member deleted as those of a dead node.
    pub(super) fn restore(
        &mut self,
        lost: Vec<(RegisterKey, Register)>,
        now: Now,
        actions: &mut Vec<Action>,
    ) {
        if lost.is_empty() || now.since_start < self.next_restore {
            return; // they are sent again
        }
        self.next_restore = now.since_start + RESTORE_EVERY;
        for (key, deletion) in lost {
            let known = self.map.register(&key);
            let known = known.filter(|known| known.stamp < deletion.stamp);
            if let Some(value) = known.and_then(|known| known.value.clone()) {
                self.write(key, 0, Some(value), now, actions);
            }
        }
    }

    /// Adds nodes that the map has, removes those that it no longer has.
    pub(super) fn follow_map(&mut self, changed: &[RegisterKey], now: Now) {
        for key in changed {
            let RegisterKey::Node(id) = key else { continue };
            if *id == self.own {
                continue;
            }
            match self.map.get(key) {
                Some(_) if self.is_revoked(*id) => {}
                Some(_) => self.know(*id, now),
                None if !self.peers.is_linked(*id) => {
                    self.peers.remove(*id);
                    self.dials.remove(*id);
                }
                None => {}
            }
        }
    }

    /// Ends sessions with nodes that are revoked and were not `before`, and knows those again whose
    /// revocation ended.
    pub(super) fn enforce(
        &mut self,
        before: &BTreeSet<NodeId>,
        now: Now,
        actions: &mut Vec<Action>,
    ) {
        let revoked = self.map.revoked().clone();
        for id in revoked.difference(before) {
            let life = self.peers.life(*id);
            self.dials.remove(*id);
            self.peers.remove(*id);
            actions.push(Action::Unlink(*id));
            if matches!(life, Some(Life::Alive | Life::Suspect)) {
                actions.push(Action::Life(*id, Life::Dead));
            }
        }
        let back = before.difference(&revoked).map(|id| RegisterKey::Node(*id));
        self.follow_map(&back.collect::<Vec<_>>(), now);
    }

    pub(super) fn write(
        &mut self,
        key: RegisterKey,
        epoch: u64,
        value: Option<String>,
        now: Now,
        actions: &mut Vec<Action>,
    ) {
        let stamp = self.clock.stamp(now.wall_ms);
        let register = Register {
            epoch,
            stamp,
            value,
        };
        let is_allowed = self.map.admits(&key, &register) && self.map.would_win(&key, &register);
        // Without random numbers nothing is signed.
        let signature = self.signer.sign(&SignedEntry::message(&key, &register));
        let (true, Ok(signature)) = (is_allowed, signature) else {
            return; // a rule, an entry of a higher epoch, or no room
        };
        let entry = SignedEntry {
            key: key.clone(),
            register,
            signature,
        };
        let revoked = self.map.revoked().clone();
        if !self.map.merge(entry.clone(), now.wall_ms) {
            return;
        }
        let changed = vec![key];
        self.follow_map(&changed, now);
        self.enforce(&revoked, now, actions);
        let entries = vec![entry];
        self.broadcast(&GossipMessage::Entries { entries }, actions);
        actions.push(Action::Changed(changed));
    }

    /// Deletes this node's facts and notifies the others.
    pub(super) fn leave(&mut self, now: Now, actions: &mut Vec<Action>) {
        self.write(RegisterKey::Node(self.own), 0, None, now, actions);
        self.left = true;
        let (id, incarnation) = (self.own, self.incarnation + 1);
        let life = Life::Left;
        let rumours = vec![Rumour {
            id,
            incarnation,
            life,
        }];
        self.broadcast(&GossipMessage::Gossip { rumours }, actions);
        actions.extend(self.peers.linked().map(Action::Unlink));
    }
}
