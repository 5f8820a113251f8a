#!/usr/bin/env python3
"""OpenAI's Python SDK and curl against a server off loopback: `ok NAME` or `FAILED NAME: why`.

Usage: PACELINE_BINARY=FILE PACELINE_MODEL=FILE tls_python.py BASE_URL MODEL

Starts servers of its own, in homes of their own, on all addresses and free ports; BASE_URL is not
used. A relay between client and server keeps what a capture would show. Ends with 1 when a case
failed. `cargo xtask sdk` runs this.
"""

import contextlib
import hashlib
import os
import pathlib
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import traceback

import httpx
import openai

BINARY, MODEL = os.environ["PACELINE_BINARY"], os.environ["PACELINE_MODEL"]
# Reading 100 MB of weights takes a second.
START_S = 60
# Longest time of one request.
PATIENCE_S = 60
SECRET = "The password is quetzalcoatl. What is the password?"


class Server:
    """`paceline up` on all addresses, with its certificate and a key."""

    def __init__(self, *arguments):
        self.home = tempfile.TemporaryDirectory(prefix="paceline-tls-")
        env = {**os.environ, "PACELINE_HOME": self.home.name}
        made = subprocess.run([BINARY, "key", "api", "new", "tls"], env=env, check=True,
                              capture_output=True, text=True, timeout=START_S)
        self.key = made.stdout.strip()
        command = [BINARY, "up", "--no-beacons", "--control-port", "0", "--host", "0.0.0.0",
                   "--port", "0", *arguments]
        self.process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True)
        late = threading.Timer(START_S, self.process.kill)
        late.start()
        self.said = []
        self.port = next(self.ports(), None)
        late.cancel()
        # Goes on reading, so that the server never waits.
        threading.Thread(target=self.process.stderr.read, daemon=True).start()
        if self.port is None:
            self.close()
            raise AssertionError(f"the server ended: {''.join(self.said)}")
        self.certificate = pathlib.Path(self.home.name, "tls/cert.pem")

    def ports(self):
        for line in self.process.stderr:
            self.said.append(line)
            if line.startswith("listening on https://"):
                yield int(line.rsplit(":", 1)[1])

    def close(self):
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(20)
        self.home.cleanup()


class Relay:
    """Passes connections on to a port and keeps all bytes, as a capture does."""

    def __init__(self, port):
        self.target, self.seen = port, bytearray()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            client, _ = self.listener.accept()
            server = socket.create_connection(("127.0.0.1", self.target), PATIENCE_S)
            for one, other in ((client, server), (server, client)):
                threading.Thread(target=self.copy, args=(one, other), daemon=True).start()

    def copy(self, one, other):
        try:
            while data := one.recv(1 << 16):
                self.seen += data
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)
        except OSError:
            pass


def chat(port, key, certificate, scheme="https"):
    """What the model says to the secret."""
    trusted = ssl.create_default_context(cafile=certificate)
    client = openai.OpenAI(base_url=f"{scheme}://127.0.0.1:{port}/v1", api_key=key, max_retries=0,
                           timeout=PATIENCE_S, http_client=httpx.Client(verify=trusted))
    messages = [{"role": "user", "content": SECRET}]
    answer = client.chat.completions.create(model=sys.argv[2], messages=messages,
                                            max_tokens=16)
    return answer.choices[0].message.content


def a_capture_shows_no_prompt(server, _):
    relay = Relay(server.port)
    assert chat(relay.port, server.key, server.certificate), "no answer"
    for text in ("quetzalcoatl", server.key):
        assert text.encode() not in relay.seen, f"{text!r} can be read"
    # The same without TLS, so that the relay is known to see what can be seen.
    chat(relay.port, server.key, server.certificate, "http")
    assert b"quetzalcoatl" in relay.seen, "the relay sees nothing"


def a_wrong_certificate_is_refused_by_name(server, other):
    for certificate in (other.certificate, None):
        try:
            chat(server.port, server.key, certificate)
        except openai.APIConnectionError as error:
            assert "CERTIFICATE_VERIFY_FAILED" in str(error.__cause__), repr(error.__cause__)
        else:
            raise AssertionError(f"{certificate} was taken")


def curl_takes_the_certificate(server, other):
    if shutil.which("curl") is None:
        return
    for certificate, expected in ((server.certificate, 0), (other.certificate, 60)):
        command = ["curl", "-sS", "--fail", "--max-time", str(PATIENCE_S), "--cacert", certificate,
                   f"https://127.0.0.1:{server.port}/health"]
        ended = subprocess.run(command, capture_output=True, text=True)
        assert ended.returncode == expected, f"{ended.returncode}: {ended.stderr}"


def the_fingerprint_is_printed(server, _):
    der = ssl.PEM_cert_to_DER_cert(server.certificate.read_text())
    digest = hashlib.sha256(der).hexdigest().upper()
    shown = ":".join(digest[i:i + 2] for i in range(0, len(digest), 2))
    assert any(shown in line for line in server.said), f"{shown} in {server.said}"


def main():
    failed = False
    with contextlib.ExitStack() as servers:
        def start(*arguments):
            server = Server(*arguments)
            servers.callback(server.close)
            return server

        server, other = start("--model", MODEL), start()
        for case in (a_capture_shows_no_prompt, a_wrong_certificate_is_refused_by_name,
                     curl_takes_the_certificate, the_fingerprint_is_printed):
            try:
                case(server, other)
                print(f"ok {case.__name__}", flush=True)
            except Exception as error:
                failed = True
                traceback.print_exc()
                print(f"FAILED {case.__name__}: {error}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
