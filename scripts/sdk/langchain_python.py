#!/usr/bin/env python3
"""LangChain's chat models of OpenAI, Ollama and Anthropic: a chat, a stream, a tool there and back.

Usage: langchain_python.py BASE_URL MODEL

The server is crates/serve/tests/api/standalone.rs. One line per case. Needs the packages of
requirements-langchain.txt. `cargo xtask sdk --long` runs this.
"""

import sys

import library_cases as cases

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI


@tool
def look(city: str, days: int = 1) -> str:
    """Looks."""
    return f"{city} {days}"


def chat(model):
    """An answer at once."""
    said = model.invoke(cases.HELLO)
    cases.equal(str(said.text), cases.HELLOED, "answer")


def stream(model):
    """An answer in pieces."""
    pieces = [str(piece.text) for piece in model.stream(cases.HELLO)]
    cases.equal("".join(pieces), cases.HELLOED, "answer")


def call(model):
    """A call, and the answer to its result."""
    model = model.bind_tools([look])
    turns = [HumanMessage(cases.QUESTION)]
    said = model.invoke(turns)
    calls = [(call["name"], call["args"]) for call in said.tool_calls]
    cases.equal(calls, [("look", cases.ARGUMENTS)], "calls")
    turns += [said, ToolMessage("21", tool_call_id=said.tool_calls[0]["id"])]
    cases.equal(str(model.invoke(turns).text), cases.ANSWERED, "second answer")


def main():
    """Runs all cases."""
    url, name = cases.arguments()
    models = {
        "openai": ChatOpenAI(model=name, base_url=f"{url}/v1", api_key="none", max_retries=0),
        "openai-responses": ChatOpenAI(model=name, base_url=f"{url}/v1", api_key="none",
                                       max_retries=0, use_responses_api=True),
        "ollama": ChatOllama(model=name, base_url=url),
        "anthropic": ChatAnthropic(model=name, base_url=url, api_key="none", max_tokens=99,
                                   max_retries=0),
    }
    return cases.run({
        f"{dialect}-{kind.__name__}": lambda kind=kind, model=model: kind(model)
        for dialect, model in models.items() for kind in (chat, stream, call)
    })


if __name__ == "__main__":
    sys.exit(main())
