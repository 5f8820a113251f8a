#!/usr/bin/env python3
"""Coding agents that others wrote, against a scripted server.

Usage: agents.py BASE_URL MODEL PACELINE FOLDER

Claude Code, Codex (also with --oss, as of Ollama and of LM Studio) and OpenCode come from npm into
FOLDER, without their install scripts: a chat and a round trip of a tool each, started by
`paceline agent` where it knows them. The server is crates/serve/tests/api/standalone.rs, whose
"model" answers `Hello, world.`, or calls the tool that runs commands and tells what it printed. Each
runs in a home of its own, without updates and telemetry. One line per case: `ok NAME`,
`FAILED NAME: why`, or `SKIPPED NAME: why` where a program cannot be installed. Ends with 1 when a
case failed. `cargo xtask sdk --long` runs this.
"""

import os
import pathlib
import subprocess
import sys
import tempfile

PACKAGES = {
    "claude": ("@anthropic-ai/claude-code@2.1.330", "claude"),
    "codex": ("@openai/codex@0.169.0", "codex"),
    "opencode": ("opencode-ai@1.18.33", "opencode"),
}
INSTALL_S, PATIENCE_S = 600, 180
CHAT, CHATTED = "Say hello", "Hello, world."
TRIP, TRIPPED = "Please make a round trip", "Done: round-trip-42"
QUIET = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_TELEMETRY": "1",
    "DISABLE_AUTOUPDATER": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1", "NO_COLOR": "1",
    # Else Claude Code refuses to run tools unasked as root, which CI is.
    "IS_SANDBOX": "1",
}


def install(folder, package):
    """npm's package in `folder`; why not, if it cannot be had."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["npm", "install", "--prefix", str(folder), "--ignore-scripts", "--no-audit",
               "--no-fund", "--silent", package]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else " ".join(done.stderr.split())[:300] or "npm failed"


def binary(folder, program):
    """The native program in a platform's package, else npm's link to its wrapper."""
    names = {program, f"{program}.exe"}
    found = [p for p in (folder / "node_modules").rglob("*")
             if p.name in names and p.is_file() and ".bin" not in p.parts and p.stat().st_size > 1 << 20]
    return found[0] if found else folder / "node_modules/.bin" / program


class Agent:
    """A program, with how it is asked something without a terminal."""

    def __init__(self, name, words, by_paceline=True):
        self.name, self.words, self.by_paceline = name, words, by_paceline

    def ask(self, prompt, where):
        """What it prints."""
        url, _, paceline, path = where
        with tempfile.TemporaryDirectory() as home:
            work = pathlib.Path(home) / "work"
            work.mkdir()
            environment = {**os.environ, **QUIET, "HOME": home, "PATH": path,
                           "XDG_CONFIG_HOME": f"{home}/.config", "XDG_DATA_HOME": f"{home}/.local",
                           "CODEX_HOME": f"{home}/.codex", "CODEX_OSS_BASE_URL": f"{url}/v1"}
            os.mkdir(f"{home}/.codex")
            start = [paceline, "agent", "--url", url] if self.by_paceline else []
            command = [*start, *self.words, prompt]
            done = subprocess.run(
                command, cwd=work, env=environment, stdin=subprocess.DEVNULL, capture_output=True,
                text=True, errors="replace", timeout=PATIENCE_S, check=False)
        return done.stdout + done.stderr


def agents(model):
    """All, by the package that they need."""
    codex = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    oss = lambda provider: ["codex", *codex, "--oss", "--local-provider", provider, "-m", model]
    return [
        Agent("claude", ["claude", "-p", "--dangerously-skip-permissions"]),
        Agent("codex", ["codex", *codex]),
        Agent("codex-oss-ollama", oss("ollama"), False),
        Agent("codex-oss-lmstudio", oss("lmstudio"), False),
        Agent("opencode", ["opencode", "run"]),
    ]


def main():
    """Runs all and counts."""
    url, model, paceline, folder = sys.argv[1:5]
    folder = pathlib.Path(folder)
    failed, paths, missing = False, [os.environ["PATH"]], {}
    for name, (package, program) in PACKAGES.items():
        why = install(folder / name, package)
        if why is None:
            found = binary(folder / name, program)
            links = folder / name / "path"
            links.mkdir(exist_ok=True)
            link = links / program
            link.unlink(missing_ok=True)
            link.symlink_to(found.resolve())
            paths.insert(0, str(links))
        else:
            missing[name] = why
    where = (url.rstrip("/"), model, paceline, os.pathsep.join(paths))
    for agent in agents(model):
        why = missing.get(agent.name.split("-")[0])
        for kind, prompt, expected in [("chat", CHAT, CHATTED), ("tool", TRIP, TRIPPED)]:
            case = f"{agent.name}-{kind}"
            if why is not None:
                print(f"SKIPPED {case}: {why}", flush=True)
                continue
            try:
                said = agent.ask(prompt, where)
            except (OSError, subprocess.TimeoutExpired) as error:
                said = str(error)
            if expected in said:
                print(f"ok {case}", flush=True)
            else:
                failed = True
                print(said, file=sys.stderr)
                print(f"FAILED {case}: no {expected!r} in {' '.join(said.split())[-300:]!r}", flush=True)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
