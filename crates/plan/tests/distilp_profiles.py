#!/usr/bin/env python3
"""Prints distilp.toml: the numbers that distilp's placement model takes from its own test profiles.

Run in a checkout of firstbatchxyz/distilp (Apache-2.0) at 43eda2e: distilp_profiles.py CHECKOUT
"""
import json
import sys
from pathlib import Path

SETS = {
    "hermes_70b": ["m3_air"],
    "llama_3_70b/4bit": ["m3_air"],
    "llama_3_70b/online": ["m1", "m2"],
    "qwen3_32b/bf16": ["m3_air"],
}


def main(root: Path) -> None:
    print("# Numbers of distilp 0.1.6's test profiles (firstbatchxyz/distilp 43eda2e, test/profiles), by distilp_profiles.py.")
    for name, devices in SETS.items():
        folder = root / "test" / "profiles" / name
        model = json.loads((folder / "model_profile.json").read_text())
        q = model["quantization"]
        decode = model["f_q"]["decode"]["b_1"]
        print(f'\n[[profile]]\nname = "{name}"')
        print(f'layers = {model["L"]}\nlayer_bytes = {float(model["b"][1])}')
        print(f'in_bytes = {float(model["b_i"][1])}\nout_bytes = {float(model["b_o"][1])}')
        print(f'vocab = {float(model["V"])}\nlayer_flops = {decode[1]}')
        print(f'head_flops = {float(model["f_out"]["decode"]["b_1"])}')
        print(f'cached = {float(model["hk"] * model["ek"] + model["hv"] * model["ev"])}')
        print(f'tokens = {float(model["n_kv"])}')
        for index, file in enumerate(devices):
            d = json.loads((folder / f"{file}.json").read_text())
            assert d["os_type"] == "mac_metal" and d["is_unified_mem"] and d["c_cpu"] == d["c_gpu"] == 0
            print("\n[[profile.device]]")
            print(f'cpu_flops = {d["scpu"][q]["b_1"]}\ngpu_flops = {d["sgpu_metal"][q]["b_1"]}')
            print(f'cpu_bytes = {d["T_cpu"]}\ngpu_bytes = {d["T_metal"]}')
            print(f'cpu_kv_copy = {d["t_kvcpy_cpu"]}\ngpu_kv_copy = {d["t_kvcpy_gpu"]}')
            print(f'comm = {float(d["t_comm"])}\ndisk = {d["s_disk"]}')
            print(f'memory = {float(d["d_avail_metal"])}\nhead = {"true" if index == 0 else "false"}')


if __name__ == "__main__":
    main(Path(sys.argv[1]))
