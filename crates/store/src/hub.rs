//! Models from the hub: single files of the catalogue, and repositories by id.

use paceline_base::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::catalogue::{CatalogueModel, HubFile};
use crate::download::{DownloadSpec, PullContext, fetch, sleep};
use crate::hash::is_sha256;
use crate::http::HttpClient;
use crate::index::{FileRecord, Kind};
use crate::name::{EntryName, HubId, check_file_path, escape_path};
use crate::options::PullOptions;
use crate::parallel_fetch::fetch_all;
use crate::progress::{Cancel, PullPreview, SilentProgress};
use crate::select::{ListedFile, ModelFileSet, choose};
use crate::usual_names::HubFiles;
use crate::{Error, Home, disk};

/// Maximum file list. The hub's lists have some 200 bytes per file.
const LISTING_BYTES_MAX: usize = 16 << 20;

/// Maximum repositories of a search.
const FOUND_REPOS_MAX: usize = 20;

/// A repository's files at one commit.
#[derive(Debug)]
pub(crate) struct RepoListing {
    id: HubId,
    revision: String,
    licence: Option<String>,
    files: Vec<ListedFile>,
}

/// Selected files of a listing, which form a model of the store.
#[derive(Debug)]
pub(crate) struct FileSelection {
    pub(crate) name: EntryName,
    pub(crate) kind: Kind,
    pub(crate) source: String,
    revision: String,
    id: HubId,
    licence: Option<String>,
    files: Vec<ListedFile>,
}

/// The used part of the hub's JSON (`GET /api/models/ID?blobs=true`).
#[derive(Debug, Deserialize)]
struct ListingJson {
    sha: Option<String>,
    #[serde(default)]
    siblings: Vec<SiblingJson>,
    /// The publisher's facts about the model, in any form.
    #[serde(default, rename = "cardData")]
    card: Value,
}

#[derive(Debug, Deserialize)]
struct SiblingJson {
    rfilename: String,
    size: Option<u64>,
    lfs: Option<LfsJson>,
}

#[derive(Debug, Deserialize)]
struct LfsJson {
    sha256: Option<String>,
}

pub(crate) fn fetch_catalogue_file(
    client: &mut HttpClient,
    home: &Home,
    model: &CatalogueModel,
    hub: &HubFile,
    ctx: &mut PullContext<'_>,
) -> Result<FileRecord, Error> {
    let path = format!(
        "{}/resolve/{}/{}",
        hub.repo,
        hub.revision,
        escape_path(hub.file)
    );
    let wanted = DownloadSpec {
        url: client.url(&path),
        dir: home.entry_dir(&EntryName::alias(model.alias)),
        file: model.file.to_owned(),
        bytes: Some(model.bytes.0),
        sha256: Some(model.sha256.to_owned()),
    };
    fetch(client, &wanted, ctx)
}

pub(crate) fn list_files(
    client: &mut HttpClient,
    id: &HubId,
    ctx: &mut PullContext<'_>,
) -> Result<RepoListing, Error> {
    let url = client.url(&format!("api/models/{id}?blobs=true"));
    let policy = &ctx.options.retry;
    for failures in 1.. {
        match list_once(client, id, &url, ctx) {
            Err(error) if error.is_transient() && failures < policy.attempts => {
                let wait = policy.wait(failures);
                let secs = wait.as_secs_f64();
                ctx.progress
                    .message(&format!("{error}; trying again in {secs:.1} s"));
                sleep(wait, ctx.cancel)?;
            }
            outcome => return outcome,
        }
    }
    unreachable!("the loop returns at the last attempt at the latest")
}

/// Looks up the files of `hub_id`, `owner/name[:selector]`, without downloading.
pub fn look_up(hub_id: &str, options: &PullOptions) -> Result<HubFiles, Error> {
    let (repo, selector) = match hub_id.split_once(':') {
        Some((repo, selector)) => (repo, Some(selector)),
        None => (hub_id, None),
    };
    let (cancel, id) = (Cancel::default(), HubId::parse(repo)?);
    Ok(look_up_id(&id, selector, options, &cancel)?.on_hub())
}

/// The files of a repository that `selector` selects.
pub(crate) fn look_up_id(
    id: &HubId,
    selector: Option<&str>,
    options: &PullOptions,
    cancel: &Cancel,
) -> Result<FileSelection, Error> {
    let mut client = HttpClient::new(&options.hub, &options.deadlines)?;
    let mut ctx = PullContext {
        options,
        cancel,
        progress: &mut SilentProgress,
    };
    list_files(&mut client, id, &mut ctx)?.select(selector)
}

/// A repository that the hub finds.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct FoundRepo {
    /// `owner/name`.
    pub id: String,
    /// Downloads in the last month.
    #[serde(default)]
    pub downloads: u64,
    #[serde(default)]
    pub likes: u64,
}

/// The repositories with GGUF files that the hub finds for `query`, the most downloaded first. Asks
/// once, without retries.
///
/// # Errors
/// [`Error`] of the request; [`Error::BadListing`].
pub fn search(
    query: &str,
    options: &PullOptions,
    cancel: &Cancel,
) -> Result<Vec<FoundRepo>, Error> {
    let mut client = HttpClient::new(&options.hub, &options.deadlines)?;
    let query = escape_path(query).replace('/', "%2F");
    let path =
        format!("api/models?search={query}&filter=gguf&sort=downloads&limit={FOUND_REPOS_MAX}");
    let url = client.url(&path);
    let response = client.get(&url, &[], cancel)?;
    client.check_status(&response, &url)?;
    let text = response.read_all(LISTING_BYTES_MAX, cancel)?;
    let found: Vec<Value> = serde_json::from_slice(&text).map_err(|error| Error::BadListing {
        repo: "the search".to_owned(),
        reason: error.to_string(),
    })?;
    let found = found
        .into_iter()
        .filter_map(|it| FoundRepo::deserialize(it).ok());
    // No download takes other ids.
    let found = found.filter(|it| HubId::parse(&it.id).is_ok());
    Ok(found.take(FOUND_REPOS_MAX).collect())
}

fn list_once(
    client: &mut HttpClient,
    id: &HubId,
    url: &str,
    ctx: &mut PullContext<'_>,
) -> Result<RepoListing, Error> {
    let response = client.get(url, &[], ctx.cancel)?;
    client.check_status(&response, url)?;
    parse_listing(id, &response.read_all(LISTING_BYTES_MAX, ctx.cancel)?)
}

fn parse_listing(id: &HubId, text: &[u8]) -> Result<RepoListing, Error> {
    let bad = |reason: String| Error::BadListing {
        repo: id.to_string(),
        reason,
    };
    let json: ListingJson = serde_json::from_slice(text).map_err(|error| bad(error.to_string()))?;
    let is_commit = |sha: &String| sha.len() == 40 && sha.bytes().all(|b| b.is_ascii_hexdigit());
    let revision = json.sha.filter(is_commit).unwrap_or_else(|| "main".into());
    let file = |sibling: SiblingJson| ListedFile {
        path: sibling.rfilename,
        bytes: sibling.size,
        sha256: sibling
            .lfs
            .and_then(|lfs| lfs.sha256)
            .filter(|sha256| is_sha256(sha256)),
    };
    Ok(RepoListing {
        id: id.clone(),
        revision,
        licence: licence(&json.card),
        files: json.siblings.into_iter().map(file).collect(),
    })
}

/// The licence of a model's card: its name, else its identifier, and its address.
fn licence(card: &Value) -> Option<String> {
    let text = |key: &str| match &card[key] {
        Value::Array(all) => all.first().and_then(Value::as_str),
        one => one.as_str(),
    };
    let name = text("license_name").or_else(|| text("license"))?;
    let address = text("license_link").filter(|link| link.starts_with("https://"));
    let all = [Some(name), address].into_iter().flatten();
    Some(all.collect::<Vec<_>>().join(", "))
}

/// Parses `bytes` as a file list and selects from it, for fuzzing.
pub(crate) fn parse(bytes: &[u8]) {
    let id = HubId::parse("owner/repo").expect("it is one");
    for selector in [None, Some("Q4_K_M"), Some("model.gguf")] {
        let Ok(listing) = parse_listing(&id, bytes) else {
            return;
        };
        let chosen = listing.select(selector).into_iter();
        for file in chosen.flat_map(|selection| selection.files) {
            assert!(check_file_path(&file.path).is_ok(), "{}", file.path);
        }
    }
}

impl RepoListing {
    pub(crate) fn select(self, selector: Option<&str>) -> Result<FileSelection, Error> {
        let (kind, chosen) = match choose(&self.id, selector, &self.files)? {
            ModelFileSet::Gguf(files) => (Kind::Gguf, files),
            ModelFileSet::Folder(files) => (Kind::Safetensors, files),
        };
        let name = match kind {
            Kind::Gguf => EntryName::gguf(&self.id, &chosen[0])?,
            Kind::Safetensors => EntryName::folder(&self.id),
        };
        let mut files: Vec<ListedFile> = self
            .files
            .into_iter()
            .filter(|file| chosen.contains(&file.path))
            .collect();
        files.sort_by(|a, b| a.path.cmp(&b.path));
        files.dedup_by(|a, b| a.path == b.path);
        let source = format!("hub {} at {}", self.id, self.revision);
        Ok(FileSelection {
            name,
            kind,
            source,
            revision: self.revision,
            id: self.id,
            licence: self.licence,
            files,
        })
    }
}

impl FileSelection {
    pub(crate) fn on_hub(self) -> HubFiles {
        HubFiles {
            commit: self.revision,
            bytes: self.files.iter().filter_map(|file| file.bytes).sum(),
            files: self.files.into_iter().map(|file| file.path).collect(),
        }
    }

    pub(crate) fn preview(&self) -> PullPreview {
        let files = self.files.iter();
        PullPreview {
            name: self.name.clone(),
            source: self.source.clone(),
            licence: self.licence.clone(),
            files: files
                .map(|file| (file.path.clone(), file.bytes.map(Bytes)))
                .collect(),
        }
    }

    /// Downloads all files into the model's folder. The first record is the model file for GGUF.
    pub(crate) fn fetch(
        &self,
        client: &mut HttpClient,
        home: &Home,
        ctx: &mut PullContext<'_>,
    ) -> Result<Vec<FileRecord>, Error> {
        let dir = home.entry_dir(&self.name);
        disk::create_dir(&dir)?;
        let total: u64 = self.files.iter().filter_map(|file| file.bytes).sum();
        let present = disk::tree_bytes(&dir, 2);
        disk::check_space(ctx.options.free_space, &dir, total.saturating_sub(present))?;
        let wanted = self
            .files
            .iter()
            .map(|file| self.wanted(file, client, home));
        match &wanted.collect::<Result<Vec<_>, Error>>()?[..] {
            [only] => Ok(vec![fetch(client, only, ctx)?]),
            several => fetch_all(client, several, ctx),
        }
    }

    fn wanted(
        &self,
        file: &ListedFile,
        client: &HttpClient,
        home: &Home,
    ) -> Result<DownloadSpec, Error> {
        // `choose` returns only valid paths; checked again at this border.
        check_file_path(&file.path).map_err(|rule| Error::BadListing {
            repo: self.id.to_string(),
            reason: rule.into(),
        })?;
        let path = format!(
            "{}/resolve/{}/{}",
            self.id,
            self.revision,
            escape_path(&file.path)
        );
        Ok(DownloadSpec {
            url: client.url(&path),
            dir: home.entry_dir(&self.name),
            file: file.path.clone(),
            bytes: file.bytes,
            sha256: file.sha256.clone(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn licences_are_read_from_cards_of_any_form() {
        for (card, text) in [
            (r#"{"license":"apache-2.0"}"#, Some("apache-2.0")),
            (r#"{"license":["mit","other"]}"#, Some("mit")),
            (
                r#"{"license":"other","license_name":"llama3.1","license_link":"https://x.y/L"}"#,
                Some("llama3.1, https://x.y/L"),
            ),
            (
                r#"{"license":"other","license_link":"LICENSE"}"#,
                Some("other"),
            ),
            (r#"{"license":3}"#, None),
            ("[]", None),
            ("null", None),
        ] {
            let text_of_card = licence(&serde_json::from_str(card).unwrap());
            assert_eq!(text_of_card.as_deref(), text, "{card}");
            let listing = parse_listing(
                &HubId::parse("o/r").unwrap(),
                format!(r#"{{"cardData":{card},"siblings":[{{"rfilename":"a.gguf"}}]}}"#)
                    .as_bytes(),
            );
            let preview = listing.unwrap().select(None).unwrap().preview();
            assert_eq!(preview.licence.as_deref(), text);
            assert_eq!((preview.files.len(), preview.bytes()), (1, None));
        }
    }

    #[test]
    fn hostile_listings_are_errors_or_harmless() {
        let id = HubId::parse("o/r").unwrap();
        for text in ["", "[]", "{\"siblings\":3}", "{\"siblings\":[{}]}", "\u{0}"] {
            let refused = parse_listing(&id, text.as_bytes());
            assert!(matches!(refused, Err(Error::BadListing { .. })), "{text:?}");
        }
        let text = r#"{"sha":"../../x","siblings":[
            {"rfilename":"../../../evil.gguf"},{"rfilename":"/etc/evil.gguf"},
            {"rfilename":"a/../../evil.gguf"},{"rfilename":"fine.gguf","size":1,
             "lfs":{"sha256":"nonsense"}}]}"#;
        let listing = parse_listing(&id, text.as_bytes()).unwrap();
        assert_eq!(listing.revision, "main");
        let selection = listing.select(None).unwrap();
        assert_eq!(selection.name.as_str(), "o/r:fine.gguf");
        assert_eq!(selection.files.len(), 1);
        assert_eq!(selection.files[0].sha256, None);
        for selector in ["../../../evil.gguf", "evil.gguf"] {
            let listing = parse_listing(&id, text.as_bytes()).unwrap();
            let refused = listing.select(Some(selector));
            assert!(
                matches!(refused, Err(Error::NoMatchingGguf { .. })),
                "{selector}"
            );
        }
    }
}
