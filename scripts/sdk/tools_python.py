#!/usr/bin/env python3
"""OpenAI's, Anthropic's and Ollama's Python clients: tools there and back, and answers of a schema.

Usage: tools_python.py BASE_URL MODEL

The server is crates/serve/tests/api/standalone.rs, whose model calls the tool `look` and then says
what it answered. One line per case, `ok NAME` or `FAILED NAME: why`. Ends with 1 when a case
failed. Needs the packages of requirements.txt. `cargo xtask sdk` runs this.
"""

import faulthandler
import json
import sys
import time
import traceback

import anthropic
import ollama
import openai

PATIENCE_S = 60
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
          "required": ["city"]}
PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
          "required": ["name", "age"], "additionalProperties": False}
ARGUMENTS = {"city": "Köln", "days": 3}
THOUGHT = "I must <tool_call> look it up."
ASK = [{"role": "user", "content": "How warm is it in Köln? " * 40}]
FUNCTION = {"type": "function", "function": {"name": "look", "parameters": SCHEMA, "strict": True}}
CASES = []


def case(function):
    """Registers a case; its name is the function's."""
    CASES.append(function)
    return function


def equal(got, expected, what):
    """Fails unless both are equal."""
    if got != expected:
        raise AssertionError(f"{what}: got {got!r}, expected {expected!r}")


class Server:
    """The server, by each client."""

    def __init__(self, url, model):
        self.model = model
        options = {"max_retries": 0, "timeout": PATIENCE_S, "api_key": "none"}
        self.anthropic = anthropic.Anthropic(base_url=url, **options)
        self.openai = openai.OpenAI(base_url=f"{url}/v1", **options)
        self.ollama = ollama.Client(host=url, timeout=PATIENCE_S)


@case
def openai_chat(server):
    """A call whole and streamed, its result, and what the second turn found in the cache."""
    ask = {"model": server.model, "tools": [FUNCTION]}
    first = server.openai.chat.completions.create(messages=ASK, **ask)
    choice = first.choices[0]
    equal(choice.finish_reason, "tool_calls", "finish reason")
    equal(choice.message.reasoning_content, THOUGHT, "reasoning")
    call = choice.message.tool_calls[0]
    equal((call.function.name, json.loads(call.function.arguments)), ("look", ARGUMENTS), "call")
    with server.openai.chat.completions.stream(messages=ASK, **ask) as stream:
        streamed = stream.get_final_completion().choices[0].message
    equal(streamed.tool_calls[0].function.name, "look", "streamed name")
    arguments = json.loads(streamed.tool_calls[0].function.arguments)
    equal(arguments, ARGUMENTS, "streamed arguments")
    result = {"role": "tool", "tool_call_id": call.id, "content": "21"}
    turns = [*ASK, choice.message.model_dump(exclude_none=True), result]
    second = server.openai.chat.completions.create(messages=turns, **ask)
    equal(second.choices[0].message.content, "It has 21 degrees.", "second answer")
    cached = second.usage.prompt_tokens_details.cached_tokens
    # Whole pages of 64 tokens.
    equal(cached > first.usage.prompt_tokens - 64, True, f"{cached} cached tokens")


@case
def openai_formats(server):
    """An answer of a schema, and a schema that cannot be followed."""
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    ask = {"model": server.model, "messages": [{"role": "user", "content": "Who?"}]}
    said = server.openai.chat.completions.create(response_format=form, **ask)
    equal(json.loads(said.choices[0].message.content), {"name": "Ada", "age": 36}, "answer")
    form["json_schema"]["schema"] = {"type": "array", "uniqueItems": True}
    try:
        server.openai.chat.completions.create(response_format=form, **ask)
    except openai.BadRequestError as error:
        equal("uniqueItems" in error.message, True, error.message)
    else:
        raise AssertionError("uniqueItems was taken")


@case
def openai_responses(server):
    """A call streamed, its result by previous_response_id, and an answer of a schema."""
    tool = {"type": "function", **FUNCTION["function"], "strict": False}
    ask = {"model": server.model, "tools": [tool]}
    with server.openai.responses.stream(input=ASK, **ask) as stream:
        final = stream.get_final_response()
    equal([item.type for item in final.output], ["reasoning", "message", "function_call"], "items")
    call = final.output[2]
    equal((call.name, json.loads(call.arguments)), ("look", ARGUMENTS), "call")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "21"}
    second = server.openai.responses.create(input=[output], previous_response_id=final.id, **ask)
    equal(second.output_text, "It has 21 degrees.", "second answer")
    form = {"format": {"type": "json_schema", "name": "person", "schema": PERSON}}
    said = server.openai.responses.create(model=server.model, input="Who?", text=form)
    equal(json.loads(said.output_text), {"name": "Ada", "age": 36}, "answer")


@case
def anthropic_messages(server):
    """Blocks of thinking, text and tool_use, whole and streamed, and the result."""
    tool = {"name": "look", "input_schema": SCHEMA}
    ask = {"model": server.model, "max_tokens": 99, "tools": [tool]}
    with server.anthropic.messages.stream(messages=ASK, **ask) as stream:
        final = stream.get_final_message()
    equal(final.stop_reason, "tool_use", "stop reason")
    equal([block.type for block in final.content], ["thinking", "text", "tool_use"], "blocks")
    equal((final.content[0].thinking, final.content[2].input), (THOUGHT, ARGUMENTS), "blocks")
    whole = server.anthropic.messages.create(messages=ASK, **ask)
    equal([block.type for block in whole.content], ["thinking", "text", "tool_use"], "blocks")
    call = whole.content[2]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "21"}
    turns = [*ASK, {"role": "assistant", "content": [block.model_dump() for block in whole.content]},
             {"role": "user", "content": [result]}]
    second = server.anthropic.messages.create(messages=turns, **ask)
    equal(second.content[0].text, "It has 21 degrees.", "second answer")


@case
def ollama_chat(server):
    """A call with an object of arguments, whole and streamed, its result, and a format."""
    ask = {"model": server.model, "tools": [FUNCTION]}
    whole = server.ollama.chat(messages=ASK, **ask)
    equal(whole.message.thinking, THOUGHT, "thinking")
    equal(dict(whole.message.tool_calls[0].function.arguments), ARGUMENTS, "arguments")
    pieces = list(server.ollama.chat(messages=ASK, stream=True, **ask))
    calls = [call for piece in pieces for call in piece.message.tool_calls or []]
    equal([dict(call.function.arguments) for call in calls], [ARGUMENTS], "streamed calls")
    result = {"role": "tool", "tool_name": "look", "content": "21"}
    second = server.ollama.chat(messages=[*ASK, whole.message, result], **ask)
    equal(second.message.content, "It has 21 degrees.", "second answer")
    said = server.ollama.chat(
        model=server.model, messages=[{"role": "user", "content": "Who?"}], format=PERSON)
    equal(json.loads(said.message.content), {"name": "Ada", "age": 36}, "answer")


def main():
    """Runs all cases."""
    _, url, model = sys.argv
    faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
    server = Server(url.rstrip("/"), model)
    failed = 0
    for run in CASES:
        start = time.monotonic()
        try:
            run(server)
            print(f"ok {run.__name__} with tools ({time.monotonic() - start:.1f} s)", flush=True)
        except Exception as error:  # pylint: disable=broad-except
            failed += 1
            why = f"{type(error).__name__}: {error}".replace("\n", " ")
            print(f"FAILED {run.__name__}: {why}", flush=True)
            traceback.print_exc()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
