//! The receiver's end: checks an offered release and installs it on this machine.

use std::io::{self, BufRead, Read, Write};
use std::path::Path;

use paceline_cluster::nodes::agent::local;
use paceline_store::Cancel;
use paceline_store::release::{self, Prefix, Release, ReleaseKey, ReleaseSource, SignedSums};
use serde_json::json;

use super::{
    Error, FromReceiver, MESSAGES, MachineAbout, RESTART, SILENCE_MAX, ToReceiver, read_line,
    write_line,
};

/// Most bytes of an archive: ten times those of a release with MLX's layer.
const ARCHIVE_BYTES_MAX: u64 = 1 << 30;

/// The machine that a receiver may change.
#[derive(Clone, Copy, Debug)]
pub struct ReceiverSettings<'a> {
    /// The program that this machine's node executes.
    pub program: &'a Path,
    /// Paceline's files, with the node's socket.
    pub home: &'a Path,
    pub version: release::Version,
}

/// Serves one leader until its input ends.
///
/// # Errors
/// The connection is lost. A refused release is none: the leader gets the reason.
pub fn receive(
    settings: ReceiverSettings<'_>,
    input: &mut impl BufRead,
    output: &mut impl Write,
) -> io::Result<()> {
    let installation = installation(settings.program);
    let about = MachineAbout {
        messages: MESSAGES,
        version: settings.version.to_string(),
        platform: release::platform(),
        problem: installation.as_ref().err().cloned(),
    };
    write_line(&mut *output, &FromReceiver::About(about))?;
    let Ok(installation) = installation else {
        return Ok(());
    };
    loop {
        match read_line(input) {
            Ok(ToReceiver::Restart) => {
                return match restart(settings.home, output) {
                    Ok(()) => Ok(()),
                    Err(reason) => write_line(output, &FromReceiver::Failed(reason)),
                };
            }
            Ok(ToReceiver::Offer {
                sums,
                signature,
                bytes,
                from,
            }) => {
                let offer = (&SignedSums { sums, signature }, ReleaseSource::from(&*from));
                let mut archive = input.take(bytes.min(ARCHIVE_BYTES_MAX));
                let installed = install(settings, &installation, offer, &mut archive);
                // A leader that still sends would not read the reason.
                io::copy(&mut archive, &mut io::sink())?;
                match installed {
                    Ok(()) => write_line(&mut *output, &FromReceiver::Installed)?,
                    Err(error) => {
                        return write_line(output, &FromReceiver::Failed(error.to_string()));
                    }
                }
            }
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            Err(error) => return Err(error),
        }
    }
}

/// The installation of a program and its key, or why other machines cannot upgrade it.
fn installation(program: &Path) -> Result<(Prefix, ReleaseKey), String> {
    let prefix = Prefix::of_program(program).map_err(|error| error.to_string())?;
    let key = prefix.key().map_err(|error| error.to_string())?;
    let key = key.ok_or("its installation has no release key: upgrade it on that machine")?;
    let writable = prefix.check_writable();
    writable.map_err(|error| format!("its node may not replace its program: {error}"))?;
    Ok((prefix, key))
}

fn install(
    settings: ReceiverSettings<'_>,
    (prefix, key): &(Prefix, ReleaseKey),
    (texts, from): (&SignedSums, ReleaseSource),
    archive: &mut impl Read,
) -> Result<(), Error> {
    let release = Release::checked(texts, Some(key))?;
    let (offered, file) = release.archive(&release::platform())?;
    if offered < settings.version {
        return Err(Error::Older {
            machine: "this machine".to_owned(),
            installed: settings.version,
            offered,
        });
    }
    let failed = |source| release::Error::File {
        path: settings.home.to_owned(),
        source,
    };
    let mut copy = tempfile::NamedTempFile::new_in(settings.home).map_err(failed)?;
    io::copy(archive, &mut copy).map_err(failed)?;
    file.check(copy.path(), &Cancel::default())?;
    Ok(prefix.install(copy.path(), offered, &from)?)
}

/// Has the node drain and restart; returns the reason if it does not.
fn restart(home: &Path, output: &mut impl Write) -> Result<(), String> {
    let asked = local::ask(home, RESTART, json!({}), SILENCE_MAX, |_| {
        // A lost leader does not stop the restart.
        let _ = write_line(&mut *output, &FromReceiver::Draining);
    });
    asked.map(drop).map_err(|error| error.to_string())
}
