#!/usr/bin/env python3
"""Records what other programs read of tool calls in the form of each family.

Usage: tool_calls.py SGLANG_WHEEL OUT

SGLANG_WHEEL is the file of `pip download --no-deps sglang==0.5.23` (Apache-2.0, 39 MB). Only its folder
`sglang/srt/function_call` and two files beside it are unpacked, into a folder that is removed at the end;
nothing of the server itself is imported. mlx-lm 0.32.2 (MIT) and transformers 5.23.0 (Apache-2.0) are
imported as installed. Also needs pydantic, orjson and partial-json-parser. No program's text gets into OUT
(crates/text/tests/golden/tool_calls.json): the calls, their spellings and the response templates
are ours, the readings theirs.

A case has the calls that were spelt and the programs that read these calls. Other readings are kept under
`differs`. OUT is only written when some program reads each case as it was meant.
"""

import importlib
import importlib.metadata
import json
import pathlib
import sys
import tempfile
import types
import zipfile

import pydantic

STRING, INTEGER = {"type": "string"}, {"type": "integer"}
PARAMETERS = {"type": "object", "properties": {
    "city": STRING, "days": INTEGER, "code": STRING, "deep": {"type": "object"},
    "flags": {"type": "array", "items": {"type": "boolean"}}}}
TOOLS = [{"type": "function", "function": {"name": name, "description": "d", "parameters": PARAMETERS}}
         for name in ("get_weather", "run", "noop")]

DEEP = {"a": [1, -2.5, True, None, "x"], "b": {"c": {}, "d": "e, f: {g}"}}
CALLS = {
    "plain": [("get_weather", {"city": "Hamburg", "days": 2})],
    "unicode": [("get_weather", {"city": "Zürich, 東京 🌧", "days": -1})],
    "quotes": [("get_weather", {"city": 'Ham"burg\\ \'x\'', "days": 0})],
    "lines": [("run", {"code": "if a < b:\n\tprint('&amp; <b>')\n\n# end"})],
    "list": [("run", {"flags": [True, False]})],
    "empty list": [("run", {"flags": []})],
    "object": [("run", {"deep": DEEP})],
    "mixed": [("run", {"deep": {"k": "v"}, "code": "x = {1: [2]}", "days": 12345678901})],
    "number as text": [("get_weather", {"city": "12", "days": 12})],
    "no arguments": [("noop", {})],
    "two": [("get_weather", {"city": "Köln", "days": 1}), ("noop", {})],
    "three": [("run", {"code": "1"}), ("run", {"code": "2"}), ("get_weather", {"city": "a", "days": 3})],
}


def dumps(value):
    return json.dumps(value, ensure_ascii=False)


def bare(value):
    """A value as forms without types write it."""
    return value if isinstance(value, str) else dumps(value)


def elements(calls, call, key):
    return "".join(call(name, "".join(key(k, bare(v)) for k, v in arguments.items())) for name, arguments in calls)


def hermes(calls):
    return "\n".join(f'<tool_call>\n{dumps({"name": n, "arguments": a})}\n</tool_call>' for n, a in calls)


def qwen_xml(calls):
    return "\n".join(
        "<tool_call>\n" + elements([one], lambda n, p: f"<function={n}>\n{p}</function>\n",
                                   lambda k, v: f"<parameter={k}>\n{v}\n</parameter>\n") + "</tool_call>"
        for one in calls)


def glm(calls):
    pair = lambda k, v: f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n"
    return "\n".join(elements([one], lambda n, p: f"<tool_call>{n}\n{p}</tool_call>", pair) for one in calls)


def kimi(calls):
    each = "".join(
        f"<|tool_call_begin|>functions.{n}:{i}<|tool_call_argument_begin|>{dumps(a)}<|tool_call_end|>"
        for i, (n, a) in enumerate(calls))
    return f"<|tool_calls_section_begin|>{each}<|tool_calls_section_end|>"


def minimax(calls):
    inner = elements(calls, lambda n, p: f'<invoke name="{n}">\n{p}</invoke>\n',
                     lambda k, v: f'<parameter name="{k}">{v}</parameter>\n')
    return f"<minimax:tool_call>\n{inner}</minimax:tool_call>"


def deepseek_v3(calls):
    each = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{dumps(a)}\n```<｜tool▁call▁end｜>" for n, a in calls)
    return f"<｜tool▁calls▁begin｜>{each}<｜tool▁calls▁end｜>"


def deepseek_v31(calls):
    each = "".join(f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{dumps(a)}<｜tool▁call▁end｜>" for n, a in calls)
    return f"<｜tool▁calls▁begin｜>{each}<｜tool▁calls▁end｜>"


def dsml(block):
    def spell(calls):
        def call(name, arguments):
            inner = "".join(
                f'<｜DSML｜parameter name="{k}" string="{str(isinstance(v, str)).lower()}">{bare(v)}'
                "</｜DSML｜parameter>\n" for k, v in arguments.items())
            return f'<｜DSML｜invoke name="{name}">\n{inner}</｜DSML｜invoke>\n'
        return f"<｜DSML｜{block}>\n{''.join(call(*one) for one in calls)}</｜DSML｜{block}>"
    return spell


def mistral_list(calls):
    return "[TOOL_CALLS]" + dumps([{"name": n, "arguments": a} for n, a in calls])


def mistral_args(calls):
    return "".join(f"[TOOL_CALLS]{n}[ARGS]{dumps(a)}" for n, a in calls)


def llama(calls):
    return "<|python_tag|>" + "; ".join(dumps({"name": n, "parameters": a}) for n, a in calls)


def gemma_value(value):
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{gemma_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma_value, value)) + "]"
    return dumps(value)


def gemma(calls):
    return "".join(f"<|tool_call>call:{n}{gemma_value(a)}<tool_call|>" for n, a in calls)


def harmony(calls):
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{dumps(a)}<|call|>" for n, a in calls)


# Family, markers of its template, the end of a prompt, whether text may come before, the spelling, the
# detector of SGLang and the parser of mlx-lm.
FAMILIES = [
    ("JsonTags", "<tool_call> </think>", "", True, hermes, ("hermes_detector", "HermesDetector"), "json_tools"),
    ("QwenXml", "<tool_call> <function= <parameter= </think>", "", True, qwen_xml,
     ("qwen3_coder_detector", "Qwen3CoderDetector"), "qwen3_coder"),
    ("Glm", "<tool_call> <arg_key> </think>", "", True, glm, ("glm4_moe_detector", "Glm4MoeDetector"), "glm47"),
    ("KimiK2", "<|tool_calls_section_begin|>", "", True, kimi, ("kimik2_detector", "KimiK2Detector"), "kimi_k2"),
    ("MiniMax", "<minimax:tool_call> </think>", "", True, minimax, ("minimax_m2", "MinimaxM2Detector"), "minimax_m2"),
    ("DeepSeekV3", "<｜tool▁calls▁begin｜> ```json", "", True, deepseek_v3,
     ("deepseekv3_detector", "DeepSeekV3Detector"), None),
    ("DeepSeekV31", "<｜tool▁calls▁begin｜> </think>", "", True, deepseek_v31,
     ("deepseekv31_detector", "DeepSeekV31Detector"), None),
    ("Dsml", "<｜DSML｜function_calls> </think>", "", True, dsml("function_calls"),
     ("deepseekv32_detector", "DeepSeekV32Detector"), None),
    ("Dsml V4", "dsml_token tool_calls> </think>", "", True, dsml("tool_calls"),
     ("deepseekv4_detector", "DeepSeekV4Detector"), None),
    ("Mistral list", "[TOOL_CALLS] [/THINK]", "", True, mistral_list, ("mistral_detector", "MistralDetector"), "mistral"),
    ("Mistral", "[TOOL_CALLS] [ARGS]", "", True, mistral_args, ("mistral_detector", "MistralDetector"), "mistral"),
    ("Llama3", "<|python_tag|>", "", False, llama, ("llama32_detector", "Llama32Detector"), None),
    ("Gemma4", "<|tool_call> <channel|>", "", True, gemma, ("gemma4_detector", "Gemma4Detector"), "gemma4"),
    ("Harmony", "<|start|> <|channel|>", "<|start|>assistant", False, harmony,
     ("gpt_oss_detector", "GptOssDetector"), None),
]


class Function(pydantic.BaseModel):
    name: str
    description: str | None = None
    parameters: dict | None = None
    strict: bool = False


class Tool(pydantic.BaseModel):
    type: str = "function"
    function: Function


class Settings:
    """Settings of SGLang's server, none of which is on."""

    def __getattr__(self, name):
        return types.SimpleNamespace(get=lambda: False)


def sglang(folder, wheel):
    """Makes the detectors of the wheel importable, without the server that they come with."""
    with zipfile.ZipFile(wheel) as archive:
        wanted = ("sglang/srt/function_call/", "sglang/srt/parser/harmony_parser.py")
        archive.extractall(folder, [name for name in archive.namelist() if name.startswith(wanted)])
    sys.path.insert(0, str(folder))
    protocol = types.ModuleType("sglang.srt.entrypoints.openai.protocol")
    protocol.Tool, protocol.Function, protocol.ToolChoice = Tool, Function, object
    environ = types.ModuleType("sglang.srt.environ")
    environ.envs = Settings()
    for name in ("sglang.srt.entrypoints", "sglang.srt.entrypoints.openai"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules[protocol.__name__], sys.modules[environ.__name__] = protocol, environ


def by_sglang(detector, answer):
    module, name = detector
    module = importlib.import_module(f"sglang.srt.function_call.{module}")
    tools = [Tool.model_validate(tool) for tool in TOOLS]
    read = getattr(module, name)().detect_and_parse(answer, tools)
    return [[call.name, json.loads(call.parameters)] for call in read.calls]


def by_mlx_lm(parser, answer):
    """As its server does it: the texts between the markers, each read apart."""
    module = importlib.import_module(f"mlx_lm.tool_parsers.{parser}")
    calls = []
    for part in answer.split(module.tool_call_start)[1:]:
        if module.tool_call_end:
            part = part.split(module.tool_call_end)[0]
        read = module.parse_tool_call(part, TOOLS)
        calls += read if isinstance(read, list) else [read]
    return [[call["name"], call["arguments"]] for call in calls]


# Response templates of our own, in the form of transformers.
RESPONSES = {
    "JsonTags": {
        "start_anchor": "<|im_start|>assistant\n", "defaults": {"role": "assistant"},
        "fields": {
            "thinking": {"open": "<think>", "close": "</think>"},
            "tool_calls": {"open_pattern": "\\s*<tool_call>", "close": "</tool_call>", "repeats": True,
                           "content": "json", "transform": {"type": "function", "function": "{content}"}},
            "content": {"close_pattern": "\\s*<\\|im_end\\|>"}}},
    "QwenXml": {
        "start_anchor_pattern": "<\\|im_start\\|>assistant\\n",
        "fields": {
            "reasoning_content": {"open": "<think>", "close": "</think>"},
            "tool_calls": {
                "open_pattern": "\\s*<tool_call>\\s*<function=(?P<name>[^>\\n]+)>",
                "close_pattern": "</function>\\s*</tool_call>", "repeats": True, "content": "xml-inline",
                "content_args": {"tag_pattern": "<parameter=(?P<key>[^>\\n]+)>\\n(?P<value>.*?)\\n</parameter>"},
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}},
            "content": {}}},
    "Gemma4": {
        "start_anchor": ["<|turn>model\n"],
        "fields": {
            "thinking": {"open": "<|channel>thought\n", "close": "<channel|>"},
            "tool_calls": {
                "open_pattern": "<\\|tool_call>call:(?P<name>\\w+)", "close": "<tool_call|>", "repeats": True,
                "content": "json",
                "content_args": {"unquoted_keys": True, "string_delims": [["<|\"|>", "<|\"|>"]]},
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}},
            "content": {"close": ["<turn|>", "<eos>"]}}},
    "Mistral list": {
        "start_anchor": "[/INST]",
        "fields": {
            "tool_calls": {"open": "[TOOL_CALLS]", "content": "json", "transform_each": True,
                           "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}}},
            "content": {"close": "</s>"}}},
}


def by_transformers(template, answer):
    from transformers.utils.chat_parsing import parse_response
    message = parse_response(answer, template, prefix="", tools=TOOLS)
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return [[call["name"], call["arguments"]] for call in calls]


def read(case, program, action):
    """Notes what a program reads; an error is a reading too."""
    try:
        calls = action()
    except Exception as error:
        calls = f"{type(error).__name__}"
    if calls == case["calls"]:
        case["read_by"].append(program)
    else:
        case.setdefault("differs", {})[program] = calls


def cases():
    for family, template, prompt, takes_text, spell, detector, parser in FAMILIES:
        for name, calls in CALLS.items():
            for text in ("", "I look.\n") if takes_text and name in ("plain", "two") else ("",):
                answer = text + spell(calls)
                case = {"family": family, "name": name, "template": template, "prompt": prompt, "answer": answer,
                        "text": text.strip(), "calls": [[n, a] for n, a in calls], "read_by": []}
                read(case, "sglang", lambda: by_sglang(detector, prompt + answer))
                if parser:
                    read(case, "mlx-lm", lambda: by_mlx_lm(parser, answer))
                if family in RESPONSES:
                    read(case, "transformers", lambda: by_transformers(RESPONSES[family], answer))
                yield case


def main():
    wheel, out = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        sglang(pathlib.Path(folder), wheel)
        every = list(cases())
    unread = [f"{case['family']}/{case['name']}" for case in every if not case["read_by"]]
    if unread:
        sys.exit(f"no program reads {', '.join(unread)} as it was meant")
    versions = {name: importlib.metadata.version(name) for name in ("mlx-lm", "transformers")}
    versions["sglang"] = pathlib.Path(wheel).name.split("-")[1]
    recorded = {"versions": versions, "tools": TOOLS, "responses": RESPONSES, "cases": every}
    # A line a case, so that a change shows what it changes.
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in recorded.pop("cases"))
    head = json.dumps(recorded, ensure_ascii=False, indent=1).removesuffix("\n}")
    text = f'{head},\n "cases": [\n{lines}\n]}}\n'
    pathlib.Path(out).write_text(text, encoding="utf-8")
    differ = sum(len(case.get("differs", {})) for case in every)
    readings = sum(len(case["read_by"]) for case in every)
    print(f"{len(every)} cases, {readings} readings as meant, {differ} that differ")


if __name__ == "__main__":
    main()
