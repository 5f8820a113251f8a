//! The child process: it renders one template, within limits.

use std::convert::Infallible;
use std::time::Duration;

use paceline_cluster::Control;
use paceline_cluster::sandbox::Sandbox;
use paceline_text::chat::{Here, Interpreter, TemplateError};

use super::{ChildRequest, ChildResponse, limits};
use crate::Error;

/// Renders one template for the parent at standard input, within limits. Ends with the parent, or
/// when the template breaks a limit.
///
/// # Errors
/// [`Error::Cluster`] if there is no parent, or its message does not parse; [`Error::System`] if
/// the limits cannot be set.
pub fn run() -> Result<Infallible, Error> {
    let clock = limits::CpuTimeLimit::open();
    limits::set().map_err(|source| Error::System {
        what: "set the limits of a template's process",
        source,
    })?;
    // Before the threads of the control channel start, so that they are sandboxed too.
    Sandbox::Template.enter();
    let control: Control<ChildRequest, ChildResponse> = Control::from_stdin()?;
    let mut template = None;
    loop {
        let Some(ask) = control.recv(Duration::MAX)? else {
            continue;
        };
        clock.allow();
        let answer = handle_request(&mut template, ask);
        match control.send(&answer) {
            Ok(()) => {}
            // Control characters take six bytes in JSON.
            Err(_) => control.send(&Err(TemplateError::OutputTooLong {
                limit: paceline_cluster::LINE_BYTES_MAX,
            }))?,
        }
    }
}

fn handle_request(template: &mut Option<Here>, ask: ChildRequest) -> ChildResponse {
    match ask {
        ChildRequest::Load(source) => {
            *template = Some(Here::compile(&source)?);
            Ok(String::new())
        }
        ChildRequest::Render(job) => match template {
            Some(template) => template.render(job),
            None => Err(TemplateError::Ended {
                reason: "has no template".to_owned(),
            }),
        },
    }
}
