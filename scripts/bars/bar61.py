#!/usr/bin/env python3
"""Bars of draft heads: bar61.py PACELINE MODEL OUT [--minutes N] [--requests N]

Trains an EAGLE-3 head for MODEL (SmolLM2) on invitations, one narrow kind of text, and measures it
on held-out prompts: accepted drafts a step, speed beside plain decoding, equal tokens. OUT keeps
prompts, the head and report.json; a second run continues it.
"""

import argparse
import itertools
import json
import random
import subprocess
import time
from pathlib import Path

NAMES = "Anna Ben Clara David Emma Felix Grace Henry Iris Jack Karen Leo Maria Noah Olivia Paul".split()
EVENTS = ["a birthday party", "a picnic", "a team dinner", "a film night", "a book club meeting",
          "a garden party", "a board game evening", "a farewell lunch", "a concert", "a hike"]
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()


def prompts(n):
    every = list(itertools.product(NAMES, EVENTS, DAYS))
    random.Random(61).shuffle(every)
    return [f"Write a short email that invites {name} to {event} on {day}."
            for name, event, day in every[:n]]


def ask(paceline, model, prompt, *more):
    began = time.monotonic()
    out = subprocess.run([paceline, "run", model, prompt, "--json", *more], check=True,
                         capture_output=True, text=True).stdout
    return json.loads(out), time.monotonic() - began


def main():
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("paceline")
    args.add_argument("model")
    args.add_argument("out", type=Path)
    args.add_argument("--prompts", type=int, default=400)
    args.add_argument("--steps", type=int, default=150)
    args.add_argument("--requests", type=int, default=20)
    args.add_argument("--threads", default="2")
    args = args.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    texts = prompts(args.prompts + args.requests)
    data, head = args.out / "prompts.jsonl", args.out / "head"
    lines = (json.dumps({"prompt": text, "completion": "."}) for text in texts[:args.prompts])
    data.write_text("".join(line + "\n" for line in lines))
    resume = ["--resume"] if (head / "run.json").exists() else []
    began = time.monotonic()
    out = subprocess.run(
        [args.paceline, "train", args.model, "--drafter", "--data", data, "--output", head,
         "--max-tokens-per-row", "320", "--draft-vocab", "2000", "--batch", "8", "--lr", "1e-3",
         "--warmup", "10", "--steps", str(args.steps), "--eval-every", "25", "--json",
         "--threads", args.threads, *resume], check=True, stdout=subprocess.PIPE, text=True).stdout
    report = {"train": json.loads(out), "train_wall_s": time.monotonic() - began, "answers": []}
    fixed = ["--max-tokens", "200", "--threads", args.threads]
    for number, text in enumerate(texts[args.prompts:]):
        sampling = (["--temperature", "0"] if number % 2 == 0
                    else ["--temperature", "0.7", "--seed", str(number)])
        plain, _ = ask(args.paceline, args.model, text, *fixed, *sampling)
        drafted, _ = ask(args.paceline, args.model, text, *fixed, *sampling, "--drafter", str(head))
        assert plain["tokens"] == drafted["tokens"], text
        report["answers"].append({"prompt": text, "n": len(plain["tokens"]),
                                  "plain": plain, "drafted": drafted})
    (args.out / "report.json").write_text(json.dumps(report, indent=1))
    print(json.dumps(report["train"]))


if __name__ == "__main__":
    main()
