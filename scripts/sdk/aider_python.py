#!/usr/bin/env python3
"""aider by OpenAI's dialect: a message and its answer, streamed and at once.

Usage: aider_python.py BASE_URL MODEL

The server is crates/serve/tests/api/standalone.rs. One line per case. Needs the packages of
requirements-aider.txt. `cargo xtask sdk --long` runs this.
"""

import pathlib
import subprocess
import sys

import library_cases as cases

# Nothing is asked of the network but the server, and nothing of whoever sits there.
QUIET = ["--no-git", "--yes-always", "--no-check-update", "--no-show-model-warnings",
         "--no-show-release-notes", "--analytics-disable", "--no-pretty", "--no-detect-urls"]


def ask(url, model, *more):
    """What aider prints."""
    program = pathlib.Path(sys.executable).with_name("aider")
    command = [program, "--model", f"openai/{model}", "--openai-api-base", f"{url}/v1",
               "--openai-api-key", "none", *QUIET, *more, "--message", cases.HELLO]
    done = subprocess.run(command, cwd=cases.HOME.name, stdin=subprocess.DEVNULL, capture_output=True,
                          text=True, errors="replace", timeout=cases.PATIENCE_S, check=False)
    said = done.stdout + done.stderr
    if cases.HELLOED not in said:
        raise AssertionError(f"no {cases.HELLOED!r} in {said[-400:]!r}")


def main():
    """Runs all cases."""
    url, model = cases.arguments()
    return cases.run({
        "stream": lambda: ask(url, model),
        "chat": lambda: ask(url, model, "--no-stream"),
    })


if __name__ == "__main__":
    sys.exit(main())
