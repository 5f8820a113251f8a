//! Limits on the load of a server.

use crate::Error;

/// Limits of a server; the error of a rejected request names the limit.
#[derive(Clone, Debug)]
pub struct ApiLimits {
    /// Maximum open connections; further ones wait unaccepted. Each costs some 20 KB.
    pub connections: usize,
    /// Maximum concurrent requests to the model, from headers to the end of the response; further
    /// ones get 429.
    pub requests: usize,
    /// Of these, maximum requests of one client if there are several: keys, or machines without
    /// keys.
    pub requests_of_one: usize,
    /// Maximum connections of one other machine; further ones are closed.
    pub connections_of_one: usize,
    /// Maximum stored responses for `previous_response_id`.
    pub stored_responses: usize,
    /// Approximate memory of stored responses, in bytes.
    pub stored_bytes: usize,
    /// Maximum journals of streamed responses, those in progress included. Further streams cannot
    /// be resumed.
    pub journals: usize,
    /// Memory of journals in bytes; one takes a quarter at most. A stream whose journal exceeds it
    /// continues without one, and the event `unprotected` reports that.
    pub journal_bytes: usize,
    /// Maximum bodies parsed and tokenised at the same time, a thread each; further ones wait.
    /// Bounds memory: parsing takes up to 100 bytes per value of the body.
    pub parsing: usize,
    pub body_bytes: usize,
    /// Maximum depth of a body; at most 100 (serde_json refuses more than 127).
    pub json_depth: usize,
    /// Maximum values and keys in a body.
    pub json_values: usize,
    /// Maximum choices per prompt (`n`).
    pub choices: usize,
    /// Maximum prompts of a request to `/v1/completions`.
    pub prompts: usize,
    /// Maximum messages of a conversation.
    pub messages: usize,
    /// Maximum unread replies of one choice. A slower client is cut off with an error; shorter
    /// responses never are.
    pub unread_replies: usize,
}

impl Default for ApiLimits {
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

impl ApiLimits {
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
