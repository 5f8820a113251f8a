//! systemd: unit text and `systemctl`.

use std::path::{Path, PathBuf};

use super::{Error, Folders, STOP_S, Scope, Service, State, ask};

const NAME: &str = "paceline.service";

pub(super) fn path(scope: Scope, folders: &Folders) -> PathBuf {
    match scope {
        Scope::User => folders.config.join("systemd/user").join(NAME),
        Scope::System => folders.root.join("etc/systemd/system").join(NAME),
    }
}

/// The unit. A service of the system gets a user of its own from systemd and keeps its files in
/// `/var/lib/paceline`.
pub(super) fn unit(service: &Service) -> String {
    let words = service.arguments.iter().map(|word| quoted(word));
    let command: Vec<String> = std::iter::once(quoted(&service.program.to_string_lossy()))
        .chain(words)
        .collect();
    let home = service.home.as_ref();
    let home = home.map(|home| setting("PACELINE_HOME", &home.to_string_lossy()));
    let (own, target) = match service.scope {
        Scope::User => (home.unwrap_or_default(), "default.target"),
        Scope::System => (
            home.unwrap_or_else(|| {
                "DynamicUser=yes\nStateDirectory=paceline\nEnvironment=PACELINE_HOME=%S/paceline\n"
                    .to_owned()
            }),
            "multi-user.target",
        ),
    };
    format!(
        "# Written by `paceline service install`; `paceline service remove` removes it.\n\
         [Unit]\n\
         Description=paceline: this machine's node\n\
         Wants=network-online.target\n\
         After=network-online.target\n\
         \n\
         [Service]\n\
         ExecStart={}\n\
         {own}\
         Restart=on-failure\n\
         RestartSec=1\n\
         KillMode=mixed\n\
         TimeoutStopSec={STOP_S}\n\
         NoNewPrivileges=yes\n\
         \n\
         [Install]\n\
         WantedBy={target}\n",
        command.join(" "),
    )
}

fn setting(name: &str, value: &str) -> String {
    format!(
        "Environment={}\n",
        quoted(&format!("{name}={value}")).replace("$$", "$")
    )
}

/// A word of a command line, as systemd.syntax(7) and systemd.service(5) want it: `%` and `$` mean
/// something there, quotes and backslashes as in C.
fn quoted(word: &str) -> String {
    let mut out = String::from("\"");
    for sign in word.chars() {
        match sign {
            '"' | '\\' => out.extend(['\\', sign]),
            '%' | '$' => out.extend([sign, sign]),
            '\n' => out.push_str("\\n"),
            _ => out.push(sign),
        }
    }
    out.push('"');
    out
}

fn systemctl(scope: Scope, words: &[&str], unit: &Path) -> Result<String, Error> {
    let scope = match scope {
        Scope::User => "--user",
        Scope::System => "--system",
    };
    let all: Vec<&str> = std::iter::once(scope)
        .chain(words.iter().copied())
        .collect();
    ask("systemctl", &all, unit)
}

pub(super) fn start(scope: Scope, unit: &Path) -> Result<(), Error> {
    systemctl(scope, &["daemon-reload"], unit)?;
    systemctl(scope, &["enable", NAME], unit)?;
    systemctl(scope, &["restart", NAME], unit).map(drop)
}

pub(super) fn stop(scope: Scope, unit: &Path) -> Result<(), Error> {
    systemctl(scope, &["disable", "--now", NAME], unit).map(drop)
}

pub(super) fn state(scope: Scope, unit: &Path) -> Result<State, Error> {
    let asked = "--property=ActiveState,MainPID,UnitFileState";
    systemctl(scope, &["show", NAME, asked], unit).map(|said| read(&said))
}

/// Reads `NAME=VALUE` lines of `systemctl show`.
fn read(said: &str) -> State {
    let value = |name: &str| {
        let line = said.lines().filter_map(|line| line.split_once('='));
        let mut found = line.filter(|(key, _)| *key == name);
        found.next().map(|(_, value)| value.trim().to_owned())
    };
    State {
        state: value("ActiveState").unwrap_or_else(|| "unknown".to_owned()),
        pid: value("MainPID")
            .and_then(|pid| pid.parse().ok())
            .filter(|pid| *pid > 0),
        enabled: value("UnitFileState").is_some_and(|state| state == "enabled"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Manager;
    use super::super::tests::service;
    use super::*;

    #[test]
    fn words_mean_themselves() {
        let text = unit(&service(Manager::Systemd, Scope::User));
        let start = r#"ExecStart="/opt/a \"b\" & 100%%/paceline" "up" "smollm2" "--alias" "$$x""#;
        assert!(text.contains(start), "{text}");
        assert!(
            text.contains("Environment=\"PACELINE_HOME=/data/my models\"\n"),
            "{text}"
        );
        assert!(text.contains("WantedBy=default.target"), "{text}");
    }

    #[test]
    fn a_service_of_the_system_is_nobodys_process() {
        let mut system = service(Manager::Systemd, Scope::System);
        system.home = None;
        let text = unit(&system);
        assert!(
            text.contains("DynamicUser=yes\nStateDirectory=paceline\n"),
            "{text}"
        );
        assert!(text.contains("WantedBy=multi-user.target"), "{text}");
    }

    #[test]
    fn what_systemctl_shows_is_read() {
        let state = read("ActiveState=active\nMainPID=42\nUnitFileState=enabled\n");
        let expected = State {
            state: "active".to_owned(),
            pid: Some(42),
            enabled: true,
        };
        assert_eq!(state, expected);
        assert_eq!(read("MainPID=0\n").pid, None);
    }
}
