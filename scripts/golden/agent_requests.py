#!/usr/bin/env python3
"""Records the requests of Claude Code, Codex and OpenCode, without their texts.

Usage: agent_requests.py SCRIPTED PACELINE FOLDER OUT

SCRIPTED is target/release/examples/scripted and PACELINE the program (`cargo build --release --workspace
--bins --example scripted`). The agents come from npm into FOLDER (1.1 GB), in the versions of
scripts/sdk/agents.py, which starts them as here: a chat and a round trip of a tool each. Between them and
the scripted server stands a proxy, which keeps the body of each POST.

OUT (crates/serve/tests/api/agents.json) has the bodies with all that gives them their form: fields, types,
roles, names of tools and parameters, schemas, ids. Prompts, descriptions and other texts are their makers'
and are not kept: `{"$text": N}` stands for one of N characters. OUT is the same from run to run but for
ids, numbers of characters and, with other versions, whatever those changed.
"""

import contextlib
import http.client
import http.server
import json
import os
import pathlib
import re
import subprocess
import sys
import threading

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "sdk"))
import agents  # noqa: E402

# Keys whose text is form, not prose; and the scripted server's own words.
KEPT = {"type", "role", "name", "id", "model", "call_id", "tool_call_id", "tool_use_id", "arguments", "effort",
        "display", "status", "$schema", "$ref", "format", "pattern", "required", "enum", "const", "tool_choice",
        "include", "keep", "default", "signature"}
# Longest text of any other key that is kept.
SHORT = 8
VOLATILE = "x-anthropic-billing-header:"
PATIENCE_S = 60


def scrubbed(value, key=""):
    """`value` without prose."""
    if isinstance(value, dict):
        return {name: scrubbed(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [scrubbed(inner, key) for inner in value]
    if not isinstance(value, str) or len(value) <= SHORT or value.startswith(VOLATILE):
        return value
    if key in KEPT and len(value) <= 400:
        return value
    return {"$text": len(value)}


class Proxy(http.server.BaseHTTPRequestHandler):
    """Passes requests on and keeps the bodies of POSTs."""

    target, kept = None, []

    def handle_one(self):
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if self.command == "POST" and body:
            with contextlib.suppress(ValueError):
                self.kept.append((self.path.split("?")[0], json.loads(body)))
        upstream = http.client.HTTPConnection("127.0.0.1", self.target, timeout=PATIENCE_S)
        hop = ("host", "connection", "content-length", "accept-encoding", "transfer-encoding")
        headers = {k: v for k, v in self.headers.items() if k.lower() not in hop}
        upstream.request(self.command, self.path, body or None, headers)
        answer = upstream.getresponse()
        self.send_response(answer.status)
        for name, told in answer.getheaders():
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(name, told)
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        while piece := answer.read1(1 << 16):
            self.wfile.write(piece)
            self.wfile.flush()

    do_GET = do_POST = do_HEAD = handle_one

    def log_message(self, *_):
        pass


def installed(folder):
    """The agents' packages; gives a PATH with them."""
    paths = [os.environ["PATH"]]
    for name, (package, program) in agents.PACKAGES.items():
        why = agents.install(folder / name, package)
        if why is not None:
            sys.exit(f"{package} cannot be had: {why}")
        links = folder / name / "path"
        links.mkdir(exist_ok=True)
        (links / program).unlink(missing_ok=True)
        (links / program).symlink_to(agents.binary(folder / name, program).resolve())
        paths.insert(0, str(links))
    return os.pathsep.join(paths)


def record(url, paceline, path):
    """The requests of all agents, in order."""
    cases = []
    for agent in agents.agents("tiny"):
        for kind, prompt, expected in (("chat", agents.CHAT, agents.CHATTED), ("tool", agents.TRIP, agents.TRIPPED)):
            Proxy.kept.clear()
            said = agent.ask(prompt, (url, "tiny", paceline, path))
            if expected not in said:
                sys.exit(f"{agent.name} {kind}: no {expected!r} in {said[-600:]!r}")
            requests = [{"path": at, "body": scrubbed(body)} for at, body in Proxy.kept]
            cases.append({"agent": agent.name, "case": kind, "requests": requests})
            print(f"{agent.name} {kind}: {len(requests)} requests", file=sys.stderr)
    return cases


def main():
    scripted, paceline, folder, out = sys.argv[1:]
    path = installed(pathlib.Path(folder))
    child = subprocess.Popen([scripted], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                             stderr=subprocess.PIPE, text=True)
    try:
        Proxy.target = int(re.search(r"http://[^:]+:(\d+)", child.stderr.readline())[1])
        threading.Thread(target=child.stderr.read, daemon=True).start()
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        cases = record(f"http://127.0.0.1:{server.server_port}", paceline, path)
    finally:
        child.stdin.close()
        child.wait(PATIENCE_S)
    versions = [package for package, _ in agents.PACKAGES.values()]
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    text = f'{{"versions": {json.dumps(versions)},\n"cases": [\n{lines}\n]}}\n'
    pathlib.Path(out).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
