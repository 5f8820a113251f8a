"""Fresh roots: packages are installed where nothing of this project is, and answer there.

A fresh root is this machine's own system in a mount namespace of its own: an overlay whose changes are
thrown away, without homes, with an empty PATH but for the system's programs. So there is no Rust, no
build folder and no store. Where `debootstrap` is installed, the Debian package goes into a Debian that it
makes instead. Both need root.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ARCH = platform.machine()
DEBIAN_ARCH = {"x86_64": "amd64", "aarch64": "arm64"}.get(ARCH, ARCH)

#: Seconds for a program.
LIMIT = 120

#: What a fresh root is asked, and how.
ASK = 'run /in/model.gguf "Name three colours." --max-tokens 8 --temperature 0'

#: Makes the root `$1` and runs `$2` in it. `$3` has what to install, at `/in`; `$4` is this Python.
ENTER = r"""
set -eu
layers=$1.layers
mkdir -p "$1" "$layers"
mount -t tmpfs tmpfs "$layers"
mkdir "$layers/upper" "$layers/work"
mount -t overlay overlay -o "lowerdir=/,upperdir=$layers/upper,workdir=$layers/work" "$1"
for empty in root home tmp run mnt opt; do
    mkdir -p "$1/$empty"
    mount -t tmpfs tmpfs "$1/$empty"
done
mkdir -p "$1/in" "$1$4"
mount --bind "$3" "$1/in"
mount --bind "$4" "$1$4"
mount -t proc proc "$1/proc"
mount --rbind /dev "$1/dev"
exec chroot "$1" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 PYTHON="$4/bin/python3" \
    ${SSL_CERT_FILE:+"SSL_CERT_FILE=$SSL_CERT_FILE"} sh -euc "$2"
"""

#: Runs `$2` in the root `$1` that is whole already.
ENTER_WHOLE = r"""
set -eu
mount -t proc proc "$1/proc"
exec chroot "$1" env -i PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 sh -euc "$2"
"""

#: A shell need look for one name at a time only.
WITHOUT_RUST = ("for program in cargo rustc paceline; do "
                "if command -v $program >/dev/null; then echo this root is not fresh; exit 9; fi; done; ")


class Skip(Exception):
    """A tool or a right is missing."""


def need(tool: str) -> str:
    found = shutil.which(tool)
    if not found:
        raise Skip(f"{tool} is not installed")
    return found


def run(*command, **options) -> str:
    """What a program says, on both streams.

    Raises:
        AssertionError: it fails; with its last words.
    """
    done = subprocess.run([str(word) for word in command], text=True, stdout=subprocess.PIPE,
                          stderr=options.pop("stderr", subprocess.STDOUT),
                          timeout=options.pop("timeout", LIMIT), **options)
    assert done.returncode == 0, f"{command[0]} ended with {done.returncode}: {done.stdout[-800:]}"
    return done.stdout


def inside(work: str, given: Path, model: Path, folder: Path) -> None:
    """Runs `work` in a fresh root, with `given` and the model in `/in`; its last line is an answer."""
    if os.geteuid() != 0:
        raise Skip("this user is not root")
    need("unshare")
    into = folder / f"in-{given.name}"
    into.mkdir(exist_ok=True)
    shutil.copy(given, into)
    shutil.copy(model, into / "model.gguf")
    if given.suffix == ".whl":  # with what it needs: the root asks no index
        run(sys.executable, "-m", "pip", "download", "--quiet", "--only-binary", ":all:", "--dest", into,
            given, timeout=600)
    try:
        run("unshare", "--mount", "--pid", "--fork", "true")
    except AssertionError as error:
        raise Skip(f"no namespaces here: {error}") from None
    said = run("unshare", "--mount", "--pid", "--fork", "sh", "-c", ENTER, "sh", folder / "root",
               WITHOUT_RUST + work.replace("ASK", ASK), into, sys.base_prefix, timeout=600,
               stderr=None)
    assert len(said.strip()) > 2, f"no answer in {said!r}"


def archive(given: Path, model: Path, folder: Path) -> None:
    """The archive is unpacked into /opt."""
    inside(f"mkdir -p /opt/paceline; tar -xzf /in/{given.name} -C /opt/paceline --strip-components=1; "
           "/opt/paceline/bin/paceline ASK", given, model, folder)


def engine(given: Path, model: Path, folder: Path) -> None:
    """The archive's program installs MLX and answers by it; this root has no Python and no compiler.

    Answers by the CPU build of MLX, which needs no device."""
    inside("rm -rf /usr/bin/python3* /usr/bin/*++* /usr/bin/*gcc* /usr/bin/cc /usr/bin/c[89]9* /usr/bin/clang*; "
           f'export PATH=/usr/bin:/bin; mkdir -p /opt/paceline; tar -xzf /in/{given.name} -C /opt/paceline '
           "--strip-components=1; for program in python3 c++ cc; do "
           "if command -v $program >/dev/null; then exit 9; fi; done; "
           "/opt/paceline/bin/paceline engines install mlx --build cpu >&2; "
           "/opt/paceline/bin/paceline ASK --engine mlx", given, model, folder)


def wheel(given: Path, model: Path, folder: Path) -> None:
    """The wheel is installed into a new environment; its command and its `LLM` answer."""
    program = ("import paceline, paceline.distributed, numpy\n"
               'with paceline.LLM("/in/model.gguf") as llm:\n'
               '    print(llm.chat("Name three colours.", temperature=0, max_tokens=8))\n')
    inside('"$PYTHON" -m venv /opt/venv; '
           f"/opt/venv/bin/pip install --quiet --no-index --find-links /in /in/{given.name}; "
           f"/opt/venv/bin/python -c '{program}'; /opt/venv/bin/paceline ASK", given, model, folder)


#: In a bare root, with two releases and a model in `/in`: installs, answers, upgrades with a running node, refuses
#: what is changed, and removes. Whatever lay there before lies there after, and models.
LIFE = r"""
listed() { find / -xdev -path /proc -prune -o -path /in -prune -o -path /tmp -prune -o -print | sort; }
export PACELINE_HOME=$HOME/.paceline
mkdir -p "$PACELINE_HOME/models/kept"
listed >/in/before
sh /in/former/install.sh >&2
paceline ASK
refused() { if "$@" >/in/said 2>&1; then cat /in/said; exit 8; fi; }
cp -r /in/next /in/changed
echo >>/in/changed/$(cd /in/next; echo paceline-*.tar.gz)
refused sh /in/changed/install.sh
grep -q 'sha256 is' /in/said
refused paceline upgrade /in/changed
grep -q 'sha256 is' /in/said
rm -r /in/changed; cp -r /in/next /in/changed
sed -i '1s/^./x/' /in/changed/SHA256SUMS
refused paceline upgrade /in/changed
grep -q signature /in/said
paceline up --discovery none --control-port 0 --port 0 2>/in/log & node=$!
for try in $(seq 100); do if paceline nodes >/dev/null 2>&1; then break; fi; sleep 0.1; done
paceline upgrade /in/next >&2
[ "$(paceline version)" = "paceline NEXT" ]
paceline nodes --json | grep -q '"build": *"NEXT"'
refused paceline upgrade /in/former
kill $node; wait $node
paceline ASK
sh /usr/local/lib/paceline/install.sh --uninstall >&2
listed >/in/after
diff /in/before /in/after >&2
"""

#: The bytes that `crates/cli/src/release.rs` reads, up to the version.
MARK, VERSION_BYTES = b"paceline-release:", 15
NEXT = "9.1.0"


def next_release(program: Path, target: Path) -> Path:
    """A copy of a program that states a later version."""
    data = program.read_bytes()
    at = data.index(MARK) + len(MARK)
    target.write_bytes(data[:at] + NEXT.ljust(VERSION_BYTES).encode() + data[at + VERSION_BYTES:])
    target.chmod(0o755)
    return target


def bare(kind: str, folder: Path) -> Path:
    """A Debian of debootstrap's; for `rpm` with that manager, and without Debian's own."""
    if os.geteuid() != 0:
        raise Skip("this user is not root")
    need("debootstrap")
    root = folder / f"bare-{kind}"
    run("debootstrap", "--variant=minbase", *(["--include=rpm"] if kind == "rpm" else []), "stable", root,
        timeout=900)
    if kind == "rpm":
        for program in [*root.glob("usr/bin/apt*"), *root.glob("usr/bin/dpkg*")]:
            program.unlink()
    (root / "in").mkdir()
    return root


def life(kind: str, releases: dict[str, Path], model: Path, folder: Path) -> None:
    """A release is installed, upgraded and removed in a bare root."""
    root = bare(kind, folder)
    for name, release in releases.items():
        shutil.copytree(release, root / "in" / name)
    shutil.copy(model, root / "in/model.gguf")
    work = LIFE.replace("ASK", ASK).replace("NEXT", NEXT)
    said = run("unshare", "--mount", "--pid", "--fork", "sh", "-c", ENTER_WHOLE, "sh", root,
               WITHOUT_RUST + work, stderr=None, timeout=600)
    assert len(said.strip()) > 2, f"no answer in {said!r}"


def debian(given: Path, model: Path, folder: Path) -> None:
    """The package is installed by dpkg; in a Debian of debootstrap's where that is installed."""
    if not shutil.which("debootstrap"):
        need("dpkg")
        inside(f"dpkg -i /in/{given.name} >&2; paceline ASK", given, model, folder)
        return
    if os.geteuid() != 0:
        raise Skip("this user is not root")
    root = folder / "debian"
    run("debootstrap", "--variant=minbase", "stable", root, timeout=900)
    (root / "in").mkdir()
    shutil.copy(given, root / "in")
    shutil.copy(model, root / "in/model.gguf")
    said = run("unshare", "--mount", "--pid", "--fork", "sh", "-c", ENTER_WHOLE, "sh", root,
               f"{WITHOUT_RUST}dpkg -i /in/{given.name} >&2; paceline {ASK}", stderr=None)
    assert len(said.strip()) > 2, f"no answer in {said!r}"
