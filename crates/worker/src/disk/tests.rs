//! Pages survive restarts, and damaged or foreign files are ignored.

use super::*;

/// Waits for the writer thread, which a new process would not see.
fn settle(disk: &Disk) {
    while disk.queued.load(Ordering::Relaxed) > 0 {
        std::thread::yield_now();
    }
}

fn cache(folder: &Path) -> DiskCache {
    DiskCache {
        folder: folder.join("prefixes"),
        limit: Bytes(1 << 20),
    }
}

fn page(disk: &Disk, i: u32) -> PersistedPage {
    PersistedPage {
        name: disk.name(&PageName::default(), &[i; 64]),
        index: i,
        pool: i % 3,
        page: 0,
    }
}

fn bytes(i: u32, len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 7 + i as usize) as u8).collect()
}

#[test]
fn pages_are_there_after_a_restart() {
    let home = tempfile::tempdir().unwrap();
    let mut disk = Disk::in_space(&cache(home.path()), "model").unwrap();
    for i in 0..9 {
        let page = page(&disk, i);
        disk.put(&page, &bytes(i, 100 * i as usize));
    }
    settle(&disk);
    drop(disk);
    let mut disk = Disk::in_space(&cache(home.path()), "model").unwrap();
    assert_eq!(disk.here.len(), 9);
    for i in 0..9 {
        let page = page(&disk, i);
        assert!(disk.has(&page));
        let mut into = vec![9; 100 * i as usize];
        assert!(disk.get(&page, &mut into));
        assert_eq!(into, bytes(i, into.len()));
    }
    let other = Disk::in_space(&cache(home.path()), "another model").unwrap();
    assert!(other.here.is_empty());
}

#[test]
fn names_follow_from_all_tokens_before() {
    let home = tempfile::tempdir().unwrap();
    let disk = Disk::in_space(&cache(home.path()), "model").unwrap();
    let first = disk.name(&PageName::default(), &[1; 64]);
    let second = disk.name(&first, &[1; 64]);
    assert_eq!(second, disk.name(&first, &[1; 64]));
    let all = [
        first,
        second,
        disk.name(&second, &[1; 64]),
        disk.name(&first, &[2; 64]),
    ];
    assert_eq!(all.iter().collect::<HashSet<_>>().len(), all.len());
    let file = disk.path(&page(&disk, 4));
    let (known, rest) = parse(file.file_name().unwrap().to_str().unwrap()).unwrap();
    assert_eq!((known, rest), ((page(&disk, 4).name, 1), ""));
}

#[test]
fn a_file_that_is_not_whole_is_ignored() {
    let home = tempfile::tempdir().unwrap();
    let mut disk = Disk::in_space(&cache(home.path()), "model").unwrap();
    let page = page(&disk, 5);
    disk.put(&page, &bytes(5, 40));
    settle(&disk);
    let path = disk.path(&page);
    let whole = fs::read(&path).unwrap();
    let mut into = vec![0; 40];
    for len in 0..whole.len() {
        fs::write(&path, &whole[..len]).unwrap();
        assert!(!disk.get(&page, &mut into), "{len} bytes");
    }
    for bit in 0..8 * whole.len() {
        let mut bad = whole.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        fs::write(&path, &bad).unwrap();
        assert!(!disk.get(&page, &mut into), "bit {bit}");
    }
    assert!(!disk.has(&page), "it is computed and written again");
    fs::write(&path, &whole).unwrap();
    assert!(disk.get(&page, &mut into));
    assert!(!disk.get(&page, &mut [0; 39]), "a page of other sizes");
    // The page of another sequence under this one's name.
    let other = PersistedPage {
        name: disk.name(&page.name, &[1; 64]),
        ..page
    };
    fs::rename(&path, disk.path(&other)).unwrap();
    assert!(!disk.get(&other, &mut into));
}

#[test]
fn the_folder_is_private_and_foreign_files_are_left_alone() {
    let home = tempfile::tempdir().unwrap();
    let cache = cache(home.path());
    fs::create_dir(&cache.folder).unwrap();
    fs::set_permissions(&cache.folder, Permissions::from_mode(0o755)).unwrap();
    let mut disk = Disk::in_space(&cache, "model").unwrap();
    let page = page(&disk, 1);
    disk.put(&page, &[1; 10]);
    settle(&disk);
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&cache.folder), 0o700);
    assert_eq!(mode(&disk.folder), 0o700);
    assert_eq!(mode(&disk.path(&page)), 0o600);
    let foreign = disk.folder.join("notes.txt");
    fs::write(&foreign, [0; 2000]).unwrap();
    let small = DiskCache {
        limit: Bytes(160),
        ..cache
    };
    let mut disk = Disk::in_space(&small, "model").unwrap();
    assert_eq!(disk.here.len(), 1);
    let another = PersistedPage { pool: 9, ..page };
    disk.put(&another, &[1; 10]); // sweeps before it writes
    settle(&disk);
    assert!(foreign.exists());
}

#[test]
fn files_keep_to_the_limit_and_ends_of_prompts_go_first() {
    let home = tempfile::tempdir().unwrap();
    let cache = cache(home.path());
    let mut disk = Disk::in_space(&cache, "model").unwrap();
    for i in 0..400 {
        let page = page(&disk, i);
        disk.put(&page, &[i as u8; 10_000]);
        settle(&disk);
    }
    let files = files(&cache.folder);
    let total: u64 = files.iter().map(|(_, len, _)| len).sum();
    assert!(total <= cache.limit.0, "{total} bytes");
    assert!(files.len() > 80, "{} files", files.len());
    let mut into = vec![0; 10_000];
    let first = page(&disk, 0);
    assert!(disk.get(&first, &mut into), "what all others follow");
    let large = page(&disk, 1000);
    disk.put(&large, &vec![0; 100_000]);
    assert!(!disk.has(&large), "more than a sixteenth of the limit");
}
