//! Stored responses for `previous_response_id`, in memory and bounded.
//!
//! `/v1/responses` with `store` (its default) keeps the conversation with its output, so that a
//! later request can name it in `previous_response_id`. At the limits the oldest of the client that
//! has the most is evicted, so that no client evicts another's within its equal share. None outlive
//! the server. Ids have 128 random bits; only the key that created a response may read
//! it.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use paceline_text::chat::ChatMessage;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::access::ClientIdentity;
use crate::journal::key_of;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct StoredResponse {
    /// `resp_...`.
    pub(crate) id: String,
    pub(crate) client: ClientIdentity,
    /// The conversation with its output, without instructions.
    pub(crate) turns: Vec<ChatMessage>,
    pub(crate) response: Value,
}

impl StoredResponse {
    /// Approximate memory, in bytes.
    fn bytes(&self) -> usize {
        const BESIDE: usize = 256;
        let call_bytes = |turn: &ChatMessage| {
            let calls = turn.tool_calls.iter();
            calls
                .map(|call| BESIDE + 4 * call.arguments.to_string().len())
                .sum::<usize>()
        };
        let turn = |turn: &ChatMessage| {
            let reasoning = turn.reasoning.as_ref().map_or(0, String::len);
            BESIDE + turn.content.len() + reasoning + call_bytes(turn)
        };
        // Parsed JSON takes a multiple of its text.
        self.turns.iter().map(turn).sum::<usize>() + 4 * self.response.to_string().len()
    }
}

#[derive(Debug)]
pub(crate) struct ResponseStore {
    /// Oldest first, with their sizes.
    kept: Mutex<VecDeque<(usize, Arc<StoredResponse>)>>,
    count_max: usize,
    bytes_max: usize,
}

impl ResponseStore {
    pub(crate) fn new(count_max: usize, bytes_max: usize) -> Self {
        Self {
            kept: Mutex::default(),
            count_max,
            bytes_max,
        }
    }

    fn kept(&self) -> MutexGuard<'_, VecDeque<(usize, Arc<StoredResponse>)>> {
        self.kept.lock().expect("nothing panics with the lock")
    }

    /// Stores a response, unless it alone exceeds the limit.
    pub(crate) fn put(&self, stored: StoredResponse) {
        let bytes = stored.bytes();
        if bytes > self.bytes_max {
            return;
        }
        let mut kept = self.kept();
        // A resumed stream completes its response again.
        kept.retain(|(_, other)| other.id != stored.id || other.client != stored.client);
        kept.push_back((bytes, Arc::new(stored)));
        while kept.len() > self.count_max {
            evict(&mut kept, |_| 1);
        }
        while kept.iter().map(|(bytes, _)| bytes).sum::<usize>() > self.bytes_max {
            evict(&mut kept, |bytes| bytes);
        }
    }

    pub(crate) fn get(&self, id: &str, client: &ClientIdentity) -> Option<Arc<StoredResponse>> {
        let kept = self.kept();
        let mut all = kept.iter().map(|(_, stored)| stored);
        let found = all.find(|stored| stored.id == id && stored.client == *client);
        found.map(Arc::clone)
    }

    /// The response `id` of the key with this id. Without keys, knowing the response's id is
    /// enough: the same program has another address at another node.
    pub(crate) fn of_key(&self, id: &str, key: Option<&str>) -> Option<Arc<StoredResponse>> {
        let kept = self.kept();
        let mut all = kept.iter().map(|(_, stored)| stored);
        let found = all.find(|it| it.id == id && key_of(&it.client).as_deref() == key);
        found.map(Arc::clone)
    }

    pub(crate) fn has(&self, id: &str) -> bool {
        self.kept().iter().any(|(_, stored)| stored.id == id)
    }

    /// Removes the response; whether it existed.
    pub(crate) fn remove(&self, id: &str, client: &ClientIdentity) -> bool {
        let mut kept = self.kept();
        let before = kept.len();
        kept.retain(|(_, stored)| stored.id != id || stored.client != *client);
        kept.len() < before
    }
}

/// Removes the oldest response of the client whose responses weigh the most, by their sizes.
fn evict(kept: &mut VecDeque<(usize, Arc<StoredResponse>)>, weight: impl Fn(usize) -> usize) {
    let mut held: Vec<(&ClientIdentity, usize)> = Vec::new();
    for (bytes, stored) in kept.iter() {
        match held
            .iter_mut()
            .find(|(client, _)| **client == stored.client)
        {
            Some((_, sum)) => *sum += weight(*bytes),
            None => held.push((&stored.client, weight(*bytes))),
        }
    }
    // Of equals the one with the oldest response.
    let most = held.iter().rev().max_by_key(|(_, sum)| *sum);
    let most = most.map(|(client, _)| (*client).clone());
    let oldest = kept
        .iter()
        .position(|(_, stored)| Some(&stored.client) == most.as_ref());
    if let Some(oldest) = oldest {
        kept.remove(oldest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_client_evicts_its_own() {
        let store = ResponseStore::new(8, 100_000);
        let of = |key: &str, id: String, bytes| StoredResponse {
            client: ClientIdentity::Key(key.into()),
            ..stored(&id, bytes)
        };
        let has = |key: &str, id: &str| {
            let client = ClientIdentity::Key(key.into());
            store.get(id, &client).is_some()
        };
        for i in 0..4 {
            store.put(of("a", format!("a{i}"), 10));
        }
        for i in 0..300 {
            store.put(of("b", format!("b{i}"), 10));
        }
        assert!((0..4).all(|i| has("a", &format!("a{i}"))));
        assert!(has("b", "b299") && has("b", "b296") && !has("b", "b295"));
        store.put(of("b", "large".into(), 98_500));
        assert!((0..4).all(|i| has("a", &format!("a{i}"))), "bytes too");
        assert!(has("b", "large") && !has("b", "b299"));
    }

    fn stored(id: &str, bytes: usize) -> StoredResponse {
        StoredResponse {
            id: id.to_owned(),
            client: ClientIdentity::Anybody,
            turns: vec![ChatMessage::new("user", "x".repeat(bytes))],
            response: Value::Null,
        }
    }

    #[test]
    fn the_oldest_go_first() {
        let store = ResponseStore::new(2, 10_000);
        let who = ClientIdentity::Anybody;
        ["a", "b", "c"]
            .iter()
            .for_each(|id| store.put(stored(id, 1)));
        assert!(store.get("a", &who).is_none() && store.get("c", &who).is_some());
        store.put(stored("d", 9_000));
        assert!(store.get("b", &who).is_none() && store.get("d", &who).is_some());
        store.put(stored("e", 20_000));
        assert!(store.get("e", &who).is_none() && store.get("d", &who).is_some());
        assert!(store.get("d", &ClientIdentity::Key("k".into())).is_none());
        assert!(store.remove("d", &who) && !store.remove("d", &who));
    }
}
