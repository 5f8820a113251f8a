#!/usr/bin/env python3
"""instructor over OpenAI's client: an answer of a schema in two of its modes, and one in pieces.

Usage: instructor_python.py BASE_URL MODEL

The server is crates/serve/tests/api/standalone.rs, which says `{"name": "Ada", "age": 36}` where it
is held to a schema. One line per case. Needs the packages of requirements-instructor.txt.
`cargo xtask sdk --long` runs this.
"""

import sys

import library_cases as cases

import instructor
import openai
import pydantic


class Person(pydantic.BaseModel):
    """What the answer must be."""

    name: str
    age: int


def ask(client, model, mode):
    """The answer to a question, in a mode of instructor."""
    client = instructor.from_openai(client, mode=mode)
    person = client.chat.completions.create(
        model=model, response_model=Person, max_retries=0,
        messages=[{"role": "user", "content": "Who?"}])
    cases.equal((person.name, person.age), ("Ada", 36), "answer")


def pieces(client, model):
    """An answer that fills while it comes."""
    client = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    last = None
    for last in client.chat.completions.create_partial(
            model=model, response_model=Person, max_retries=0,
            messages=[{"role": "user", "content": "Who?"}]):
        pass
    cases.equal((last.name, last.age), ("Ada", 36), "answer")


def main():
    """Runs all cases."""
    url, model = cases.arguments()
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    return cases.run({
        "json-schema": lambda: ask(client, model, instructor.Mode.JSON_SCHEMA),
        "json": lambda: ask(client, model, instructor.Mode.JSON),
        "partial": lambda: pieces(client, model),
    })


if __name__ == "__main__":
    sys.exit(main())
