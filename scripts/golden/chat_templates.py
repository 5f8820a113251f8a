#!/usr/bin/env python3
"""Records what transformers' own Jinja environment makes of real chat templates.

Usage: chat_templates.py TEMPLATES OUT

TEMPLATES is the folder that `cargo xtask models` unpacks (`chat-templates` beside the test models):
`vendor/llama.cpp/models/templates` of the source package of pip's llama-cpp-python 0.3.36. The
templates are their models' and are not committed; OUT (crates/text/tests/golden/templates.json)
has the SHA-256 of each and what it makes of a few conversations. Where the model's licence restricts
what may be passed on, or is not known, OUT has the SHA-256 of the text instead of the text.

Conversations have the form that transformers documents: arguments of calls are objects, and a turn
that only calls tools has null as its content, as OpenAI's SDKs send it. A template that writes null
as a word, or fails on it, gets an empty text. Reasoning goes by three names, as transformers itself
does it. The clock stands at 2026-07-26 09:08:07.
"""

import copy
import datetime
import hashlib
import json
import os
import sys

import jinja2
import transformers
from transformers.utils import chat_template_utils as ctu

# Name of the file, licence of the model it comes from (as of its model card).
FREE = {
    "ByteDance-Seed-OSS": "Apache-2.0",
    "GLM-4.6": "MIT",
    "GLM-4.7-Flash": "MIT",
    "HuggingFaceTB-SmolLM3-3B": "Apache-2.0",
    "MiniMax-M2": "MIT",
    "Mistral-Small-3.2-24B-Instruct-2506": "Apache-2.0",
    "Qwen-QwQ-32B": "Apache-2.0",
    "Qwen-Qwen2.5-7B-Instruct": "Apache-2.0",
    "Qwen-Qwen3-0.6B": "Apache-2.0",
    "Qwen3-Coder": "Apache-2.0",
    "Qwen3.5-4B": "Apache-2.0",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "MIT",
    "deepseek-ai-DeepSeek-V3.1": "MIT",
    "deepseek-ai-DeepSeek-V3.2": "MIT",
    "google-gemma-4-31B-it": "Apache-2.0",
    "ibm-granite-granite-4.0": "Apache-2.0",
    "microsoft-Phi-3.5-mini-instruct": "MIT",
    "mistralai-Ministral-3-14B-Reasoning-2512": "Apache-2.0",
    "mistralai-Mistral-Nemo-Instruct-2407": "Apache-2.0",
    "openai-gpt-oss-120b": "Apache-2.0",
}
HASHED = {
    "Kimi-K2-Thinking": "modified MIT",
    "Kimi-K3": "not known",
    "LFM2-8B-A1B": "LFM Open License",
    "MiniMax-M3": "not known",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "NVIDIA Open Model License",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "Llama 3.1 Community License",
    "deepseek-ai-DeepSeek-V4": "not known",
    "google-gemma-2-2b-it": "Gemma Terms of Use",
    "meta-llama-Llama-3.1-8B-Instruct": "Llama 3.1 Community License",
    "meta-llama-Llama-3.2-3B-Instruct": "Llama 3.2 Community License",
    "meta-llama-Llama-3.3-70B-Instruct": "Llama 3.3 Community License",
    "moonshotai-Kimi-K2": "modified MIT",
}
REASONING = ("reasoning_content", "reasoning", "thinking")
NOW = datetime.datetime(2026, 7, 26, 9, 8, 7)

WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "The weather in a city, by day.\nIn \"metric\" units.",
    "parameters": {"type": "object", "properties": {
        "city": {"type": "string", "description": "A name, such as Zürich & Köln"},
        "days": {"type": "integer", "minimum": 1},
        "exact": {"type": "boolean", "default": False},
        "units": {"type": "string", "enum": ["C", "F"]},
        "layers": {"type": "array", "items": {"type": "string"}},
    }, "required": ["city"]}}}
CLOCK = {"type": "function", "function": {
    "name": "clock", "description": "The time.", "parameters": {"type": "object", "properties": {}}}}
ARGUMENTS = {"city": "Zürich <b>\"x\"</b>", "days": 3, "exact": True, "layers": ["rain", "wind"]}
SYSTEM = {"role": "system", "content": "Be brief."}


def call(name, arguments, ident):
    return {"id": ident, "name": name, "arguments": arguments}


def user(text):
    return {"role": "user", "content": text}


def result(name, ident, text):
    return {"role": "tool", "content": text, "tool_call_id": ident, "name": name}


ONE_CALL = {"role": "assistant", "content": "", "tool_calls": [call("get_weather", ARGUMENTS, "abcdef001")]}
TWO_CALLS = {"role": "assistant", "content": "Let me look.", "tool_calls": [
    call("get_weather", {"city": "Köln", "days": 1.5}, "abcdef002"), call("clock", {}, "abcdef003")]}
NUMBERS = {"role": "assistant", "content": "", "tool_calls": [
    call("get_weather", {"city": "a/b <'é>", "e": 1e-05, "f": 1e-7, "x": 1.0, "big": 1e16, "n": 2**63}, "abcdef004"),
    call("clock", {}, "abcdef005")]}
ONE_RESULT = result("get_weather", "abcdef001", "{\"sky\": \"clear\"}")
CASES = [
    {"name": "plain", "messages": [user("Why is the sky <blue> & \"wide\"?\n")]},
    {"name": "turns", "messages": [
        SYSTEM, user("1"), {"role": "assistant", "content": "two"}, user("  trés é中  ")]},
    {"name": "ended", "is_ended": True, "messages": [user("1"), {"role": "assistant", "content": "two"}]},
    {"name": "tools", "tools": [WEATHER, CLOCK], "messages": [SYSTEM, user("Weather?")]},
    {"name": "called", "tools": [WEATHER, CLOCK], "messages": [user("Weather?"), ONE_CALL, ONE_RESULT]},
    {"name": "called_twice", "tools": [WEATHER, CLOCK], "messages": [
        SYSTEM, user("Weather?"), ONE_CALL, ONE_RESULT, {"role": "assistant", "content": "Clear."},
        user("And there?"), TWO_CALLS, result("get_weather", "abcdef002", "rain"),
        result("clock", "abcdef003", "12:00")]},
    {"name": "calls_with_numbers", "tools": [WEATHER, CLOCK], "messages": [
        user("Weather?"), NUMBERS, result("get_weather", "abcdef004", "rain"), result("clock", "abcdef005", "")]},
    {"name": "reasoned", "messages": [
        user("1"), {"role": "assistant", "content": "two", "reasoning": "one and one\nis two"}, user("3")]},
    {"name": "reasoned_to_call", "tools": [WEATHER, CLOCK], "messages": [
        user("Weather?"), ONE_CALL | {"reasoning": "I must look."}, ONE_RESULT]},
    {"name": "no_thinking", "variables": {"enable_thinking": False, "thinking": False},
     "messages": [user("1")]},
    {"name": "thinking", "variables": {"enable_thinking": True, "thinking": True}, "messages": [user("1")]},
    {"name": "effort", "variables": {"reasoning_effort": "high"}, "messages": [SYSTEM, user("1")]},
]


class Clock(datetime.datetime):
    """`datetime` of the module that compiles templates."""

    @classmethod
    def now(cls, tz=None):
        return NOW


def dressed(message, source, is_null):
    """A message in the form that transformers documents."""
    out = {"role": message["role"], "content": message["content"]}
    if is_null and "tool_calls" in message and not message["content"]:
        out["content"] = None
    if "reasoning" in message:
        out |= {key: message["reasoning"] for key in REASONING if key in source}
    if "tool_calls" in message:
        out["tool_calls"] = [
            {"id": c["id"], "type": "function",
             "function": {"name": c["name"], "arguments": copy.deepcopy(c["arguments"])}}
            for c in message["tool_calls"]]
    return out | {key: message[key] for key in ("tool_call_id", "name") if key in message}


def render(source, case):
    """As `render_as`; with an empty text for null where the template writes or fails on that."""
    rendered, plain = render_as(source, case, True), render_as(source, case, False)
    if not isinstance(rendered, str) or not isinstance(plain, str):
        return plain
    has_word = any(word in rendered and word not in plain for word in ("None", "null"))
    return plain if has_word else rendered


def render_as(source, case, is_null):
    """The text, or the template's refusal; None for what is an error of Python."""
    messages = [dressed(m, source, is_null) for m in case["messages"]]
    try:
        rendered, _ = ctu.render_jinja_template(
            conversations=[messages], tools=case.get("tools"), chat_template=source,
            add_generation_prompt=not case.get("is_ended", False), bos_token="<s>", eos_token="</s>",
            **case.get("variables", {}))
    except jinja2.exceptions.TemplateError as error:
        return {"error": str(error)} if type(error) is jinja2.exceptions.TemplateError else None
    except TypeError:
        return None
    return rendered[0]


def record(folder, name, licence, is_hashed):
    """The answers of one template, by case."""
    with open(os.path.join(folder, f"{name}.jinja"), encoding="utf-8", newline="") as file:
        source = file.read()
    rendered = {}
    for case in CASES:
        text = render(source, case)
        if text is None:
            continue
        if is_hashed and isinstance(text, str):
            text = {"sha256": hashlib.sha256(text.encode()).hexdigest()}
        rendered[case["name"]] = text
    return {"name": name, "licence": licence, "sha256": hashlib.sha256(source.encode()).hexdigest(),
            "rendered": rendered}


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    folder, out = sys.argv[1:]
    ctu.datetime = Clock
    templates = [record(folder, n, l, False) for n, l in FREE.items()]
    templates += [record(folder, n, l, True) for n, l in HASHED.items()]
    golden = {
        "origin": f"transformers {transformers.__version__}, jinja2 {jinja2.__version__}, templates of "
                  "llama-cpp-python 0.3.36; scripts/golden/chat_templates.py",
        "cases": CASES,
        "templates": templates,
    }
    with open(out, "w", encoding="utf-8") as file:
        json.dump(golden, file, ensure_ascii=False, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()
