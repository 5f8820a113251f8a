//! `model.safetensors.index.json`: which file holds which tensor.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};

/// Tensor names and file names in the order of the index; names may still repeat.
pub(super) struct WeightMap {
    pub(super) entries: Vec<(String, String)>,
}

impl WeightMap {
    /// Reads the whole index; fields other than `weight_map` are skipped.
    pub(super) fn parse(json: &[u8]) -> Result<Self, serde_json::Error> {
        #[derive(Deserialize)]
        struct Index {
            weight_map: WeightMap,
        }
        serde_json::from_slice(json).map(|index: Index| index.weight_map)
    }
}

impl<'de> Deserialize<'de> for WeightMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct WeightMapEntries;
        impl<'de> Visitor<'de> for WeightMapEntries {
            type Value = WeightMap;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map from tensor names to file names")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<WeightMap, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(WeightMap { entries })
            }
        }
        deserializer.deserialize_map(WeightMapEntries)
    }
}
