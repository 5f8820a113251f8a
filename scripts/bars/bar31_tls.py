#!/usr/bin/env python3
"""Issue 31, safe off loopback: capture without the prompt, a wrong certificate refused by the SDKs, curl --cacert.

    bar31_tls.py BINARY [--model GGUF] [--sdks PYTHON]     root; 1 to 2 minutes. PYTHON has openai and anthropic (default:
    the test clients of `cargo xtask sdk`, ~/.cache/paceline/test-clients/python/bin/python, else this one)

n0 serves at 10.77.0.1 with a key; the client is the bridge's namespace (10.77.0.254). All frames are captured by a packet socket.
"""
import argparse, sys, os
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from common31 import *
from common import SMOLLM2

ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
ap.add_argument("binary")
ap.add_argument("--model", default=SMOLLM2)
ap.add_argument("--sdks")
a = ap.parse_args()
SDK = a.sdks or next((p for p in [os.path.expanduser(f"~/.cache/paceline/test-clients/{d}/bin/python") for d in
                                  ("venv", "python", "sdk")] if os.path.exists(p)), sys.executable)
PROMPT = "the quick brown fox jumps over the lazy dog and 48151623"
CAPTURE = """import socket, sys
raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)); raw.bind(('p0', 0))
out = open(sys.argv[1], 'wb', buffering=0); print('listening', flush=True)
while True: out.write(raw.recv(65535))"""
net = Net(1)
n0 = Machine(a.binary, net, 0)
frames = tempfile.mktemp(prefix="b31-frames-")
within = lambda *args, **more: subprocess.run(["ip", "netns", "exec", net.bridge, *args], capture_output=True, text=True, **more)
try:
    key = n0.told("key", "api", "new", "bars").split()[-1]
    n0.log = open(f"{n0.home}/log", "a+")
    n0.child = subprocess.Popen(n0.command("up", a.model, "--host", "10.77.0.1", "--port", "52415"), env=n0.env, cwd=n0.home,
                                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=n0.log)
    n0.until("listens", lambda: "listening on https://10.77.0.1" in n0.said())
    said = n0.said()
    print(*[line for line in said.splitlines() if "cert" in line or "fingerprint" in line.lower() or "listening" in line], sep="\n")
    cert = re.search(r"--cacert (\S+)", said)[1]
    url = "https://10.77.0.1:52415"
    capture = subprocess.Popen(["ip", "netns", "exec", net.bridge, sys.executable, "-c", CAPTURE, frames], stdout=subprocess.PIPE, text=True)
    capture.stdout.readline()
    models = json.loads(within("curl", "-s", "--cacert", cert, "-H", f"Authorization: Bearer {key}", url + "/v1/models").stdout)
    model = models["data"][0]["id"]
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8})
    ok = within("curl", "-s", "-w", "%{http_code}", "--cacert", cert, "-H", f"Authorization: Bearer {key}", "-d", body,
                "-H", "Content-Type: application/json", url + "/v1/chat/completions")
    verdict("curl --cacert with the printed certificate", int(ok.stdout.endswith("200")), 1)
    none = within("curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "--cacert", cert, url + "/v1/models")
    verdict("without a key: 401", int(none.stdout == "401"), 1)
    wrong = within("curl", "-sS", "-H", f"Authorization: Bearer {key}", url + "/v1/models")
    verdict("curl without it refuses", int(wrong.returncode == 60), 1)
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "/dev/null", "-out", frames + ".pem", "-days", "2",
                    "-subj", "/CN=other"], check=True, capture_output=True)
    for sdk, code in [("openai", "import openai; c = openai.OpenAI(base_url=U + '/v1', api_key=K, max_retries=0); c.models.list()"),
                      ("anthropic", "import anthropic; c = anthropic.Anthropic(base_url=U, api_key=K, max_retries=0); c.models.list()")]:
        probe = within(SDK, "-c", f"import {sdk}")
        if probe.returncode != 0:
            print(f"SKIPPED {sdk}: {SDK} has it not (--sdks PYTHON)")
            continue
        for name, ca, expected in [("wrong", frames + ".pem", False), ("right", cert, True)]:
            env = {**os.environ, "SSL_CERT_FILE": ca}
            told = within(SDK, "-c", f"U, K = {url!r}, {key!r}\n{code}\nprint('fine')", env=env)
            named = "CERTIFICATE_VERIFY_FAILED" in told.stderr
            good = ("fine" in told.stdout) if expected else ("fine" not in told.stdout and named)
            verdict(f"{sdk} with the {name} certificate", int(good), 1)
    capture.kill(); capture.wait()
    seen = open(frames, "rb").read()
    verdict("frames that show the prompt", int(PROMPT[:20].encode() in seen), 0, at_least=False)
    verdict("frames were seen at all, KB", len(seen) / 1e3, 5)
finally:
    n0.end()
    net.end()
