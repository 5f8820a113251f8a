//! Adapters beside a served model: each answers under a name of its own, and all share the model's
//! weights, batches and cache.

use paceline_node::AdapterOf;

use super::Args;
use crate::adapter;
use crate::error::Error;
use crate::loaded::Opened;

impl Args {
    /// Whether adapters are put into a copy of the model, as MLX needs it.
    ///
    /// # Errors
    /// An engine and a class that do not fit each other.
    pub(super) fn fuses(&self) -> Result<bool, Error> {
        if self.adapter.is_empty() {
            return Ok(false);
        }
        let (engine, class) = (self.engine, self.compute.class);
        adapter::beside(engine, class, self.split.nodes).map(|beside| !beside)
    }

    /// Has all adapters beside the model.
    ///
    /// # Errors
    /// [`Error::SameName`], also for one that is called as the model is; what is wrong with one.
    pub(super) fn adapt(&self, opened: &mut Opened) -> anyhow::Result<()> {
        let model = self.named(self.model().unwrap_or_default());
        for tuned in &self.adapter {
            let name = tuned.id();
            let is_known = |known: &AdapterOf| known.name == name;
            // The only one without a name answers as the model.
            let is_model = self.only_adapter().is_none()
                && (name == model.id || model.aliases.contains(&name));
            if is_model || opened.adapters().iter().any(is_known) {
                return Err(Error::SameName { name }.into());
            }
            opened.adapt(&name, &tuned.path)?;
        }
        Ok(())
    }
}
