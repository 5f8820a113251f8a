"""Power cuts of three hosts with four open answers each: SIGKILL to all of their processes, then all return (issue 54).

usage: bar54_power.py PROGRAM CYCLES MODEL [--plain]       --plain is without `up --durable`

Each client comes back at a drawn host with the `Last-Event-ID` of its last event. Hosts are network namespaces.
"""
import json, os, random, subprocess, sys, threading, time

PROGRAM, CYCLES, MODEL, N, TOKENS = sys.argv[1], int(sys.argv[2]), sys.argv[3], 3, 150
OPTIONS = ["--threads", 1] + ([] if "--plain" in sys.argv else ["--durable"])
os.environ.setdefault("PACELINE", PROGRAM)
import common31  # noqa: E402, reads PACELINE

PROMPTS = [f"Once upon a time number {i}" for i in range(4)]
READER = r"""
import http.client, json, sys
model, prompt, tokens, last = sys.argv[1:5]
body = {"model": model, "prompt": prompt, "max_tokens": int(tokens), "temperature": 0, "stream": True, "ignore_eos": True}
headers = {"Content-Type": "application/json", **({"Last-Event-ID": last} if last else {})}
connection = http.client.HTTPConnection("127.0.0.1", 52415, timeout=60)
try:
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    print(json.dumps({"status": response.status}), flush=True)
    last = None
    for line in response if response.status == 200 else []:
        line = line.decode().strip()
        if line.startswith("id:"):
            last = line[3:].strip()
        elif line.startswith("data:") and line[5:].strip() == "[DONE]":
            print(json.dumps({"whole": True}), flush=True)
        elif line.startswith("data:"):
            choices = json.loads(line[5:]).get("choices") or [{}]
            print(json.dumps({"last": last, "text": choices[0].get("text", "")}), flush=True)
except OSError:
    pass  # the power is off
"""


class Stream:
    def __init__(self, machine, model, prompt):
        self.machine, self.model, self.prompt = machine, model, prompt
        self.text, self.last, self.whole, self.status = "", "", False, None

    def start(self):
        command = ["ip", "netns", "exec", self.machine.ns, sys.executable, "-c", READER, self.model, self.prompt]
        self.child = subprocess.Popen([*command, str(TOKENS), self.last], stdout=subprocess.PIPE,
                                      stderr=subprocess.DEVNULL, text=True)
        self.status, self.thread = None, threading.Thread(target=self.read, daemon=True)
        self.thread.start()

    def read(self):
        for line in self.child.stdout:
            said = json.loads(line)
            self.status, self.whole = said.get("status", self.status), self.whole or "whole" in said
            self.text, self.last = self.text + said.get("text", ""), said.get("last") or self.last

    def wait(self, seconds):
        self.thread.join(seconds)
        self.child.kill()
        self.child.wait()

    def go_on(self, machine, seconds):
        self.machine, end = machine, time.time() + seconds
        while not self.whole and self.status != 404 and time.time() < end:
            self.start()
            self.wait(40)
            time.sleep(0.3)


def cycle(machines, number, whole):
    entry, back = machines[number % N], random.choice(machines)
    streams = [Stream(entry, *key) for key in whole]
    for stream in streams:
        stream.start()
    entry.until("streams", lambda: all(stream.text for stream in streams))
    time.sleep(random.uniform(0.05, 1.2))
    for machine in random.sample(machines, N):
        machine.child.kill()
        machine.child.wait()
    for stream in streams:
        stream.wait(5)
    for machine in random.sample(machines, N):
        machine.up(*OPTIONS)
    for stream in streams:
        stream.go_on(back, 60)
    return sum(stream.text == whole[stream.model, stream.prompt] for stream in streams)


random.seed(7)
net, machines, equal = common31.Net(N, "pw"), [], 0
try:
    machines = [common31.Machine(PROGRAM, net, n) for n in range(N)]
    for machine in machines:
        machine.up(*OPTIONS)
    common31.form(machines)
    machines[0].told("load", MODEL, "--nodes", N, "--threads", 1, "--context", 1024)
    model, whole = machines[0].get("/v1/models")["data"][0]["id"], {}
    for prompt in PROMPTS:
        stream = Stream(machines[0], model, prompt)
        stream.go_on(machines[0], 60)
        whole[model, prompt] = stream.text
    for number in range(CYCLES):
        equal += cycle(machines, number, whole)
        print(f"{equal} of {(number + 1) * len(PROMPTS)} answers whole and equal", flush=True)
finally:
    for machine in machines:
        machine.end()
    net.end()
sys.exit(equal != CYCLES * len(PROMPTS))
