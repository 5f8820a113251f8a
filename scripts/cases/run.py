#!/usr/bin/env python3
"""Inputs that users of other programs reported as failures, tried on this one.

Usage: run.py PACELINE [NAME...]

Prints `ok CASE` or `FAILED CASE: why` a line and ends with 1 when a case failed. Cases whose name
begins with one of NAME run, or all. PACELINE_MODEL names SmolLM2's file for the cases that need it;
without it these are skipped. `cargo xtask sdk` runs this.

A case is a table of a TOML file beside this script:

    [[case]]
    name = "BR-07 other seeds stay reproducible"
    post = "/v1/completions"                      a path, or several
    each = ["7", "-2"]                            what @ stands for, one request each
    body = '{"model":"t1","prompt":"a","seed":@}' as sent; without it the request is a GET
    check = "a.status == 200"                     an expression a line: all must hold

`run` in place of `post` is a command, or several. `files` has calls of the functions of files.py.
`hub` has the files of a repository `o/r`, whose URL is @hub in `env`; @url is the server. `head` has
headers. A check sees `r`, all answers (of all paths, and in each of all bodies), and `a`, the first.
Names begin with the report's number. models.toml has the models of the server.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
import urllib.error
import urllib.request
from pathlib import Path

import files

HERE = Path(__file__).parent
# A case takes a second on a busy machine.
PATIENCE_S = 60
# Loading SmolLM2 and the tiny models takes some seconds; under load ten times of it.
START_S = 120
MODEL = os.environ.get("PACELINE_MODEL")


class Answer:
    """What came back over HTTP."""

    def __init__(self, status, head, body):
        self.status, self.head, self.text = status, head, body.decode("utf-8", "replace")

    @property
    def json(self):
        return json.loads(self.text)

    @property
    def chunks(self):
        """The objects of a stream: server-sent events, or a line each."""
        lines = [line.removeprefix("data:").strip() for line in self.text.splitlines()
                 if line.startswith(("data:", "{"))]
        return [json.loads(line) for line in lines if line != "[DONE]"]

    def __repr__(self):
        return f"{self.status} {self.text[:400]}"


class Run:
    """What a command left."""

    def __init__(self, done):
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr

    @property
    def json(self):
        return json.loads(self.out)

    @property
    def said(self):
        return self.out + self.err

    def __repr__(self):
        return f"exit code {self.code}\n{self.out[-300:]}\n{self.err[-400:]}"


class Server:
    """`paceline up` with the models of models.toml, in the current folder."""

    def __init__(self, paceline):
        models = tomllib.loads((HERE / "models.toml").read_text())["model"]
        for model in models:
            make(model["files"])
        names = [f"./{model['name']}" for model in models] + ([MODEL] if MODEL else [])
        command = [paceline, "up", *names, "--port", "0", "--control-port", "0", "--discovery",
                   "none", "--threads", "1", "--prefix-cache", "off"]
        self.log = open("server.log", "wb")
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)
        self.url = self.address()

    def address(self):
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            if found := re.search(r"listening on (\S+)", Path("server.log").read_text()):
                return found[1]
            time.sleep(0.02)
        raise SystemExit("FAILED server: " + Path("server.log").read_text()[-2000:])

    def ask(self, path, body, head):
        """One request; `body` is the text that is sent."""
        head = {"Content-Type": "application/json"} | head
        request = urllib.request.Request(
            self.url + path, body if body is None else body.encode(), head)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return Answer(answer.status, answer.headers, answer.read())
        except urllib.error.HTTPError as error:
            return Answer(error.code, error.headers, error.read())

    def end(self):
        self.process.terminate()
        self.process.wait(30)


def make(recipes):
    """Makes files by calls of the functions of files.py."""
    for recipe in recipes:
        eval(recipe, vars(files) | {"HERE": HERE})


def variants(case, field, url):
    """The texts of `field`, one for each value of `each` in the place of `@`."""
    texts = case[field] if isinstance(case[field], list) else [case[field]]
    texts = [text.replace("@url", url) for text in texts]
    return [text.replace("@", value) for value in case.get("each", ["@"]) for text in texts]


def outcomes(case, server, paceline):
    """What came of all requests, or commands."""
    make(case.get("files", []))
    environment = os.environ | {
        k: v.replace("@hub", case.get("hub_url", "")) for k, v in case.get("env", {}).items()}
    if "run" in case:
        return [Run(subprocess.run(
            [paceline, *shlex.split(text)], env=environment, timeout=PATIENCE_S, text=True,
            capture_output=True)) for text in variants(case, "run", server.url)]
    bodies = variants(case, "body", server.url) if "body" in case else [None]
    paths = case["post"] if isinstance(case["post"], list) else [case["post"]]
    return [server.ask(path, body, case.get("head", {})) for path in paths for body in bodies]


def read_tokens(usage):
    """Prompt tokens of an answer by Anthropic's API, cached ones too."""
    return usage["input_tokens"] + usage["cache_read_input_tokens"]


def attempt(case, server, paceline):
    """Why the case fails, if it does."""
    if "hub" in case:
        case["hub_url"] = files.hub(*case["hub"])
    got = outcomes(case, server, paceline)
    names = {"r": got, "a": got[0], "json": json, "re": re, "Path": Path,
             "read": read_tokens}
    for check in case["check"].strip().splitlines():
        if not eval(check, names):
            return f"{check} -- {got}"
    return None


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    paceline, wanted = os.path.abspath(sys.argv[1]), tuple(sys.argv[2:])
    cases = [case for path in sorted(HERE.glob("*.toml"))
             for case in tomllib.loads(path.read_text()).get("case", [])
             if case["name"].startswith(wanted or "")]
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["PACELINE_HOME"] = f"{folder}/home"
        os.environ.pop("PACELINE_MODEL", None)
        server = Server(paceline)
        try:
            for case in cases:
                failed += report(case, server, paceline)
        finally:
            server.end()
    sys.exit(1 if failed else 0)


def report(case, server, paceline):
    """Runs one case and prints its line; whether it failed."""
    if case.get("needs_smollm2") and not MODEL:
        print(f"SKIPPED {case['name']}: PACELINE_MODEL is not set", flush=True)
        return False
    began = time.monotonic()
    try:
        why = attempt(case, server, paceline)
    except Exception:
        why = traceback.format_exc(limit=-1)
    if why:
        print(f"FAILED {case['name']}: {' '.join(why.split())}", flush=True)
    else:
        print(f"ok {case['name']} ({time.monotonic() - began:.1f} s)", flush=True)
    return bool(why)


if __name__ == "__main__":
    main()
