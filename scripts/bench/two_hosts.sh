#!/usr/bin/env bash
# two_hosts.sh RATE COMMAND...: runs `COMMAND... 0` and `COMMAND... 1` at the same time, each in a
# network namespace of its own, 10.77.0.1 and 10.77.0.2, with a link of RATE between them, such as
# 1gbit; `none` sets no limit. For measurements of what waits for a wire. Needs root and iproute2.
set -euo pipefail

rate=$1
shift
[ $# -gt 0 ] || { sed -n 's/^# //p' "$0" >&2; exit 2; }

hosts=(paceline-0 paceline-1)
on() { ip netns exec "${hosts[$1]}" "${@:2}"; }
clean() {
    kill $(jobs -p) 2>/dev/null || true
    for host in "${hosts[@]}"; do ip netns del "$host" 2>/dev/null || true; done
}
trap clean EXIT

for host in "${hosts[@]}"; do ip netns add "$host"; done
ip link add wire netns "${hosts[0]}" type veth peer name wire netns "${hosts[1]}"
for i in 0 1; do
    on $i ip addr add "10.77.0.$((i + 1))/24" dev wire
    on $i ip link set wire up
    on $i ip link set lo up
    # A burst is what a link carries in 1 ms or so; what waits is dropped after 50 ms.
    [ "$rate" = none ] || on $i tc qdisc add dev wire root tbf rate "$rate" burst 256kb latency 50ms
done

on 1 "$@" 1 &
on 0 "$@" 0
wait
