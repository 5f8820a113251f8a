#!/usr/bin/env python3
"""Issue 62: answers held to a schema, and prompts that come again. SmolLM2; needs jsonschema.

    PACELINE=PROGRAM python scripts/bars/bar62_answers.py [schemas] [warm]

schemas  36 schemas at temperatures 0, 1 and 1.3, 220 tokens at most: none may end in white space, none may be invalid. Those that
         end at the limit are counted, since a small model may write long strings.
warm     a prompt of 40 to 1900 tokens twice: at most a page of 64 tokens and one are computed again.
"""
from concurrent.futures import ThreadPoolExecutor

import jsonschema
from common32 import SMOLLM2, Up, arguments, bar, end, json, told

TEXT, INT = {"type": "string", "maxLength": 40}, {"type": "integer"}


def record(**properties):
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def list_of(items, **more):
    return {"type": "array", "items": items, "maxItems": 4, **more}


SCHEMAS = [
    record(price=record(amount={"type": "number"}, currency=TEXT)), record(v={"const": 42}, w={"const": None}), {"const": 7.5},
    {"$ref": "#/definitions/a", "definitions": {"a": record(n=INT)}}, {"$ref": "#/$defs/a", "$defs": {"a": list_of(INT)}},
    {"type": "boolean"}, {"type": "null"}, {"type": "integer", "minimum": 3, "maximum": 9}, {"type": "number"}, TEXT,
    {"enum": ["red", "green", "blue"]}, {"enum": [1, None, "x", True]}, record(a=TEXT), record(a=TEXT, b=INT, c={"type": "boolean"}),
    record(a=record(b=record(c=record(d=INT)))), list_of(INT, minItems=2), list_of(TEXT), list_of(record(n=INT)), list_of(list_of(INT)),
    {"type": "array", "prefixItems": [TEXT, INT], "items": False, "minItems": 2}, {"anyOf": [INT, record(s=TEXT)]},
    {"oneOf": [record(kind={"const": "a"}), record(kind={"const": "b"}, n=INT)]}, {"type": ["string", "null"], "maxLength": 20},
    {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"}, {"type": "string", "format": "date"}, {"type": "string", "format": "date-time"},
    {"type": "string", "format": "time"}, {"type": "string", "format": "uuid"}, {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "email"}, {"type": "string", "minLength": 5, "maxLength": 9},
    {"type": "object", "properties": {"a": INT, "b": TEXT}, "required": ["a"], "additionalProperties": False},
    {"type": "object", "additionalProperties": INT, "maxProperties": 2}, {"allOf": [record(a=INT), {"type": "object"}]},
    record(day={"enum": ["mon", "tue"]}, at={"type": "string", "format": "time"}), record(tags=list_of({"enum": ["x", "y"]}), n=INT),
]
CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER


def schemas(server):
    spaces, invalid, cut, refused = [], [], 0, []

    def ask(job):
        i, temperature = job
        format = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMAS[i]}}
        body = {"model": server.model, "messages": [{"role": "user", "content": "What does bread cost? Answer in JSON."}], "max_tokens": 220,
                "temperature": temperature, "seed": 62, "response_format": format}
        return job, server.call("POST", "/v1/chat/completions", body)

    with ThreadPoolExecutor(4) as pool:
        for job, answer in pool.map(ask, [(i, t) for i in range(len(SCHEMAS)) for t in (0, 1.0, 1.3)]):
            if "choices" not in answer:
                refused.append((job, answer))
                continue
            choice = answer["choices"][0]
            text = choice["message"]["content"]
            if text != text.rstrip():
                spaces.append((job, text[-30:]))
            if choice["finish_reason"] == "length":
                cut += 1
                continue
            try:
                jsonschema.validate(json.loads(text), SCHEMAS[job[0]], format_checker=CHECKER)
            except (jsonschema.ValidationError, ValueError) as why:
                invalid.append((job, text, str(why)[:100]))
    for found in [*spaces, *invalid, *refused]:
        print("  ", found)
    told(f"{len(SCHEMAS)} schemas x 3: ended at the limit", cut)
    bar("answers that end in white space", len(spaces), "", 0, False)
    bar("invalid answers", len(invalid), "", 0, False)
    bar("refused", len(refused), "", 0, False)


def warm(server):
    again = []
    for n in [40, 63, 64, 65, 128, 129, 500, 1024, 1900]:
        prompt = [(n + 7 * i) % 900 + 100 for i in range(n)]
        body = {"model": server.model, "prompt": prompt, "max_tokens": 2, "temperature": 0}
        server.call("POST", "/v1/completions", body)
        usage = server.call("POST", "/v1/completions", body)["usage"]
        again.append(n - usage.get("prompt_tokens_details", {}).get("cached_tokens", 0))
    bar("tokens of a prompt that are computed again, the most", max(again), "", 65, False)


parser = arguments(__doc__)
parser.add_argument("bars", nargs="*")
chosen = parser.parse_args().bars or ["schemas", "warm"]
server = Up(SMOLLM2, "--context", 2048, "--parallel", 4, "--threads", 1, "--drafts", 0, "--prefix-cache", "off")
for name in chosen:
    {"schemas": schemas, "warm": warm}[name](server)
server.end()
end()
