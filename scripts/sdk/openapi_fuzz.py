#!/usr/bin/env python3
"""schemathesis over a live server's OpenAPI document: a line per operation, `ok` or `FAILED`.

Usage: OPENAI_API_KEY=KEY [PACELINE_BINARY=PROGRAM] openapi_fuzz.py BASE_URL [MODEL]

Some hundred requests for each operation that asks the model, right and wrong by the document: none
may get a status of 500 or above, what is wrong must be refused and what is right answered, each
with the status, type, headers and body that the document says. Of the dialects beside OpenAI's the
document says the fields and not all that is in them: of these only the status is checked, and that
some requests are answered.

With MODEL the server is crates/serve/tests/api/standalone.rs: its model calls tools and fills holes,
and only the operations that need one of these are tested; without MODEL, all others. With
PACELINE_BINARY a server of a tiny encoder is started for the operations that make vectors.

schemathesis.toml has the checks and the seed, schemathesis_hooks.py keeps answers short. What
schemathesis prints goes to stderr; it has the requests that failed, as commands for curl. Ends with
1 when something failed.

Needs the packages of requirements.txt. `cargo xtask sdk` runs this.
"""

import collections
import contextlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import urllib.request
import xml.etree.ElementTree

HERE = pathlib.Path(__file__).resolve().parent
ENCODER = HERE.parents[1] / "tests-data/golden/encoder/bert-mean"
# Servers without keys take any.
KEY = os.environ.get("OPENAI_API_KEY") or "none"
# Some ten times what two cores take.
PATIENCE_S = 300
# Fewest right requests that an operation which asks the model must have answered, so that a run
# that tests refusals only does not pass. Half of what the seed gives.
FEWEST_ANSWERS = 12
# The same for operations of which only the status is checked.
FEWEST = {
    "POST /v1/responses": 12,
    "GET /v1/responses/{id}": 1,
    "DELETE /v1/responses/{id}": 1,
    "POST /infill": 12,
    "POST /v1/embeddings": 12,
    "POST /api/embed": 12,
    "POST /api/embeddings": 12,
}


def operations(url):
    """`METHOD PATH` of all that the document has, but for the document itself."""
    headers = {"Authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(f"{url}/openapi.json", headers=headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        paths = json.load(response)["paths"]
    every = {f"{method.upper()} {path}" for path, item in paths.items() for method in item}
    return every - {"GET /openapi.json"}


# Operations whose bodies the document describes to the end.
STRICT = r"^/($|health|metrics|v1/models|v1/chat/completions|v1/completions)"
# Operations whose answers depend on whether the model calls tools or fills holes.
SCRIPTED = r"^/(v1/responses|infill|v1/messages|api/chat)"
# Operations that make vectors.
VECTORS = r"^/(v1/embeddings|api/embed|api/embeddings)$"
STATUS = ["--checks", "not_a_server_error"]


def fuzz(url, folder, name, options):
    """Runs schemathesis; true when it found nothing."""
    environment = {
        **os.environ,
        "OPENAI_API_KEY": KEY,
        "PACELINE_FUZZ_LOG": str(folder / "statuses"),
        "PYTHONPATH": str(HERE),
        "PYTHONDONTWRITEBYTECODE": "1",
        "SCHEMATHESIS_HOOKS": "schemathesis_hooks",
    }
    command = [
        pathlib.Path(sys.executable).with_name("schemathesis"), "--config-file", str(HERE / "schemathesis.toml"),
        "run", f"{url}/openapi.json", "--report", "junit",
        "--report-junit-path", str(folder / name), *options,
    ]
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=sys.stderr, timeout=PATIENCE_S, check=False
    )
    return done.returncode == 0


def findings(report):
    """Per operation, what the report says against it, on one line."""
    cases = xml.etree.ElementTree.parse(report).iter("testcase")
    wrong = ("failure", "error")
    text = lambda one: " ".join((one.text or "").split())[:400]
    return {case.get("name"): [text(one) for one in case if one.tag in wrong] for case in cases}


@contextlib.contextmanager
def encoder(folder):
    """A server of a tiny encoder; gives its URL."""
    command = [os.environ["PACELINE_BINARY"], "up", "--no-beacons", "--port", "0", "--model", str(ENCODER)]
    environment = {**os.environ, "PACELINE_HOME": str(folder / "home")}
    server = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True)
    try:
        found = (re.search(r"http://[0-9.]+:[0-9]+", line) for line in server.stderr)
        url = next((one[0] for one in found if one), None)
        if url is None:
            raise RuntimeError("the server of the encoder ended")
        threading.Thread(target=server.stderr.read, daemon=True).start()
        yield url
    finally:
        server.terminate()
        server.wait(20)


def runs(url, folder, is_scripted):
    """Runs schemathesis over each kind of operation: whether it found nothing, its findings, and
    the operations that there are."""
    passed, found = True, {}
    every = {one for one in operations(url)
             if bool(re.match(SCRIPTED, one.split(" ")[1])) == is_scripted}

    def run(url, name, *options):
        nonlocal passed
        passed = fuzz(url, folder, name, options) and passed
        found.update(findings(folder / name))

    if is_scripted:
        run(url, "scripted.xml", "--include-path-regex", SCRIPTED, *STATUS)
    else:
        run(url, "strict.xml", "--include-path-regex", STRICT)
        run(url, "loose.xml", "--exclude-path-regex", f"{STRICT}|{SCRIPTED}|openapi", *STATUS)
    if "PACELINE_BINARY" in os.environ:
        with encoder(folder) as vectors:
            run(vectors, "vectors.xml", "--include-path-regex", VECTORS, *STATUS)
            every |= {one for one in operations(vectors) if re.match(VECTORS, one.split(" ")[1])}
    return passed, found, every


def fewest(operation):
    """How many requests an operation must have answered."""
    method, path = operation.split(" ")
    if re.match(STRICT, path):
        return FEWEST_ANSWERS if method == "POST" else 1
    return FEWEST.get(operation, 0)


def main():
    """Runs it and counts."""
    url, is_scripted = sys.argv[1].rstrip("/"), len(sys.argv) > 2
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        passed, found, every = runs(url, folder, is_scripted)
        lines = (folder / "statuses").read_text(encoding="utf-8").splitlines()
    statuses = collections.Counter(tuple(line.split("\t")) for line in lines)
    named = False
    for operation in sorted(every):
        asked = sum(count for (name, _), count in statuses.items() if name == operation)
        answered = statuses[(operation, "200")]
        wrong = found.get(operation, ["was not tested"])
        if answered < fewest(operation):
            wrong.append(f"{answered} of {asked} requests were answered")
        failures = [f"{count} of status {status}" for (name, status), count in statuses.items()
                    if name == operation and status >= "500" and status != "501"]
        if wrong := wrong + failures:
            named = True
            print(f"FAILED {operation}: {'; '.join(wrong)}")
        else:
            print(f"ok {operation} ({asked} requests, {answered} answered)")
    if not passed and not named:
        print("FAILED schemathesis: it ended badly and says nothing against an operation")
    return 0 if passed and not named else 1


if __name__ == "__main__":
    sys.exit(main())
