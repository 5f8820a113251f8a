//! Tests of `stores.rs`.

use super::disk::copies_in;
use super::*;
use std::fs;

fn model(name: &str, bytes: u64, unused_s: Option<u64>) -> Holding {
    Holding {
        name: name.to_owned(),
        bytes,
        here_bytes: bytes,
        unused_s,
        ..Holding::default()
    }
}

#[test]
fn a_spent_budget_says_what_would_free_how_much() {
    let mut models = [
        model("new", 3000, Some(5)),
        model("old", 1000, Some(90)),
        model("never", 2000, None),
    ];
    assert_eq!(may_have(4000, 10_000, &models, "mini"), Ok(()));
    let refused = may_have(4001, 10_000, &models, "mini").unwrap_err();
    let refused = refused.to_string();
    let order = ["rm never --node mini", "rm old", "rm new"].map(|part| refused.find(part));
    assert!(order.is_sorted() && order[0].is_some(), "{refused}");
    assert!(refused.contains("over the disk budget of"), "{refused}");
    models.iter_mut().for_each(|it| it.is_loaded = true);
    let refused = may_have(u64::MAX, 10_000, &models, "mini").unwrap_err();
    let refused = refused.to_string();
    assert!(refused.contains("--disk-budget"), "{refused}");
    assert!(!refused.contains("paceline rm"), "{refused}");
}

#[test]
fn other_nodes_remove_copies_and_no_models_of_the_user() {
    let own = model("a", 1, None);
    let copy = Holding {
        is_copy: true,
        ..own.clone()
    };
    let refused = copies_only(std::slice::from_ref(&own)).unwrap_err();
    assert!(refused.contains("--allow-delete"), "{refused}");
    // The copy goes, and the user's model of the name stays.
    assert_eq!(copies_only(&[own, copy]), Ok(()));
    assert_eq!(copies_only(&[]), Ok(()), "it has no such model");
}

#[test]
fn a_full_disk_takes_no_copy() {
    let mut models = [model("old", 1 << 30, Some(90))];
    let fits = |more, free, models: &[Holding]| {
        fits_disk(more, (free, Path::new("/h/copies")), models, "mini")
    };
    assert_eq!(fits(5, 5, &models), Ok(()));
    let refused = fits(3 << 30, 1 << 30, &models).unwrap_err().to_string();
    let told = "3.0 GiB more do not fit on the file system of /h/copies, 1.0 GiB are free: ";
    let remove = "`paceline rm old --node mini` frees 1.0 GiB";
    assert_eq!(refused, format!("{told}{remove}"));
    models[0].is_loaded = true;
    let refused = fits(6, 5, &models).unwrap_err().to_string();
    assert!(refused.contains("PACELINE_HOME"), "{refused}");
}

#[test]
fn copies_are_found_by_their_files() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| fs::write(dir.path().join(name), bytes).unwrap();
    write("aa.gguf", b"12345");
    write("aa.shard", b"12345");
    write("aa.name", b"mine");
    write("bb.tree", b"");
    let part = fs::File::create(dir.path().join("cc.shard")).unwrap();
    part.set_len(1 << 30).unwrap();
    write("dd.gguf.partial", b"123");
    write("dd.gguf.partial.json", b"{}");
    write("aa.gguf.partial", b"123");
    let found = copies_in(dir.path());
    let told: Vec<_> = found
        .iter()
        .map(|it| (it.name.as_str(), it.bytes))
        .collect();
    assert_eq!(told, [("mine", 5), ("cc", 1 << 30), ("dd", 3)]);
    assert!(found[1].here_bytes < 1 << 20, "{found:?}");
    assert!(found.iter().all(|it| it.is_copy));
}
