//! Model files: opens a GGUF file or a Hugging Face folder, and maps roles to tensor names.
//!
//! Weight loading and the planner use it. It reads tensors without packing or checking them against
//! a configuration.

use std::ops::Range;
use std::path::Path;

use paceline_base::{BlockType, Bytes};
use paceline_weights::gguf::Gguf;
use paceline_weights::hf::{HfFolder, StackSlice};
use paceline_weights::mlx::Quantised;
use paceline_weights::scaled;
use paceline_weights::tensor::{FindArrivals, Tensor};
use serde_json::Value;

use crate::Error;
use crate::families::{ExpertLayout, FileNames, ModelFamily, QWEN3_VL_MOE, blocks, dbrx_stem};
use crate::role::{LayerRole, Nth, Role, StreamPart};

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
                other.or_else(|| kimi_stem(folder, &stem)).unwrap_or(stem)
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
        let (Self::Hf(folder), Role::Layer(layer, part)) = (self, role) else {
            return None;
        };
        let nth = part.expert()?;
        let name = match part {
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

/// Configuration of a folder's text part.
fn text_part(folder: &HfFolder) -> &Value {
    let config = folder.config();
    config.get("text_config").unwrap_or(config)
}

/// `model_type` of a folder's text part.
fn model_type(folder: &HfFolder) -> Option<&str> {
    text_part(folder).get("model_type")?.as_str()
}

/// `name` as stored in `folder`. A decoder saved without its head, such as an embedding model, has
/// no `model.` prefix.
fn bare<'a>(folder: &HfFolder, name: &'a str) -> &'a str {
    let bare = name.strip_prefix("model.").filter(|bare| folder.has(bare));
    bare.filter(|_| !folder.has(name)).unwrap_or(name)
}

/// Tensor names in GGUF files: `gguf-py/gguf/constants.py` of llama.cpp.
fn gguf_stem(family: ModelFamily, role: Role) -> String {
    if let Some(name) = (family.file_names().gguf_own)(role) {
        return match role {
            Role::Layer(layer, _) => format!("blk.{layer}.{name}"),
            _ => name.to_owned(),
        };
    }
    let (layer, part) = match role {
        Role::TokenEmbedding => return "token_embd".to_owned(),
        Role::OutputNorm => return "output_norm".to_owned(),
        Role::Output => return "output".to_owned(),
        Role::RopeFactors => return "rope_freqs".to_owned(),
        Role::ShortRopeFactors => return "rope_factors_short".to_owned(),
        Role::LongRopeFactors => return "rope_factors_long".to_owned(),
        Role::PerLayerEmbedding => return "per_layer_token_embd".to_owned(),
        Role::PerLayerProjection => return "per_layer_model_proj".to_owned(),
        Role::PerLayerNorm => return "per_layer_proj_norm".to_owned(),
        Role::Streams(part) => return format!("output_{part:?}"), // no files of the family
        Role::Layer(layer, part) => (layer, part),
    };
    format!("blk.{layer}.{}", gguf_part(family, part))
}

/// Name of a layer's weight in GGUF files.
fn gguf_part(family: ModelFamily, part: LayerRole) -> &'static str {
    match part {
        LayerRole::AttentionNorm => "attn_norm",
        LayerRole::Query | LayerRole::Key | LayerRole::Value if family.joins_qkv() => "attn_qkv",
        LayerRole::Gate if family.joins_gate_up() => "ffn_up",
        LayerRole::Query => "attn_q",
        LayerRole::Key => "attn_k",
        LayerRole::Value => "attn_v",
        LayerRole::AttentionOutput => "attn_output",
        LayerRole::QueryNorm => "attn_q_norm",
        LayerRole::KeyNorm => "attn_k_norm",
        LayerRole::Sinks => "attn_sinks",
        LayerRole::PostAttentionNorm => "post_attention_norm",
        LayerRole::FfnNorm => family.file_names().gguf_ffn_norm,
        LayerRole::Gate => "ffn_gate",
        LayerRole::Up => "ffn_up",
        LayerRole::Down => "ffn_down",
        LayerRole::PostFfnNorm => "post_ffw_norm",
        LayerRole::Router | LayerRole::RouterScale => "ffn_gate_inp",
        LayerRole::RouterChoice => "exp_probs_b",
        LayerRole::ExpertGate(_) => "ffn_gate_exps",
        LayerRole::ExpertUp(_) => "ffn_up_exps",
        LayerRole::ExpertDown(_) | LayerRole::ExpertScales => "ffn_down_exps",
        LayerRole::SharedRouter => "ffn_gate_inp_shexp",
        LayerRole::SharedGate => "ffn_gate_shexp",
        LayerRole::SharedUp => "ffn_up_shexp",
        LayerRole::SharedDown => "ffn_down_shexp",
        LayerRole::QueryDown => "attn_q_a",
        LayerRole::QueryDownNorm => "attn_q_a_norm",
        LayerRole::QueryUp => "attn_q_b",
        LayerRole::LatentDown => "attn_kv_a_mqa",
        LayerRole::LatentNorm => "attn_kv_a_norm",
        LayerRole::LatentUp => "attn_kv_b",
        LayerRole::KeyUp(_) => "attn_k_b",
        LayerRole::ValueUp(_) => "attn_v_b",
        LayerRole::IndexerQuery => "indexer.attn_q_b",
        LayerRole::IndexerKey => "indexer.attn_k",
        LayerRole::IndexerNorm => "indexer.k_norm",
        LayerRole::IndexerQueryNorm => "indexer.q_norm",
        LayerRole::IndexerWeights => "indexer.proj",
        LayerRole::DenseNorm => "post_ffw_norm_1",
        LayerRole::BesideNorm => "pre_ffw_norm_2",
        LayerRole::PostBesideNorm => "post_ffw_norm_2",
        LayerRole::PerLayerGate => "inp_gate",
        LayerRole::PerLayerOutput => "proj",
        LayerRole::PostPerLayerNorm => "post_norm",
        LayerRole::OutputScale => "layer_output_scale",
        LayerRole::DeltaQkv => "attn_qkv",
        LayerRole::DeltaGate => "attn_gate",
        LayerRole::DeltaQkvGate | LayerRole::MambaInput => "ssm_in",
        LayerRole::DeltaStep => "ssm_beta",
        LayerRole::DeltaDecay => "ssm_alpha",
        LayerRole::DeltaStepDecay => "ssm_ba",
        LayerRole::DeltaConv
        | LayerRole::DeltaQueryConv
        | LayerRole::DeltaKeyConv
        | LayerRole::DeltaValueConv => "ssm_conv1d",
        LayerRole::DeltaBias => "ssm_dt",
        LayerRole::DeltaScale => "ssm_a",
        LayerRole::DeltaNorm => "ssm_norm",
        LayerRole::DeltaOutput => "ssm_out",
        LayerRole::DeltaGateDown | LayerRole::DeltaDecayDown => "ssm_low", // no files of the family
        LayerRole::MambaSkip => "ssm_d",
        LayerRole::AttentionStreams(_) | LayerRole::FfnStreams(_) => "hyper_connection",
        LayerRole::LaurelDown => "laurel_l",
        LayerRole::LaurelUp => "laurel_r",
        LayerRole::LaurelNorm => "laurel_post_norm",
        LayerRole::ConvQuery | LayerRole::ConvKey | LayerRole::ConvValue => "shortconv.in_proj",
        LayerRole::ConvTaps => "shortconv.conv",
        LayerRole::ConvOutput => "shortconv.out_proj",
    }
}

/// Name of a weight of Qwen's multi-token prediction layer. Here its number follows the model's
/// last layer; files have other names for it.
fn prediction_stem(folder: &HfFolder, role: Role, stem: &str) -> Option<String> {
    let Role::Layer(layer, _) = role else {
        return None;
    };
    let (model, part) = stem.split_once(&format!(".layers.{layer}."))?;
    let norm = |model: &str, layer| format!("{model}.layers.{layer}.input_layernorm.weight");
    let is_prediction = !folder.has(&norm(model, layer)) && folder.has(&norm("mtp", 0));
    is_prediction.then(|| format!("mtp.layers.0.{part}"))
}

/// Name of a dense feed-forward of Kimi Linear in folders saved by transformers 5.
fn kimi_stem(folder: &HfFolder, stem: &str) -> Option<String> {
    let is_kimi =
        model_type(folder) == Some("kimi_linear") && !folder.has_weight(&format!("{stem}.weight"));
    is_kimi.then(|| stem.replace(".mlp.", ".block_sparse_moe."))
}

/// Prefix of a folder's tensor names. Multimodal models have a prefix for the text part, in
/// transformers' or in MLX's order.
fn prefix(folder: &HfFolder) -> &'static str {
    let begins = ["model.language_model", "language_model.model", "backbone"];
    let there = |begin: &&str| {
        let has = |name: &str| folder.has(&format!("{begin}.{name}.weight"));
        has("embed_tokens") || has("embeddings")
    };
    begins.into_iter().find(there).unwrap_or("model")
}

/// Tensor names in the Hugging Face layout: `modeling_llama.py`, `modeling_gemma4.py` of
/// transformers.
fn hf_stem(names: &FileNames, model: &str, role: Role) -> String {
    if let Some(name) = (names.hf_own)(role) {
        return match role {
            Role::Layer(layer, _) => format!("{model}.layers.{layer}.{name}"),
            _ => format!("{model}.{name}"),
        };
    }
    let (layer, part) = match role {
        Role::TokenEmbedding => return format!("{model}.embed_tokens"),
        Role::OutputNorm => return format!("{model}.norm"),
        Role::Output if model == "language_model.model" => {
            return "language_model.lm_head".to_owned(); // MLX's order
        }
        Role::Output => return "lm_head".to_owned(),
        Role::RopeFactors => return "rope_freqs".to_owned(),
        Role::ShortRopeFactors => return "rope_factors_short".to_owned(),
        Role::LongRopeFactors => return "rope_factors_long".to_owned(),
        Role::PerLayerEmbedding => return format!("{model}.embed_tokens_per_layer"),
        Role::PerLayerProjection => return format!("{model}.per_layer_model_projection"),
        Role::PerLayerNorm => return format!("{model}.per_layer_projection_norm"),
        Role::Streams(StreamPart::Expand(i)) => return format!("{model}.altup_projections.{i}"),
        Role::Streams(StreamPart::Collapse(i)) => {
            return format!("{model}.altup_unembed_projections.{i}");
        }
        Role::Streams(part) => {
            return format!("{model}.hyper_connection_mixer.{}", stream_part(part));
        }
        Role::Layer(layer, part) => (layer, part),
    };
    if let LayerRole::AttentionStreams(stream) | LayerRole::FfnStreams(stream) = part {
        let half = if part.is_of_ffn() { "mlp" } else { "attn" };
        let stream = stream_part(stream);
        return format!("{model}.layers.{layer}.{half}_hyper_connection.{stream}");
    }
    if let Some(name) = hf_expert(names, part) {
        return format!("{model}.layers.{layer}.{name}");
    }
    format!("{model}.layers.{layer}.{}", hf_part(names, part))
}

/// Name of a part of a mix of residual streams: `modeling_qwen4_exp.py` of transformers.
const fn stream_part(part: StreamPart) -> &'static str {
    match part {
        StreamPart::Norm => "hc_norm",
        StreamPart::Down => "input_mix_weight_down",
        StreamPart::Up => "input_mix_weight_up",
        StreamPart::Inject => "block_inject_weight",
        _ => "", // named by their family
    }
}

/// Name of a part of a layer in the Hugging Face layout; not of experts.
fn hf_part(names: &FileNames, part: LayerRole) -> &'static str {
    let joined = match part {
        LayerRole::Query | LayerRole::Key | LayerRole::Value => names.qkv,
        LayerRole::Gate | LayerRole::Up => names.gate_up,
        _ => None,
    };
    if let Some(joined) = joined {
        return joined;
    }
    match part {
        LayerRole::AttentionNorm => "input_layernorm",
        LayerRole::Query => "self_attn.q_proj",
        LayerRole::Key => "self_attn.k_proj",
        LayerRole::Value => "self_attn.v_proj",
        LayerRole::AttentionOutput => "self_attn.o_proj",
        LayerRole::QueryNorm => "self_attn.q_norm",
        LayerRole::KeyNorm => "self_attn.k_norm",
        LayerRole::Sinks => "self_attn.sinks",
        LayerRole::FfnNorm => names.hf_ffn_norm,
        LayerRole::PostAttentionNorm => "post_attention_layernorm",
        LayerRole::Gate => "mlp.gate_proj",
        LayerRole::Up => "mlp.up_proj",
        LayerRole::Down => "mlp.down_proj",
        LayerRole::PostFfnNorm => "post_feedforward_layernorm",
        LayerRole::QueryDown => "self_attn.q_a_proj",
        LayerRole::QueryDownNorm => "self_attn.q_a_layernorm",
        LayerRole::QueryUp => "self_attn.q_b_proj",
        LayerRole::LatentDown => "self_attn.kv_a_proj_with_mqa",
        LayerRole::LatentNorm => "self_attn.kv_a_layernorm",
        LayerRole::LatentUp => "self_attn.kv_b_proj",
        LayerRole::KeyUp(_) => "self_attn.embed_q",
        LayerRole::ValueUp(_) => "self_attn.unembed_out",
        LayerRole::IndexerQuery => "self_attn.indexer.wq_b",
        LayerRole::IndexerKey => "self_attn.indexer.wk",
        LayerRole::IndexerNorm => "self_attn.indexer.k_norm",
        LayerRole::IndexerQueryNorm => "self_attn.indexer.q_norm",
        LayerRole::IndexerWeights => "self_attn.indexer.weights_proj",
        LayerRole::RouterScale => "router.scale",
        LayerRole::ExpertScales => "router.per_expert_scale",
        LayerRole::DenseNorm => "post_feedforward_layernorm_1",
        LayerRole::BesideNorm => "pre_feedforward_layernorm_2",
        LayerRole::PostBesideNorm => "post_feedforward_layernorm_2",
        LayerRole::PerLayerGate => "per_layer_input_gate",
        LayerRole::PerLayerOutput => "per_layer_projection",
        LayerRole::PostPerLayerNorm => "post_per_layer_input_norm",
        LayerRole::OutputScale => "layer_scalar",
        LayerRole::DeltaQkv => "linear_attn.in_proj_qkv",
        LayerRole::DeltaGate => "linear_attn.in_proj_z",
        LayerRole::DeltaQkvGate => "linear_attn.in_proj_qkvz",
        LayerRole::DeltaStep => "linear_attn.in_proj_b",
        LayerRole::DeltaDecay => "linear_attn.in_proj_a",
        LayerRole::DeltaStepDecay => "linear_attn.in_proj_ba",
        LayerRole::DeltaConv => "linear_attn.conv1d",
        LayerRole::DeltaBias => "linear_attn.dt_bias",
        LayerRole::DeltaScale => "linear_attn.A_log",
        LayerRole::DeltaNorm => "linear_attn.norm",
        LayerRole::DeltaOutput => "linear_attn.out_proj",
        LayerRole::DeltaGateDown => "self_attn.g_a_proj",
        LayerRole::DeltaDecayDown => "self_attn.f_a_proj",
        LayerRole::DeltaQueryConv => "self_attn.q_conv1d",
        LayerRole::DeltaKeyConv => "self_attn.k_conv1d",
        LayerRole::DeltaValueConv => "self_attn.v_conv1d",
        LayerRole::ConvQuery | LayerRole::ConvKey | LayerRole::ConvValue => "conv.in_proj",
        LayerRole::ConvTaps => "conv.conv",
        LayerRole::MambaInput | LayerRole::MambaSkip => "", // named by their family
        LayerRole::LaurelDown => "laurel.linear_left",
        LayerRole::LaurelUp => "laurel.linear_right",
        LayerRole::LaurelNorm => "laurel.post_laurel_norm",
        LayerRole::ConvOutput => "conv.out_proj",
        other => unreachable!("{other:?} is a part of experts"),
    }
}

/// Names of unstacked experts in the Hugging Face layout.
fn hf_expert(names: &FileNames, part: LayerRole) -> Option<String> {
    let FileNames { block, shared, .. } = names;
    let expert = |e: usize, name: usize| format!("{block}.experts.{e}.{}", names.expert[name]);
    Some(match part {
        LayerRole::Router => names.router.to_owned(),
        LayerRole::RouterChoice => names.choice.to_owned(),
        LayerRole::ExpertGate(e) => expert(e.index, 0),
        LayerRole::ExpertUp(e) => expert(e.index, 1),
        LayerRole::ExpertDown(e) => expert(e.index, 2),
        LayerRole::SharedRouter => format!("{block}.shared_expert_gate"),
        LayerRole::SharedGate => format!("{shared}.gate_proj"),
        LayerRole::SharedUp => format!("{shared}.up_proj"),
        LayerRole::SharedDown => format!("{shared}.down_proj"),
        _ => return None,
    })
}

impl LayerRole {
    /// Index of the expert or head whose matrices a GGUF file stacks.
    const fn expert(self) -> Option<Nth> {
        match self {
            Self::ExpertGate(e) | Self::ExpertUp(e) | Self::ExpertDown(e) => Some(e),
            Self::KeyUp(head) | Self::ValueUp(head) => Some(head),
            _ => None,
        }
    }

    /// Whether it is of a layer's second half.
    const fn is_of_ffn(self) -> bool {
        matches!(
            self,
            Self::FfnNorm
                | Self::Gate
                | Self::Up
                | Self::Down
                | Self::Router
                | Self::RouterChoice
                | Self::ExpertGate(_)
                | Self::ExpertUp(_)
                | Self::ExpertDown(_)
                | Self::SharedGate
                | Self::SharedUp
                | Self::SharedDown
                | Self::FfnStreams(_)
        )
    }

    /// Whether its name in the Hugging Face layout has no suffix.
    const fn is_bare_in_hf(self) -> bool {
        matches!(
            self,
            Self::Sinks
                | Self::RouterChoice
                | Self::RouterScale
                | Self::ExpertScales
                | Self::OutputScale
                | Self::DeltaBias
                | Self::DeltaScale
                | Self::MambaSkip
                | Self::AttentionStreams(StreamPart::OutputScale)
        )
    }
}

/// An expert's matrix in a GGUF file with an unusual layout. That is one tensor per expert, as in
/// early files of Mixtral, or gate and up joined in one tensor.
fn other_expert(file: &Gguf, layer: usize, part: LayerRole) -> Result<Option<Tensor>, Error> {
    let (name, half) = match part {
        LayerRole::ExpertGate(_) => ("gate", Some(0)),
        LayerRole::ExpertUp(_) => ("up", Some(1)),
        LayerRole::ExpertDown(_) => ("down", None),
        _ => return Ok(None),
    };
    if file.has(&format!("blk.{layer}.ffn_{name}_exps.weight")) {
        return Ok(None);
    }
    let nth = part.expert().expect("it is of an expert");
    let own = format!("blk.{layer}.ffn_{name}.{}.weight", nth.index);
    let both = format!("blk.{layer}.ffn_gate_up_exps.weight");
    match half {
        _ if file.has(&own) => Ok(Some(file.tensor(&own)?)),
        Some(half) if file.has(&both) => {
            half_of(of_expert(file.tensor(&both)?, nth)?, half).map(Some)
        }
        _ => Ok(None),
    }
}

/// Place of a short convolution's projection among the three that files store as one.
const fn conv_part(role: Role) -> Option<usize> {
    match role {
        Role::Layer(_, LayerRole::ConvKey) => Some(0),
        Role::Layer(_, LayerRole::ConvQuery) => Some(1),
        Role::Layer(_, LayerRole::ConvValue) => Some(2),
        _ => None,
    }
}

/// Rows of the parts `own` of a matrix with `parts` parts of equal height.
fn rows_among(mut tensor: Tensor, parts: usize, own: Range<usize>) -> Result<Tensor, Error> {
    let rows = tensor.shape.first().copied().unwrap_or(0);
    let each = rows.checked_div(parts).unwrap_or(0);
    if rows == 0 || each * parts != rows || own.end > parts {
        let mut expected = tensor.shape.clone();
        if let Some(first) = expected.first_mut() {
            *first = (each * parts).max(parts);
        }
        return Err(Error::Shape {
            name: tensor.name,
            got: tensor.shape,
            expected,
        });
    }
    let bytes = tensor.bytes.len() / rows * each;
    let part = tensor.bytes.slice(own.start * bytes..own.end * bytes);
    tensor.bytes = part.expect("rows of it");
    tensor.shape[0] = own.len() * each;
    Ok(tensor)
}

/// As [`rows_among`], for a matrix quantised by MLX.
fn quantised_rows(matrix: &Quantised, parts: usize, own: Range<usize>) -> Result<Quantised, Error> {
    let each = matrix.rows.checked_div(parts).unwrap_or(0);
    let rows = own.start * each..own.end * each;
    let part = matrix.row_range(rows);
    let part = part.filter(|_| each > 0 && each * parts == matrix.rows);
    part.ok_or_else(|| Error::Shape {
        name: matrix.name.clone(),
        got: vec![matrix.rows, matrix.cols],
        expected: vec![(each * parts).max(parts), matrix.cols],
    })
}

/// First or second half of a matrix's rows.
fn half_of(mut tensor: Tensor, half: usize) -> Result<Tensor, Error> {
    let rows = tensor.shape[0];
    if !rows.is_multiple_of(2) {
        return Err(Error::Shape {
            expected: vec![rows + 1, tensor.shape[1]],
            got: tensor.shape,
            name: tensor.name,
        });
    }
    let bytes = tensor.bytes.len() / 2;
    let part = tensor.bytes.slice(half * bytes..(half + 1) * bytes);
    tensor.bytes = part.expect("a half of it");
    tensor.shape[0] = rows / 2;
    Ok(tensor)
}

/// One expert's part of a tensor `(experts, rows, columns)`.
fn of_expert(mut tensor: Tensor, Nth { index, of }: Nth) -> Result<Tensor, Error> {
    let got = tensor.shape.clone();
    if got.len() != 3 || got[0] != of {
        let sizes = got.iter().skip(1).copied().chain([0, 0]);
        return Err(Error::Shape {
            name: tensor.name,
            expected: [of].into_iter().chain(sizes.take(2)).collect(),
            got,
        });
    }
    let bytes = tensor.bytes.len() / of;
    let part = tensor.bytes.slice(index * bytes..(index + 1) * bytes);
    tensor.bytes = part.expect("a part of it");
    tensor.shape.remove(0);
    Ok(tensor)
}
