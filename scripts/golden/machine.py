#!/usr/bin/env python3
"""Records the files of /proc and /sys that telemetry reads, twice: machine.py OUT.json [SECONDS]

For tests-data/golden/telemetry, which tests read as the folders of other machines. Linux; no root, no packages.
Two seconds lie between both times unless SECONDS says otherwise. `expected` has what this program makes of the files by
itself: keys of a sample, absent where the machine does not tell. Look through the file before it is committed.
"""

import json
import re
import sys
import time
from glob import glob
from pathlib import Path

PATTERNS = """proc/stat proc/meminfo proc/net/dev proc/diskstats proc/pressure/* sys/block/*/size
sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_cur_freq sys/class/hwmon/hwmon*/temp*_input
sys/devices/system/cpu/cpu[0-9]*/thermal_throttle/package_throttle_total_time_ms
sys/class/powercap/intel-rapl:*/energy_uj sys/class/powercap/intel-rapl:*/max_energy_range_uj
sys/class/power_supply/*/type sys/class/power_supply/*/scope sys/class/power_supply/*/capacity
sys/class/power_supply/*/status sys/class/power_supply/*/power_now sys/class/power_supply/*/current_now
sys/class/power_supply/*/voltage_now sys/class/drm/card*/device/gpu_busy_percent
sys/class/drm/card*/device/mem_info_vram_total sys/class/drm/card*/device/mem_info_vram_used
sys/class/drm/card*/device/hwmon/hwmon*/power1_average sys/class/drm/card*/device/hwmon/hwmon*/temp*_input""".split()


def record():
    files = {}
    for path in sorted(path for pattern in PATTERNS for path in glob(f"/{pattern}")):
        try:
            text = Path(path).read_text()
        except OSError:
            continue  # what root alone may read is absent for telemetry too
        if path == "/proc/stat":
            text = "".join(line for line in text.splitlines(True) if not line.startswith(("intr", "softirq")))
        files[path[1:]] = text
    return files


def words(files, path, name):
    """The words behind each name of a table."""
    lines = (re.split(r"[\s:]+", line.strip()) for line in files.get(path, "").splitlines())
    return {line[name]: line[name + 1:] for line in lines if len(line) > name + 1}


def expected(then, now, seconds):
    told = {}

    def cores(files):
        ticks = {name: [int(word) for word in all[:8]] for name, all in words(files, "proc/stat", 0).items() if name.startswith("cpu")}
        return {name: (sum(all) - all[3] - all[4], sum(all)) for name, all in ticks.items()}
    before, after = cores(then), cores(now)
    busy = [min((after[name][0] - before[name][0]) / (after[name][1] - before[name][1]), 1) for name in after]
    told["cpu_busy"], told["core_busy"] = busy[0], busy[1:]
    memory = words(now, "proc/meminfo", 0)
    for key, name in (("memory_bytes", "MemTotal"), ("memory_available_bytes", "MemAvailable")):
        told[key] = 1024 * int(memory[name][0])
    swap = [1024 * int(memory[name][0]) for name in ("SwapTotal", "SwapFree")]
    if swap[0]:
        told["swap_bytes"], told["swap_used_bytes"] = swap[0], swap[0] - swap[1]
    for what, key in (("cpu", "cpu_pressure"), ("memory", "memory_pressure"), ("io", "io_pressure")):
        if found := re.search(r"^some avg10=([\d.]+)", now.get(f"proc/pressure/{what}", ""), re.M):
            told[key] = float(found[1]) / 100
    disks = [name for name in words(now, "proc/diskstats", 2) if f"sys/block/{name}/size" in now and not re.match("loop|ram|zram|dm-|md|sr", name)]
    for key, at in (("disk_read_bytes_s", 2), ("disk_write_bytes_s", 6)):
        if disks:
            moved = (int(words(now, "proc/diskstats", 2)[d][at]) - int(words(then, "proc/diskstats", 2)[d][at]) for d in disks)
            told[key] = 512 * sum(moved) / seconds
    nets = {name: all for name, all in words(now, "proc/net/dev", 0).items() if name not in ("lo", "Inter-|", "face")}
    rate = lambda name, at: (int(nets[name][at]) - int(words(then, "proc/net/dev", 0)[name][at])) / seconds
    told["networks"] = [{"name": name, "received_bytes_s": rate(name, 0), "sent_bytes_s": rate(name, 8)} for name in sorted(nets)]
    return told


def main():
    out, seconds = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 2.0
    then = record()
    time.sleep(seconds)
    now = record()
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    kernel = Path("/proc/sys/kernel/osrelease").read_text().strip()
    about = f"{model[1] if model else 'unknown processor'}, Linux {kernel}, by scripts/golden/machine.py"
    whole = {"about": about, "seconds": seconds, "then": then, "now": now, "expected": expected(then, now, seconds)}
    Path(out).write_text(json.dumps(whole, indent=1) + "\n")


main()
