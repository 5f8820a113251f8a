//! Model files: opens a GGUF file or a Hugging Face folder, and maps roles to tensor names.
//!
//! Weight loading and the planner use it. It reads tensors without packing or checking them against
//! a configuration.

use std::ops::Range;
use std::path::Path;

use paceline_base::Bytes;
use paceline_formats::gguf::Gguf;
use paceline_formats::hf::{HfFolder, Wanted};
use paceline_formats::mlx::Quantised;
use paceline_formats::tensor::Tensor;
use serde_json::Value;

use crate::Error;
use crate::families::{Family, FileNames, Stacks, dbrx_stem};
use crate::role::{Nth, Part, Role};

/// An opened model: a GGUF file with all its parts, or a Hugging Face folder.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "one value per loaded model")]
pub enum Source {
    /// A single file, or all parts of a divided one.
    Gguf(Gguf),
    /// A folder with `config.json` and safetensors.
    Hf(HfFolder),
}

impl Source {
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

    pub fn file_bytes(&self) -> Bytes {
        match self {
            Self::Gguf(file) => file.file_bytes(),
            Self::Hf(folder) => folder.file_bytes(),
        }
    }

    /// Tensor name of a weight, without `.weight` or `.bias`.
    fn stem(&self, family: Family, role: Role) -> String {
        match self {
            Self::Gguf(_) => gguf_stem(family, role),
            Self::Hf(folder) if family.joins_qkv() => {
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
            Self::Hf(folder) => hf_stem(family.file_names(), prefix(folder), role),
        }
    }

    /// Tensor name of a weight. Some vectors end in another word than `.weight`, or in none.
    fn name(&self, family: Family, role: Role) -> String {
        let stem = self.stem(family, role);
        match (self, role) {
            (Self::Gguf(_), Role::Layer(_, Part::RouterChoice)) => format!("{stem}.bias"),
            (Self::Gguf(_), Role::Layer(_, Part::RouterScale | Part::ExpertScales)) => {
                format!("{stem}.scale")
            }
            (Self::Gguf(_), Role::Layer(_, Part::DeltaBias)) => format!("{stem}.bias"),
            (Self::Gguf(_), Role::Layer(_, Part::DeltaScale)) => stem,
            (Self::Hf(_), Role::Layer(_, part)) if part.is_bare_in_hf() => stem,
            _ => format!("{stem}.weight"),
        }
    }

    /// Reads the weight of `role`.
    ///
    /// # Errors
    /// If the file lacks it, or stores it in an unsupported type.
    pub fn weight(&self, family: Family, role: Role) -> Result<Tensor, Error> {
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
        if family.joins_qkv()
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
            None if part == Part::SharedRouter => Ok(Tensor {
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
    pub fn opt_weight(&self, family: Family, role: Role) -> Result<Option<Tensor>, Error> {
        self.opt_tensor(&self.name(family, role))
    }

    /// Whether the file has the weight of `role` under its default name, in any format.
    pub(crate) fn has_any(&self, family: Family, role: Role) -> bool {
        let name = self.name(family, role);
        match self {
            Self::Gguf(file) => file.has(&name),
            Self::Hf(folder) => folder.has(&name),
        }
    }

    /// DBRX: a weight within a joined matrix of queries, keys and values, or of a layer's experts
    /// in folders not written by MLX. `None` for other weights.
    fn joined(&self, family: Family, role: Role) -> Result<Option<Tensor>, Error> {
        if let Some((parts, own)) = self.joined_parts(family, role)? {
            let name = match (self, role) {
                (Self::Gguf(_), Role::Layer(layer, _)) => format!("blk.{layer}.attn_qkv.weight"),
                _ => self.name(family, role),
            };
            return rows_among(self.tensor(&name)?, parts, own).map(Some);
        }
        let (Self::Hf(folder), Role::Layer(_, part)) = (self, role) else {
            return Ok(None);
        };
        let stack = self.stem(family, role);
        let Some(nth) = part.expert().filter(|_| stack.contains(".mlp.")) else {
            return Ok(None);
        };
        if let Part::ExpertDown(_) = part {
            let Nth { index, of } = nth;
            let (first, step) = (0, 1);
            let wanted = Wanted {
                index,
                of,
                first,
                step,
            };
            return Ok(Some(folder.stacked_rows(&stack, wanted)?));
        }
        let own = nth.index..nth.index + 1;
        rows_among(folder.tensor(&stack)?, nth.of, own).map(Some)
    }

    /// Head count and own range of `role` in a joined matrix of queries, keys and values. `None`
    /// for other weights and families.
    fn joined_parts(
        &self,
        family: Family,
        role: Role,
    ) -> Result<Option<(usize, Range<usize>)>, Error> {
        let place = match role {
            Role::Layer(_, Part::Query) => 0,
            Role::Layer(_, Part::Key) => 1,
            Role::Layer(_, Part::Value) => 2,
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
    fn joined_heads(&self, family: Family) -> Result<[usize; 2], Error> {
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
                let within = config.get("attn_config");
                let kv_heads = within.and_then(|within| within.get("kv_n_heads"));
                [config.get("n_heads"), kv_heads].map(|n| n.and_then(Value::as_u64))
            }
        };
        let heads = heads.map_or(0, |n| n as usize);
        Ok([heads, kv_heads.map_or(heads, |n| n as usize)])
    }

    /// The stacked tensor of a gpt-oss folder that has an expert's matrix, and its place there.
    fn stacked(&self, family: Family, role: Role) -> Option<(&HfFolder, String, Wanted)> {
        let (Self::Hf(folder), Role::Layer(layer, part)) = (self, role) else {
            return None;
        };
        if family.file_names().stacks != Stacks::Alternate {
            return None;
        }
        let (name, first, step) = match part {
            Part::ExpertGate(_) => ("gate_up_proj", 0, 2),
            Part::ExpertUp(_) => ("gate_up_proj", 1, 2),
            _ => ("down_proj", 0, 1),
        };
        let Nth { index, of } = part.expert()?;
        let stack = format!("model.layers.{layer}.mlp.experts.{name}");
        Some((
            folder,
            stack,
            Wanted {
                index,
                of,
                first,
                step,
            },
        ))
    }

    /// An expert's matrix from a folder that stacks all experts in one tensor, where the rows of
    /// `up` follow those of `gate`. Gemma 4 folders always have this layout; other families may, as
    /// written by transformers 5. `None` for other folders and weights.
    fn behind(&self, family: Family, role: Role) -> Result<Option<Tensor>, Error> {
        let (Self::Hf(folder), Role::Layer(layer, part)) = (self, role) else {
            return Ok(None);
        };
        let (name, half) = match part {
            Part::ExpertGate(_) => ("gate_up_proj", Some(0)),
            Part::ExpertUp(_) => ("gate_up_proj", Some(1)),
            Part::ExpertDown(_) => ("down_proj", None),
            _ => return Ok(None),
        };
        let always = family.file_names().stacks == Stacks::Behind;
        let block = if always { "experts" } else { "mlp.experts" };
        let stack = format!("{}.layers.{layer}.{block}.{name}", prefix(folder));
        if !always && !folder.has(&stack) {
            return Ok(None);
        }
        let nth = part.expert().expect("it is of an expert");
        let tensor = of_expert(folder.tensor(&stack)?, nth)?;
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
        family: Family,
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
    pub fn quantised(&self, family: Family, role: Role) -> Result<Option<Quantised>, Error> {
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
    fn mlx_stack(&self, family: Family, role: Role) -> Option<(&HfFolder, String, Nth)> {
        let (Self::Hf(folder), Role::Layer(layer, part)) = (self, role) else {
            return None;
        };
        let nth = part.expert()?;
        let name = match part {
            Part::ExpertGate(_) => "gate_proj",
            Part::ExpertUp(_) => "up_proj",
            Part::KeyUp(_) => "embed_q",
            Part::ValueUp(_) => "unembed_out",
            _ => "down_proj",
        };
        let stack = match part {
            Part::KeyUp(_) | Part::ValueUp(_) => "self_attn",
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
    pub fn block_len(&self, family: Family, role: Role) -> Result<usize, Error> {
        match self.quantised(family, role)? {
            Some(matrix) => Ok(matrix.scheme.group_size),
            None => Ok(self.weight(family, role)?.block_type.len()),
        }
    }

    /// The bias of `role`.
    ///
    /// # Errors
    /// As [`weight`](Self::weight).
    pub fn bias(&self, family: Family, role: Role) -> Result<Tensor, Error> {
        self.tensor(&format!("{}.bias", self.stem(family, role)))
    }

    /// The bias of `role`, `None` when the file lacks it.
    ///
    /// # Errors
    /// As [`weight`](Self::weight).
    pub fn opt_bias(&self, family: Family, role: Role) -> Result<Option<Tensor>, Error> {
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
            Self::Hf(folder) => folder.has(bare(folder, name)),
        };
        there.then(|| self.tensor(name)).transpose()
    }
}

/// `name` as stored in `folder`. A decoder saved without its head, such as an embedding model, has
/// no `model.` prefix.
fn bare<'a>(folder: &HfFolder, name: &'a str) -> &'a str {
    let bare = name.strip_prefix("model.").filter(|bare| folder.has(bare));
    bare.filter(|_| !folder.has(name)).unwrap_or(name)
}

/// Tensor names in GGUF files: `gguf-py/gguf/constants.py` of llama.cpp.
fn gguf_stem(family: Family, role: Role) -> String {
    let (layer, part) = match role {
        Role::TokenEmbedding => return "token_embd".to_owned(),
        Role::OutputNorm => return "output_norm".to_owned(),
        Role::Output => return "output".to_owned(),
        Role::RopeFactors => return "rope_freqs".to_owned(),
        Role::PerLayerEmbedding => return "per_layer_token_embd".to_owned(),
        Role::PerLayerProjection => return "per_layer_model_proj".to_owned(),
        Role::PerLayerNorm => return "per_layer_proj_norm".to_owned(),
        Role::Layer(layer, part) => (layer, part),
    };
    let name = match part {
        Part::AttentionNorm => "attn_norm",
        Part::Query => "attn_q",
        Part::Key => "attn_k",
        Part::Value => "attn_v",
        Part::AttentionOutput => "attn_output",
        Part::QueryNorm => "attn_q_norm",
        Part::KeyNorm => "attn_k_norm",
        Part::Sinks => "attn_sinks",
        Part::PostAttentionNorm => "post_attention_norm",
        Part::FfnNorm => family.file_names().gguf_ffn_norm,
        Part::Gate => "ffn_gate",
        Part::Up => "ffn_up",
        Part::Down => "ffn_down",
        Part::PostFfnNorm => "post_ffw_norm",
        Part::Router | Part::RouterScale => "ffn_gate_inp",
        Part::RouterChoice => "exp_probs_b",
        Part::ExpertGate(_) => "ffn_gate_exps",
        Part::ExpertUp(_) => "ffn_up_exps",
        Part::ExpertDown(_) | Part::ExpertScales => "ffn_down_exps",
        Part::SharedRouter => "ffn_gate_inp_shexp",
        Part::SharedGate => "ffn_gate_shexp",
        Part::SharedUp => "ffn_up_shexp",
        Part::SharedDown => "ffn_down_shexp",
        Part::QueryDown => "attn_q_a",
        Part::QueryDownNorm => "attn_q_a_norm",
        Part::QueryUp => "attn_q_b",
        Part::LatentDown => "attn_kv_a_mqa",
        Part::LatentNorm => "attn_kv_a_norm",
        Part::LatentUp => "attn_kv_b",
        Part::KeyUp(_) => "attn_k_b",
        Part::ValueUp(_) => "attn_v_b",
        Part::DenseNorm => "post_ffw_norm_1",
        Part::BesideNorm => "pre_ffw_norm_2",
        Part::PostBesideNorm => "post_ffw_norm_2",
        Part::PerLayerGate => "inp_gate",
        Part::PerLayerOutput => "proj",
        Part::PostPerLayerNorm => "post_norm",
        Part::OutputScale => "layer_output_scale",
        Part::DeltaQkv => "attn_qkv",
        Part::DeltaGate => "attn_gate",
        Part::DeltaQkvGate => "ssm_in",
        Part::DeltaStep => "ssm_beta",
        Part::DeltaDecay => "ssm_alpha",
        Part::DeltaStepDecay => "ssm_ba",
        Part::DeltaConv => "ssm_conv1d",
        Part::DeltaBias => "ssm_dt",
        Part::DeltaScale => "ssm_a",
        Part::DeltaNorm => "ssm_norm",
        Part::DeltaOutput => "ssm_out",
    };
    format!("blk.{layer}.{name}")
}

/// Prefix of a folder's tensor names. Multimodal models have a prefix for the text part, in
/// transformers' or in MLX's order.
fn prefix(folder: &HfFolder) -> &'static str {
    let begins = ["model.language_model", "language_model.model"];
    let there = |begin: &&str| folder.has(&format!("{begin}.embed_tokens.weight"));
    begins.into_iter().find(there).unwrap_or("model")
}

/// Tensor names in the Hugging Face layout: `modeling_llama.py`, `modeling_gemma4.py` of
/// transformers.
fn hf_stem(names: &FileNames, model: &str, role: Role) -> String {
    let (layer, part) = match role {
        Role::TokenEmbedding => return format!("{model}.embed_tokens"),
        Role::OutputNorm => return format!("{model}.norm"),
        Role::Output if model == "language_model.model" => {
            return "language_model.lm_head".to_owned(); // MLX's order
        }
        Role::Output => return "lm_head".to_owned(),
        Role::RopeFactors => return "rope_freqs".to_owned(),
        Role::PerLayerEmbedding => return format!("{model}.embed_tokens_per_layer"),
        Role::PerLayerProjection => return format!("{model}.per_layer_model_projection"),
        Role::PerLayerNorm => return format!("{model}.per_layer_projection_norm"),
        Role::Layer(layer, part) => (layer, part),
    };
    if let Some(name) = hf_expert(names, part) {
        return format!("{model}.layers.{layer}.{name}");
    }
    let name = match part {
        Part::AttentionNorm => "input_layernorm",
        Part::Query => "self_attn.q_proj",
        Part::Key => "self_attn.k_proj",
        Part::Value => "self_attn.v_proj",
        Part::AttentionOutput => "self_attn.o_proj",
        Part::QueryNorm => "self_attn.q_norm",
        Part::KeyNorm => "self_attn.k_norm",
        Part::Sinks => "self_attn.sinks",
        Part::FfnNorm => names.hf_ffn_norm,
        Part::PostAttentionNorm => "post_attention_layernorm",
        Part::Gate => "mlp.gate_proj",
        Part::Up => "mlp.up_proj",
        Part::Down => "mlp.down_proj",
        Part::PostFfnNorm => "post_feedforward_layernorm",
        Part::QueryDown => "self_attn.q_a_proj",
        Part::QueryDownNorm => "self_attn.q_a_layernorm",
        Part::QueryUp => "self_attn.q_b_proj",
        Part::LatentDown => "self_attn.kv_a_proj_with_mqa",
        Part::LatentNorm => "self_attn.kv_a_layernorm",
        Part::LatentUp => "self_attn.kv_b_proj",
        Part::KeyUp(_) => "self_attn.embed_q",
        Part::ValueUp(_) => "self_attn.unembed_out",
        Part::RouterScale => "router.scale",
        Part::ExpertScales => "router.per_expert_scale",
        Part::DenseNorm => "post_feedforward_layernorm_1",
        Part::BesideNorm => "pre_feedforward_layernorm_2",
        Part::PostBesideNorm => "post_feedforward_layernorm_2",
        Part::PerLayerGate => "per_layer_input_gate",
        Part::PerLayerOutput => "per_layer_projection",
        Part::PostPerLayerNorm => "post_per_layer_input_norm",
        Part::OutputScale => "layer_scalar",
        Part::DeltaQkv => "linear_attn.in_proj_qkv",
        Part::DeltaGate => "linear_attn.in_proj_z",
        Part::DeltaQkvGate => "linear_attn.in_proj_qkvz",
        Part::DeltaStep => "linear_attn.in_proj_b",
        Part::DeltaDecay => "linear_attn.in_proj_a",
        Part::DeltaStepDecay => "linear_attn.in_proj_ba",
        Part::DeltaConv => "linear_attn.conv1d",
        Part::DeltaBias => "linear_attn.dt_bias",
        Part::DeltaScale => "linear_attn.A_log",
        Part::DeltaNorm => "linear_attn.norm",
        Part::DeltaOutput => "linear_attn.out_proj",
        other => unreachable!("{other:?} is a part of experts"),
    };
    format!("{model}.layers.{layer}.{name}")
}

/// Names of unstacked experts in the Hugging Face layout.
fn hf_expert(names: &FileNames, part: Part) -> Option<String> {
    let FileNames { block, shared, .. } = names;
    let expert = |e: usize, name: usize| format!("{block}.experts.{e}.{}", names.expert[name]);
    Some(match part {
        Part::Router => names.router.to_owned(),
        Part::RouterChoice => names.choice.to_owned(),
        Part::ExpertGate(e) => expert(e.index, 0),
        Part::ExpertUp(e) => expert(e.index, 1),
        Part::ExpertDown(e) => expert(e.index, 2),
        Part::SharedRouter => format!("{block}.shared_expert_gate"),
        Part::SharedGate => format!("{shared}.gate_proj"),
        Part::SharedUp => format!("{shared}.up_proj"),
        Part::SharedDown => format!("{shared}.down_proj"),
        _ => return None,
    })
}

impl Part {
    /// Index of the expert or head whose matrices a GGUF file stacks.
    const fn expert(self) -> Option<Nth> {
        match self {
            Self::ExpertGate(e) | Self::ExpertUp(e) | Self::ExpertDown(e) => Some(e),
            Self::KeyUp(head) | Self::ValueUp(head) => Some(head),
            _ => None,
        }
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
        )
    }
}

/// An expert's matrix in a GGUF file with an unusual layout: one tensor per expert, as in early
/// files of Mixtral, or gate and up joined in one tensor.
fn other_expert(file: &Gguf, layer: usize, part: Part) -> Result<Option<Tensor>, Error> {
    let (name, half) = match part {
        Part::ExpertGate(_) => ("gate", Some(0)),
        Part::ExpertUp(_) => ("up", Some(1)),
        Part::ExpertDown(_) => ("down", None),
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
