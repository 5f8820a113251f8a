//! Models of the cluster that this node does not answer with now, and why. Requests for them are
//! refused with the truth instead of an unknown name.

use std::net::SocketAddr;
use std::sync::{PoisonError, RwLock};

use crate::rejection::Rejection;

/// A model that this node does not answer with now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnservedModel {
    /// Names that clients call it by.
    pub names: Vec<String>,
    pub state: UnservedState,
}

/// Why a model is not served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UnservedState {
    /// It loads, or this node is about to answer with it.
    Loading,
    /// Its load failed, for this reason.
    Failed(String),
    /// Other nodes answer with it, at these addresses.
    Elsewhere(Vec<SocketAddr>),
}

#[derive(Debug, Default)]
pub(crate) struct UnservedModels(RwLock<Vec<UnservedModel>>);

impl UnservedModels {
    pub(crate) fn set(&self, models: Vec<UnservedModel>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = models;
    }

    pub(crate) fn is_empty(&self) -> bool {
        let models = self.0.read().unwrap_or_else(PoisonError::into_inner);
        models.is_empty()
    }

    /// Why a request for a model of this name is refused; the first model without a name. `None` if
    /// the cluster has no such model.
    pub(crate) fn refusal(&self, name: Option<&str>) -> Option<Rejection> {
        let models = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let is_called = |model: &UnservedModel, name: &str| {
            let name = name.strip_suffix(":latest").unwrap_or(name);
            model.names.iter().any(|own| own == name)
        };
        let mut models = models.iter();
        let model = models.find(|model| name.is_none_or(|name| is_called(model, name)))?;
        Some(match &model.state {
            UnservedState::Loading => Rejection::Loading,
            UnservedState::Failed(reason) => Rejection::Unavailable {
                reason: reason.clone(),
            },
            UnservedState::Elsewhere(at) => {
                let at: Vec<String> = at.iter().map(SocketAddr::to_string).collect();
                Rejection::Elsewhere {
                    model: model.names.first().cloned().unwrap_or_default(),
                    at: at.join(", "),
                }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_tells_the_state_of_the_model_that_was_named() {
        let models = UnservedModels::default();
        let model = |names: &[&str], state| UnservedModel {
            names: names.iter().copied().map(str::to_owned).collect(),
            state,
        };
        let at: SocketAddr = "10.0.0.1:52415".parse().unwrap();
        models.set(vec![
            model(&["smollm2", "smollm2:poet"], UnservedState::Loading),
            model(&["folder"], UnservedState::Elsewhere(vec![at])),
            model(
                &["broken"],
                UnservedState::Failed("no such file".to_owned()),
            ),
        ]);
        let told = |name| models.refusal(name).map(|refusal| refusal.to_string());
        let loading = Some("the model is being loaded".to_owned());
        assert_eq!(told(None), loading);
        assert_eq!(told(Some("smollm2:poet")), loading);
        assert_eq!(told(Some("smollm2:latest")), loading);
        let elsewhere =
            "this node does not answer with \"folder\", which is served at 10.0.0.1:52415";
        assert_eq!(told(Some("folder")).as_deref(), Some(elsewhere));
        let failed = "the model cannot answer: no such file";
        assert_eq!(told(Some("broken")).as_deref(), Some(failed));
        assert_eq!(told(Some("qwen3")), None);
    }
}
