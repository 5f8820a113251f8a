#!/usr/bin/env python3
"""Issue 31, doctor --peer in namespaces: a dropped multicast, a blocked port, MTU 1280 and a skewed clock, each named with a command.

    bar31_doctor.py BINARY        root, gcc; 2 minutes. The clock: n1's `up` with a preloaded clock_gettime 90 s ahead.
"""
import argparse, sys, os
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from common31 import *

ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
ap.add_argument("binary")
a = ap.parse_args()
SHIM = r"""#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t id, struct timespec *t) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int rc = real(id, t);
    if (id == CLOCK_REALTIME) t->tv_sec += 90;
    return rc;
}"""
shim = tempfile.mktemp(prefix="b31-clock-", suffix=".so")
subprocess.run(["gcc", "-shared", "-fPIC", "-o", shim, "-x", "c", "-", "-ldl"], input=SHIM, text=True, check=True)
net = Net(2)
n0, n1 = (Machine(a.binary, net, n) for n in range(2))


def wrong(machine, peer):
    checks = json.loads(machine.told("doctor", "--peer", peer, "--json"))["checks"]
    found = [(c["name"], c["found"], c["mend"]) for c in checks if c["state"] != "ok"]
    for name, what, mend in found:
        print(f"  {machine.name}: {name}: {what}\n      mend: {mend}")
    return {name for name, _, mend in found if mend}


def expect(what, machine, peer, names):
    found = wrong(machine, peer)
    verdict(what, int(names <= found), 1)


try:
    n0.up("--data-ports", "52500-52509")
    n1.up("--data-ports", "52500-52509")
    form([n0, n1])
    verdict("nothing is wrong, nothing is named", int(wrong(n0, "10.77.0.2") == set()), 1)
    ip("-n", n1.ns, "link", "set", "eth0", "mtu", 1280)
    expect("MTU 1280", n0, "10.77.0.2", {"packet size"})
    ip("-n", n1.ns, "link", "set", "eth0", "mtu", 1500)
    ip("-n", net.bridge, "link", "set", "dev", "br0", "type", "bridge", "mcast_snooping", 0)
    ip("-n", net.bridge, "link", "set", "dev", "p1", "type", "bridge_slave", "mcast_flood", "off")
    expect("dropped multicast, from here", n0, "10.77.0.2", {"multicast from here"})
    expect("dropped multicast, from there", n1, "10.77.0.1", {"multicast from there"})
    ip("-n", net.bridge, "link", "set", "dev", "p1", "type", "bridge_slave", "mcast_flood", "on")
    ip("-n", n1.ns, "rule", "add", "iif", "lo", "ipproto", "tcp", "sport", "52500-52509", "blackhole")
    expect("blocked data port", n0, "10.77.0.2", {"data port there"})
    ip("-n", n1.ns, "rule", "add", "iif", "lo", "ipproto", "tcp", "sport", "52416", "blackhole")
    expect("blocked control port", n0, "10.77.0.2", {"control port there"})
    expect("blocked control port, from there", n1, "10.77.0.1", {"control port here"})
    ip("-n", n1.ns, "rule", "del", "iif", "lo", "ipproto", "tcp", "sport", "52416", "blackhole")
    ip("-n", n1.ns, "rule", "del", "iif", "lo", "ipproto", "tcp", "sport", "52500-52509", "blackhole")
    n1.child.kill(); n1.child.wait()
    time.sleep(3)
    n1.up("--data-ports", "52500-52509", preload=shim)
    expect("a clock 90 s ahead", n0, "10.77.0.2", {"clock"})
    checks = json.loads(n0.told("doctor", "--json"))["checks"]
    print("doctor alone:", ", ".join(f"{c['name']} {c['state']}" for c in checks))
finally:
    n0.end(); n1.end(); net.end()
    os.unlink(shim)
