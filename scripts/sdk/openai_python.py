#!/usr/bin/env python3
"""OpenAI's Python SDK against a live server: one line per case, `ok NAME` or `FAILED NAME: why`.

Usage: OPENAI_API_KEY=KEY openai_python.py BASE_URL MODEL

BASE_URL is that of the server, http://127.0.0.1:52415; MODEL is one that chats, small enough that
a hundred short answers take a minute, with a context of 8192 tokens at least. Nothing else may use
the server meanwhile: some cases fill it and count what is left. With a key the server must ask for
keys, without one it must not. Ends with 1 when a case failed.

Needs the package openai in the version of requirements.txt. `cargo xtask sdk` runs this.
"""

import asyncio
import faulthandler
import math
import os
import re
import sys
import threading
import time
import traceback
import urllib.request

import openai

KEY = os.environ.get("OPENAI_API_KEY", "")
# Longest time of one request.
PATIENCE_S = 60
# All cases: some ten times what two cores take.
PATIENCE_ALL_S = 300
# Room for requests that the server has by default (Limits in crates/serve/src/config.rs).
PLACES = 64
CONTEXT = 8192
GREETING = [{"role": "user", "content": "Hi"}]
QUESTION = [{"role": "user", "content": "Name three colours of the rainbow."}]
STORY = [{"role": "user", "content": "Tell me a very long story about a lighthouse keeper."}]
# The tokens that end an answer of SmolLM2, forbidden.
NO_END = {"0": -100, "2": -100}
PROMPT = "The capital of France is"
CASES = []


def case(function):
    """Registers a case; its name is the function's."""
    CASES.append(function)
    return function


class Server:
    """The server and how it is asked."""

    def __init__(self, url, model):
        self.url, self.model = url.rstrip("/"), model
        self.client = self.connect()

    def connect(self, kind=openai.OpenAI, **options):
        """A client that does not repeat what failed."""
        defaults = {"api_key": KEY or "none", "max_retries": 0, "timeout": PATIENCE_S}
        return kind(base_url=f"{self.url}/v1", **{**defaults, **options})

    def chat(self, messages=QUESTION, **options):
        """A chat completion, at temperature 0 and of 24 tokens unless told otherwise."""
        defaults = {"model": self.model, "temperature": 0, "max_tokens": 24}
        return self.client.chat.completions.create(messages=messages, **{**defaults, **options})

    def complete(self, prompt=PROMPT, **options):
        """A text completion, likewise."""
        defaults = {"model": self.model, "temperature": 0, "max_tokens": 24}
        return self.client.completions.create(prompt=prompt, **{**defaults, **options})

    def figure(self, name):
        """A gauge of /metrics."""
        headers = {"Authorization": f"Bearer {KEY}"} if KEY else {}
        request = urllib.request.Request(f"{self.url}/metrics", headers=headers)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            text = response.read().decode()
        return float(re.search(rf"^paceline_{name} (\S+)$", text, re.M).group(1))

    def until(self, name, value):
        """Waits until a gauge has this value; fails after PATIENCE_S."""
        start = time.monotonic()
        while (got := self.figure(name)) != value:
            waits = time.monotonic() - start < PATIENCE_S
            equal(waits, True, f"{name} is {value} within {PATIENCE_S} s, still {got}")
            time.sleep(0.02)

    def until_idle(self, limit_s=10):
        """Waits until nothing is in work; fails after `limit_s`."""
        names = ("requests_in_flight", "sequences_running", "sequences_waiting")
        start = time.monotonic()
        while busy := {name: value for name in names if (value := self.figure(name))}:
            waits = time.monotonic() - start < limit_s
            equal(waits, True, f"idle within {limit_s} s, still {busy}")
            time.sleep(0.02)


def equal(got, expected, what="value"):
    """Fails unless the two are equal."""
    if got != expected:
        raise AssertionError(f"{what}: got {got!r}, expected {expected!r}")


def differs(one, other, what):
    """Fails if the two are equal."""
    if one == other:
        raise AssertionError(f"{what}: both are {one!r}")


def refused(kind, action, param=None, code=None):
    """Runs `action`, which must raise exactly `kind`; checks the error's fields."""
    try:
        action()
    except kind as error:
        equal(type(error), kind, "error class")
        if param is not None:
            equal(error.param, param, f"param of {error.message!r}")
            is_named = param.split(".")[-1] in error.message
            equal(is_named, True, f"{param} named by {error.message!r}")
        if code is not None:
            equal(error.code, code, f"code of {error.message!r}")
        return error
    raise AssertionError(f"no {kind.__name__}")


def pieces(stream):
    """The texts of a stream's choices, their finish reasons and the chunks."""
    texts, ends, chunks = {}, {}, []
    for chunk in stream:
        chunks.append(chunk)
        for choice in chunk.choices:
            text = choice.text if hasattr(choice, "text") else choice.delta.content
            equal(choice.index in ends, False, "text after the end")
            texts[choice.index] = texts.get(choice.index, "") + (text or "")
            if choice.finish_reason is not None:
                ends[choice.index] = choice.finish_reason
    return texts, ends, chunks


def text(answer, index=0):
    """What a choice of a whole answer says."""
    choice = answer.choices[index]
    equal(choice.index, index, "index")
    return choice.text if hasattr(choice, "text") else choice.message.content


@case
def models(server):
    listed = server.client.models.list().data
    equal([model.id for model in listed], [server.model])
    got = server.client.models.retrieve(server.model)
    equal((got.id, got.object, got.owned_by), (server.model, "model", "paceline"))
    equal(got.created > 1_500_000_000, True, "created after 2017")
    get = lambda: server.client.models.retrieve("gpt-4")
    refused(openai.NotFoundError, get, code="model_not_found")


@case
def chat_whole(server):
    answer = server.chat()
    equal(answer.object, "chat.completion")
    equal(answer.model, server.model, "model")
    equal(answer.id.startswith("chatcmpl-") and bool(answer.system_fingerprint), True, "names")
    choice = answer.choices[0]
    equal((choice.message.role, choice.message.refusal, choice.logprobs), ("assistant", None, None))
    equal(bool(choice.message.content.strip()), True, "some text")
    equal(choice.finish_reason in ("stop", "length"), True, choice.finish_reason)
    equal(text(server.chat()), text(answer), "the same again at temperature 0")
    usage = answer.usage
    equal(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens, "sum of the usage")
    equal(0 < usage.completion_tokens <= 24, True, f"{usage.completion_tokens} of 24 tokens")


@case
def chat_streamed_is_whole(server):
    whole = server.chat()
    texts, ends, chunks = pieces(server.chat(stream=True))
    equal(texts, {0: text(whole)}, "text")
    equal(ends, {0: whole.choices[0].finish_reason}, "finish_reason")
    equal(chunks[0].choices[0].delta.role, "assistant", "role of the first chunk")
    equal({chunk.id for chunk in chunks}, {chunks[0].id}, "one id")
    equal(len(chunks) > 5, True, f"text in pieces, {len(chunks)} chunks")
    equal([chunk for chunk in chunks if chunk.usage], [], "usage unasked for")


@case
def chat_stream_helper(server):
    with server.client.chat.completions.stream(
        model=server.model, messages=GREETING, temperature=0, max_tokens=48
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        equal("".join(deltas), text(stream.get_final_completion()), "text")


@case
def chat_conversation(server):
    messages = [
        {"role": "system", "content": "You are a polite robot."},
        {"role": "user", "content": [{"type": "text", "text": "My name is Bob."}], "name": "bob"},
        {"role": "assistant", "content": "Hello Bob!"},
        {"role": "user", "content": "What is my name?"},
    ]
    said = text(server.chat(messages))
    equal("Bob" in said, True, f"the name in {said!r}")
    developer = [{**messages[0], "role": "developer"}, *messages[1:]]
    equal(text(server.chat(developer)), said, "developer is system")
    differs(text(server.chat(messages[-1:])), said, "without what was said before")


@case
def completion_whole_and_streamed(server):
    whole = server.complete()
    equal(whole.object, "text_completion")
    equal("Paris" in text(whole), True, f"Paris in {text(whole)!r}")
    texts, ends, chunks = pieces(server.complete(stream=True))
    equal((texts, ends), ({0: text(whole)}, {0: whole.choices[0].finish_reason}), "streamed")
    equal(len(chunks) > 5, True, f"text in pieces, {len(chunks)} chunks")
    equal(text(server.complete(echo=True)), PROMPT + text(whole), "echo")


@case
def completion_of_many_prompts(server):
    prompts = [PROMPT, "One, two, three,", "Once upon a time"]
    answer = server.complete(prompts, max_tokens=6)
    alone = [text(server.complete(prompt, max_tokens=6)) for prompt in prompts]
    equal([text(answer, i) for i in range(3)], alone, "each as if alone")
    ids = [[1, 2, 3], [100, 200]]
    answer = server.complete(ids, max_tokens=3)
    equal(answer.usage.prompt_tokens, 5, "token ids as they are")
    equal(len(answer.choices), 2, "choices")


@case
def stop_texts(server):
    for ask, stop in ((server.chat, " "), (server.complete, ["\n", ".", " the"])):
        free, stops = text(ask()), [stop] if isinstance(stop, str) else stop
        first = min(at for at in (free.find(s) for s in stops) if at >= 0)
        answer = ask(stop=stop)
        equal(text(answer), free[:first], "text before the first of the stop texts")
        equal(answer.choices[0].finish_reason, "stop", "finish_reason")
        texts, ends, _ = pieces(ask(stop=stop, stream=True))
        equal((texts.get(0, ""), ends), (free[:first], {0: "stop"}), "streamed")
    # Inside of a token and over a border of tokens.
    free = text(server.complete())
    answer = server.complete(stop=free[3:9])
    equal((text(answer), answer.choices[0].finish_reason), (free[:3], "stop"), "over a border")
    answer = server.complete(stop="never said")
    got = (text(answer), answer.choices[0].finish_reason)
    equal(got, (free, "length"), "a text that does not come")


@case
def limits_of_length(server):
    for option in ({"max_tokens": 5}, {"max_tokens": openai.omit, "max_completion_tokens": 5}):
        answer = server.chat(STORY, **option)
        equal(answer.choices[0].finish_reason, "length", "finish_reason")
        equal(answer.usage.completion_tokens, 5, "tokens")
    equal(server.complete(max_tokens=1).usage.completion_tokens, 1, "one token")
    equal(server.complete(max_tokens=openai.omit).usage.completion_tokens, 16, "the default")
    nothing = server.complete(max_tokens=0)
    equal((text(nothing), nothing.usage.completion_tokens), ("", 0), "no token")


def check_distribution(chosen, top, asked):
    """Probabilities of `top` sum to one at most; the chosen is their largest."""
    total = sum(math.exp(logprob) for logprob in top.values())
    equal(total <= 1 + 1e-4, True, f"sum of probabilities {total}")
    equal(max(top.values()), chosen, "the most probable at temperature 0")
    equal(list(top.values()), sorted(top.values(), reverse=True), "order")
    equal(len(top) <= max(asked, 1), True, f"{len(top)} of {asked}")


@case
def logprobs_of_chat(server):
    answer = server.chat(logprobs=True, top_logprobs=5)
    entries = answer.choices[0].logprobs.content
    equal(b"".join(bytes(entry.bytes) for entry in entries).decode(), text(answer), "bytes")
    for entry in entries:
        equal(len(entry.top_logprobs), 5, "alternatives")
        equal(entry.top_logprobs[0].token, entry.token, "the chosen first")
        top = {i: one.logprob for i, one in enumerate(entry.top_logprobs)}
        check_distribution(entry.logprob, top, 5)
    bare = server.chat(logprobs=True).choices[0].logprobs.content
    equal([(e.token, e.logprob, e.top_logprobs) for e in bare],
          [(e.token, e.logprob, []) for e in entries], "without alternatives")
    _, _, chunks = pieces(server.chat(logprobs=True, top_logprobs=5, stream=True))
    parts = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs]
    equal([e for part in parts for e in part.content or []], entries, "streamed")


@case
def logprobs_of_completion(server):
    answer = server.complete(logprobs=3)
    got = answer.choices[0].logprobs
    equal("".join(got.tokens), text(answer), "tokens")
    for chosen, top in zip(got.token_logprobs, got.top_logprobs, strict=True):
        check_distribution(chosen, top, 3)
    starts = [len("".join(got.tokens[:i])) for i in range(len(got.tokens))]
    equal(got.text_offset, starts, "text_offset")
    _, _, chunks = pieces(server.complete(logprobs=3, stream=True))
    parts = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs]
    equal([lp for part in parts for lp in part.token_logprobs], got.token_logprobs, "streamed")
    equal([at for part in parts for at in part.text_offset], got.text_offset, "offsets streamed")


@case
def several_choices(server):
    options = {"n": 3, "temperature": 1, "seed": 7, "max_tokens": 16}
    for ask in (server.chat, server.complete):
        answer = ask(**options)
        texts = [text(answer, i) for i in range(3)]
        equal(len(set(texts)), 3, "different choices")
        streamed, ends, _ = pieces(ask(stream=True, **options))
        equal([streamed[i] for i in range(3)], texts, "streamed")
        equal(ends, {i: answer.choices[i].finish_reason for i in range(3)}, "ends")
        alone = ask(**{**options, "n": 1, "seed": 9})
        equal(text(alone), texts[2], "choice 2 alone, by its seed")


@case
def seeds(server):
    def answer(seed, **options):
        return text(server.chat(STORY, temperature=1, seed=seed, **options))

    equal(answer(1), answer(1), "one seed")
    equal(len({answer(seed) for seed in (1, 2, 3, -1, 2**63 - 1)}), 5, "five seeds")
    differs(answer(openai.omit), answer(openai.omit), "without a seed")


@case
def sampling(server):
    def answer(**options):
        return text(server.complete(**{"seed": 3, "max_tokens": 24, **options}))

    greedy = answer(temperature=0)
    differs(answer(temperature=1.5), greedy, "a high temperature")
    equal(answer(temperature=1.5, top_p=1e-6), greedy, "top_p that leaves one token")
    equal(answer(temperature=1.5, extra_body={"top_k": 1}), greedy, "top_k of one")
    equal(answer(temperature=1.5, extra_body={"min_p": 1}), greedy, "min_p of one")


@case
def penalties(server):
    def words(**options):
        said = text(server.complete(" ".join(["ha"] * 10), **options)).split()
        return len(set(said))

    repeated = words()
    equal(repeated <= 4, True, f"{repeated} different words without penalties")
    for options in (
        {"frequency_penalty": 2},
        {"presence_penalty": 2},
        {"extra_body": {"repetition_penalty": 2}},
    ):
        equal(words(**options) > 2 * repeated, True, f"more words than {repeated} by {options}")


@case
def logit_bias(server):
    number = "28"  # a comma, in SmolLM2's vocabulary
    word = text(server.complete([int(number)], echo=True, max_tokens=0))
    equal(len(word) > 0, True, "token 28 has a text")
    commanded = server.chat(logit_bias={number: 100}, max_tokens=4)
    equal(text(commanded), word * 4, "a token that is commanded")
    free = text(server.chat(STORY, max_tokens=48))
    equal(word in free, True, f"{word!r} in {free!r}")
    banned = text(server.chat(STORY, max_tokens=48, logit_bias={number: -100}))
    equal(word in banned, False, f"{word!r} in {banned!r}, where it is banned")


@case
def usage_of_streams(server):
    for ask in (server.chat, server.complete):
        ask(n=2)
        # The second time the prompt is in the cache, as it is the third time.
        whole = ask(n=2)
        _, _, chunks = pieces(ask(n=2, stream=True, stream_options={"include_usage": True}))
        *before, last = chunks
        equal(last.choices, [], "choices of the last chunk")
        equal(last.usage, whole.usage, "usage")
        equal([chunk.usage for chunk in before], [None] * len(before), "usage before the end")


@case
def fields_without_effect(server):
    plain = text(server.chat())
    fields = {
        "user": "u", "store": False, "metadata": {"a": "b"}, "service_tier": "auto",
        "safety_identifier": "s", "prompt_cache_key": "k", "parallel_tool_calls": True,
        "tools": [], "tool_choice": "none", "response_format": {"type": "text"},
    }
    for field, value in fields.items():
        equal(text(server.chat(**{field: value})), plain, field)


@case
def wrong_fields_are_named(server):
    cases = [
        ({"extra_body": {"foo": 1}}, "foo", "unknown_parameter"),
        ({"extra_body": {"stream_options": {"foo": 1}, "stream": True}},
         "stream_options.foo", "unknown_parameter"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]},
         "tools", "unsupported_parameter"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "unsupported_parameter"),
        ({"modalities": ["audio"]}, "modalities", "unsupported_parameter"),
        ({"temperature": 2.5}, "temperature", "invalid_value"),
        ({"top_p": -1}, "top_p", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 17}, "n", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": "9"}, "max_tokens", "invalid_type"),
        ({"max_completion_tokens": 3}, "max_tokens", "conflicting_parameters"),
        ({"top_logprobs": 3}, "top_logprobs", "conflicting_parameters"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x", "invalid_value"),
        ({"stop": ["a"] * 65}, "stop", "invalid_value"),
        ({"seed": 0.5}, "seed", "invalid_type"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "owner", "content": ""}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
    ]
    for options, param, code in cases:
        refused(openai.BadRequestError, lambda: server.chat(**options), param, code)
    for options, param, code in [
        ({"suffix": "x"}, "suffix", "unsupported_parameter"),
        ({"best_of": 2}, "best_of", "unsupported_parameter"),
        ({"logprobs": 6}, "logprobs", "invalid_value"),
        ({"prompt": []}, "prompt", "invalid_value"),
        ({"prompt": [10**9]}, "prompt[0]", "invalid_value"),
    ]:
        refused(openai.BadRequestError, lambda: server.complete(**options), param, code)


@case
def prompt_over_the_context(server):
    code = "context_length_exceeded"
    long = [{"role": "user", "content": "word " * CONTEXT}]
    refused(openai.BadRequestError, lambda: server.chat(long), code=code)
    refused(openai.BadRequestError, lambda: server.chat(long, stream=True), code=code)
    error = refused(openai.BadRequestError, lambda: server.complete([5] * CONTEXT), code=code)
    equal(str(CONTEXT) in error.message, True, error.message)


@case
def wrong_model(server):
    for ask in (server.chat, server.complete):
        for options in ({}, {"stream": True}):
            ask_wrongly = lambda: ask(model="gpt-4", **options)
            refused(openai.NotFoundError, ask_wrongly, "model", "model_not_found")


@case
def keys_are_asked_for(server):
    wrong = server.connect(api_key="sk-wrong")
    if not KEY:
        equal([model.id for model in wrong.models.list()], [server.model], "any key is accepted")
        return
    for client in (wrong, server.connect(api_key=KEY[:-1]), server.connect(api_key=KEY + "x")):
        ask = lambda: client.chat.completions.create(model=server.model, messages=QUESTION)
        refused(openai.AuthenticationError, ask, code="invalid_api_key")
        refused(openai.AuthenticationError, client.models.list, code="invalid_api_key")


@case
def leaving_ends_the_answer(server):
    server.until_idle()
    stream = server.chat(STORY, stream=True, n=2, max_tokens=4000, logit_bias=NO_END)
    with stream:
        for _ in range(8):
            next(stream)
        equal(server.figure("requests_in_flight"), 1.0, "requests in flight")
        # The second choice may begin behind the first one's first tokens.
        server.until("sequences_running", 2.0)
    server.until_idle(limit_s=2)


@case
def timeout_ends_the_answer(server):
    hasty = server.connect(timeout=0.5)
    ask = lambda: hasty.chat.completions.create(
        model=server.model, messages=STORY, max_tokens=4000, logit_bias=NO_END)
    refused(openai.APITimeoutError, ask)
    server.until_idle(limit_s=2)


@case
def twenty_streams_at_once(server):
    expected = text(server.chat())
    got = [None] * 20

    def one(index):
        try:
            got[index] = pieces(server.chat(stream=True))[0][0]
        except Exception as error:  # pylint: disable=broad-except
            got[index] = repr(error)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    equal(got, [expected] * 20, "the answer of one alone, twenty times")
    server.until_idle(limit_s=2)


@case
def asynchronous_client(server):
    async def run():
        async with server.connect(openai.AsyncOpenAI) as client:
            async def one(seed):
                options = {"model": server.model, "messages": STORY, "max_tokens": 12, "seed": seed}
                stream = await client.chat.completions.create(stream=True, **options)
                deltas = [chunk.choices[0].delta.content or "" async for chunk in stream]
                whole = await client.chat.completions.create(**options)
                return "".join(deltas), text(whole)

            for streamed, whole in await asyncio.gather(*(one(seed) for seed in range(4))):
                equal(streamed, whole, "streamed")
            try:
                await client.chat.completions.create(model="gpt-4", messages=QUESTION)
            except openai.NotFoundError:
                return
            raise AssertionError("no NotFoundError")

    asyncio.run(run())


@case
def flood_is_limited(server):
    """More requests than there are places: the rest is refused at once, the others are kept."""
    async def one(client):
        try:
            return await client.chat.completions.create(
                model=server.model, messages=STORY, max_tokens=2000, stream=True,
                logit_bias=NO_END)
        except openai.RateLimitError as error:
            equal(error.code, "server_busy", "code")
            equal(int(error.response.headers["retry-after"]) >= 1, True, "retry-after")
            return None

    async def flood():
        client = server.connect(openai.AsyncOpenAI)
        streams = await asyncio.gather(*(one(client) for _ in range(PLACES + 16)))
        taken = [stream for stream in streams if stream]
        equal(len(taken), PLACES, "requests that were taken")
        equal(server.figure("requests_in_flight"), float(PLACES), "requests in flight")
        for stream in taken:
            await stream.close()
        await client.close()

    server.until_idle()
    asyncio.run(flood())
    server.until_idle()
    # With the SDK's own patience a busy server is asked again.
    equal(bool(text(server.chat())), True, "an answer after the flood")


def main():
    """Runs all cases."""
    _, url, model = sys.argv
    faulthandler.dump_traceback_later(PATIENCE_ALL_S, exit=True)
    server = Server(url, model)
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
