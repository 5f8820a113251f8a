//! The files of a download, before it begins.

use crate::name::EntryName;
use crate::options::PullOptions;
use crate::progress::{Cancel, PullPreview};
use crate::spec::{DownloadPlan, DownloadTarget};
use crate::{Error, hub};

/// Describes a download, by the hub's file list. The catalogue's models need no request.
pub fn preview(
    plan: &DownloadPlan,
    options: &PullOptions,
    cancel: &Cancel,
) -> Result<PullPreview, Error> {
    match &plan.target {
        DownloadTarget::Catalogue(model) => Ok(PullPreview {
            name: EntryName::alias(model.alias),
            source: match &model.hub {
                Some(hub) => format!("hub {} at {}", hub.repo, hub.revision),
                None => "Python wheels".to_owned(),
            },
            licence: Some(format!("{}, {}", model.licence, model.licence_url)),
            files: vec![(model.file.to_owned(), Some(model.bytes))],
        }),
        DownloadTarget::Hub { id, selector } => {
            let selection = hub::look_up_id(id, selector.as_deref(), options, cancel)?;
            Ok(selection.preview())
        }
    }
}
