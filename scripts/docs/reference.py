"""Makes docs/reference out of the definitions themselves, or checks that it is what they say.

    python scripts/docs/reference.py --binary PACELINE --model SMOLLM2 [--python PYTHON] [--write]

- `commands.md`: the help of every command, from the program;
- `families.md`: what is supported for each model family, from `paceline models --families --json`;
- `http.md`: paths and fields of the HTTP API, from `/openapi.json` of a server with SmolLM2;
- `python.md`: the package for Python, from its signatures and docstrings, by PYTHON that has the wheel.

Without `--write`, prints `ok NAME` or `FAILED NAME: why` for each page.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import threading
import urllib.request
from pathlib import Path

from tutorials import stock

PAGES = Path(__file__).resolve().parents[2] / "docs/reference"

AGAIN = "Made by `cargo xtask docs --write`; do not edit."

#: Seconds until a server answers, and for a program.
LIMIT = 120


def say(*command: str | Path, **options) -> str:
    done = subprocess.run([str(word) for word in command], text=True, capture_output=True, timeout=LIMIT,
                          stdin=subprocess.DEVNULL, **options)
    assert done.returncode == 0, f"{command[0]}: {done.stderr.strip()[-600:]}"
    return done.stdout


# Commands.

def commands(binary: Path) -> str:
    """A section for each command that the program's help lists, in that order.

    An option that an earlier command has with the same text, of more than five words, is only named.
    """
    text = ["# Commands", "", AGAIN, "Every command has `--help`.", ""]
    first: dict[str, str] = {}
    for words in walk(binary, []):
        title = " ".join(["paceline", *words])
        shown = plain(say(binary, *words, "--help"))
        shown, again = without_known(without_logs(shown) if words else shown, title, first)
        text += [f"{'##' if len(words) < 2 else '###'} {title}", "", "```text", *shown, "```", ""]
        for earlier, names in again.items():
            text += textwrap.wrap(f"As for `{earlier}`: {', '.join(f'`{name}`' for name in names)}.", 100,
                                  break_on_hyphens=False)
            text.append("")
    return "\n".join(text)


def without_known(lines: list[str], title: str, first: dict[str, str]) -> tuple[list[str], dict[str, list[str]]]:
    """Without `--help` and the options that `first` has of earlier commands; their names by command."""
    kept: list[str] = []
    again: dict[str, list[str]] = {}
    for line in lines:
        option = re.match(r"  .{0,6}?(--[\w-]+)(.*?)  +(\S.*)", line)
        if not option:
            kept.append(line)
        elif option[1] != "--help":
            short = len(option[3].split()) <= 5
            known = title if short else first.setdefault(" ".join(option.groups()), title)
            if known == title:
                kept.append(line)
            else:
                again.setdefault(known, []).append(option[1])
    # Headings whose options are all gone.
    full = [line for line, after in zip(kept, [*kept[1:], ""]) if after or not line.endswith(":")]
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(full)).rstrip()
    return text.split("\n"), again


def walk(binary: Path, words: list[str]):
    yield words
    said = say(binary, *words, "--help")
    section = re.search(r"^Commands:\n((?:  .*\n|\n(?=  ))+)", said, re.MULTILINE)
    for name in re.findall(r"^  (\w[\w-]*)", section[1] if section else "", re.MULTILINE):
        if name != "help":
            yield from walk(binary, [*words, name])


def without_logs(lines: list[str]) -> list[str]:
    """Without the options of all commands about logs, which `paceline` itself shows."""
    kept, leaves = [], False
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if line and (indent <= 6 or line.lstrip().startswith("-")):
            leaves = line.lstrip().startswith("--log")
        if not leaves:
            kept.append(line)
    return kept


def plain(said: str) -> list[str]:
    return [line.rstrip() for line in said.strip().splitlines()]


# Families.

def families(binary: Path) -> str:
    """A row for each family."""
    rows = json.loads(say(binary, "models", "--families", "--json"))["families"]
    text = ["# Model families", "", AGAIN, "Log-probabilities of each family were compared with those of the",
            "program in the last column.", "",
            "| models | names in files | engines | splits | drafts | training | pictures | checked by |",
            "|---|---|---|---|---|---|---|---|"]
    mark = {True: "yes", False: "-"}
    for row in rows:
        names = ", ".join(f"`{name}`" for name in row["names"])
        lists = [", ".join(row[column]) or "-" for column in ("engines", "splits")]
        flags = [mark[row[column]] for column in ("drafts", "training", "pictures")]
        text.append(f"| {' | '.join([row['models'], names, *lists, *flags, row['checked']])} |")
    return "\n".join([*text, ""])


# HTTP.

def http(binary: Path, model: Path) -> str:
    with tempfile.TemporaryDirectory() as home:
        stock(Path(home), model)
        # What depends on the machine or the model is named here.
        server = subprocess.Popen(
            [binary, "up", "smollm2", "--port", "0", "--discovery", "none", "--control-port", "0",
             "--context", "2048", "--parallel", "4", "--threads", "1"],
            env={**os.environ, "PACELINE_HOME": home}, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            threading.Timer(LIMIT, server.kill).start()
            url = listening(server.stderr)
            threading.Thread(target=server.stderr.read, daemon=True).start()
            with urllib.request.urlopen(f"{url}/openapi.json", timeout=LIMIT) as answer:
                return page(json.load(answer))
        finally:
            server.kill()
            server.wait()


def listening(lines) -> str:
    said = []
    for line in lines:
        said.append(line)
        found = re.match(r"listening on (\S+)", line)
        if found:
            return found[1]
    raise AssertionError(f"the server does not listen: {''.join(said)[-600:]}")


def page(document: dict) -> str:
    text = ["# HTTP API", "", AGAIN, "", document["info"]["description"], "",
            "A server tells the same at `/openapi.json` for its own model. This page is for SmolLM2, which takes no tools.", "",
            "| method | path | |", "|---|---|---|"]
    for path, methods in document["paths"].items():
        for method, what in methods.items():
            text.append(f"| {method.upper()} | `{path}` | {cell(what.get('summary', ''))} |")
    text.append("")
    shown: set[str] = set()
    first: dict[str, str] = {}
    for path, methods in document["paths"].items():
        for method, what in methods.items():
            schema = body(what)
            name = schema.get("$ref", "").rpartition("/")[2]
            if not schema or name in shown:
                continue
            shown.add(name or path)
            schema = document["components"]["schemas"][name] if name else schema
            title = f"{method.upper()} {path}"
            text += [f"## {title}", "", *fields(schema, title, first), ""]
    for name, schema in document["components"]["schemas"].items():
        if name not in shown and schema.get("properties"):
            text += [f"## {name}", "", *fields(schema, name, first), ""]
    return "\n".join(text)


def body(what: dict) -> dict:
    content = what.get("requestBody", {}).get("content", {})
    return content.get("application/json", {}).get("schema", {})


def fields(schema: dict, title: str, first: dict[str, str]) -> list[str]:
    """A row for each field; a field that `first` has, with the same text, of an
    earlier table is only named, where that table has four such fields or more.
    """
    for part in schema.get("allOf", []) + schema.get("anyOf", []):
        if "properties" not in schema and "properties" in part:
            schema = {**part, "description": schema.get("description", part.get("description", ""))}
    text = [schema["description"], ""] if schema.get("description") else []
    wanted = schema.get("required", [])
    rows = [f"| `{name}`{' (required)' if name in wanted else ''} | {kind(field)} | "
            f"{cell(field.get('description', ''))} |"
            for name, field in schema.get("properties", {}).items()]
    known = [first.setdefault(row, title) for row in rows]
    again: dict[str, list[str]] = {}
    kept = []
    for row, earlier in zip(rows, known):
        if earlier == title or known.count(earlier) < 4:
            kept.append(row)
        else:
            again.setdefault(earlier, []).append(row.split("`")[1])
    table = ["| field | value | |", "|---|---|---|", *kept] if kept else []
    for earlier, names in again.items():
        names = ", ".join(f"`{name}`" for name in names)
        table += ["", *textwrap.wrap(f"As for {earlier}: {names}.", 100, break_on_hyphens=False)]
    return [*text, *table]


def kind(schema: dict) -> str:
    """What values a field takes, in a few words."""
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2]
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        return " or ".join(dict.fromkeys(kind(option) for option in options))
    types = schema.get("type", "any")
    name = " or ".join(types) if isinstance(types, list) else types
    if name == "array" and schema.get("items"):
        name = f"array of {kind(schema['items'])}"
    return name + bounds(schema)


def bounds(schema: dict) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    parts = [f"{word} {value}" for word, value in
             (("from", low), ("above", above), ("to", high), ("below", below)) if value is not None]
    return f", {' '.join(parts)}" if parts else ""


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


# Python.

#: Prints the page; runs in the Python that has the wheel.
DESCRIBE = r'''
import importlib, inspect, re
MODULES = ["paceline", "paceline.distributed", "paceline.errors"]

def heading(name, call):
    try:
        text = str(inspect.signature(call))
    except (TypeError, ValueError):
        text = ""
    # Annotations are kept as text: without their quotes.
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)
    return f"### `{name}{text.replace(chr(10), ' ')}`"

def doc(thing):
    return inspect.getdoc(thing) or ""

def members(kind):
    for name, value in vars(kind).items():
        if name.startswith("_"):
            continue
        call = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        if inspect.isfunction(call) or isinstance(value, property):
            yield name, value, call

def describe(name, thing):
    if not inspect.isclass(thing):
        return [heading(name, thing), "", doc(thing), ""]
    exception = issubclass(thing, BaseException)
    text = [f"### class `{name}`" if exception else heading(name, thing), "", doc(thing), ""]
    for member, value, call in [] if exception else members(thing):
        label = f"{name}.{member}"
        title = f"### `{label}`" if isinstance(value, property) else heading(label, call)
        text += ["#" + title, "", doc(call), ""]
    return text

for module in MODULES:
    loaded = importlib.import_module(module)
    print(f"## {module}\n\n{doc(loaded)}\n")
    for name in sorted(loaded.__all__, key=str.lower):
        thing = getattr(loaded, name)
        foreign = getattr(thing, "__module__", module) == "paceline.errors" != module
        if inspect.ismodule(thing) or foreign or not callable(thing):
            continue
        print("\n".join(describe(name, thing)))
'''


def python(program: Path) -> str:
    said = say(program, "-c", DESCRIBE, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"})
    return "\n".join(["# Python", "", AGAIN, "", tidy(said)])


def tidy(text: str) -> str:
    """Docstrings as Markdown: sections of arguments become blocks of text, spaces at ends go."""
    lines = [line.rstrip() for line in text.splitlines()]
    out: list[str] = []
    inside = False
    for at, line in enumerate(lines):
        starts = re.fullmatch(r"(Args|Returns|Raises|Attributes):", line) or line.startswith(">>> ")
        if starts and not inside:
            out.append("```text")
            inside = True
        ends = inside and line.startswith("#")
        if ends:
            while out[-1] == "":
                out.pop()
            out += ["```", ""]
            inside = False
        blank = line == "" and inside
        following = next((each for each in lines[at:] if each), "")
        section = re.fullmatch(r"(Args|Returns|Raises|Attributes):", following)
        if blank and not section and not following.startswith((" ", "#", ">>> ")):
            out.append("```")
            inside = False
        out.append(line)
    if inside:
        out.append("```")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out)).strip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--binary", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--python", type=Path)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    binary = arguments.binary.resolve()
    makers = {"commands": lambda: commands(binary), "families": lambda: families(binary),
              "http": lambda: http(binary, arguments.model.resolve())}
    if arguments.python:
        makers["python"] = lambda: python(arguments.python)
    else:
        print("SKIPPED docs/reference/python.md is fresh: no Python with the wheel")
    failed = False
    for name, make in makers.items():
        path, title = PAGES / f"{name}.md", f"docs/reference/{name}.md is fresh"
        made = make().rstrip() + "\n"
        if arguments.write:
            path.write_text(made)
        had = path.read_text() if path.exists() else ""
        if had == made:
            print(f"ok {title}", flush=True)
            continue
        failed = True
        unlike = list(difflib.unified_diff(had.splitlines(), made.splitlines(), lineterm="", n=0))[2:8]
        print(f"FAILED {title}: `cargo xtask docs --write` makes it anew: {' / '.join(unlike)}", flush=True)
    os._exit(failed)  # the timer of a server that has ended need not run out


if __name__ == "__main__":
    main()
