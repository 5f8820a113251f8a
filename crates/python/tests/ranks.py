"""Ranks as processes for the tests: a script starts itself, once for each rank.

`run(size, case)` starts `size` copies of the running script with `--rank R case`; each copy calls
the function of that name with its group. A case fails with the first rank's last line of stderr.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback

SECONDS = 60.0


def start(size: int, case: str, backend: str = "any", program: str | None = None) -> list:
    """Starts the ranks and tells each where all are."""
    script = program or os.path.abspath(sys.argv[0])
    command = [sys.executable, script, "--rank", case, backend]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    ranks = [subprocess.Popen([*command, str(rank)], text=True, **pipes) for rank in range(size)]
    hosts = [json.loads(rank.stdout.readline() or "[]") for rank in ranks]
    for rank in ranks:
        rank.stdin.write(json.dumps(hosts) + "\n")
        rank.stdin.flush()
    return ranks


def end(ranks: list, expected: dict[int, int] | None = None) -> list[str]:
    """Waits for the ranks and returns what each printed.

    Raises:
        AssertionError: a rank ended with another status than 0, or than `expected` says.
    """
    said = []
    try:
        for number, rank in enumerate(ranks):
            out, err = rank.communicate(timeout=SECONDS)
            wanted = (expected or {}).get(number, 0)
            why = err.strip().splitlines()[-1:] or ["nothing on stderr"]
            assert rank.returncode == wanted, f"rank {number}: {rank.returncode}: {why[0]}"
            said.append(out)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return said


def run(size: int, case: str, backend: str = "any") -> list[str]:
    """Runs one case to its end."""
    return end(start(size, case, backend))


def be_rank(cases: dict) -> bool:
    """In a rank: runs its case and returns True. In the parent: False."""
    if sys.argv[1:2] != ["--rank"]:
        return False
    import paceline.distributed as dist

    case, backend, rank = sys.argv[2], sys.argv[3], int(sys.argv[4])
    listener = dist.Listener(["127.0.0.1:0"])
    print(json.dumps(listener.addrs), flush=True)
    hosts = json.loads(sys.stdin.readline())
    group = dist.join(listener, rank, hosts, backend=backend, deadline=SECONDS)
    cases[case](group)
    return True


class Report:
    """Prints a line for each case, as all test scripts of this project do."""

    failed = False

    def check(self, name: str, work, *arguments) -> None:
        """`ok NAME` or `FAILED NAME: why`."""
        try:
            work(*arguments)
        except Exception as error:
            self.failed = True
            traceback.print_exc()
            print(f"FAILED {name}: {type(error).__name__}: {error}".replace("\n", " "), flush=True)
        else:
            print(f"ok {name}", flush=True)
