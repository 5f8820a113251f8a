"""Makes packages of paceline out of a built program: .tar.gz, .deb, .rpm and an SBOM.

    python3 packaging/make.py --binary target/release/paceline --out target/packages

All have the program, its manual, completions for bash, zsh and fish, the licence; and, if they lie beside
the program, the C library and its header, and MLX's C layer (folder `paceline-lib`, see layer.py). The same program gives the same bytes: times come from
SOURCE_DATE_EPOCH, else from the last commit. `dpkg-deb` and `rpmbuild` are programs of Debian's
packages `dpkg` and `rpm`; a package whose tool is missing is named as SKIPPED.

`--arch` names a processor that is not this machine's; manual and completions then come from `--tool`, a
paceline of this machine.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import uuid
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUMMARY = "Pools machines to run language models too large for one of them"


def run(*command: str | Path, **options) -> str:
    return subprocess.run([str(word) for word in command], check=True, text=True,
                          stdout=subprocess.PIPE, **options).stdout


def epoch() -> int:
    """Seconds that every file of a package bears as its time."""
    named = os.environ.get("SOURCE_DATE_EPOCH")
    if named:
        return int(named)
    try:
        return int(run("git", "-C", ROOT, "log", "-1", "--format=%ct"))
    except (OSError, subprocess.CalledProcessError):
        return 0


def version() -> str:
    return tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]


def glibc(program: Path) -> str:
    """The newest version of glibc that `program` names: the least that it needs."""
    found = re.findall(rb"GLIBC_2\.(\d+)", program.read_bytes())
    return f"2.{max(map(int, found))}" if found else "2.28"


def strip(path: Path, *options: str) -> None:
    """Removes symbols where this machine's tool knows the processor; they only cost space. On a Mac it would
    break the signature."""
    if shutil.which("strip") and sys.platform != "darwin":
        subprocess.run(["strip", *options, path], stderr=subprocess.DEVNULL, check=False)


#: The public key that signs releases, and what installs and removes them: `lib/paceline` has both.
KEY, INSTALLER = ROOT / "packaging/release.pub", ROOT / "packaging/install.sh"

#: A folder beside a program whose files become `lib/paceline` of the prefix: MLX's C layer.
OWN = "paceline-lib"


def stage(binary: Path, tool: Path, folder: Path) -> None:
    """Lays the files of a package out below `folder`, as they will lie below `/`; `tool` is a
    paceline of this machine, which writes the manual and the completions."""
    shutil.rmtree(folder, ignore_errors=True)
    places = {name: folder / "usr" / path for name, path in {
        "bin": "bin", "man": "share/man/man1", "doc": "share/doc/paceline", "lib": "lib",
        "include": "include", "bash": "share/bash-completion/completions",
        "zsh": "share/zsh/vendor-completions", "fish": "share/fish/vendor_completions.d"}.items()}
    for place in places.values():
        place.mkdir(parents=True)
    program = places["bin"] / "paceline"
    shutil.copy(binary, program)
    program.chmod(0o755)
    strip(program)
    run(tool, "man", "--output", places["man"])
    for page in sorted(places["man"].iterdir()):
        with open(page.with_name(page.name + ".gz"), "wb") as file:
            file.write(gzip.compress(page.read_bytes(), mtime=0))
        page.unlink()
    for shell, name in {"bash": "paceline", "zsh": "_paceline", "fish": "paceline.fish"}.items():
        (places[shell] / name).write_text(run(tool, "completions", shell))
    shutil.copy(ROOT / "LICENSE", places["doc"] / "copyright")
    shutil.copy(ROOT / "CHANGELOG.md", places["doc"])
    for library in binary.parent.glob("libpaceline_c.[sd][oy]*"):
        shutil.copy(library, places["lib"])
        strip(places["lib"] / library.name, "--strip-unneeded")
        shutil.copy(ROOT / "crates/capi/include/paceline.h", places["include"])
    if (binary.parent / OWN).is_dir():
        shutil.copytree(binary.parent / OWN, places["lib"] / "paceline")
    for place in sorted(folder.rglob("*")):
        os.utime(place, (epoch(), epoch()))


def installed_tarball(folder: Path, *about) -> Path:
    """The archive for install.sh, which has that script and the key that signs releases too."""
    own = folder / "usr/lib/paceline"
    own.mkdir(exist_ok=True)
    added = [Path(shutil.copy(file, own)) for file in (KEY, INSTALLER) if file.is_file()]
    made = tarball(folder, *about)
    for file in added:
        file.unlink()
    if not any(own.iterdir()):
        own.rmdir()
    return made


def tarball(folder: Path, arch: str, out: Path, name: str = "paceline", system: str | None = None) -> Path:
    """An archive that is unpacked into a prefix, such as /usr/local."""
    name = f"{name}-{version()}-{system or platform.system().lower()}-{arch}"
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for path in sorted((folder / "usr").rglob("*")):
            entry = archive.gettarinfo(path, f"{name}/{path.relative_to(folder / 'usr')}")
            entry.uid = entry.gid = 0
            entry.uname = entry.gname = "root"
            entry.mtime = epoch()
            with open(path, "rb") if path.is_file() else io.BytesIO() as file:
                archive.addfile(entry, file if path.is_file() else None)
    target = out / f"{name}.tar.gz"
    target.write_bytes(gzip.compress(buffer.getvalue(), mtime=0))
    return target


def deb(folder: Path, arch: str, out: Path) -> Path:
    arch = {"x86_64": "amd64", "aarch64": "arm64"}.get(arch, arch)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) // 1024
    control = folder / "DEBIAN/control"
    control.parent.mkdir()
    control.write_text(f"""Package: paceline
Version: {version()}
Architecture: {arch}
Maintainer: paceline
Installed-Size: {size}
Depends: libc6 (>= {glibc(folder / 'usr/bin/paceline')}), libgcc-s1
Recommends: ca-certificates
Section: science
Priority: optional
Description: {SUMMARY}
 One program pools the Macs, GPU boxes and CPU hosts a person owns. Its answers never
 depend on how many machines computed them.
""")
    target = out / f"paceline_{version()}_{arch}.deb"
    run("dpkg-deb", "--root-owner-group", "-Zxz", "--build", folder, target,
        env={**os.environ, "SOURCE_DATE_EPOCH": str(epoch())})
    shutil.rmtree(control.parent)
    return target


def rpm(folder: Path, arch: str, out: Path) -> Path:
    top = out / "rpmbuild"
    shutil.rmtree(top, ignore_errors=True)
    files = [f"/{path.relative_to(folder)}" for path in sorted(folder.rglob("*")) if path.is_file()]
    spec = top / "paceline.spec"
    spec.parent.mkdir(parents=True)
    spec.write_text(f"""Name: paceline
Version: {version()}
Release: 1
Summary: {SUMMARY}
License: Apache-2.0
Requires: glibc >= {glibc(folder / 'usr/bin/paceline')}
AutoReqProv: no
%description
One program pools the Macs, GPU boxes and CPU hosts a person owns.
%install
cp -a {folder}/. %{{buildroot}}/
%files
""" + "\n".join(files) + "\n")
    run("rpmbuild", "-bb", "--quiet", "--target", f"{arch}-linux", "--define", f"_topdir {top}",
        "--define", "_build_id_links none", "--define", "debug_package %{nil}",
        "--define", "__os_install_post %{nil}", "--define", "use_source_date_epoch_as_buildtime 1",
        "--define", "clamp_mtime_to_source_date_epoch 1", "--define", "_buildhost paceline",
        spec, env={**os.environ, "SOURCE_DATE_EPOCH": str(epoch())}, stderr=subprocess.STDOUT)
    made = next((top / "RPMS").rglob("*.rpm"))
    target = out / made.name
    shutil.move(made, target)
    shutil.rmtree(top)
    return target


def sbom(out: Path) -> Path:
    """What is linked into the program, in CycloneDX's form, out of cargo's lock file."""
    facts = json.loads(run("cargo", "metadata", "--format-version", "1", "--locked", cwd=ROOT))
    packages = {package["id"]: package for package in facts["packages"]}
    nodes = {node["id"]: node for node in facts["resolve"]["nodes"]}
    root = next(key for key, package in packages.items() if package["name"] == "paceline-cli")
    linked, waiting = set(), [root]
    while waiting:
        key = waiting.pop()
        if key in linked:
            continue
        linked.add(key)
        waiting += [dep["pkg"] for dep in nodes[key]["deps"]
                    if any(kind["kind"] is None for kind in dep["dep_kinds"])]
    parts = sorted((packages[key] for key in linked if packages[key]["source"]),
                   key=lambda part: (part["name"], part["version"]))
    text = "".join(f"{part['name']} {part['version']}\n" for part in parts)
    serial = uuid.UUID(bytes=hashlib.sha256(text.encode()).digest()[:16], version=4)
    object_ = {
        "bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1,
        "serialNumber": f"urn:uuid:{serial}",
        "metadata": {"component": {"type": "application", "name": "paceline", "version": version()}},
        "components": [{
            "type": "library", "name": part["name"], "version": part["version"],
            "purl": f"pkg:cargo/{part['name']}@{part['version']}",
            "licenses": [{"expression": part["license"].replace("/", " OR ")}]
            if part.get("license") else [],
        } for part in parts],
    }
    target = out / f"paceline-{version()}.cdx.json"
    target.write_text(json.dumps(object_, indent=1) + "\n")
    return target


def filled(template: Path, target: Path, **values: str) -> Path:
    """Writes `template` with each `@NAME@` replaced; a name without a value stays."""
    text = template.read_text()
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    target.write_text(text)
    shutil.copymode(template, target)
    return target


def formula(out: Path, url: str) -> Path:
    """Homebrew's formula for the archives in `out`, which will be published at `url`."""
    systems = {"darwin-arm64": "on_macos", "linux-x86_64": "on_intel", "linux-aarch64": "on_arm"}
    blocks = {}
    for system, block in systems.items():
        archive = out / f"paceline-{version()}-{system}.tar.gz"
        if archive.is_file():
            digest = hashlib.sha256(archive.read_bytes()).hexdigest()
            blocks[system] = f'''  {block} do
    url "{url}/{archive.name}"
    sha256 "{digest}"
  end
'''
    linux = "".join(text for system, text in blocks.items() if system.startswith("linux"))
    if linux:
        linux = "  on_linux do\n" + "".join(f"  {line}\n" for line in linux.splitlines()) + "  end\n"
    return filled(ROOT / "packaging/homebrew/paceline.rb.in", out / "paceline.rb", VERSION=version(),
                  HOMEPAGE=url.partition("/releases")[0], ARCHIVES=blocks.get("darwin-arm64", "") + linux)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--binary", type=Path, default=ROOT / "target/release/paceline")
    parser.add_argument("--out", type=Path, default=ROOT / "target/packages")
    parser.add_argument("--arch", default=platform.machine(), help="processor of BINARY, such as aarch64")
    parser.add_argument("--tool", type=Path, help="a paceline of this machine [default: BINARY]")
    arguments = parser.parse_args()
    binary, out = arguments.binary.resolve(), arguments.out.resolve()
    if not binary.is_file():
        sys.exit(f"{binary} is missing: cargo build --release makes it")
    out.mkdir(parents=True, exist_ok=True)
    folder = out / "stage"
    stage(binary, (arguments.tool or binary).resolve(), folder)
    made = [installed_tarball(folder, arguments.arch, out), sbom(out)]
    for name, tool, make in (("deb", "dpkg-deb", deb), ("rpm", "rpmbuild", rpm)):
        if shutil.which(tool):
            made.append(make(folder, arguments.arch, out))
        else:
            print(f"SKIPPED the {name} package: {tool} is not installed")
    shutil.rmtree(folder)
    for path in made:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        print(f"{digest}  {path}  {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
