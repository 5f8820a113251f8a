"""Hooks of schemathesis: answers are kept short, so that a run of hundreds takes half a minute,
and every status is noted."""

import json
import os

import schemathesis

# What a generated request may ask for at most. The server's own bounds are in the document, and
# values outside of them are sent as they are.
MAX_TOKENS = 3
MAX_CHOICES = 2
# The server's largest number of tokens and of choices (crates/serve, request/bounds.rs and
# Limits).
LARGEST_TOKENS = 2**31 - 1
LARGEST_CHOICES = 16


def is_count(value, largest):
    """Whether the server would take it for a number of tokens or choices."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 1 <= value <= largest


def shorten(path, body):
    """Bounds the answers of other dialects, where their field for it is not wrong."""
    name = {"/v1/responses": "max_output_tokens", "/infill": "n_predict"}.get(path)
    if path in ("/api/chat", "/api/generate"):
        body, name = body.setdefault("options", {}), "num_predict"
    if name and isinstance(body, dict) and body.get(name, 1) in (None, -1, 1):
        body[name] = MAX_TOKENS
    elif name and isinstance(body, dict) and is_count(body.get(name), LARGEST_TOKENS):
        body[name] = min(body[name], MAX_TOKENS)


# Fields that bind the answer, of which a request may have one: right values, since the document
# cannot say which grammars compile.
GUIDES = {
    "guided_json": (dict, {"type": "object"}),
    "guided_regex": (str, "[ab]+"),
    "guided_choice": (list, ["a", "b"]),
    "guided_grammar": (str, 'start: "a"'),
    "grammar": (str, 'start: "a"'),
}


def tokenise(body):
    """Has every text of a prompt a token: a vocabulary may lack all bytes of a generated one."""
    ended = lambda text: text + "a" if isinstance(text, str) and text else text
    prompt = body.get("prompt")
    if "prompt" in body:
        body["prompt"] = [ended(one) for one in prompt] if isinstance(prompt, list) else ended(prompt)


def guide(body):
    """Makes what binds the answer right, where its form is; one of several stays."""
    form = body.get("response_format")
    bound = isinstance(form, dict) and form.get("type") in ("json_object", "json_schema")
    inner = form.get("json_schema") if bound else None
    if isinstance(inner, dict) and isinstance(inner.get("schema"), dict):
        inner["schema"] = {"type": "object"}
    for name, (kind, value) in GUIDES.items():
        given = body.get(name)
        is_right = isinstance(given, kind) and (given or kind is dict)
        if kind is list and is_right:
            is_right = all(isinstance(text, str) and text for text in given)
        if is_right and bound:
            del body[name]
        elif is_right:
            body[name], bound = value, True


# Responses that the server stores, each the first of its conversation.
STORED = []


def name_stored(case):
    """Has an operation on a stored response name one."""
    if STORED and case.path == "/v1/responses/{id}" and case.path_parameters:
        is_last = case.operation.method.upper() == "DELETE"
        case.path_parameters["id"] = STORED.pop() if is_last else STORED[-1]


def respond(body):
    """Has a request for a response go on from a stored one, or from none, where the name's form is
    right, and makes a schema of the answer right."""
    previous = body.get("previous_response_id")
    if isinstance(previous, str) and 1 <= len(previous) <= 128:
        body["previous_response_id"] = STORED[-1] if STORED else None
    text = body.get("text")
    form = text.get("format") if isinstance(text, dict) else None
    if isinstance(form, dict) and isinstance(form.get("schema"), dict):
        form["schema"] = {"type": "object"}


def keep_stored(case, response):
    """Notes a response that begins a conversation and is stored."""
    if case.path != "/v1/responses" or response.status_code != 200:
        return
    try:
        told = json.loads(response.content)
    except ValueError:
        return  # events
    if told.get("store") and told.get("previous_response_id") is None:
        STORED.append(told["id"])


@schemathesis.hook
def before_call(context, case, kwargs):
    """Bounds what is valid and long; what is wrong stays as it is."""
    name_stored(case)
    body = case.body
    if case.operation.method.upper() != "POST" or not isinstance(body, dict):
        return
    shorten(case.path, body)
    if case.path == "/v1/responses":
        respond(body)
    if case.path.endswith("completions"):
        guide(body)
        tokenise(body)
    fields = ("max_tokens", "max_completion_tokens")
    if case.path.endswith("completions") and all(body.get(field) is None for field in fields):
        body["max_tokens"] = MAX_TOKENS
    for field in fields:
        if is_count(body.get(field), LARGEST_TOKENS):
            body[field] = min(body[field], MAX_TOKENS)
    if is_count(body.get("n"), LARGEST_CHOICES):
        body["n"] = min(body["n"], MAX_CHOICES)


@schemathesis.hook
def after_call(context, case, response):
    """Notes what was asked and how it was answered, for openapi_fuzz.py to count."""
    with open(os.environ["PACELINE_FUZZ_LOG"], "a", encoding="utf-8") as log:
        log.write(f"{case.operation.label}\t{response.status_code}\n")
    keep_stored(case, response)
