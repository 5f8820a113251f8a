//! Model files: opens a GGUF file or a Hugging Face folder, and maps roles to tensor names.
//!
//! Weight loading and the planner use it. It reads tensors without packing or checking them against
//! a configuration.

mod names;
mod parts;

use std::ops::Range;
use std::path::Path;

use paceline_base::{BlockType, Bytes};
use paceline_weights::gguf::Gguf;
use paceline_weights::hf::{HfFolder, StackSlice};
use paceline_weights::mlx::Quantised;
use paceline_weights::scaled;
use paceline_weights::tensor::{FindArrivals, MappedBytes, Tensor};
use serde_json::Value;

use crate::Error;
use crate::families::{ExpertLayout, ModelFamily, QWEN3_VL_MOE, blocks, dbrx_stem};
use crate::role::{LayerRole, Nth, Role, StreamPart};
use names::{
    bare, deepseek4_stem, gguf_stem, hf_stem, model_type, prediction_stem, prefix, renamed_stem,
    text_part,
};
use parts::{conv_part, half_of, of_expert, other_expert, quantised_rows, rows_among};

/// An opened model: a GGUF file with all its parts, or a Hugging Face folder.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "one value per loaded model")]
pub enum ModelSource {
    /// A single file, or all parts of a divided one.
    Gguf(Gguf),
    /// A folder with `config.json` and safetensors.
    Hf(HfFolder),
}

impl ModelSource {
    /// Opens `path`: a folder is read in the Hugging Face layout, anything else as GGUF.
    ///
    /// # Errors
    /// [`Error::Gguf`] and [`Error::Hf`] name the fault. The file is closed.
    pub fn open(path: &Path) -> Result<Self, Error> {
        if path.is_dir() {
            Ok(Self::Hf(HfFolder::open(path)?))
        } else {
            Ok(Self::Gguf(Gguf::open(path)?))
        }
    }

    /// Opens `path` as [`open`](Self::open) does, while weights are still being downloaded. Reading
    /// a weight waits until the progress that `find` returns for its file reports its bytes.
    ///
    /// # Errors
    /// The errors of [`open`](Self::open), and those of `find`.
    pub fn open_arriving(path: &Path, find: &FindArrivals<'_>) -> Result<Self, Error> {
        Ok(match path.is_dir() {
            true => Self::Hf(HfFolder::open_arriving(path, find)?),
            false => Self::Gguf(Gguf::open_arriving(path, find)?),
        })
    }

    pub fn file_bytes(&self) -> Bytes {
        match self {
            Self::Gguf(file) => file.file_bytes(),
            Self::Hf(folder) => folder.file_bytes(),
        }
    }

    /// Tensor name of a weight, without `.weight` or `.bias`.
    pub(crate) fn stem(&self, family: ModelFamily, role: Role) -> String {
        let role = self.in_block(family, role);
        match self {
            Self::Gguf(_) => gguf_stem(family, role),
            Self::Hf(folder) if family == ModelFamily::Dbrx => {
                let stem = dbrx_stem(role);
                let expert = match role {
                    Role::Layer(_, part) => part.expert(),
                    _ => None,
                };
                // MLX stores each expert's matrix under its index.
                let apart = expert.map(|nth| stem.replace(".mlp.", &format!(".{}.", nth.index)));
                let apart = apart.filter(|apart| folder.has(&format!("{apart}.weight")));
                apart.unwrap_or(stem)
            }
            Self::Hf(folder) => {
                let stem = hf_stem(family.file_names(), prefix(folder), role);
                let other = prediction_stem(folder, role, &stem);
                let other = other.or_else(|| renamed_stem(folder, &stem));
                other
                    .or_else(|| deepseek4_stem(folder, &stem))
                    .unwrap_or(stem)
            }
        }
    }

    /// `role` with the block of the file in place of the layer, where a layer may have two blocks.
    fn in_block(&self, family: ModelFamily, role: Role) -> Role {
        let (ModelFamily::NemotronH, Role::Layer(layer, part)) = (family, role) else {
            return role;
        };
        let layers = match self {
            Self::Gguf(file) => {
                let architecture = file.metadata().str("general.architecture").ok();
                architecture.and_then(|name| blocks::of_gguf(file, name))
            }
            Self::Hf(folder) => blocks::of_config(text_part(folder)),
        };
        match layers.and_then(|layers| layers.get(layer).copied()) {
            Some(blocks) => Role::Layer(blocks.mixer + usize::from(part.is_of_ffn()), part),
            None => role,
        }
    }

    /// Tensor name of a weight. Some vectors end in another word than `.weight`, or in none.
    fn name(&self, family: ModelFamily, role: Role) -> String {
        let stem = self.stem(family, role);
        match (self, role) {
            (Self::Gguf(_), Role::Layer(_, LayerRole::RouterChoice)) => format!("{stem}.bias"),
            (Self::Gguf(_), Role::Layer(_, LayerRole::RouterScale | LayerRole::ExpertScales)) => {
                format!("{stem}.scale")
            }
            (Self::Gguf(_), Role::Layer(_, LayerRole::DeltaBias)) => format!("{stem}.bias"),
            (Self::Gguf(_), Role::Layer(_, LayerRole::DeltaScale | LayerRole::MambaSkip)) => stem,
            (Self::Hf(_), Role::Layer(_, part)) if part.is_bare_in_hf() => stem,
            (Self::Hf(_), Role::Layer(_, LayerRole::NgramQueryNorm | LayerRole::NgramKeyNorm))
                if family == ModelFamily::DeepSeek4 =>
            {
                stem
            }
            (Self::Hf(_), Role::Streams(part)) if part.is_of_constrained() => stem,
            _ => format!("{stem}.weight"),
        }
    }

    /// Reads the weight of `role`.
    ///
    /// # Errors
    /// If the file lacks it, or stores it in an unsupported type.
    pub fn weight(&self, family: ModelFamily, role: Role) -> Result<Tensor, Error> {
        let tensor = self.without_factor(family, role)?;
        match self.factor(&tensor, family, role)? {
            None => Ok(tensor),
            Some(factor) => {
                let name = tensor.name.clone();
                let bytes = tensor.bytes.arrived()?;
                let scaled = scaled::times(&Tensor { bytes, ..tensor }, factor);
                let memory = |error| paceline_weights::hf::Error::Memory {
                    tensor: name,
                    error,
                };
                Ok(scaled.map_err(memory)?)
            }
        }
    }

    /// The factor that a GGUF file may have for a matrix of NVFP4, or for each expert's. In files
    /// of Gemma 4 factors of experts have the same name; the router applies those.
    fn factor(
        &self,
        tensor: &Tensor,
        family: ModelFamily,
        role: Role,
    ) -> Result<Option<f32>, Error> {
        let Self::Gguf(file) = self else {
            return Ok(None);
        };
        if family == ModelFamily::Gemma4 && matches!(role, Role::Layer(_, LayerRole::ExpertDown(_)))
        {
            return Ok(None);
        }
        let name = tensor.name.strip_suffix("weight").unwrap_or_default();
        let name = format!("{name}scale");
        if tensor.block_type != BlockType::NVFP4 || !file.has(&name) {
            return Ok(None);
        }
        let factors = file.tensor(&name)?;
        let own = match role {
            Role::Layer(_, part) => part.expert(),
            _ => None,
        };
        let (count, index) = own.map_or((1, 0), |nth| (nth.of, nth.index));
        if factors.block_type != BlockType::F32 || factors.shape != [count] {
            return Err(Error::Shape {
                name,
                got: factors.shape,
                expected: vec![count],
            });
        }
        let bytes = factors.bytes.arrived()?;
        Ok(bytes
            .as_chunks()
            .0
            .get(index)
            .map(|&x| f32::from_le_bytes(x)))
    }

    /// The weight of `role` without the factor that it may have.
    fn without_factor(&self, family: ModelFamily, role: Role) -> Result<Tensor, Error> {
        if let Some((folder, module, nth)) = self.mlx_stack(family, role) {
            return match folder.quantised_expert(&module, nth.index, nth.of)? {
                Some(quantised) => Ok(quantised.joined()?),
                None => of_expert(folder.tensor(&format!("{module}.weight"))?, nth),
            };
        }
        if let Some((folder, stack, wanted)) = self.stacked(family, role) {
            return Ok(folder.stacked(&stack, wanted)?);
        }
        if let Some(tensor) = self.behind(family, role)? {
            return Ok(tensor);
        }
        if let (Self::Gguf(file), Role::Layer(layer, part)) = (self, role)
            && let Some(tensor) = other_expert(file, layer, part)?
        {
            return Ok(tensor);
        }
        if (family.joins_qkv() || conv_part(role).is_some())
            && let Some(tensor) = self.joined(family, role)?
        {
            return Ok(tensor);
        }
        let tensor = self.tensor(&self.name(family, role))?;
        if let (Self::Gguf(_), Role::Streams(part)) = (self, role)
            && let StreamPart::Expand(index) | StreamPart::Collapse(index) = part
        {
            let of = tensor.shape.first().copied().unwrap_or(0).max(index + 1);
            return of_expert(tensor, Nth { index, of });
        }
        let (Self::Gguf(_), Role::Layer(_, part)) = (self, role) else {
            return Ok(tensor);
        };
        match part.expert() {
            Some(nth) => of_expert(tensor, nth),
            None if part == LayerRole::SharedRouter => Ok(Tensor {
                shape: [&[1], &*tensor.shape].concat(),
                ..tensor
            }),
            None => Ok(tensor),
        }
    }

    /// Name and bytes of a tensor of integers; only folders have such tensors.
    ///
    /// # Errors
    /// If the file lacks it.
    pub(crate) fn integers(
        &self,
        family: ModelFamily,
        role: Role,
    ) -> Result<(String, MappedBytes), Error> {
        let name = self.name(family, role);
        let bytes = match self {
            Self::Gguf(_) => None,
            Self::Hf(folder) => folder.bytes_of(bare(folder, &name)),
        };
        match bytes {
            Some(bytes) => Ok((name, bytes.arrived()?)),
            None => self.tensor(&name).map(|tensor| (name, tensor.bytes)),
        }
    }

    /// The weight of `role`, `None` when the file lacks it.
    ///
    /// # Errors
    /// As [`weight`](Self::weight).
    pub fn opt_weight(&self, family: ModelFamily, role: Role) -> Result<Option<Tensor>, Error> {
        self.opt_tensor(&self.name(family, role))
    }

    /// Whether the file has the weight of `role` under its default name, in any format.
    pub fn has_any(&self, family: ModelFamily, role: Role) -> bool {
        let name = self.name(family, role);
        match self {
            Self::Gguf(file) => file.has(&name),
            Self::Hf(folder) => folder.has_weight(&name),
        }
    }

    /// A weight within a joined matrix of queries, keys and values, or of gate and up. In DBRX's
    /// folders that MLX did not write, experts are joined too. `None` for other weights.
    fn joined(&self, family: ModelFamily, role: Role) -> Result<Option<Tensor>, Error> {
        if let Some((parts, own)) = self.joined_parts(family, role)? {
            let name = self.name(family, role);
            return rows_among(self.tensor(&name)?, parts, own).map(Some);
        }
        let (Self::Hf(folder), Role::Layer(_, part)) = (self, role) else {
            return Ok(None);
        };
        let stack = self.stem(family, role);
        let Some(nth) = part.expert().filter(|_| stack.contains(".mlp.")) else {
            return Ok(None);
        };
        if let LayerRole::ExpertDown(_) = part {
            let wanted = StackSlice::whole(nth.index, nth.of);
            return Ok(Some(folder.stacked_rows(&stack, wanted)?));
        }
        let own = nth.index..nth.index + 1;
        rows_among(folder.tensor(&stack)?, nth.of, own).map(Some)
    }

    /// Number of parts and own range of `role` in a joined matrix: heads of queries, keys and
    /// values, or gate and up. `None` for other weights and families.
    fn joined_parts(
        &self,
        family: ModelFamily,
        role: Role,
    ) -> Result<Option<(usize, Range<usize>)>, Error> {
        if let Some(part) = conv_part(role) {
            return Ok(Some((3, part..part + 1)));
        }
        let place = match role {
            Role::Layer(_, LayerRole::Gate) if family.joins_gate_up() => {
                return Ok(Some((2, 0..1)));
            }
            Role::Layer(_, LayerRole::Up) if family.joins_gate_up() => return Ok(Some((2, 1..2))),
            Role::Layer(_, LayerRole::Query) => 0,
            Role::Layer(_, LayerRole::Key) => 1,
            Role::Layer(_, LayerRole::Value) => 2,
            _ => return Ok(None),
        };
        if !family.joins_qkv() {
            return Ok(None);
        }
        let [heads, kv_heads] = self.joined_heads(family)?;
        let keys = heads.saturating_add(kv_heads);
        let all = keys.saturating_add(kv_heads);
        let own = [0..heads, heads..keys, keys..all][place].clone();
        Ok(Some((all, own)))
    }

    /// Query and KV heads of a family with joined projections, from the file.
    fn joined_heads(&self, family: ModelFamily) -> Result<[usize; 2], Error> {
        let [heads, kv_heads] = match self {
            Self::Gguf(file) => {
                let number = |key: &str| {
                    let key = format!("{}.attention.{key}", family.name());
                    file.metadata().opt_u64(&key)
                };
                [number("head_count")?, number("head_count_kv")?]
            }
            Self::Hf(folder) => {
                let config = folder.config();
                let both = match family {
                    ModelFamily::Dbrx => ["/n_heads", "/attn_config/kv_n_heads"],
                    _ => ["/num_attention_heads", "/num_key_value_heads"],
                };
                both.map(|field| config.pointer(field).and_then(Value::as_u64))
            }
        };
        let heads = heads.map_or(0, |n| n as usize);
        Ok([heads, kv_heads.map_or(heads, |n| n as usize)])
    }

    /// The stacked tensor of a gpt-oss folder that has an expert's matrix, and its place there.
    fn stacked(&self, family: ModelFamily, role: Role) -> Option<(&HfFolder, String, StackSlice)> {
        let (Self::Hf(folder), Role::Layer(layer, part)) = (self, role) else {
            return None;
        };
        if family.file_names().stacks != ExpertLayout::Alternate {
            return None;
        }
        let (name, first, step) = match part {
            LayerRole::ExpertGate(_) => ("gate_up_proj", 0, 2),
            LayerRole::ExpertUp(_) => ("gate_up_proj", 1, 2),
            _ => ("down_proj", 0, 1),
        };
        let Nth { index, of } = part.expert()?;
        let stack = format!("model.layers.{layer}.mlp.experts.{name}");
        Some((
            folder,
            stack,
            StackSlice {
                index,
                of,
                first,
                step,
            },
        ))
    }

    /// An expert's matrix from a folder that stacks all experts in one tensor, where the rows of
    /// `up` follow those of `gate`. Gemma 4 folders always have this layout; other families may, as
    /// written by transformers 5. Those of Qwen3-VL have inputs by outputs. `None` for other
    /// folders and weights.
    fn behind(&self, family: ModelFamily, role: Role) -> Result<Option<Tensor>, Error> {
        let (Self::Hf(folder), Role::Layer(layer, part)) = (self, role) else {
            return Ok(None);
        };
        let (name, half) = match part {
            LayerRole::ExpertGate(_) => ("gate_up_proj", Some(0)),
            LayerRole::ExpertUp(_) => ("gate_up_proj", Some(1)),
            LayerRole::ExpertDown(_) => ("down_proj", None),
            _ => return Ok(None),
        };
        let always = family.file_names().stacks == ExpertLayout::Behind;
        let block = if always { "experts" } else { "mlp.experts" };
        let stack = format!("{}.layers.{layer}.{block}.{name}", prefix(folder));
        if !always && !folder.has(&stack) {
            return Ok(None);
        }
        let nth = part.expert().expect("it is of an expert");
        let tensor = match model_type(folder) == Some(QWEN3_VL_MOE) {
            true => folder.stacked(&stack, StackSlice::whole(nth.index, nth.of))?,
            false => of_expert(folder.tensor(&stack)?, nth)?,
        };
        match half {
            None => Ok(Some(tensor)),
            Some(half) => half_of(tensor, half).map(Some),
        }
    }

    /// Biases of all experts of a layer, `(experts, n)`, with the first row of `role` and the
    /// stride between its rows. `None` if the file has none.
    ///
    /// # Errors
    /// As [`weight`](Self::weight).
    pub fn expert_biases(
        &self,
        family: ModelFamily,
        role: Role,
    ) -> Result<Option<(Tensor, usize, usize)>, Error> {
        let (name, first, step) = match self.mlx_stack(family, role) {
            Some((_, module, _)) => (format!("{module}.bias"), 0, 1),
            None => match self.stacked(family, role) {
                Some((_, stack, wanted)) => (format!("{stack}_bias"), wanted.first, wanted.step),
                None => (format!("{}.bias", self.stem(family, role)), 0, 1),
            },
        };
        Ok(self.opt_tensor(&name)?.map(|biases| (biases, first, step)))
    }

    /// The separate parts of a weight in a folder quantised by MLX; `None` if the weight is one
    /// tensor, or absent. Copies nothing, while [`weight`](Self::weight) joins the parts.
    ///
    /// # Errors
    /// If the parts do not fit each other or the configuration.
    pub fn quantised(&self, family: ModelFamily, role: Role) -> Result<Option<Quantised>, Error> {
        if let Some((folder, module, nth)) = self.mlx_stack(family, role) {
            return Ok(folder.quantised_expert(&module, nth.index, nth.of)?);
        }
        match self {
            Self::Gguf(_) => Ok(None),
            Self::Hf(folder) => {
                let matrix = folder.quantised(&self.stem(family, role))?;
                match (matrix, self.joined_parts(family, role)?) {
                    (Some(matrix), Some((parts, own))) => {
                        quantised_rows(&matrix, parts, own).map(Some)
                    }
                    (matrix, _) => Ok(matrix),
                }
            }
        }
    }

    /// Module of an MLX folder with all experts or heads of a layer, and the index of `role` there.
    fn mlx_stack(&self, family: ModelFamily, role: Role) -> Option<(&HfFolder, String, Nth)> {
        let role = self.in_block(family, role);
        let (Self::Hf(folder), Role::Layer(layer, part)) = (self, role) else {
            return None;
        };
        let nth = part.expert()?;
        let name = match part {
            LayerRole::ExpertGate(_) if !family.has_gates() => "fc1",
            LayerRole::ExpertDown(_) if !family.has_gates() => "fc2",
            LayerRole::ExpertGate(_) => "gate_proj",
            LayerRole::ExpertUp(_) => "up_proj",
            LayerRole::KeyUp(_) => "embed_q",
            LayerRole::ValueUp(_) => "unembed_out",
            _ => "down_proj",
        };
        let stack = match part {
            LayerRole::KeyUp(_) | LayerRole::ValueUp(_) => "self_attn",
            _ => family.file_names().mlx_experts,
        };
        let module = format!("{}.layers.{layer}.{stack}.{name}", prefix(folder));
        let there = folder.has(&format!("{module}.weight"));
        there.then_some((folder, module, nth))
    }

    /// Columns of `role`'s weight per scale, 1 for floats. Copies nothing.
    ///
    /// # Errors
    /// As [`weight`](Self::weight).
    pub fn block_len(&self, family: ModelFamily, role: Role) -> Result<usize, Error> {
        match self.quantised(family, role)? {
            Some(matrix) => Ok(matrix.scheme.group_size),
            None => Ok(self.without_factor(family, role)?.block_type.len()),
        }
    }

    /// The bias of `role`.
    ///
    /// # Errors
    /// As [`weight`](Self::weight).
    pub fn bias(&self, family: ModelFamily, role: Role) -> Result<Tensor, Error> {
        self.tensor(&format!("{}.bias", self.stem(family, role)))
    }

    /// The bias of `role`, `None` when the file lacks it.
    ///
    /// # Errors
    /// As [`weight`](Self::weight).
    pub fn opt_bias(&self, family: ModelFamily, role: Role) -> Result<Option<Tensor>, Error> {
        self.opt_tensor(&format!("{}.bias", self.stem(family, role)))
    }

    fn tensor(&self, name: &str) -> Result<Tensor, Error> {
        Ok(match self {
            Self::Gguf(file) => file.tensor(name)?,
            Self::Hf(folder) => folder.tensor(bare(folder, name))?,
        })
    }

    fn opt_tensor(&self, name: &str) -> Result<Option<Tensor>, Error> {
        let there = match self {
            Self::Gguf(file) => file.has(name),
            Self::Hf(folder) => folder.has_weight(bare(folder, name)),
        };
        there.then(|| self.tensor(name)).transpose()
    }
}
