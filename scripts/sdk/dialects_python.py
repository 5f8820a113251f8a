#!/usr/bin/env python3
"""Anthropic's, Ollama's and OpenAI's Python clients against a live server's other dialects.

Usage: OPENAI_API_KEY=KEY dialects_python.py BASE_URL MODEL

One line per case, `ok NAME` or `FAILED NAME: why`, as openai_python.py has them, whose helpers it
takes. MODEL is small and chats. Ends with 1 when a case failed.

Needs the packages of requirements.txt. `cargo xtask sdk` runs this.
"""

import faulthandler
import json
import sys
import time
import traceback

import anthropic
import ollama
import openai

from openai_python import KEY, PATIENCE_ALL_S, PATIENCE_S, equal

HELLO = [{"role": "user", "content": "Name three colours of the rainbow."}]
CASES = []


def case(function):
    """Registers a case; its name is the function's."""
    CASES.append(function)
    return function


class Server:
    """The server, by each client."""

    def __init__(self, url, model):
        self.model = model
        options = {"max_retries": 0, "timeout": PATIENCE_S}
        self.anthropic = anthropic.Anthropic(base_url=url, api_key=KEY or "none", **options)
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY or "none", **options)
        headers = {"Authorization": f"Bearer {KEY}"} if KEY else {}
        self.ollama = ollama.Client(host=url, headers=headers, timeout=PATIENCE_S)

    def message(self, extra=None, **options):
        """Arguments of a message at temperature 0 and of 24 tokens unless told otherwise.

        The SDK has no argument for the temperature since 2.0; `extra` are more fields of the body.
        """
        body = {"temperature": 0, **(extra or {})}
        defaults = {"model": self.model, "max_tokens": 24, "messages": HELLO, "extra_body": body}
        return {**defaults, **options}


@case
def anthropic_message(server):
    """Whole and streamed answers are equal, and tokens are counted."""
    system = "Be brief. " * 60  # the cache keeps whole pages of 64 tokens
    whole = server.anthropic.messages.create(**server.message(system=system))
    equal(whole.role, "assistant", "role")
    with server.anthropic.messages.stream(**server.message(system=system)) as stream:
        said = "".join(stream.text_stream)
        final = stream.get_final_message()
    equal(said, whole.content[0].text, "streamed text")
    equal(final.usage.output_tokens, whole.usage.output_tokens, "output tokens")
    counted = server.anthropic.messages.count_tokens(
        model=server.model, system=system, messages=HELLO)
    usage = whole.usage
    equal(usage.input_tokens + usage.cache_read_input_tokens, counted.input_tokens, "input tokens")
    # The second time the prompt is in the cache.
    equal(final.usage.cache_read_input_tokens > 0, True, "tokens read from the cache")


@case
def anthropic_stops(server):
    """A stop text is named, and a bound is told."""
    first = server.anthropic.messages.create(**server.message())
    word = first.content[0].text.split()[1]
    stopped = server.anthropic.messages.create(**server.message(stop_sequences=[word]))
    equal(stopped.stop_reason, "stop_sequence", "stop reason")
    equal(stopped.stop_sequence, word, "stop sequence")
    cut = server.anthropic.messages.create(**server.message(max_tokens=2))
    equal(cut.stop_reason, "max_tokens", "stop reason")


@case
def anthropic_errors(server):
    """Errors have the classes that the SDK has for them."""
    for kind, options in [
        (anthropic.NotFoundError, {"model": "claude-opus-9"}),
        (anthropic.BadRequestError, {"max_tokens": 0}),
        (anthropic.BadRequestError, {"messages": [{"role": "user", "content": "x " * 60_000}]}),
    ]:
        try:
            server.anthropic.messages.create(**server.message(**options))
        except kind as error:
            equal(error.body["type"], "error", "type of the body")
        else:
            raise AssertionError(f"no {kind.__name__} for {list(options)}")


@case
def ollama_chat(server):
    """Whole and streamed answers are equal; figures are there."""
    options = {"temperature": 0, "num_predict": 24}
    ask = {"model": server.model, "messages": HELLO, "options": options}
    whole = server.ollama.chat(**ask)
    pieces = list(server.ollama.chat(**ask, stream=True))
    said = "".join(piece.message.content for piece in pieces)
    equal(said, whole.message.content, "streamed text")
    equal(pieces[-1].done, True, "done of the last")
    equal(pieces[-1].eval_count, whole.eval_count, "tokens")
    equal(whole.total_duration >= whole.eval_duration > 0, True, "durations")


@case
def ollama_generate(server):
    """A prompt as it is, and with the template."""
    options = {"temperature": 0, "num_predict": 8}
    raw = server.ollama.generate(
        model=server.model, prompt="The capital of France is", raw=True, options=options)
    equal("Paris" in raw.response, True, f"Paris in {raw.response!r}")
    chat = server.ollama.generate(model=server.model, prompt="Hi", options=options)
    equal(bool(chat.response), True, "an answer")


@case
def ollama_models(server):
    """The model is listed, shown, loaded and pulled."""
    names = [model.model for model in server.ollama.list().models]
    equal(f"{server.model}:latest" in names, True, f"{server.model}:latest in {names}")
    shown = server.ollama.show(server.model)
    equal("completion" in shown.capabilities, True, "capabilities")
    equal(len(server.ollama.ps().models), 1, "loaded models")
    equal(server.ollama.pull(server.model).status, "success", "pulling what is there")
    try:
        server.ollama.show("llama9")
    except ollama.ResponseError as error:
        equal(error.status_code, 404, "status")
        equal("llama9" in error.error, True, error.error)
    else:
        raise AssertionError("another model was shown")


@case
def openai_responses(server):
    """Responses whole, streamed, and one after the other."""
    ask = {"model": server.model, "temperature": 0, "max_output_tokens": 24}
    first = server.openai.responses.create(input="Name a colour.", **ask)
    equal(first.output_text != "", True, "an answer")
    with server.openai.responses.stream(input="Name a colour.", **ask) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    equal("".join(deltas), first.output_text, "streamed text")
    equal(final.output_text, first.output_text, "final text")
    following = server.openai.responses.create(
        input="And another?", previous_response_id=first.id, **ask)
    turns = [
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And another?"},
    ]
    spelt = server.openai.responses.create(input=turns, store=False, **ask)
    equal(following.output_text, spelt.output_text, "the next answer")
    equal(server.openai.responses.retrieve(first.id).id, first.id, "the kept response")
    server.openai.responses.delete(first.id)
    try:
        server.openai.responses.retrieve(first.id)
    except openai.NotFoundError as error:
        equal(error.code, "response_not_found", "code")
    else:
        raise AssertionError("a deleted response is there")


@case
def unknown_fields(server):
    """A field that nobody knows is refused by name in every dialect."""
    tries = [
        lambda: server.anthropic.messages.create(**server.message(extra={"foo": 1})),
        lambda: server.openai.responses.create(
            model=server.model, input="a", extra_body={"foo": 1}),
    ]
    for ask in tries:
        try:
            ask()
        except (anthropic.BadRequestError, openai.BadRequestError) as error:
            equal("foo" in json.dumps(error.body), True, str(error.body))
        else:
            raise AssertionError("an unknown field passed")


def main():
    """Runs all cases."""
    _, url, model = sys.argv
    faulthandler.dump_traceback_later(PATIENCE_ALL_S, exit=True)
    server = Server(url.rstrip("/"), model)
    failed = 0
    for run in CASES:
        start = time.monotonic()
        try:
            run(server)
            print(f"ok {run.__name__} ({time.monotonic() - start:.1f} s)", flush=True)
        except Exception as error:  # pylint: disable=broad-except
            failed += 1
            why = f"{type(error).__name__}: {error}".replace("\n", " ")
            print(f"FAILED {run.__name__}: {why}", flush=True)
            traceback.print_exc()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
