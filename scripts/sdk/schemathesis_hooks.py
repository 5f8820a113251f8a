"""Hooks of schemathesis: answers are kept short, so that a run of hundreds takes half a minute,
and every status is noted."""

import os

import schemathesis

# What a generated request may ask for at most. The server's own bounds are in the document, and
# values outside of them are sent as they are.
MAX_TOKENS = 3
MAX_CHOICES = 2
# The server's largest number of tokens and of choices (crates/serve, request/fields.rs and
# Limits).
LARGEST_TOKENS = 2**31 - 1
LARGEST_CHOICES = 16


def is_count(value, largest):
    """Whether the server would take it for a number of tokens or choices."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 1 <= value <= largest


@schemathesis.hook
def before_call(context, case, kwargs):
    """Bounds what is valid and long; what is wrong stays as it is."""
    body = case.body
    if case.operation.method.upper() != "POST" or not isinstance(body, dict):
        return
    fields = ("max_tokens", "max_completion_tokens")
    if all(body.get(field) is None for field in fields):
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
