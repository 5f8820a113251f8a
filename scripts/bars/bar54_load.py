"""Three machines under a steady load beside other work: false detections of silence, death or a slow split (issue 54).

usage: bar54_load.py PROGRAM SECONDS MODEL [BUILD..]      BUILD is a command that runs again and again beside it

Nothing fails here, so each change is false: another epoch, state or split of the instance, its nodes, a node that is
not alive or a path that is down, by any machine's view; so is an answer that is not whole and equal. Hosts are network namespaces.
"""
import json, os, subprocess, sys, threading, time

PROGRAM, SECONDS, MODEL, BUILD, N = os.path.abspath(sys.argv[1]), float(sys.argv[2]), os.path.abspath(sys.argv[3]), sys.argv[4:], 3
STREAMS, TOKENS, PAUSE_S = 4, 200, 0.3  # each client pauses between its answers
os.environ.setdefault("PACELINE", PROGRAM)
import common31  # noqa: E402, reads PACELINE

CLIENT = r"""
import hashlib, json, sys, time, urllib.request
number, tokens, model, pause = sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[5])
end = time.time() + float(sys.argv[4])
body = {"model": model, "prompt": f"Once upon a time number {number}", "max_tokens": tokens, "temperature": 0,
        "stream": True, "ignore_eos": True}
while time.time() < end:
    text, how, gap, last = "", "cut", 0, time.monotonic()
    try:
        request = urllib.request.Request("http://127.0.0.1:52415/v1/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        for line in urllib.request.urlopen(request, timeout=120):
            gap, last = max(gap, time.monotonic() - last), time.monotonic()
            if line.startswith(b"data: [DONE]"):
                how = "whole"
            elif line.startswith(b"data: "):
                event = json.loads(line[6:])
                how, text = (event["error"]["code"], text) if "error" in event else (how, text + event["choices"][0].get("text", ""))
    except (OSError, ValueError, LookupError) as fault:
        how = str(fault)
    print(json.dumps([how, hashlib.sha256(text.encode()).hexdigest(), gap]), flush=True)
    time.sleep(pause)
"""
answers, gaps, faults = {}, [], []


def say(fault):
    faults.append(fault)
    print(f"{time.strftime('%H:%M:%S')} {fault} (load {os.getloadavg()[0]:.1f})", flush=True)


def read(number, child):
    for line in child.stdout:
        how, text, gap = json.loads(line)
        gaps.append(gap)
        whole = answers.setdefault(number, text)
        if how != "whole" or text != whole:
            say(f"stream {number}: {how}, {'equal' if text == whole else 'other text'}")


def seen(machine):
    """What must not change, by one machine's view."""
    shown = [{key: it.get(key) for key in ["state", "epoch", "restarts", "nodes", "split", "reason", "computing"]}
             for it in json.loads(machine.told("ps", "--json"))]
    return {"ps": shown, "nodes": {it["name"]: it["state"] for it in machine.nodes()}}


def watch(machine, end):
    before = seen(machine)
    while time.time() < end:
        time.sleep(3)
        now = seen(machine)
        if now != before:
            say(f"{machine.name} saw {json.dumps(before)} and sees {json.dumps(now)}")
        before = now


def beside(end):
    while BUILD and time.time() < end:
        subprocess.run(BUILD, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=max(1, end - time.time()))


net, machines, children = common31.Net(N, "ld"), [], []
try:
    machines = [common31.Machine(PROGRAM, net, n) for n in range(N)]
    for machine in machines:
        machine.up("--threads", 1, "--log", "info,paceline_serve=warn")
    common31.form(machines)
    machines[0].told("load", MODEL, "--nodes", N, "--threads", 1, "--context", 1024, "--spare", 0)
    model, end = machines[0].get("/v1/models")["data"][0]["id"], time.time() + SECONDS
    began, logged = time.time(), [len(machine.said()) for machine in machines]
    for number in range(STREAMS):
        entry = ["ip", "netns", "exec", machines[number % N].ns, sys.executable, "-c", CLIENT]
        children.append(subprocess.Popen([*entry, str(number), str(TOKENS), model, str(SECONDS), str(PAUSE_S)], stdout=subprocess.PIPE, text=True))
    threads = [threading.Thread(target=read, args=[n, child]) for n, child in enumerate(children)]
    threads += [threading.Thread(target=watch, args=[machine, end]) for machine in machines]
    threads.append(threading.Thread(target=beside, args=[end], daemon=True))
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads[:-1]):
        time.sleep(60)
        print(f"{time.time() - began:.0f} s: {len(gaps)} answers, longest gap {max(gaps, default=0):.2f} s, {len(faults)} false, "
              f"load {os.getloadavg()[0]:.1f}", flush=True)
    for machine, start in zip(machines, logged):
        print(f"--- {machine.name}", machine.said()[start:][-3000:], sep="\n")
    print(f"{len(gaps)} answers in {SECONDS:.0f} s, longest gap {max(gaps):.2f} s, false detections: {len(faults)}", flush=True)
finally:
    for child in children:
        child.kill()
    for machine in machines:
        machine.end()
    net.end()
sys.exit(bool(faults))
