//! Adapters of a served model: each has a name of its own, and all share the model's weights,
//! batches and cache.

use paceline_node::AdapterOf;

use super::Args;
use crate::adapter;
use crate::error::Error;
use crate::local_model::LocalModel;

impl Args {
    /// Whether adapters are fused into a copy of the model, as MLX requires.
    ///
    /// # Errors
    /// An engine and a class that contradict each other.
    pub(super) fn fuses(&self) -> Result<bool, Error> {
        if self.adapter.is_empty() {
            return Ok(false);
        }
        let (engine, class) = (self.engine, self.compute.class);
        adapter::beside(engine, class, self.split.nodes).map(|beside| !beside)
    }

    /// Adds all adapters to the model.
    ///
    /// # Errors
    /// [`Error::SameName`], also for the model's own name; an unusable adapter.
    pub(super) fn adapt(&self, opened: &mut LocalModel) -> anyhow::Result<()> {
        let model = self.named(self.model().unwrap_or_default());
        for tuned in &self.adapter {
            let name = tuned.id();
            let is_known = |known: &AdapterOf| known.name == name;
            // A single adapter without a name replaces the model.
            let is_model = self.only_adapter().is_none()
                && (name == model.id || model.aliases.contains(&name));
            if is_model || opened.adapters().iter().any(is_known) {
                return Err(Error::SameName { name }.into());
            }
            opened.add_adapter(&name, &tuned.path)?;
        }
        Ok(())
    }
}
