"""A client of the API in the namespace of a host: streams an answer.

Arguments: model, tokens, temperature. Prints one JSON object: the answer's text, or the error, and
the longest wait for a piece in seconds.
"""

import json
import sys
import time
import urllib.request

model, tokens, temperature = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
body = {
    "model": model,
    "messages": [{"role": "user", "content": "go"}],
    "temperature": temperature,
    "seed": 5,
    "max_tokens": tokens,
    "ignore_eos": True,
    "stream": True,
}
request = urllib.request.Request(
    "http://127.0.0.1:52415/v1/chat/completions",
    json.dumps(body).encode(),
    {"Content-Type": "application/json"},
)
text, longest, last, error, ended = "", 0.0, time.monotonic(), None, False
with urllib.request.urlopen(request, timeout=60) as lines:
    for line in lines:
        line = line.decode().strip()
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            ended = True
            break
        event = json.loads(line[len("data: ") :])
        error = error or event.get("error")
        piece = event["choices"][0]["delta"].get("content") if event.get("choices") else None
        if piece:
            now = time.monotonic()
            text, longest, last = text + piece, max(longest, now - last), now
            print("piece", file=sys.stderr, flush=True)
print(json.dumps({"text": text, "longest": longest, "error": error, "ended": ended}))
