#!/usr/bin/env python3
"""What `paceline.distributed` costs beside the Rust figure, and what importing it costs.

    latency.py --paceline PROGRAM [--rounds 7]        in an environment that has the wheel

In turns: `paceline bench comm --transport shm`, row `all_reduce` of 4 KiB, and two Python ranks
that call `all_sum` of 1024 float32, in place and into a new array. Prints medians of all rounds.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

CALLS = 4000
WARM_UP = 500


def rank(number: int) -> None:
    import numpy as np

    import paceline.distributed as dist

    listener = dist.Listener(["127.0.0.1:0"])
    print(json.dumps(listener.addrs), flush=True)
    hosts = json.loads(sys.stdin.readline())
    group = dist.join(listener, number, hosts, backend="shm", deadline=60)
    x = np.ones(1024, np.float32)
    result = {}
    for name, call in {"in place": lambda: dist.all_sum(x, group, out=x),
                       "new array": lambda: dist.all_sum(x, group)}.items():
        times = []
        for turn in range(WARM_UP + CALLS):
            x[:] = 1
            began = time.perf_counter_ns()
            call()
            if turn >= WARM_UP:
                times.append((time.perf_counter_ns() - began) / 1000)
        result[name] = statistics.median(times)
    dist.barrier(group)
    print(json.dumps(result), flush=True)


def python() -> dict:
    ranks = [subprocess.Popen([sys.executable, __file__, "--rank", str(one)], text=True,
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE) for one in range(2)]
    hosts = json.dumps([json.loads(one.stdout.readline()) for one in ranks])
    for one in ranks:
        one.stdin.write(hosts + "\n")
        one.stdin.flush()
    return [json.loads(one.communicate()[0]) for one in ranks][0]


def rust(program: str) -> float:
    command = [program, "bench", "comm", "--transport", "shm", "--max-bytes", "4096", "--json"]
    report = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return next(row["p50_us"] for row in report["rows"]
                if row["op"] == "all_reduce" and row["bytes"] == 4096)


def imports() -> float:
    program = ("import time; began = time.perf_counter(); import paceline, paceline.distributed; "
               "print(1000 * (time.perf_counter() - began))")
    return float(subprocess.run([sys.executable, "-c", program], check=True,
                                capture_output=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--paceline", default="paceline")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rank", type=int)
    args = parser.parse_args()
    if args.rank is not None:
        rank(args.rank)
        return
    rounds = [(rust(args.paceline), python(), imports()) for _ in range(args.rounds)]
    median = statistics.median
    for name in rounds[0][1]:
        more = [ours[name] - base for base, ours, _ in rounds]
        print(f"all_sum of 4 KiB, {name}: {median(ours[name] for _, ours, _ in rounds):.2f} us, "
              f"Rust {median(base for base, *_ in rounds):.2f} us; more by {median(more):.2f} us "
              f"({min(more):.2f} .. {max(more):.2f})")
    spent = [ms for *_, ms in rounds]
    print(f"import: {median(spent):.1f} ms ({min(spent):.1f} .. {max(spent):.1f})")


if __name__ == "__main__":
    main()
