//! Models whose weights arrive while ranks load them: the bits of complete files, and no rank
//! waits for the rows, experts or layers of others.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Mutex;

use paceline_base::lock;
use paceline_weights::gguf::Gguf;
use paceline_weights::safetensors::Safetensors;
use paceline_weights::tensor::{Absent, Arrivals, MappedBytes};

use super::*;

/// A file whose weights are zero until they are waited for.
#[derive(Debug)]
struct HoledFile {
    whole: Vec<u8>,
    file: File,
    /// By byte: whether it was waited for.
    waited: Mutex<Vec<bool>>,
}

impl Arrivals for HoledFile {
    fn wait(&self, range: Range<usize>) -> Result<(), Absent> {
        let bytes = &self.whole[range.clone()];
        self.file.write_all_at(bytes, range.start as u64).unwrap();
        lock(&self.waited)[range].fill(true);
        Ok(())
    }
}

/// A model of such files, for one rank.
pub(super) struct HoledModel {
    _dir: tempfile::TempDir,
    model: PathBuf,
    files: BTreeMap<PathBuf, Arc<HoledFile>>,
}

impl HoledModel {
    /// A copy of `model`: a folder, or the first GGUF file in its folder.
    fn new(model: &Path) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let own = dir.path().join(model.file_name().unwrap());
        let (folder, copy) = match model.is_dir() {
            true => (model, dir.path().to_owned()),
            false => (model.parent().unwrap(), own),
        };
        let mut files = BTreeMap::new();
        for entry in std::fs::read_dir(folder).unwrap() {
            let from = entry.unwrap().path();
            let to = dir.path().join(from.file_name().unwrap());
            let whole = std::fs::read(&from).unwrap();
            let header = header(&from).unwrap_or(whole.len());
            std::fs::write(&to, &whole[..header]).unwrap();
            let file = File::options().write(true).open(&to).unwrap();
            file.set_len(whole.len() as u64).unwrap();
            let file = HoledFile {
                waited: Mutex::new(vec![false; whole.len()]),
                whole,
                file,
            };
            files.insert(to, Arc::new(file));
        }
        Self {
            model: copy,
            _dir: dir,
            files,
        }
    }

    pub(super) fn open(&self) -> ModelSource {
        let find = |file: &Path, _: &MappedBytes| {
            Ok(Some(Arc::clone(&self.files[file]) as Arc<dyn Arrivals>))
        };
        ModelSource::open_arriving(&self.model, &find).unwrap()
    }

    /// By byte of a tensor: whether it was waited for.
    fn waited(&self, (file, range): (&Path, Range<usize>)) -> Vec<bool> {
        lock(&self.files[file].waited)[range].to_vec()
    }
}

/// Bytes before the weights; `None` for a file without weights.
fn header(path: &Path) -> Option<usize> {
    match path.extension()?.to_str()? {
        "safetensors" => Some(Safetensors::open(path).unwrap().content().1),
        "gguf" => {
            let model = Gguf::open(path).unwrap();
            let mut parts = model.paths().zip(model.contents());
            let (_, (_, header)) = parts.find(|(part, _)| *part == path)?;
            Some(header)
        }
        _ => None,
    }
}

/// Two ranks of a split load holed copies of `model` and have the bits of its complete files.
fn load_two(model: &Path, kind: &str) -> (Split, Config, [HoledModel; 2]) {
    let config = config_of(&ModelSource::open(model).unwrap()).unwrap();
    let tokens = tokens(config.vocab);
    let case = Case {
        steps: &[[9, 3], [1, 1]],
        ..Case::new(model, &tokens)
    };
    let (expected, _) = case.alone();
    let split = Split::plan(&config, kind.parse().unwrap(), 2, &[]).unwrap();
    let holed = [HoledModel::new(model), HoledModel::new(model)];
    let case = Case {
        holed: &holed,
        ..case
    };
    assert_eq!(case.split(&split).logits, expected, "{}", model.display());
    (split, config, holed)
}

/// Writes a random model in two parts; the path of the first.
fn write_parts(dir: &Path, family: ModelFamily, block_type: BlockType) -> PathBuf {
    let whole = Tiny::new(family, block_type).file();
    let path = |no: usize| dir.join(format!("tiny-0000{no}-of-00002.gguf"));
    let half = whole.tensors.len() / 2;
    for (no, tensors) in [(0, &whole.tensors[..half]), (1, &whole.tensors[half..])] {
        let mut part = whole.clone();
        part.tensors = tensors.to_vec();
        let total = whole.tensors.len();
        for (key, value) in [("no", no), ("count", 2), ("tensors.count", total)] {
            part.set(&format!("split.{key}"), Some((value as u32).into()));
        }
        part.write(&path(no + 1));
    }
    path(1)
}

/// Whether ranks of a stage have different rows, or experts, of a tensor.
fn is_cut(name: &str) -> bool {
    const CUT: &str = "q_proj. k_proj. v_proj. gate_proj. up_proj. q_b_proj. kv_b_proj. embed_q. \
        unembed_out. in_proj_ Wqkv experts lm_head attn_q. attn_k. ffn_gate. _exps. attn_qkv";
    let is_vector = name.ends_with(".bias") || name.ends_with("_bias");
    !is_vector && (name == "output.weight" || CUT.split(' ').any(|part| name.contains(part)))
}

fn names(source: &ModelSource) -> Vec<String> {
    match source {
        ModelSource::Gguf(file) => file.tensors().map(|t| t.name().to_owned()).collect(),
        ModelSource::Hf(folder) => folder.names().map(str::to_owned).collect(),
    }
}

fn location<'a>(source: &'a ModelSource, name: &str) -> (&'a Path, Range<usize>) {
    let found = match source {
        ModelSource::Gguf(file) => file.location(name),
        ModelSource::Hf(folder) => folder.location(name),
    };
    found.unwrap()
}

/// No byte of a matrix that is cut by rows or experts is waited for by both ranks.
fn check_tensor_split(model: &Path) {
    let (_, _, holed) = load_two(model, "tensor");
    let sources = [0, 1].map(|rank: usize| holed[rank].open());
    let mut cut = [0; 2];
    for name in names(&sources[0]).iter().filter(|name| is_cut(name)) {
        let waited = [0, 1].map(|rank| holed[rank].waited(location(&sources[rank], name)));
        let both = waited[0].iter().zip(&waited[1]).filter(|(a, b)| **a && **b);
        let both = both.count();
        assert_eq!(both, 0, "{}: bytes of {name}", model.display());
        for (sum, waited) in cut.iter_mut().zip(&waited) {
            *sum += waited.iter().filter(|it| **it).count();
        }
    }
    assert!(cut.iter().all(|bytes| *bytes > 0), "{cut:?}");
}

/// Every layout of matrices: alone, joined, stacked, transposed, and MLX's groups.
#[test]
fn a_rank_waits_for_its_own_rows_and_experts_only() {
    let folders = "
        hf/llama-rope3-sharded hf/qwen3moe-bf16 hf/gpt-oss-mxfp4 hf/gpt-oss-bf16 hf/dbrx-bf16
        hf/deepseek-v3-bf16 hf/qwen3next-bf16
        mlx/llama-2bit-sharded mlx/qwen3moe-4bit mlx/gpt-oss-mxfp4 mlx/deepseek-v3-4bit
        mlx/dbrx-4bit";
    for folder in folders.split_whitespace() {
        check_tensor_split(&golden(folder));
    }
    for (family, block_type) in [
        (ModelFamily::Llama, BlockType::Q4_K),
        (ModelFamily::Qwen3Moe, BlockType::Q8_0),
        (ModelFamily::DeepSeek, BlockType::Q5_1),
    ] {
        let dir = tempfile::tempdir().unwrap();
        check_tensor_split(&write_parts(dir.path(), family, block_type));
    }
}

/// A stage waits for its layers only, which are those that it announces.
#[test]
fn a_stage_waits_for_what_it_announces() {
    let dir = tempfile::tempdir().unwrap();
    let parts = write_parts(dir.path(), ModelFamily::Qwen3Moe, BlockType::Q8_0);
    for model in [
        golden("hf/llama-rope3-sharded"),
        golden("mlx/qwen3moe-4bit"),
        parts,
    ] {
        let (split, config, holed) = load_two(&model, "pipeline");
        let mut seen = Vec::new();
        for (rank, holed) in (0..).zip(&holed) {
            let source = holed.open();
            let shard = split.shard(&config, Rank(rank));
            let announced = source.locations(config.family, &shard);
            for name in names(&source) {
                let (file, range) = location(&source, &name);
                let is_announced = announced.contains(&(file, range.clone()));
                let waited = holed.waited((file, range));
                assert!(
                    waited.iter().all(|it| *it == is_announced),
                    "{} rank {rank}: {name} announced: {is_announced}",
                    model.display()
                );
                seen.push(is_announced);
            }
        }
        let once = seen.iter().filter(|it| **it).count();
        assert_eq!(2 * once, seen.len(), "each tensor by one stage");
    }
}
