//! Wheels from a Python package index, without pip.
//!
//! An index has a page of links for each package (PEP 503, "simple repository API"). The fragment
//! of a link is the file's SHA-256. The link with the pinned hash is followed; its name does not
//! count. The file is verified before it is used.

use std::fs;
use std::path::{Path, PathBuf};

use crate::Error;
use crate::download::{self, DownloadSpec, PullContext};
use crate::http::{HttpClient, linked};
use crate::options::{Hub, HubDeadlines};

/// Downloads the file of `requirement` (`NAME==VERSION`) that has `sha256` into `folder`, from the
/// index at address `index`; returns its path. Resumes a download that left its part there. The
/// index's page goes into `work`.
///
/// # Errors
/// [`Error::IndexFailed`] with the reason; errors of this machine's disk as they are.
pub(crate) fn download(
    (requirement, sha256): (&str, &str),
    index: &str,
    (work, folder): (&Path, &Path),
    ctx: &mut PullContext<'_>,
) -> Result<PathBuf, Error> {
    fetch((requirement, sha256), index, (work, folder), ctx).map_err(|error| match error {
        local if local.is_local() => local,
        cause => Error::IndexFailed {
            requirement: requirement.to_owned(),
            cause: Box::new(cause),
        },
    })
}

fn fetch(
    (requirement, sha256): (&str, &str),
    index: &str,
    (work, folder): (&Path, &Path),
    ctx: &mut PullContext<'_>,
) -> Result<PathBuf, Error> {
    let (name, _) = requirement.split_once("==").unwrap_or((requirement, ""));
    let mut client = client(index, ctx)?;
    let page = client.url(&format!("{name}/"));
    let mut get = |url: &str, (dir, file): (&Path, String), sha256: Option<&str>| {
        let wanted = DownloadSpec {
            url: url.to_owned(),
            dir: dir.to_owned(),
            file: file.clone(),
            bytes: None,
            sha256: sha256.map(str::to_owned),
        };
        download::fetch(&mut client, &wanted, ctx).map(|_| dir.join(file))
    };
    let path = get(&page, (work, format!("{name}.html")), None)?;
    let text = fs::read(&path).map_err(|error| Error::io("read", &path, error))?;
    let text = String::from_utf8_lossy(&text);
    let link = link(&text, sha256).ok_or_else(|| Error::NotInIndex {
        requirement: requirement.to_owned(),
        page: page.clone(),
        sha256: sha256.to_owned(),
    })?;
    let file = format!("{}.whl", requirement.replace("==", "-"));
    get(&linked(&page, &link)?, (folder, file), Some(sha256))
}

/// A client for the index; it gets no token of the hub.
fn client(index: &str, ctx: &PullContext<'_>) -> Result<HttpClient, Error> {
    let hub = Hub {
        endpoint: index.to_owned(),
        token: None,
        ..ctx.options.hub.clone()
    };
    let deadlines = &ctx.options.deadlines;
    let deadlines = HubDeadlines {
        reach: deadlines.index_reach,
        ..deadlines.clone()
    };
    HttpClient::new(&hub, &deadlines)
}

/// Parses `bytes` as a page, for fuzzing.
pub(crate) fn parse(bytes: &[u8]) {
    let page = String::from_utf8_lossy(bytes);
    if let Some(link) = link(&page, &"0".repeat(64)) {
        let _ = linked("http://a/simple/b/", &link);
    }
}

/// The address of the link in `page` whose fragment is `sha256`.
fn link(page: &str, sha256: &str) -> Option<String> {
    let (before, _) = page.split_once(&format!("#sha256={sha256}"))?;
    let (_, address) = before.rsplit_once("href=")?;
    Some(
        address
            .trim_start_matches(['"', '\''])
            .replace("&amp;", "&"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_link_is_the_one_with_the_hash() {
        let page = "<a href=\"../../f/a-1.whl#sha256=aa\" data-x=\"1\">a</a>\n\
                    <a href='https://h/b.whl?x=1&amp;y=2#sha256=bb'>b</a><a href=c.whl#md5=cc>";
        for (hash, address) in [
            ("aa", Some("../../f/a-1.whl")),
            ("bb", Some("https://h/b.whl?x=1&y=2")),
            ("cc", None),
            ("dd", None),
        ] {
            assert_eq!(link(page, hash).as_deref(), address, "{hash}");
        }
        assert_eq!(link("#sha256=aa", "aa"), None);
    }
}
