//! Files of f32 tensors in the safetensors format, written whole or not at all.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use paceline_tensor::storage;
use paceline_weights::safetensors::Safetensors;
use serde_json::{Map, json};

use super::Error;

/// A tensor: its name, its sizes and its values.
pub type Named = (String, Vec<usize>, Vec<f32>);

/// Writes a file under a temporary name in its folder, flushes it and renames it to `path`.
pub fn replace(
    path: &Path,
    write: impl FnOnce(&mut dyn Write) -> std::io::Result<()>,
) -> Result<(), Error> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".tmp");
    let temporary = path.with_file_name(name);
    let written = || {
        let mut file = std::io::BufWriter::new(File::create(&temporary)?);
        write(&mut file)?;
        file.flush()?;
        file.get_ref().sync_all()?;
        std::fs::rename(&temporary, path)
    };
    written().map_err(Error::file("write", path))
}

/// Writes tensors in the order given.
pub fn write(path: &Path, tensors: &[(&str, &[usize], &[f32])]) -> Result<(), Error> {
    let shapes = tensors.iter().map(|(name, shape, _)| (*name, *shape));
    let shapes: Vec<_> = shapes.collect();
    write_by(path, &shapes, |i, file| write_floats(file, tensors[i].2))
}

/// Writes tensors of these names and sizes in the order given. `fill` writes the values of the
/// tensor with a number, as [`write_floats`] does.
pub fn write_by(
    path: &Path,
    tensors: &[(&str, &[usize])],
    mut fill: impl FnMut(usize, &mut dyn Write) -> std::io::Result<()>,
) -> Result<(), Error> {
    let mut header = Map::new();
    header.insert("__metadata__".to_owned(), json!({ "format": "pt" }));
    let mut start = 0;
    for (name, shape) in tensors {
        let end = start + shape.iter().product::<usize>() * size_of::<f32>();
        let of = json!({ "dtype": "F32", "shape": shape, "data_offsets": [start, end] });
        header.insert((*name).to_owned(), of);
        start = end;
    }
    let mut header = serde_json::Value::Object(header).to_string();
    while !header.len().is_multiple_of(8) {
        header.push(' ');
    }
    replace(path, |file| {
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(header.as_bytes())?;
        (0..tensors.len()).try_for_each(|i| fill(i, file))
    })
}

/// Floats as they lie in files.
pub fn write_floats(file: &mut dyn Write, values: &[f32]) -> std::io::Result<()> {
    for block in values.chunks(4096) {
        let bytes: Vec<u8> = block.iter().flat_map(|x| x.to_le_bytes()).collect();
        file.write_all(&bytes)?;
    }
    Ok(())
}

/// Floats of a file's bytes.
pub fn floats(bytes: &[u8]) -> Vec<f32> {
    let (fours, _) = bytes.as_chunks::<4>();
    fours.iter().map(|four| f32::from_le_bytes(*four)).collect()
}

/// Reads all tensors of a file, widened to f32.
pub fn read(path: &Path) -> Result<Vec<Named>, Error> {
    let bad = |error: paceline_weights::safetensors::Error| Error::malformed(path, error);
    let file = Safetensors::open(path).map_err(bad)?;
    let names: Vec<String> = file.tensors().map(|info| info.name().to_owned()).collect();
    let read = |name: String| {
        let tensor = file.tensor(&name).map_err(bad)?;
        let mut values = vec![0.0; tensor.shape.iter().product()];
        storage::dequantise(tensor.block_type, &tensor.bytes, &mut values);
        Ok((name, tensor.shape, values))
    };
    names.into_iter().map(read).collect()
}
