//! Packed weights on disk: the same bits, and what happens to files that are cut, damaged, locked
//! or cannot be written.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::common::kernels;
use crate::common::runner::Runner;
use crate::common::tiny::Tiny;
use paceline_base::{BlockType, KernelClass, Rank};
use paceline_model::{
    Config, LoadOptions, Model, ModelFamily, ModelSource, PackedFault, PackedFile, Split,
    remove_packed_orphans,
};
use paceline_tensor::Kernels;

/// A model and a folder for its packed weights.
struct Place {
    home: tempfile::TempDir,
    tiny: Tiny,
    kernels: Arc<Kernels>,
    class: KernelClass,
}

impl Place {
    fn new(family: ModelFamily, block_type: BlockType, class: KernelClass) -> Self {
        let home = tempfile::tempdir().expect("of this test");
        let tiny = Tiny::new(family, block_type);
        tiny.write(&home.path().join("model.gguf"));
        Self {
            home,
            tiny,
            kernels: kernels(),
            class,
        }
    }

    fn model(&self) -> PathBuf {
        self.home.path().join("model.gguf")
    }

    fn folder(&self) -> PathBuf {
        self.home.path().join("packed")
    }

    /// The bits of some logits, and the fault.
    fn load(&self, stamp: &str) -> (Vec<u32>, Option<PackedFault>) {
        let source = ModelSource::open(&self.model()).expect("of this test");
        let split = Split::whole(&Config::read(&source).expect("of this test"));
        let shard = format!("{} whole", self.class);
        let packed = PackedFile::open(&self.folder(), &self.model(), &shard, stamp);
        let options = LoadOptions { class: self.class };
        let (part, kernels) = ((&split, Rank(0)), Arc::clone(&self.kernels));
        let model = Model::load_packed(&source, part, (options, &packed), kernels, |_, _| {});
        let logits = Runner::new(model.expect("of this test"), 64).all(&self.tiny.tokens(20, 3));
        let bits = logits.iter().flatten().map(|x| x.to_bits()).collect();
        (bits, packed.take_fault())
    }

    /// The only file that ends so.
    fn file(&self, ending: &str) -> Option<PathBuf> {
        let folder = fs::read_dir(self.folder())
            .ok()?
            .next()?
            .expect("of this test");
        let files = fs::read_dir(folder.path()).expect("of this test");
        let mut files = files.map(|file| file.expect("of this test").path());
        files.find(|path| path.extension().is_some_and(|own| own == ending))
    }

    fn packed(&self) -> PathBuf {
        self.file("packed").expect("a complete file")
    }
}

fn inode(path: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt as _;
    fs::metadata(path).expect("a file").ino()
}

#[test]
fn a_second_start_reads_the_same_bits() {
    for (family, block_type, class) in [
        (ModelFamily::Llama, BlockType::Q4_K, KernelClass::Cpu),
        (ModelFamily::Llama, BlockType::Q8_0, KernelClass::CpuF32),
        (ModelFamily::Gemma3, BlockType::BF16, KernelClass::Cpu),
        (ModelFamily::Qwen3Moe, BlockType::IQ2_XXS, KernelClass::Cpu),
        (ModelFamily::DeepSeek, BlockType::Q5_1, KernelClass::Cpu),
        (ModelFamily::Qwen3Next, BlockType::Q6_K, KernelClass::CpuQ8),
    ] {
        let place = Place::new(family, block_type, class);
        let (expected, fault) = place.load("1");
        assert!(fault.is_none(), "{fault:?}");
        let made = inode(&place.packed());
        let (got, fault) = place.load("1");
        let name = family.name();
        assert!(fault.is_none() && got == expected, "{name}: {fault:?}");
        assert_eq!(inode(&place.packed()), made, "{name}: written again");
        let (got, _) = place.load("2");
        assert!(got == expected, "{name}");
        assert_ne!(inode(&place.packed()), made, "{name}: of other weights");
    }
}

/// A writer may be killed anywhere: the next start takes what is whole.
#[test]
fn a_file_that_was_cut_is_continued() {
    let place = Place::new(ModelFamily::Llama, BlockType::Q4_0, KernelClass::Cpu);
    let (expected, _) = place.load("1");
    let whole = fs::read(place.packed()).unwrap();
    let (packed, part) = (place.packed(), place.packed().with_extension("part"));
    let late = [30_000, whole.len() / 2, whole.len() - 4096];
    for len in [0, 1, 4096, 5000, 8192].into_iter().chain(late) {
        fs::rename(&packed, &part).unwrap();
        let file = File::options().write(true).open(&part).unwrap();
        file.set_len(len as u64).unwrap();
        let made = inode(&part);
        let (got, fault) = place.load("1");
        assert!(fault.is_none() && got == expected, "{len}: {fault:?}");
        assert!(fs::read(&packed).unwrap() == whole, "{len}");
        assert_eq!(inode(&packed), made, "{len}: not continued");
    }
}

#[test]
fn damaged_locked_and_unwritable_files_are_named_and_not_used() {
    let place = Place::new(ModelFamily::Llama, BlockType::Q4_0, KernelClass::Cpu);
    let (expected, _) = place.load("1");
    let whole = fs::read(place.packed()).unwrap();
    // A bit of the header, of data twice, of the index and of the end.
    let n = whole.len();
    for at in [9, 2 * 4096 + 100, n / 2, n - 2 * 4096 + 20, n - 4090] {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        fs::write(place.packed(), &bytes).unwrap();
        let (got, fault) = place.load("1");
        assert!(got == expected, "{at}");
        match fault {
            Some(PackedFault::Damaged { .. }) => assert!(place.file("packed").is_none(), "{at}"),
            // Not of a record: the file is written again.
            None => assert!(fs::read(place.packed()).unwrap() == whole, "{at}"),
            other => panic!("{at}: {other:?}"),
        }
        assert!(place.load("1").1.is_none(), "{at}");
    }
    let part = place.packed().with_extension("part");
    fs::rename(place.packed(), &part).unwrap();
    let writer = File::open(&part).unwrap();
    writer.lock().unwrap();
    let (got, fault) = place.load("1");
    let is_busy = matches!(fault, Some(PackedFault::Busy { .. }));
    assert!(got == expected && is_busy, "{fault:?}");
    drop(writer);
    fs::remove_file(&part).unwrap();
    std::os::unix::fs::symlink("/dev/full", &part).unwrap();
    let (got, fault) = place.load("1");
    let text = fault.map(|fault| fault.to_string()).unwrap_or_default();
    assert!(got == expected && text.contains("cannot write"), "{text}");
    fs::remove_dir_all(place.folder()).unwrap();
    fs::write(place.folder(), "").unwrap();
    let (got, fault) = place.load("1");
    let text = fault.map(|fault| fault.to_string()).unwrap_or_default();
    assert!(got == expected && text.contains("cannot make"), "{text}");
}

#[test]
fn packed_weights_of_lost_models_are_removed() {
    let place = Place::new(ModelFamily::Llama, BlockType::Q4_0, KernelClass::Cpu);
    let removed = || remove_packed_orphans(&place.folder()).unwrap().0;
    assert_eq!(removed(), 0, "none yet");
    place.load("1");
    assert_eq!(removed(), 0, "in use");
    fs::remove_file(place.model()).unwrap();
    assert!(removed() > 0);
    assert!(place.file("packed").is_none());
}
