"""A program for MLX with one changed import gives MLX's results, also among MLX's own ranks.

    python mlx_test.py              of a Python that has MLX and finds paceline
"""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile

from ranks import Report, end

PROGRAM = pathlib.Path(__file__).with_name("mlx_program.py")
IMPORT = "from mlx.core import distributed"
OURS = IMPORT.replace("mlx.core", "paceline")


def results(folder: str, texts: list[str]) -> list:
    """What ranks with these programs print."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in texts]
    hosts = [[f"127.0.0.1:{one.getsockname()[1]}"] for one in sockets]
    for one in sockets:
        one.close()
    file = pathlib.Path(folder, "hosts.json")
    file.write_text(json.dumps(hosts))
    ranks = []
    for rank, text in enumerate(texts):
        env = {**os.environ, "MLX_RANK": str(rank), "MLX_HOSTFILE": str(file)}
        ranks.append(subprocess.Popen([sys.executable, "-c", text], text=True, env=env,
                                      stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    return [json.loads(out) for out in end(ranks)]


def main() -> int:
    report = Report()
    text = PROGRAM.read_text()
    assert text.count(IMPORT) == 1
    ours = text.replace(IMPORT, OURS)
    own_wire = ours.replace('backend="ring"', 'backend="any"')
    with tempfile.TemporaryDirectory() as folder:
        expected = results(folder, [text, text])

        def same(texts: list[str]) -> None:
            got = results(folder, texts)
            assert got == expected, f"{got}, expected {expected}"

        report.check("one changed import gives MLX's results", same, [ours, ours])
        report.check("and by shared memory", same, [own_wire, own_wire])
        report.check("a rank of MLX and one of paceline in a ring", same, [text, ours])
    return report.failed


if __name__ == "__main__":
    sys.exit(main())
