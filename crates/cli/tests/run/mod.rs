//! `paceline run` and `paceline bench` as a user, a script or a terminal calls them.
//!
//! Most tests run a model of some hundred kilobytes that they write themselves ([`tiny`]). Tests in
//! [`real`] need SmolLM2 in the folder that `cargo xtask models` fills, and say so when it is not
//! there.
#![allow(clippy::unwrap_used, reason = "test code outside of test functions")]

mod answer;
mod bench;
mod chat;
mod errors;
mod real;
mod signals;
mod tiny;

use std::process::{Child, ExitStatus};

use serde_json::Value;

use crate::common::home::{TestHome, object};
use crate::common::{finish, test_model, text, until};
use tiny::TinyChatModel;

impl TestHome {
    /// Writes a model; the answer is the MODEL of the command line.
    fn tiny_model(&self, tiny: TinyChatModel) -> String {
        let path = self.path("models/tiny.gguf");
        tiny.write(&path);
        path.to_str().unwrap().to_owned()
    }

    /// The arguments of an answer that would take hours.
    fn endless(&self) -> Vec<String> {
        let model = self.tiny_model(TinyChatModel {
            ends: false,
            context: 1 << 24,
            ..TinyChatModel::default()
        });
        let args = ["run", &model, "go", "--context", "16000000"];
        args.map(str::to_owned).to_vec()
    }
}

fn wait(child: &mut Child) -> ExitStatus {
    let mut status = None;
    until("the process ends", || {
        status = child.try_wait().unwrap();
        status.is_some()
    });
    status.unwrap()
}

fn pid(child: &Child) -> rustix::process::Pid {
    rustix::process::Pid::from_child(child)
}

fn numbers(json: &Value, key: &str) -> Vec<u64> {
    let list = json[key].as_array().unwrap();
    list.iter().map(|n| n.as_u64().unwrap()).collect()
}
