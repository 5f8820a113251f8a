//! launchd: property list and `launchctl`.

use std::path::{Path, PathBuf};

use super::{Error, Folders, STOP_S, Scope, Service, State, ask};

const LABEL: &str = "net.paceline.node";

pub(super) fn path(scope: Scope, folders: &Folders) -> PathBuf {
    let folder = match scope {
        Scope::User => folders.home.join("Library/LaunchAgents"),
        Scope::System => folders.root.join("Library/LaunchDaemons"),
    };
    folder.join(format!("{LABEL}.plist"))
}

/// The property list. launchd starts the node again when it fails, not when it ended by itself.
pub(super) fn plist(service: &Service) -> String {
    let program = service.program.to_string_lossy();
    let words = std::iter::once(&*program).chain(service.arguments.iter().map(String::as_str));
    let words: String = words
        .map(|word| format!("    <string>{}</string>\n", escaped(word)))
        .collect();
    let home = service.home.as_ref().map(|home| {
        let value = escaped(&home.to_string_lossy());
        format!(
            "  <key>EnvironmentVariables</key>\n  <dict>\n    \
             <key>PACELINE_HOME</key><string>{value}</string>\n  </dict>\n"
        )
    });
    format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n\
         <!DOCTYPE plist PUBLIC \"-//Apple//DTD PLIST 1.0//EN\" \
         \"http://www.apple.com/DTDs/PropertyList-1.0.dtd\">\n\
         <plist version=\"1.0\">\n<dict>\n  \
         <key>Label</key><string>{LABEL}</string>\n  \
         <key>ProgramArguments</key>\n  <array>\n{words}  </array>\n{}  \
         <key>RunAtLoad</key><true/>\n  \
         <key>KeepAlive</key><dict><key>SuccessfulExit</key><false/></dict>\n  \
         <key>ExitTimeOut</key><integer>{STOP_S}</integer>\n  \
         <key>ProcessType</key><string>Interactive</string>\n\
         </dict>\n</plist>\n",
        home.unwrap_or_default(),
    )
}

fn escaped(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    text.replace('>', "&gt;").replace('"', "&quot;")
}

/// The launchctl domain of the services of a scope.
fn domain(scope: Scope) -> String {
    match scope {
        Scope::User => format!("gui/{}", rustix::process::getuid().as_raw()),
        Scope::System => "system".to_owned(),
    }
}

pub(super) fn start(scope: Scope, unit: &Path) -> Result<(), Error> {
    // Stops an earlier one first; it is no failure if there is none.
    let _ = stop(scope, unit);
    let file = unit.to_string_lossy();
    ask("launchctl", &["bootstrap", &domain(scope), &file], unit).map(drop)
}

pub(super) fn stop(scope: Scope, unit: &Path) -> Result<(), Error> {
    let target = format!("{}/{LABEL}", domain(scope));
    ask("launchctl", &["bootout", &target], unit).map(drop)
}

pub(super) fn state(scope: Scope, unit: &Path) -> Result<State, Error> {
    let target = format!("{}/{LABEL}", domain(scope));
    ask("launchctl", &["print", &target], unit).map(|said| read(&said))
}

/// Reads `name = value` lines of `launchctl print`.
fn read(said: &str) -> State {
    let value = |name: &str| {
        let lines = said.lines().filter_map(|line| line.split_once(" = "));
        let mut found = lines.filter(|(key, _)| key.trim() == name);
        found.next().map(|(_, value)| value.trim().to_owned())
    };
    State {
        state: value("state").unwrap_or_else(|| "unknown".to_owned()),
        pid: value("pid").and_then(|pid| pid.parse().ok()),
        // launchd bootstraps the units in these folders again at login or boot.
        enabled: true,
    }
}

#[cfg(test)]
mod tests {
    use super::super::Manager;
    use super::super::tests::service;
    use super::*;

    #[test]
    fn markup_in_a_path_stays_text() {
        let text = plist(&service(Manager::Launchd, Scope::User));
        assert!(
            text.contains("<string>/opt/a &quot;b&quot; &amp; 100%/paceline</string>"),
            "{text}"
        );
        assert!(
            text.contains("<key>PACELINE_HOME</key><string>/data/my models</string>"),
            "{text}"
        );
    }

    #[test]
    fn what_launchctl_prints_is_read() {
        let said = "gui/501/net.paceline.node = {\n\tstate = running\n\tpid = 77\n}\n";
        let state = read(said);
        assert_eq!((state.state.as_str(), state.pid), ("running", Some(77)));
    }
}
