//! Keys of tokens, for memories of n-grams that are of keys (DeepSeek V4.1).

use super::Model;
use crate::Error;

impl Model {
    /// Sets the key of each token, for memories of n-grams of such keys. The texts of tokens give
    /// them; see [`Ngrams::keys`](crate::Ngrams::keys). Other tokens have key 0. Call it before
    /// memory for steps is reserved.
    ///
    /// # Errors
    /// [`Error::Value`] if there are not as many keys as the configuration says.
    pub fn with_token_keys(mut self, keys: Vec<u32>) -> Result<Self, Error> {
        let count = keys.iter().max().map_or(0, |key| *key as usize + 1);
        let ngrams = self.config.ngrams.as_ref();
        if ngrams.and_then(|of| of.keys) != Some(count) {
            return Err(self.wrong_keys(format!("{count} of {} tokens", keys.len())));
        }
        self.token_keys = Some(keys);
        Ok(self)
    }

    fn wrong_keys(&self, got: String) -> Error {
        let of = self.config.ngrams.as_ref().and_then(|of| of.keys);
        Error::Value {
            field: "keys of tokens",
            got,
            expected: format!("{} of {} tokens", of.unwrap_or(0), self.config.vocab).into(),
        }
    }

    /// Whether this rank has a memory of n-grams of keys that were not set.
    pub fn lacks_token_keys(&self) -> bool {
        let has_memory = self.layers.iter().any(|layer| layer.ngrams.is_some());
        let of = self.config.ngrams.as_ref().and_then(|of| of.keys);
        of.is_some() && has_memory && self.token_keys.is_none()
    }

    /// # Panics
    /// If they were not set.
    pub(crate) fn token_keys(&self) -> &[u32] {
        self.token_keys.as_deref().expect("set before steps")
    }

    /// Refuses a model that [lacks keys](Self::lacks_token_keys).
    pub(crate) fn check_token_keys(&self) -> Result<(), Error> {
        match self.lacks_token_keys() {
            true => Err(self.wrong_keys("none".to_owned())),
            false => Ok(()),
        }
    }
}
