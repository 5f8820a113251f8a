"""What the programs beside this file share that drive client libraries: a home of their own, and
cases, of which each prints one line, `ok NAME` or `FAILED NAME: why`.

Import it first: libraries read their environment when they are imported.
"""

import faulthandler
import os
import sys
import tempfile
import time
import traceback

PATIENCE_S = 120
HOME = tempfile.TemporaryDirectory()
# No telemetry, no traces, and no list of prices from the network.
QUIET = {
    "HOME": HOME.name, "DO_NOT_TRACK": "1", "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}
os.environ.update(QUIET)

ARGUMENTS = {"city": "Köln", "days": 3}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
          "required": ["city"]}
FUNCTION = {"type": "function", "function": {
    "name": "look", "description": "Looks.", "parameters": SCHEMA}}
HELLO, HELLOED = "Say hello", "Hello, world."
QUESTION, ANSWERED = "How warm is it in Köln?", "It has 21 degrees."


def equal(got, expected, what):
    """Fails unless both are equal."""
    if got != expected:
        raise AssertionError(f"{what}: got {got!r}, expected {expected!r}")


def run(cases):
    """Runs the functions of `cases`, by name; 1 when one failed."""
    faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
    failed = 0
    for name, function in cases.items():
        start = time.monotonic()
        try:
            function()
            print(f"ok {name} ({time.monotonic() - start:.1f} s)", flush=True)
        except Exception as error:  # pylint: disable=broad-except
            failed += 1
            why = " ".join(f"{type(error).__name__}: {error}".split())
            print(f"FAILED {name}: {why}", flush=True)
            traceback.print_exc()
    return int(failed > 0)


def arguments():
    """The server's URL and the model's name."""
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} BASE_URL MODEL")
    return sys.argv[1].rstrip("/"), sys.argv[2]
