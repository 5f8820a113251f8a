"""A client that streams answers until its standard input ends, and reconnects when a stream breaks.

Argument: model. A broken stream is asked for again with the id of its last event. Prints one JSON object:
the number of answers, the distinct texts, and the errors.
"""

import http.client
import json
import sys
import threading
import time

body = {
    "model": sys.argv[1],
    "messages": [{"role": "user", "content": "go"}],
    "temperature": 0.8,
    "seed": 5,
    "max_tokens": 400,
    "ignore_eos": True,
    "stream": True,
}
# A restarted machine is back within a few seconds.
PATIENCE = 60

ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
answers, reconnects, texts, errors = 0, 0, set(), []


def stream(last):
    """Yields events and their ids, until the connection ends."""
    connection = http.client.HTTPConnection("127.0.0.1", 52415, timeout=PATIENCE)
    headers = {"Content-Type": "application/json"}
    if last:
        headers["Last-Event-ID"] = last
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    if response.status != 200:
        raise ConnectionError(response.status, response.read().decode())
    name = None
    for line in response:
        line = line.decode().strip()
        if line.startswith("id: "):
            name = line[4:]
        elif line.startswith("data: "):
            yield name, line[6:]


def answer():
    """The text of one answer."""
    global reconnects
    text, last, until, why = "", None, time.monotonic() + PATIENCE, None
    while time.monotonic() < until:
        try:
            for last_id, data in stream(last):
                if data == "[DONE]":
                    return text
                event = json.loads(data)
                if event.get("error"):
                    raise ConnectionError(event["error"])
                last = last_id or last
                for choice in event.get("choices", []):
                    text += choice["delta"].get("content") or ""
        except (OSError, http.client.HTTPException) as error:
            why = error
        reconnects += 1
        time.sleep(0.1)
    raise TimeoutError(repr(why))


print("begun", flush=True)
while not ended.is_set() or not answers:
    try:
        texts.add(answer())
        answers += 1
    except TimeoutError as error:
        errors.append(str(error))
        break
print(json.dumps({"answers": answers, "texts": sorted(texts), "errors": errors, "reconnects": reconnects}))
