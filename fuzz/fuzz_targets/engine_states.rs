//! Requests, replies and snapshots, as they travel between processes: what is read can be written.
#![no_main]

use libfuzzer_sys::fuzz_target;
use paceline_engine::{GenerationRequest, Reply, Snapshot};
use serde::Serialize;
use serde::de::DeserializeOwned;

fn check<T: Serialize + DeserializeOwned>(bytes: &[u8]) {
    if let Ok(value) = serde_json::from_slice::<T>(bytes) {
        serde_json::to_vec(&value).expect("it came from JSON");
    }
}

fuzz_target!(|bytes: &[u8]| {
    check::<GenerationRequest>(bytes);
    check::<Reply>(bytes);
    check::<Snapshot>(bytes);
});
