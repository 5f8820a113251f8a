#!/usr/bin/env python3
"""LiteLLM by its prefixes for OpenAI, Anthropic and Ollama: a chat, a stream, a tool there and back.

Usage: litellm_python.py BASE_URL MODEL

`ollama/` asks /api/generate, which has no tools; `ollama_chat/` asks /api/chat. The server is
crates/serve/tests/api/standalone.rs. One line per case. Needs the packages of
requirements-litellm.txt. `cargo xtask sdk --long` runs this.
"""

import json
import sys

import library_cases as cases

import litellm

litellm.telemetry = False


class Door:
    """The server, by a prefix."""

    def __init__(self, prefix, base, model):
        self.model, self.base = f"{prefix}/{model}", base

    def ask(self, messages, **more):
        """An answer, or the pieces of one."""
        return litellm.completion(model=self.model, api_base=self.base, api_key="none", max_tokens=99,
                                  messages=messages, num_retries=0, **more)


def said(text):
    """A conversation that begins."""
    return [{"role": "user", "content": text}]


def chat(door):
    """An answer at once, with its count of tokens."""
    answer = door.ask(said(cases.HELLO))
    cases.equal(answer.choices[0].message.content, cases.HELLOED, "answer")
    cases.equal(answer.usage.completion_tokens > 0, True, "tokens")


def stream(door):
    """An answer in pieces."""
    pieces = door.ask(said(cases.HELLO), stream=True)
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    cases.equal(text, cases.HELLOED, "answer")


def call(door):
    """A call, and the answer to its result."""
    turns = said(cases.QUESTION)
    message = door.ask(turns, tools=[cases.FUNCTION]).choices[0].message
    calls = [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or []]
    cases.equal(calls, [("look", cases.ARGUMENTS)], "calls")
    turns += [message.model_dump(exclude_none=True),
              {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "21"}]
    second = door.ask(turns, tools=[cases.FUNCTION]).choices[0].message.content
    cases.equal(second, cases.ANSWERED, "second answer")


def main():
    """Runs all cases."""
    url, model = cases.arguments()
    bases = {"openai": f"{url}/v1", "anthropic": url, "ollama": url, "ollama_chat": url}
    doors = {prefix: Door(prefix, base, model) for prefix, base in bases.items()}
    return cases.run({
        f"{prefix}-{kind.__name__}": lambda kind=kind, door=door: kind(door)
        for prefix, door in doors.items() for kind in (chat, stream, call)
        if (prefix, kind) != ("ollama", call)
    })


if __name__ == "__main__":
    sys.exit(main())
