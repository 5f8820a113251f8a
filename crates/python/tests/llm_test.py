"""Tests of `paceline.LLM` over processes that it starts itself.

    python llm_test.py MODEL [ENCODER]      prints `ok NAME` or `FAILED NAME: why` for each case
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

from ranks import Report

import paceline

QUESTION = "Name three colours."
GREEDY = {"temperature": 0, "max_tokens": 12}


def answers(llm: paceline.LLM) -> None:
    one = llm.chat(QUESTION, **GREEDY)
    assert one.text and 0 < one.completion_tokens <= 12 and one.prompt_tokens > 0, one
    assert one.finish_reason in ("stop", "length"), one
    assert str(one) == one.text == one.raw["choices"][0]["message"]["content"]
    pieces = list(llm.stream(QUESTION, **GREEDY))
    assert "".join(pieces) == one.text and len(pieces) > 1, pieces
    turns = [{"role": "system", "content": "Be short."}, {"role": "user", "content": QUESTION}]
    assert llm.chat(turns, **GREEDY).prompt_tokens != one.prompt_tokens
    text = llm.generate("The capital of France is", **GREEDY)
    assert "Paris" in text.text, text


def batches(llm: paceline.LLM) -> None:
    prompts = [QUESTION, "Why is the sky blue?", "Count to three.", "Hi", "Who are you?"]
    alone = [llm.chat(prompt, **GREEDY).text for prompt in prompts]
    assert [answer.text for answer in llm.batch(prompts, **GREEDY)] == alone


def coroutines(llm: paceline.LLM) -> None:
    async def talk() -> None:
        model = paceline.AsyncLLM(llm)
        one, two = await asyncio.gather(model.chat(QUESTION, **GREEDY),
                                        model.generate("Hi", **GREEDY))
        assert one.text == llm.chat(QUESTION, **GREEDY).text and two.text
        assert "".join([piece async for piece in model.stream(QUESTION, **GREEDY)]) == one.text

    asyncio.run(talk())


def connections(llm: paceline.LLM) -> None:
    other = paceline.LLM.connect(llm.url, key=llm.key)
    assert other.model == llm.model
    assert other.chat(QUESTION, **GREEDY).text == llm.chat(QUESTION, **GREEDY).text
    for expected, work in {
        "401": lambda: paceline.LLM.connect(llm.url),
        "temperature": lambda: llm.chat(QUESTION, temperature="hot"),
        "no-such-field": lambda: llm.chat(QUESTION, **{"no-such-field": 1}),
        "expected http": lambda: paceline.LLM.connect("ftp://127.0.0.1"),
        "refused": lambda: paceline.LLM.connect("http://127.0.0.1:1"),
    }.items():
        try:
            work()
        except paceline.errors.ServerError as error:
            assert expected in str(error), f"{error} lacks {expected}"
        else:
            raise AssertionError(f"{expected} passes")


def splits(model: str, llm: paceline.LLM) -> None:
    expected = llm.chat(QUESTION, **GREEDY).text
    with paceline.LLM(model, nodes=2, split="tensor", threads=1) as two:
        assert two.chat(QUESTION, **GREEDY).text == expected
        url = two.url
    try:
        paceline.LLM.connect(url)
    except paceline.errors.ServerError:
        return
    raise AssertionError("the node outlives its block")


def vectors(encoder: str, talker: paceline.LLM) -> None:
    texts = ["A cat sits on the mat.", "A kitten rests on the rug.", "Interest rates rose again."]
    with paceline.LLM(encoder, threads=1) as llm:
        cat, kitten, rates = llm.embed(texts)
        assert abs(sum(value * value for value in cat) - 1) < 1e-4
        product = lambda a, b: sum(x * y for x, y in zip(a, b, strict=True))
        assert product(cat, kitten) > 0.5 > product(cat, rates), (cat[:3], kitten[:3], rates[:3])
        assert llm.embed(texts[1]) == [kitten]
        assert asyncio.run(paceline.AsyncLLM(llm).embed(texts)) == [cat, kitten, rates]
    try:
        talker.embed("Hi")
    except paceline.errors.ServerError as error:
        assert error.status is not None and 400 <= error.status <= 501, error
    else:
        raise AssertionError("a model without vectors makes some")


def wrong_models() -> None:
    try:
        paceline.LLM("/nowhere/model.gguf")
    except paceline.errors.ServerError as error:
        assert "/nowhere/model.gguf" in str(error), error
    else:
        raise AssertionError("a file that is not there answers")


def orphans(model: str) -> None:
    """A killed interpreter leaves no node behind."""
    program = ("import sys, time, paceline\n"
               "llm = paceline.LLM(sys.argv[1], threads=1)\n"
               "print(llm.url, llm.key, flush=True)\n"
               "time.sleep(60)\n")
    child = subprocess.Popen([sys.executable, "-c", program, model], text=True,
                             stdout=subprocess.PIPE)
    url, key = child.stdout.readline().split()
    paceline.LLM.connect(url, key=key)
    child.kill()
    child.wait()
    until = time.monotonic() + 15
    while time.monotonic() < until:
        try:
            paceline.LLM.connect(url, key=key)
        except paceline.errors.ServerError:
            return
        time.sleep(0.05)
    raise AssertionError("the node is still there after 15 s")


def commands() -> None:
    from paceline import _server

    said = subprocess.run([_server.binary(), "--version"], capture_output=True, text=True,
                          check=True).stdout
    assert said == f"paceline {paceline.__version__}\n", said


def imports() -> None:
    program = "import sys, paceline, paceline.distributed; sys.exit('numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def main() -> int:
    report = Report()
    report.check("the package's own program is found", commands)
    report.check("importing imports no array library", imports)
    report.check("a model that is not there is named", wrong_models)
    model = sys.argv[1]
    with paceline.LLM(model, threads=os.cpu_count()) as llm:
        report.check("chat, stream and generate", answers, llm)
        report.check("a batch has the answers of single requests", batches, llm)
        report.check("coroutines", coroutines, llm)
        report.check("a running node, and its refusals", connections, llm)
        report.check("two nodes answer the same", splits, model, llm)
        if len(sys.argv) > 2:
            report.check("vectors of an encoder", vectors, sys.argv[2], llm)
    report.check("a killed program leaves no node", orphans, model)
    return report.failed


if __name__ == "__main__":
    sys.exit(main())
