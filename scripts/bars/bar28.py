#!/usr/bin/env python3
"""Issue 28, the doors: the bars that are speeds and counts; the others are tests. PACELINE names the binary.

    bar28.py [BAR..]         without names both, some 4 min
    grammar  [--runs 20]  2 min  SmolLM2, a thread: decode held to a schema of 20 fields over free decode, time a token, in turns
    turns    [--runs 3]   2 min  an agent's second turn: cached tokens over the first turn's prompt, by chat, responses and messages

grammar: free answers ignore the end; constrained ones end with their document, so their time is a token's. Free ones are as long as the
first constrained one. The server is not pinned: the mask is computed on another core while the step runs.
"""
import chosen
from common32 import *


def schema():
    kinds = [{"type": "string", "maxLength": 24}, {"type": "integer", "minimum": 0, "maximum": 99999}, {"type": "boolean"},
             {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}, "minItems": 2, "maxItems": 4}, {"enum": ["red", "green", "blue"]}]
    fields = {f"field_{i}": kinds[i % len(kinds)] for i in range(20)}
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


def grammar():
    server = Up(SMOLLM2, "--threads", 1, "--context", 1024, "--drafts", 0, "--parallel", 1, "--prefix-cache", "off")
    held = schema()
    try:
        ratios, apart, plain, wrong, length = [], [], [], 0, 200
        for n in range((a.runs or 20) + 1):
            prompt = f"Record {n} of the shop, as JSON with all of its fields:\n"
            ways = {"held": lambda: server.ask(prompt, 400, guided_json=held), "free": lambda: server.ask(prompt, length, ignore_eos=True)}
            found = {name: ways[name]() for name in sorted(ways, reverse=bool(n % 2))}
            again = server.ask(prompt, length, ignore_eos=True)
            if not n:
                length = found["held"]["tokens"]
                continue
            try:
                wrong += set(json.loads(found["held"]["text"])) != set(held["properties"])
            except ValueError:
                wrong += 1
            ms = {name: 1e3 / f["rate"] for name, f in found.items()}
            ratios.append(100 * (ms["held"] / ms["free"] - 1))
            apart.append(100 * (found["free"]["rate"] / again["rate"] - 1))
            plain.append(ms["free"])
        told("grammar, a token of a free answer", plain, "ms")
        told("grammar, a free answer over another one", apart, "%")
        told("grammar, answers that are no document of the schema (they may reach the limit of tokens)", wrong)
        bar("grammar, a token held to 20 fields takes more", ratios, "%", 5, False)
    finally:
        server.end()


def tokens_of(path, usage):
    """(tokens of the prompt, cached ones)"""
    if "responses" in path:
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    if "messages" in path:
        cached = usage.get("cache_read_input_tokens") or 0
        return usage["input_tokens"] + cached + (usage.get("cache_creation_input_tokens") or 0), cached
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def turns():
    long = "You are a coding agent. " + " ".join(f"Rule {i}: the file number {i} of the project must be read before it is changed." for i in range(300))
    server = Up(SMOLLM2, "--threads", 2, "--context", 8192, "--prefix-cache", "off")
    try:
        for path in ["/v1/chat/completions", "/v1/responses", "/v1/messages"]:
            shares, firsts = [], []
            for n in range(a.runs or 3):
                system = f"{path} {n}. {long}"
                question = [{"role": "user", "content": "List the files."}]

                def ask(conversation, turn):
                    began = time.perf_counter()
                    if "chat" in path:
                        body = {"messages": [{"role": "system", "content": system}, *conversation], "max_tokens": 40}
                    elif "responses" in path:
                        body = {"instructions": system, "input": conversation, "max_output_tokens": 40, "store": False}
                    else:
                        head = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.0.{turn}; cch={turn:05x};"}
                        body = {"system": [head, {"type": "text", "text": system}], "messages": conversation, "max_tokens": 40}
                    answer = server.call("POST", path, {"model": server.model, "temperature": 0, **body}, {"anthropic-version": "2023-06-01"})
                    return answer, time.perf_counter() - began
                answer, cold = ask(question, 1)
                prompt, _ = tokens_of(path, answer["usage"])
                if "chat" in path:
                    said = answer["choices"][0]["message"]["content"]
                elif "responses" in path:
                    said = "".join(part["text"] for item in answer["output"] if item["type"] == "message" for part in item["content"])
                else:
                    said = "".join(part["text"] for part in answer["content"] if part["type"] == "text")
                again, warm = ask([*question, {"role": "assistant", "content": said}, {"role": "user", "content": "Read the second."}], 2)
                shares.append(100 * tokens_of(path, again["usage"])[1] / prompt)
                firsts.append(warm / cold)
            told(f"turns {path}, whole second turn over the first", firsts, "x")
            bar(f"turns {path}, cached tokens of the second turn over the first's prompt of {prompt}", shares, "%", 99)
    finally:
        server.end()


BARS = {"grammar": (grammar, 420), "turns": (turns, 480)}
a = chosen.parsed(arguments(__doc__, runs=0), BARS)
chosen.play(a.bars, BARS)
