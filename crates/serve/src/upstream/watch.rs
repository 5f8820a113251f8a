//! Health of upstreams: asks each for its models every two seconds.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use axum::http::{HeaderMap, Method, StatusCode};
use paceline_base::printable;
use serde::Deserialize;
use tokio::time::{sleep, timeout};

use super::client::{self, UpstreamFailure, UpstreamRequest};
use super::hops::Hops;
use super::{Health, State, Upstream, UpstreamModel, Upstreams};
use crate::schema::clip;

/// Time between two looks. A failed request causes one at once.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// Least time between two looks.
const LOOK_PAUSE: Duration = Duration::from_millis(200);

/// Time for a whole list. Servers answer within milliseconds, also while they compute.
const LIST_LIMIT: Duration = Duration::from_secs(3);

/// Maximum bytes of a list. The longest public ones have some 700 KB.
const LIST_BYTES_MAX: usize = 4 << 20;

/// Maximum models of an upstream. The longest public lists have some 500.
const MODELS_MAX: usize = 1024;

/// Longest name of a model, as of this server's own.
const NAME_CHARS_MAX: usize = 256;

/// `GET /v1/models`.
#[derive(Deserialize)]
struct ModelList {
    data: Vec<ListedModel>,
}

#[derive(Deserialize)]
struct ListedModel {
    id: String,
    created: Option<u64>,
    #[serde(default)]
    hops: Vec<String>,
    down: Option<String>,
}

/// Models of a list, and the number of those that lead back here.
struct FoundModels {
    models: Vec<UpstreamModel>,
    looped: usize,
}

impl Upstreams {
    /// Looks at all upstreams until the runtime ends. Called inside the runtime, once.
    pub(crate) fn watch(&self) {
        let set = self.clone();
        tokio::spawn(async move {
            loop {
                for one in set.all() {
                    if one.is_watched.swap(true, Relaxed) {
                        continue;
                    }
                    let set = set.clone();
                    tokio::spawn(async move { set.look_at(&one).await });
                }
                set.0.grown.notified().await;
            }
        });
    }

    async fn look_at(&self, one: &Arc<Upstream>) {
        let mut looped = 0;
        while self.all().iter().any(|other| Arc::ptr_eq(other, one)) {
            let found = timeout(LIST_LIMIT, list(one, self.own())).await;
            let limit_s = LIST_LIMIT.as_secs();
            let found = found.unwrap_or(Err(UpstreamFailure::Silent { limit_s }));
            // A server that computes for one client at a time is silent meanwhile.
            let is_busy = one.running() > 0 && matches!(found, Err(UpstreamFailure::Silent { .. }));
            if !is_busy {
                self.settle(one, found, &mut looped);
            }
            sleep(LOOK_PAUSE).await;
            tokio::select! {
                () = sleep(LOOK_EVERY) => {}
                () = one.look.notified() => {}
            }
        }
    }

    /// Records what was found, then tells a change.
    fn settle(
        &self,
        one: &Upstream,
        found: Result<FoundModels, UpstreamFailure>,
        looped: &mut usize,
    ) {
        let name = &one.name;
        let mut lines = Vec::new();
        let before = one.health.borrow().clone();
        let now = match found {
            Ok(FoundModels { models, looped: n }) => {
                if before.state != State::Up {
                    lines.push(format!("upstream {name} is up, models: {}", models.len()));
                }
                if n > 0 && *looped != n {
                    lines.push(format!("upstream {name}: left out {n} that lead back here"));
                }
                *looped = n;
                Health {
                    state: State::Up,
                    models: models.into(),
                }
            }
            Err(failure) => {
                let state = State::Down(failure.clone());
                if before.state != state {
                    lines.push(format!("warning: upstream {name} is down: {failure}"));
                }
                let models = before.models;
                Health { state, models }
            }
        };
        one.health.send_replace(now);
        for line in lines {
            (self.0.tell)(&printable(&line));
        }
    }
}

/// The models of an upstream, without those that lead back to the server `own`.
async fn list(one: &Upstream, own: &str) -> Result<FoundModels, UpstreamFailure> {
    let request = UpstreamRequest {
        method: Method::GET,
        target: "/v1/models".to_owned(),
        headers: HeaderMap::new(),
        body: axum::body::Bytes::new(),
        via: Hops::default().and(own),
    };
    let reply = client::send(&one.spec, request).await?;
    match reply.status {
        StatusCode::OK => {}
        status @ (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) => {
            let status = status.as_u16();
            return Err(UpstreamFailure::Key { status });
        }
        status => {
            let status = status.as_u16();
            return Err(UpstreamFailure::Status { status });
        }
    }
    let server = Hops::of(&reply.headers).into_server();
    if server.as_deref() == Some(own) {
        return Err(UpstreamFailure::Own);
    }
    parsed(&reply.body.whole(LIST_BYTES_MAX).await?, server, own)
}

fn parsed(body: &[u8], server: Option<String>, own: &str) -> Result<FoundModels, UpstreamFailure> {
    let list: ModelList = serde_json::from_slice(body).map_err(|error| UpstreamFailure::List {
        reason: error.to_string(),
    })?;
    let got = list.data.len();
    if got > MODELS_MAX {
        let limit = MODELS_MAX;
        return Err(UpstreamFailure::LongList { got, limit });
    }
    let mut known = BTreeSet::new();
    let mut found = FoundModels {
        models: Vec::new(),
        looped: 0,
    };
    for it in list.data {
        let is_name = (1..=NAME_CHARS_MAX).contains(&it.id.chars().count());
        let is_usable = is_name && !it.id.chars().any(char::is_control);
        if it.hops.iter().any(|hop| hop == own) {
            found.looped += 1;
        } else if is_usable && known.insert(it.id.clone()) {
            found.models.push(UpstreamModel {
                id: it.id,
                created_unix_s: it.created.unwrap_or(0),
                hops: server.iter().cloned().chain(it.hops).collect(),
                down: it.down.map(|reason| clip(&printable(&reason))),
            });
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::UpstreamSpec;

    #[test]
    fn lists_are_bounded_and_models_that_lead_back_are_left_out() {
        let of = |text: &str| parsed(text.as_bytes(), Some("paceline-b".to_owned()), "paceline-a");
        let found = of(
            r#"{"object":"list","models":[],"data":[{"id":"m","created":7,"meta":{}},
            {"id":"m"},{"id":""},{"id":"a\u0007b"},{"id":"own","hops":["paceline-a"]},
            {"id":"far","created":null,"hops":["paceline-c"]}]}"#,
        );
        let found = found.unwrap_or_else(|failure| panic!("{failure}"));
        assert_eq!(found.looped, 1);
        let ids: Vec<&str> = found.models.iter().map(|it| it.id.as_str()).collect();
        assert_eq!(ids, ["m", "far"]);
        assert_eq!(found.models[0].created_unix_s, 7);
        assert_eq!(found.models[1].hops, ["paceline-b", "paceline-c"]);
        let many = format!(
            r#"{{"data":[{}{{"id":"z"}}]}}"#,
            r#"{"id":"a"},"#.repeat(MODELS_MAX)
        );
        let failure = of(&many).err();
        assert!(
            matches!(failure, Some(UpstreamFailure::LongList { .. })),
            "{failure:?}"
        );
        for bad in [
            "",
            "[]",
            "{}",
            r#"{"data":{}}"#,
            r#"{"data":[{"id":1}]}"#,
            "[[[[[[",
        ] {
            let failure = of(bad).err();
            assert!(
                matches!(failure, Some(UpstreamFailure::List { .. })),
                "{bad}: {failure:?}"
            );
        }
    }

    #[test]
    fn a_model_whose_upstream_is_down_behind_another_node_stays_known() {
        let text = r#"{"data":[{"id":"m","down":"no connection"},{"id":"n"}]}"#;
        let found = parsed(text.as_bytes(), None, "paceline-a");
        let found = found.unwrap_or_else(|failure| panic!("{failure}"));
        let set = Upstreams::default();
        let dial = Arc::new(|| Err(std::io::Error::other("unused")));
        set.add(UpstreamSpec::of_node("one".to_owned(), dial));
        let one = set.all().remove(0);
        set.settle(&one, Ok(found), &mut 0);
        let listed: Vec<String> = set.models().into_iter().map(|(_, it)| it.id).collect();
        assert_eq!(listed, ["n"]);
        assert!(set.has("m"));
        assert_eq!(one.failure_of("m").as_deref(), Some("no connection"));
        assert_eq!(one.failure_of("n"), None);
    }
}
