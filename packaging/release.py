"""Builds what is published: programs and wheels for Linux on x86-64 and AArch64, their packages and images,
and what installs them.

    python packaging/release.py [--arch x86_64 --arch aarch64] [--out target/publish] [--twice]
    python packaging/release.py --finish --url https://HOST/OWNER/NAME/releases --sign KEY

The second form makes what lists the other files, in a folder that has archives of other machines too:
install.sh, Homebrew's formula, the page's text, SHA256SUMS and its signature by minisign. The first form
ends with the same, without an address and without a signature unless they are given.

`cargo xtask release` runs it in an environment with cargo-zigbuild, maturin, wheel and Zig
(`scripts/package/requirements-release.txt`). Zig links against glibc 2.28, whatever this machine has, so
one program serves every Linux from 2018 on: a static one could not open MLX or verbs at run time.

`--twice` builds again in a clone in another folder and compares every file: paths, times and the
machine leave no trace. Prints `ok NAME`, `FAILED NAME: why` or `SKIPPED NAME: why`.
"""

from __future__ import annotations

import argparse
import email
import hashlib
import json
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import image
import layer
import make

ROOT = make.ROOT

#: The folder beside the program, until it is packaged, that becomes `lib/paceline` of a prefix.
OWN = make.OWN

#: The oldest glibc that programs run with, as manylinux_2_28 promises it (RHEL 8, Debian 10).
GLIBC = (2, 28)

#: Numbers of ELF for each processor (`e_machine`).
MACHINES = {"x86_64": 62, "aarch64": 183}

#: Seconds for a program that only says its version, in an emulator too.
LIMIT = 120


def target(arch: str) -> str:
    return f"{arch}-unknown-linux-gnu"


def environment(root: Path) -> dict[str, str]:
    """What makes builds of one commit equal: no paths of this machine, no symbols, one time."""
    home = Path(os.environ.get("CARGO_HOME", Path.home() / ".cargo"))
    sysroot = subprocess.run(["rustc", "--print", "sysroot"], check=True, text=True, cwd=root,
                             stdout=subprocess.PIPE).stdout.strip()
    maps = {str(root): "/paceline", str(home): "/cargo", sysroot: "/rust"}
    flags = [f"--remap-path-prefix={old}={new}" for old, new in maps.items()]
    kept = {name: value for name, value in os.environ.items()
            if name not in ("RUSTFLAGS", "CARGO_TARGET_DIR", "CARGO_BUILD_TARGET")}
    return {**kept, "CARGO_ENCODED_RUSTFLAGS": "\x1f".join(flags),
            "CARGO_PROFILE_RELEASE_DEBUG": "false", "CARGO_PROFILE_RELEASE_STRIP": "symbols",
            "CARGO_INCREMENTAL": "0", "SOURCE_DATE_EPOCH": str(make.epoch()),
            "CARGO_ZIGBUILD_PYTHON_PATH": sys.executable,
            # Zig's scripts and cargo-zigbuild lie beside this Python.
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}


def say(*command: str | Path, cwd: Path, env: dict[str, str]) -> None:
    """Runs a program whose output goes to ours."""
    print("$", " ".join(map(str, command)), flush=True)
    subprocess.run([str(word) for word in command], cwd=cwd, env=env, check=True)


def build(root: Path, arch: str) -> Path:
    """Program and C library of `root`; the folder where both lie."""
    say("cargo", "zigbuild", "--release", "--locked", "--target-dir", root / "target/zig",
        "--target", f"{target(arch)}.{GLIBC[0]}.{GLIBC[1]}", "-p", "paceline-cli", "-p", "paceline-capi",
        "--features", "paceline-cli/gpu", "--bin", "paceline", "--lib", cwd=root, env=environment(root))
    return root / "target/zig" / target(arch) / "release"


def wheel(root: Path, arch: str, program: Path, out: Path) -> Path:
    """The wheel, with the program in it."""
    env = environment(root)
    with tempfile.TemporaryDirectory() as folder:
        say("maturin", "build", "--release", "--zig", "--target", target(arch), "--target-dir",
            root / "target/zig", "--compatibility", f"manylinux_{GLIBC[0]}_{GLIBC[1]}",
            "--manifest-path", root / "crates/python/Cargo.toml", "--out", folder, cwd=root, env=env)
        return with_program(next(Path(folder).glob("*.whl")), program, out)


def with_program(made: Path, program: Path, out: Path) -> Path:
    """The wheel `made`, with `program` as its script and its own files, in `out`; the same inputs give the
    same bytes.

    Left out is maturin's bill of materials, which names times and paths; ours lies beside it.
    """
    with zipfile.ZipFile(made) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    (record,) = (name for name in files if name.endswith(".dist-info/RECORD"))
    info = record.rpartition("/")[0]
    files = {name: data for name, data in files.items()
             if name != record and not name.startswith(f"{info}/sboms/")}
    script = f"{info.removesuffix('.dist-info')}.data/scripts/paceline"
    files[script] = program.read_bytes()
    for own in sorted((program.parent / OWN).glob("*")):
        files[f"{info.removesuffix('.dist-info')}.data/data/lib/paceline/{own.name}"] = own.read_bytes()
    lines = [f"{name},sha256={digest(data)},{len(data)}" for name, data in sorted(files.items())]
    files[record] = "\n".join([*lines, f"{record},,", ""]).encode()
    return packed(files, script, out / made.name)


def digest(data: bytes) -> str:
    """A hash as RECORD writes it."""
    import base64

    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def packed(files: dict[str, bytes], script: str, target: Path) -> Path:
    import time

    # A zip archive knows no time before 1980.
    when = time.gmtime(max(make.epoch(), 315_532_800))[:6]
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        # What is about the package comes last, as in all wheels.
        for name in sorted(files, key=lambda name: (".dist-info/" in name, name)):
            entry = zipfile.ZipInfo(name, when)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o100755 if name == script else 0o100644) << 16
            archive.writestr(entry, files[name])
    return target


def machine(elf: bytes) -> int:
    """The processor that an ELF file is for; 0 if it is none."""
    return struct.unpack_from("<H", elf, 18)[0] if elf[:4] == b"\x7fELF" else 0


def newest_glibc(elf: bytes) -> tuple[int, int]:
    """The newest version of glibc whose symbols a file asks for."""
    found = re.findall(rb"GLIBC_(\d+)\.(\d+)", elf)
    return max(((int(major), int(minor)) for major, minor in found), default=(0, 0))


def check_elf(name: str, elf: bytes, arch: str) -> None:
    assert machine(elf) == MACHINES[arch], f"{name} is for {machine(elf)}, expected {arch}"
    if name.endswith("/libmlxc.so"):  # opened beside MLX only, which asks for more: see layer.py
        return
    asks = newest_glibc(elf)
    assert asks <= GLIBC, f"{name} asks for glibc {asks[0]}.{asks[1]}, expected at most 2.28"


def check_wheel(path: Path, arch: str) -> None:
    """Tag, programs and hashes of a wheel."""
    tag = f"cp311-abi3-manylinux_{GLIBC[0]}_{GLIBC[1]}_{arch}"
    assert path.stem.endswith(tag), f"{path.name}: expected the tag {tag}"
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        (record,) = (name for name in names if name.endswith("/RECORD"))
        rows = [line.rsplit(",", 2) for line in archive.read(record).decode().splitlines()]
        assert {name for name, _, _ in rows} == set(names), "RECORD lists other files"
        for name, hash_, size in rows:
            data = archive.read(name)
            assert name == record or (hash_, size) == (f"sha256={digest(data)}", str(len(data))), name
            if data[:4] == b"\x7fELF":
                check_elf(name, data, arch)
        (about,) = (name for name in names if name.endswith("/METADATA"))
        assert email.message_from_bytes(archive.read(about))["Version"] == make.version()
        (script,) = (name for name in names if name.endswith("scripts/paceline"))
        assert archive.getinfo(script).external_attr >> 16 & 0o111, "the program cannot be run"
        assert machine(archive.read(next(name for name in names if name.endswith(".so"))))


Skip = (layer.Skip, image.Skip)


def check_runs(program: Path, arch: str) -> None:
    """The program says its version, in an emulator where it is for another processor."""
    command = [program, "version"]
    command = emulated(arch, command)
    said = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, timeout=LIMIT).stdout
    assert said == f"paceline {make.version()}\n", said


def emulated(arch: str, command: list) -> list:
    """The command, by an emulator where it is for another processor."""
    if arch != platform.machine():
        emulator, libraries = shutil.which(f"qemu-{arch}"), Path(f"/usr/{arch}-linux-gnu")
        if not emulator or not libraries.is_dir():
            raise layer.Skip(f"qemu-{arch} or {libraries} is missing")
        command = [emulator, "-L", libraries, *command]
    return command


def check_gpu(program: Path, arch: str) -> None:
    """The program has the feature `gpu`: without it, `--device gpu` is refused by that name."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "x.f32")
        file.write_bytes(struct.pack("<4f", 1, 2, 3, 4))
        command = [program, "mapreduce", "reduce", "sum", file, "--raw", "f32", "--device", "gpu"]
        done = subprocess.run([str(word) for word in emulated(arch, command)], text=True, check=False,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LIMIT)
    assert "feature" not in done.stdout, done.stdout




def publish(root: Path, arch: str, out: Path, tool: Path | None) -> Path:
    """Everything for one processor; gives the program."""
    folder = build(root, arch)
    program = folder / "paceline"
    report(f"MLX's C layer for {arch}", layer.make, f"linux-{arch}", folder / OWN)
    wheel(root, arch, program, out)
    env = {**os.environ, "SOURCE_DATE_EPOCH": str(make.epoch())}
    say(sys.executable, ROOT / "packaging/make.py", "--binary", program, "--arch", arch, "--out", out,
        *(["--tool", tool] if tool else []), cwd=root, env=env)
    return program


def everything(root: Path, archs: list[str], out: Path) -> dict[str, Path]:
    """The program of each processor. This machine's comes first: it writes the others' manual."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    own = platform.machine()
    programs: dict[str, Path] = {}
    for arch in sorted(archs, key=lambda arch: arch != own):
        tool = None if arch == own else programs.get(own, root / "target/release/paceline")
        programs[arch] = publish(root, arch, out, tool)
        archive = out / f"paceline-{make.version()}-linux-{arch}.tar.gz"
        report(f"an image for {arch}", image.image, archive, arch,
               out / f"paceline-{make.version()}-{arch}.oci.tar")
    report("MLX's C layer for macOS", darwin_layer, out)
    return programs


#: Made by `finish` out of the others.
FINISHED = ("release.pub", "install.sh", "paceline.rb", "NOTES.md", "SHA256SUMS", "SHA256SUMS.minisig")


def finish(out: Path, url: str | None, secret: Path | None) -> None:
    """What lists the other files: install.sh, formula, text of the page, checksums, signature."""
    for name in FINISHED:
        (out / name).unlink(missing_ok=True)
    key = None
    if make.KEY.is_file():
        shutil.copy(make.KEY, out)
        key = make.KEY.read_text().splitlines()[1]
    values = {"FROM": url and f"{url}/latest/download", "KEY": key}
    make.filled(make.INSTALLER, out / "install.sh", **{name: value for name, value in values.items() if value})
    if url:
        make.formula(out, f"{url}/download/v{make.version()}")
    notes(out, url)
    lines = [f"{sum_}  {name}\n" for name, sum_ in sums(out).items()]
    (out / "SHA256SUMS").write_text("".join(lines))
    if secret:
        assert key, f"{make.KEY} is missing: programs would not know the key"
        make.run("minisign", "-S", "-s", secret, "-m", out / "SHA256SUMS", "-t", f"paceline {make.version()}")
        make.run("minisign", "-V", "-p", make.KEY, "-m", out / "SHA256SUMS")


def notes(out: Path, url: str | None) -> None:
    """The text of a release's page: how to install, what to run first, and what has changed."""
    install = f"curl -fsSL {url}/latest/download/install.sh | sh" if url else "sh install.sh"
    changes = (make.ROOT / "CHANGELOG.md").read_text()
    own = re.search(rf"^## (?:{re.escape(make.version())}|Unreleased)\b.*?\n(.*?)(?=^## |\Z)", changes, re.S | re.M)
    (out / "NOTES.md").write_text(f"""## Install or upgrade

```
{install}
paceline doctor        # what this machine has, what is missing, what mends it
paceline selftest      # known answers on each engine; its report can be posted
paceline upgrade       # later, on one machine: all machines of its cluster, one after the other
```

Linux with glibc 2.28 or later on x86-64 and AArch64, macOS 14 on Apple silicon. `SHA256SUMS` has the hash
of each file; `minisign -V -p release.pub -m SHA256SUMS` checks its signature.

## Changes

{own[1].strip() if own else ""}
""")


def darwin_layer(out: Path) -> None:
    """An archive to be unpacked into a prefix of a Mac, such as /usr/local, that has the program."""
    folder = out / "stage/usr/lib/paceline"
    layer.make("darwin-arm64", folder)
    make.tarball(out / "stage", "arm64", out, "paceline-mlx-layer", "darwin")
    shutil.rmtree(out / "stage")


def sums(out: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(out.iterdir()) if path.is_file() and not path.name.startswith("SHA256SUMS")}


def check_twice(archs: list[str], out: Path) -> None:
    """A clone in another folder gives the same files."""
    dirty = make.run("git", "-C", ROOT, "status", "--porcelain", "--untracked-files=no").strip()
    if dirty:
        raise layer.Skip("the work tree has changes that no clone would have")
    again = ROOT / "target/again/at/another/depth"
    shutil.rmtree(again, ignore_errors=True)
    again.parent.mkdir(parents=True, exist_ok=True)
    make.run("git", "clone", "--quiet", "--shared", ROOT, again)
    everything(again, archs, again / "target/publish")
    one, two = sums(out), sums(again / "target/publish")
    unlike = sorted(name for name in one.keys() | two.keys()
                    if one.get(name) != two.get(name) and name not in FINISHED)
    assert not unlike, f"other bytes: {', '.join(unlike)}"
    shutil.rmtree(again)


def report(name: str, check, *arguments) -> bool:
    """Prints a check's outcome; true when it did not fail."""
    try:
        check(*arguments)
    except Skip as skip:
        print(f"SKIPPED {name}: {skip}", flush=True)
    except Exception as error:  # noqa: BLE001
        print(f"FAILED {name}: {error!r}", flush=True)
        return False
    else:
        print(f"ok {name}", flush=True)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arch", action="append", choices=sorted(MACHINES))
    parser.add_argument("--out", type=Path, default=ROOT / "target/publish")
    parser.add_argument("--twice", action="store_true")
    parser.add_argument("--finish", action="store_true", help="build nothing")
    parser.add_argument("--url", help="page of the releases")
    parser.add_argument("--sign", type=Path, metavar="KEY", help="minisign's secret key, without a password")
    arguments = parser.parse_args()
    archs, out = arguments.arch or ["x86_64", "aarch64"], arguments.out.resolve()
    programs = {} if arguments.finish else everything(ROOT, archs, out)
    passed = [report("checksums, install.sh and the page's text", finish, out, arguments.url, arguments.sign)]
    for arch, program in programs.items():
        made = next(out.glob(f"*manylinux_*_{arch}.whl"), Path("no wheel"))
        passed += [report(f"the wheel for {arch} is a manylinux_2_28", check_wheel, made, arch),
                   report(f"the program for {arch} asks for glibc 2.28 at most", check_elf, "paceline",
                          program.read_bytes(), arch),
                   report(f"the program for {arch} runs", check_runs, program, arch),
                   report(f"the program for {arch} has array jobs on GPUs", check_gpu, program, arch)]
        if arch == platform.machine():
            with tempfile.TemporaryDirectory() as folder:
                made = out / f"paceline-{make.version()}-{arch}.oci.tar"
                passed.append(report("the image's program runs", image.check, made, Path(folder)))
    if arguments.twice:
        passed.append(report("a second build elsewhere has the same bytes", check_twice, archs, out))
    print(json.dumps(sums(out), indent=1))
    sys.exit(not all(passed))


if __name__ == "__main__":
    main()
