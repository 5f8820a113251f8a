#!/usr/bin/env python3
"""Issue 61: a draft head trained here, its acceptance, its speed, equal answers. PACELINE names the binary.

    bar61.py [BAR..]         without names all but stages, failover and machines; --out keeps prompts, the head and answers (/tmp/drafter-61)
    train   [--minutes 90]   trains a head for SmolLM2 on one narrow kind of text, or continues; reports accepted drafts
    speed   [--runs 20]      one node: decode of held-out prompts over plain, by what was accepted
    random  [--runs 6]       text that the head does not know: decode over plain
    stages  [--runs 6]       four stages with 25 ms one way (root, TAP: delay_net.py; --ms): decode over plain
    equal   [--requests 500] random requests, several at once: greedy, sampled, grammars, stop texts, penalties, logprobs
    failover                 answers with a head go on after `kill -9` of the machine that drafts, and of one behind it (root)
    machines                 a small head trained here, then over two machines (root): the same bytes, also with a worker killed
    mlx     [--requests 100] greedy requests on MLX (--kernels): equal tokens but where two logits are within 1e-3, twice the same

The kind of text: a Python class with three fields. Prompts of train and of the others differ.
"""
import random, signal
import common31
import chosen
from common32 import *

CLASSES = ("Car Book House Dog Cat Student Teacher Phone Computer Song Movie Player Game Ticket Order Invoice Customer "
           "Product Plane Train Ship Bicycle Recipe Planet City Country River Doctor Patient Hotel").split()
FIELDS = ("name color price size weight height width age speed year title author owner brand rating date "
          "status number city country language length level score").split()
TRAINED = 500  # prompts; those after them are held out
RANDOM = ["Essay on the habits of sea birds in winter,", "A letter from the moon:", "The third day of the storm was",
          "Dear diary, today", "In the year 2190", "The recipe begins with"]


def prompts():
    """All prompts, in an order that a seed fixes."""
    draw, seen = random.Random(61), set()
    while True:
        name, fields = draw.choice(CLASSES), draw.sample(FIELDS, 3)
        text = (f"Write a Python class {name} with the fields {fields[0]}, {fields[1]} and {fields[2]}, with a constructor "
                "and a getter for each field.")
        if text not in seen:
            seen.add(text)
            yield text


def held_out(n):
    every = prompts()
    return [next(every) for _ in range(TRAINED + n)][TRAINED:]


def head():
    path = f"{a.out}/head"
    if not os.path.exists(f"{path}/model.safetensors"):
        sys.exit(f"{path} has no head: run `bar61.py train` first")
    return path


def train():
    os.makedirs(a.out, exist_ok=True)
    data, out, every = f"{a.out}/prompts.jsonl", f"{a.out}/head", prompts()
    with open(data, "w") as file:
        file.writelines(json.dumps({"prompt": next(every), "completion": "."}) + "\n" for _ in range(TRAINED))
    again = ["--resume"] if os.path.exists(f"{out}/run.json") else []
    began = time.monotonic()
    child = start([BINARY, "train", SMOLLM2, "--drafter", "--data", data, "--output", out, "--max-tokens-per-row", 256,
                   "--draft-vocab", 2000, "--batch", 8, "--lr", 1e-3, "--warmup", 10, "--steps", a.steps, "--eval-every", 50,
                   "--save-every", 25, "--threads", a.threads, "--json", *again], stdout=subprocess.PIPE, text=True)
    try:
        said, _ = child.communicate(timeout=60 * a.minutes)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGINT)  # it saves a checkpoint
        child.communicate(timeout=60)
        sys.exit(f"not ready within {a.minutes} minutes; again with `bar61.py train`")
    report = json.loads(said)
    told("train, minutes of this part", (time.monotonic() - began) / 60)
    print("  " + json.dumps(report), flush=True)
    bar("train, accepted drafts a step on held-out answers", report["accepted"], "", 2.0)


def rates(ways, ask, texts):
    """The rates of each text with each way, in turn, and whether all answers are equal."""
    found, equal = [], True
    for n, text in enumerate(texts):
        order = list(ways) if n % 2 else list(ways)[::-1]
        one = {way: ask(way, text) for way in order}
        equal &= len({of["text"] for of in one.values()}) == 1
        found.append(one)
    return found, equal


def accepted(usage):
    """Accepted drafts a step, without the token that each step gives anyway."""
    right = usage["completion_tokens_details"].get("accepted_prediction_tokens", 0)
    return right / max(usage["completion_tokens"] - right, 1)


def chat(text, **more):
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": a.tokens or 160, **more}


def one_node(*more):
    common = ["--threads", a.threads, "--parallel", 4, "--context", 2048, "--prefix-cache", "off", *more]
    return {"plain": Up(SMOLLM2, *common, "--drafts", 0), "head": Up(SMOLLM2, *common, "--drafter", head())}


def speed():
    servers = one_node()

    def ask(way, text):
        return stream(servers[way].port, {"model": servers[way].model, **chat(text)}, path="/v1/chat/completions")
    rates(servers, ask, held_out(3))  # times of steps are measured
    found, equal = rates(servers, ask, held_out(3 + (a.runs or 20))[3:])
    ratios = [(accepted(one["head"]["usage"]), one["head"]["rate"] / one["plain"]["rate"]) for one in found]
    bar("speed, accepted drafts a step", [n for n, _ in ratios], "", 2.0)
    bar("speed, decode over plain where 2 are accepted", [ratio for n, ratio in ratios if n >= 2], "x", 1.0)
    bar("speed, decode over plain where 3 are accepted", [ratio for n, ratio in ratios if n >= 3], "x", 1.2)
    bar("speed, same answers", int(equal), "", 1)
    [server.end() for server in servers.values()]


def random_text():
    servers = one_node()

    def ask(way, text):
        body = {"model": servers[way].model, "prompt": text, "max_tokens": 256, "temperature": 1.0, "seed": 11, "ignore_eos": True}
        return stream(servers[way].port, body)
    rates(servers, ask, RANDOM[:2])
    found, equal = rates(servers, ask, (RANDOM * 9)[:a.runs or len(RANDOM)])
    bar("random, decode over plain", [one["head"]["rate"] / one["plain"]["rate"] for one in found], "x", 0.97)
    bar("random, same answers", int(equal), "", 1)
    [server.end() for server in servers.values()]


def asked(host, body, after=None):
    """The answer to a chat that a client in this namespace streams; `after` is called at its tenth event."""
    program = ("import json, sys\nsys.path.insert(0, sys.argv[1])\nimport common32\n"
               "def told(n): print('event', file=sys.stderr, flush=True)\n"
               "f = common32.stream(52415, json.loads(sys.stdin.read()), path='/v1/chat/completions', on_event=told, timeout=170)\n"
               "print(json.dumps({n: f[n] for n in ('rate', 'text', 'usage')}))")
    child = subprocess.Popen(["ip", "netns", "exec", host, sys.executable, "-c", program, os.path.dirname(os.path.abspath(__file__))],
                             text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    child.stdin.write(json.dumps(body))
    child.stdin.close()
    said, events = [], 0
    for line in child.stderr:
        events += line == "event\n"
        said += [line] if line != "event\n" else []
        if events == 10 and after:
            after = after()
    if child.wait() or after:
        sys.exit(f"{body['model']}: {events} events, then {''.join(said)[-600:]}")
    return json.loads(child.stdout.read())


def stages():
    from delay_net import DelayNet
    here, net, machines = folder(), DelayNet(4, a.ms), []
    ways = {"plain": ["--drafts", 0], "head": ["--drafter", head()]}
    try:
        machines = [common31.Machine(BINARY, net, n) for n in range(4)]
        [machine.up() for machine in machines]
        common31.form(machines)
        time.sleep(10)  # paths are measured
        for name, how in ways.items():
            another_name(SMOLLM2, f"{here}/{name}.gguf")  # the same model again would be a replica
            machines[0].told("load", f"{here}/{name}.gguf", "--nodes", "n0,n1,n2,n3", "--split", "pipeline", "--threads", 1,
                             "--parallel", 1, "--context", 2048, "--spare", 0, "--weights", "whole", *how)
        listed = [m["id"] for m in machines[0].get("/v1/models")["data"]]

        def ask(way, text):
            model = next(i for i in listed if i.endswith(f"/{way}.gguf"))
            return asked(net.hosts[0], {"model": model, **chat(text)})
        rates(ways, ask, held_out(2))
        found, equal = rates(ways, ask, held_out(2 + (a.runs or 6))[2:])
        told("stages, accepted drafts a step", [accepted(one["head"]["usage"]) for one in found])
        bar(f"stages, four with {a.ms:g} ms one way, decode over plain", [one["head"]["rate"] / one["plain"]["rate"] for one in found], "x", 2.5)
        bar("stages, same answers", int(equal), "", 1)
        told_by = machines[0].told("ps")
        print("  " + told_by.replace("\n", "\n  "), flush=True)
    finally:
        [machine.end() for machine in machines]
        net.end()


def drawn_request(draw, text):
    body = chat(text, max_tokens=draw.randint(8, 64))
    if draw.random() < 0.6:
        body |= {"temperature": draw.choice([0.5, 1.0, 1.5]), "seed": draw.randrange(1 << 30), "top_p": draw.choice([0.8, 1.0])}
    if draw.random() < 0.3:
        body["stop"] = draw.sample(["self", "\n\n", "return", "price", "```"], 2)
    if draw.random() < 0.3:
        body |= {"logprobs": True, "top_logprobs": draw.randint(0, 3)}
    if draw.random() < 0.3:
        body |= {"frequency_penalty": 0.5, "presence_penalty": 0.3}
    if draw.random() < 0.15:
        body["response_format"] = {"type": "json_object"}
    return body


def equal():
    servers, draw = one_node(), random.Random(500)
    known = held_out(40)
    texts = [draw.choice(known if draw.random() < 0.7 else RANDOM) for _ in range(a.requests or 500)]
    bodies = [drawn_request(draw, text) for text in texts]
    differ, right, checked = [], 0, 0

    def ask(way, body):
        return servers[way].call("POST", "/v1/chat/completions", {"model": servers[way].model, **body})
    for first in range(0, len(bodies), 4):
        answers = {way: together(*[lambda body=body: ask(way, body) for body in bodies[first:first + 4]]) for way in servers}
        for body, one, other in zip(bodies[first:], answers["plain"], answers["head"]):
            of = other["usage"]["completion_tokens_details"]
            right += of.get("accepted_prediction_tokens", 0)
            checked += of.get("accepted_prediction_tokens", 0) + of.get("rejected_prediction_tokens", 0)
            if one["choices"] != other["choices"]:
                differ.append(body)
    told("equal, draft tokens checked", checked)
    told("equal, of these accepted", right)
    for body in differ[:3]:
        print("  differs: " + json.dumps(body)[:600], flush=True)
    bar("equal, answers that differ", len(differ), "", 0, at_least=False)
    [server.end() for server in servers.values()]


def machines():
    from delay_net import DelayNet
    here, net, both, every = folder(), DelayNet(2, 1.0), [], prompts()
    data = f"{here}/prompts.jsonl"
    with open(data, "w") as file:
        file.writelines(json.dumps({"prompt": next(every), "completion": "."}) + "\n" for _ in range(40))

    def command(out, *more):
        return ["train", SMOLLM2, "--drafter", "--data", data, "--output", f"{here}/{out}", "--max-tokens-per-row", 80, "--json",
                "--draft-vocab", 500, "--batch", 4, "--lr", 1e-3, "--steps", a.steps if a.steps < 150 else 6, "--threads", 1, *more]

    def weights(out):
        with open(f"{here}/{out}/model.safetensors", "rb") as file:
            return file.read()
    try:
        told("machines, seconds of one process", json.loads(run(*command("one")))["train_s"])
        both = [common31.Machine(BINARY, net, n) for n in range(2)]
        [machine.up() for machine in both]
        common31.form(both)
        for out, is_killed in (("two", False), ("killed", True)):
            child = subprocess.Popen([str(word) for word in both[0].command(*command(out, "--nodes", 2))], env=both[0].env,
                                     cwd=both[0].home, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            if is_killed:
                until("the head is trained", lambda: os.path.exists(f"{here}/killed/.exchange/answers/all.jsonl"), 600)
                time.sleep(3)
                far = subprocess.run(["ip", "netns", "pids", net.hosts[1]], capture_output=True, text=True).stdout.split()
                far = [pid for pid in far if b"train-worker" in open(f"/proc/{pid}/cmdline", "rb").read()]
                [os.kill(int(pid), signal.SIGKILL) for pid in far]
                told("machines, workers killed on the other machine", len(far))
            said, errors = child.communicate(timeout=1200)
            print("  " + "\n  ".join((said + errors).splitlines()[-6:]), flush=True)
            bar(f"machines, {out}: the bytes of one process", int(weights(out) == weights("one")), "", 1)
    finally:
        [machine.end() for machine in both]
        net.end()


def failover():
    from delay_net import DelayNet
    here, net, machines, texts = folder(), DelayNet(3, a.ms), [], held_out(6)
    plain = Up(SMOLLM2, "--threads", a.threads, "--context", 2048, "--drafts", 0)
    expected = [plain.call("POST", "/v1/chat/completions", {"model": plain.model, **chat(text)}) for text in texts]
    plain.end()
    try:
        machines = [common31.Machine(BINARY, net, n) for n in range(3)]
        [machine.up() for machine in machines]
        common31.form(machines)
        # The machine that drafts, then one behind it.
        for lost, nodes in ((0, "n0,n1,n2"), (1, "n2,n1,n0")):
            differ, right = 0, []
            another_name(SMOLLM2, f"{here}/lost{lost}.gguf")
            machines[2 * lost].told("load", f"{here}/lost{lost}.gguf", "--nodes", nodes, "--split", "pipeline", "--threads", 1,
                                    "--parallel", 2, "--context", 2048, "--drafter", head())
            asking = machines[2]

            def is_ready(name=f"lost{lost}.gguf"):
                return any(m["id"].endswith(name) for m in asking.get("/v1/models")["data"])
            until("the model is known", is_ready, 120)
            model = next(m["id"] for m in asking.get("/v1/models")["data"] if m["id"].endswith(f"lost{lost}.gguf"))
            for n, (text, of) in enumerate(zip(texts, expected)):
                def fell():
                    pids = subprocess.run(["ip", "netns", "pids", net.hosts[lost]], capture_output=True, text=True).stdout.split()
                    [os.kill(int(pid), signal.SIGKILL) for pid in pids]
                answer = asked(net.hosts[2], {"model": model, **chat(text)}, fell if n == 1 else None)
                right.append(accepted(answer["usage"]))
                differ += answer["text"] != of["choices"][0]["message"]["content"]
            print("  " + machines[2].told("ps").replace("\n", "\n  "), flush=True)
            bar(f"failover, n{lost} lost: answers that differ", differ, "", 0, at_least=False)
            told(f"failover, n{lost} lost: accepted drafts a step in answers after it", right[2:])
            bar(f"failover, n{lost} lost: the most of them", max(right[2:]), "", 0.1)  # steps are timed anew
            machines[2].told("unload", model)
            machines[lost].child.wait()
            machines[lost].up()
    finally:
        [machine.end() for machine in machines]
        net.end()


def first_difference(one, other):
    """How far apart the two likeliest tokens were where two answers part; None for equal ones."""
    for of, there in zip(*[answer["choices"][0]["logprobs"]["content"] for answer in (one, other)]):
        if of["token"] != there["token"]:
            first, second = [top["logprob"] for top in of["top_logprobs"][:2]]
            return first - second if there["token"] in [top["token"] for top in of["top_logprobs"]] else float("inf")
    return None if one["choices"][0]["message"] == other["choices"][0]["message"] else float("inf")


def mlx():
    servers, draw = one_node("--engine", "mlx", "--class", a.kernels), random.Random(100)
    known = (a.requests or 100) * 3 // 4
    texts = held_out(known) + [draw.choice(RANDOM) for _ in range((a.requests or 100) - known)]
    parted, again, right, steps = [], 0, 0, 0
    for n, text in enumerate(texts):
        body = chat(text, max_tokens=a.tokens or 160, logprobs=True, top_logprobs=2)
        one, other = [servers[way].call("POST", "/v1/chat/completions", {"model": servers[way].model, **body}) for way in servers]
        of = other["usage"]["completion_tokens_details"].get("accepted_prediction_tokens", 0)
        right, steps = right + of, steps + other["usage"]["completion_tokens"] - of
        gap = first_difference(one, other)
        parted += [gap] if gap is not None else []
        if n % 10 == 0:
            same = servers["head"].call("POST", "/v1/chat/completions", {"model": servers["head"].model, **body})
            again += same["choices"] != other["choices"]
    told("mlx, accepted drafts a step", right / max(steps, 1))
    told("mlx, answers that part at a near tie", sum(gap <= 1e-3 for gap in parted))
    bar("mlx, answers that part elsewhere", sum(gap > 1e-3 for gap in parted), "", 0, at_least=False)
    bar("mlx, of every tenth request, those that differ the second time", again, "", 0, at_least=False)
    [server.end() for server in servers.values()]


BARS = {"train": (train, 5500), "speed": (speed, 900), "random": (random_text, 900), "stages": (stages, 1800), "equal": (equal, 1800),
        "mlx": (mlx, 1800), "failover": (failover, 900), "machines": (machines, 3600)}
parser = arguments(__doc__, runs=0, ms=25.0, tokens=0, requests=0, kernels="mlx-f32", minutes=90.0, steps=150, threads=2, out="/tmp/drafter-61")
a = chosen.parsed(parser, BARS, ["stages", "failover", "machines"])
chosen.play(a.bars, BARS)
