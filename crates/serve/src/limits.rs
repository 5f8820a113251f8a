//! How much a server takes on.

use crate::Error;

/// Bounds; what is over one is refused with the bound's value.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Connections at the same time; further ones wait unaccepted. Each costs some 20 KB.
    pub connections: usize,
    /// Requests to the model at the same time, from their headers to the end of their answer;
    /// further ones get 429.
    pub requests: usize,
    /// Requests of one client among them, when there are several clients: holders of keys, or
    /// machines without one.
    pub requests_of_one: usize,
    /// Connections of one other machine at the same time; further ones are closed.
    pub connections_of_one: usize,
    /// Responses that are kept for `previous_response_id`, and their bytes.
    pub stored_responses: usize,
    /// Bytes of memory that they take, about.
    pub stored_bytes: usize,
    /// Streamed answers that clients may come back to, those under way among them. Streams beyond
    /// that cannot be come back to.
    pub journals: usize,
    /// Bytes of memory that they take; one takes a quarter at most. A stream whose journal would
    /// take more goes on without one, and the event `unprotected` says so.
    pub journal_bytes: usize,
    /// Requests whose body is parsed and made tokens at the same time, on a thread each; further
    /// ones wait. Bounds memory: parsing takes up to 100 bytes per value of the body.
    pub parsing: usize,
    pub body_bytes: usize,
    /// Levels of arrays and objects in a body; at most 100 (serde_json refuses more than 127).
    pub json_depth: usize,
    /// Values and keys in a body.
    pub json_values: usize,
    /// Choices of a prompt (`n`).
    pub choices: usize,
    /// Prompts of a request to `/v1/completions`.
    pub prompts: usize,
    /// Messages of a conversation.
    pub messages: usize,
    /// Replies of one choice that wait for a slow reader. A reader that is behind by more is cut
    /// off with an error; a shorter answer never is.
    pub unread_replies: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 512,
            requests: 64,
            requests_of_one: 32,
            connections_of_one: 128,
            stored_responses: 256,
            stored_bytes: 64 << 20,
            journals: 256,
            journal_bytes: 64 << 20,
            parsing: 2,
            body_bytes: 8 << 20,
            json_depth: 32,
            json_values: 1 << 20,
            choices: 16,
            prompts: 64,
            messages: 2048,
            unread_replies: 8192,
        }
    }
}

impl Limits {
    /// Whether a server can have them.
    ///
    /// # Errors
    /// [`Error::Limit`].
    pub(crate) fn check(&self) -> Result<(), Error> {
        let at_least_one = [
            ("connections", self.connections),
            ("requests", self.requests),
            ("requests_of_one", self.requests_of_one),
            ("connections_of_one", self.connections_of_one),
            ("stored_responses", self.stored_responses),
            ("stored_bytes", self.stored_bytes),
            ("journals", self.journals),
            ("journal_bytes", self.journal_bytes),
            ("parsing", self.parsing),
            ("body_bytes", self.body_bytes),
            ("json_depth", self.json_depth),
            ("json_values", self.json_values),
            ("choices", self.choices),
            ("prompts", self.prompts),
            ("messages", self.messages),
            ("unread_replies", self.unread_replies),
        ];
        // The largest number of permits of a semaphore is far above this.
        let most = |name| match name {
            "json_depth" => 100,
            _ => 1 << 32,
        };
        let bad = at_least_one
            .into_iter()
            .find(|(name, value)| *value == 0 || *value > most(name));
        bad.map_or(Ok(()), |(limit, got)| {
            let most = most(limit);
            Err(Error::Limit { limit, got, most })
        })
    }
}
