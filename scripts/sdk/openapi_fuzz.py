#!/usr/bin/env python3
"""schemathesis over a live server's OpenAPI document: a line per operation, `ok` or `FAILED`.

Usage: OPENAI_API_KEY=KEY openapi_fuzz.py BASE_URL

Some hundred requests for each operation that asks the model, right and wrong by the document: none
may get a status of 500 or above, what is wrong must be refused and what is right answered, each
with the status, type, headers and body that the document says. Of the dialects beside OpenAI's the
document says the fields and not all that is in them: of these only the status is checked.
schemathesis.toml has the checks and the seed, schemathesis_hooks.py keeps answers short. What schemathesis prints goes to stderr; it has
the requests that failed, as commands for curl. Ends with 1 when something failed.

Needs the packages of requirements.txt. `cargo xtask sdk` runs this.
"""

import collections
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import urllib.request
import xml.etree.ElementTree

HERE = pathlib.Path(__file__).resolve().parent
# Some ten times what two cores take.
PATIENCE_S = 300
# Fewest right requests that an operation which asks the model must have answered, so that a run
# that tests refusals only does not pass. Half of what the seed gives.
FEWEST_ANSWERS = 12


def operations(url):
    """`METHOD PATH` of all that the document has, but for the document itself."""
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    request = urllib.request.Request(f"{url}/openapi.json", headers=headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        paths = json.load(response)["paths"]
    every = {f"{method.upper()} {path}" for path, item in paths.items() for method in item}
    return every - {"GET /openapi.json"}


# Operations whose bodies the document describes to the end.
STRICT = r"^/($|health|metrics|v1/models|v1/chat/completions|v1/completions)"


def fuzz(url, folder, name, options):
    """Runs schemathesis; true when it found nothing."""
    environment = {
        **os.environ,
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


def main():
    """Runs it and counts."""
    url = sys.argv[1].rstrip("/")
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        passed = fuzz(url, folder, "strict.xml", ["--include-path-regex", STRICT])
        loose = ["--exclude-path-regex", STRICT + "|openapi", "--checks", "not_a_server_error"]
        passed = fuzz(url, folder, "loose.xml", loose) and passed
        found = findings(folder / "strict.xml") | findings(folder / "loose.xml")
        lines = (folder / "statuses").read_text(encoding="utf-8").splitlines()
    statuses = collections.Counter(tuple(line.split("\t")) for line in lines)
    named = False
    for operation in sorted(operations(url)):
        asked = sum(count for (name, _), count in statuses.items() if name == operation)
        answered = statuses[(operation, "200")]
        wrong = found.get(operation, ["was not tested"])
        is_strict = re.match(STRICT, operation.split(" ")[1])
        fewest = FEWEST_ANSWERS if operation.startswith("POST") else 1
        if answered < (fewest if is_strict else 0):
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
