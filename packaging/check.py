"""Checks what `packaging` makes and holds; prints `ok NAME`, `FAILED NAME: why` or `SKIPPED NAME: why`.

    python3 packaging/check.py BINARY [--model FILE] [--long]

BINARY is a built paceline with libpaceline_c beside it. `--long` also installs the package into
a fresh Debian made by debootstrap and answers there.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import plistlib
import py_compile
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 120


class Skip(Exception):
    """A tool is missing."""


def need(tool: str) -> str:
    found = shutil.which(tool)
    if not found:
        raise Skip(f"{tool} is not installed")
    return found


def run(*command, **options) -> str:
    done = subprocess.run([str(word) for word in command], text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=options.pop("timeout", LIMIT), **options)
    assert done.returncode == 0, f"{command[0]} ended with {done.returncode}: {done.stdout[-800:]}"
    return done.stdout


class Checks:
    """One method a case; its docstring names it."""

    def __init__(self, binary: Path, model: str | None, folder: Path):
        self.binary, self.model, self.folder = binary, model, folder
        self.packages = folder / "packages"

    def completions(self):
        """completions of five shells"""
        for shell, sign in {"bash": "complete -F _paceline", "zsh": "#compdef paceline",
                            "fish": "complete -c paceline", "elvish": "edit:completion",
                            "powershell": "Register-ArgumentCompleter"}.items():
            text = run(self.binary, "completions", shell)
            assert sign in text and "mapreduce" in text, f"{shell}: {text[:200]}"
            checker = {"bash": ["bash", "-n"], "zsh": ["zsh", "-n"], "fish": ["fish", "--no-execute"]}
            if shell in checker and shutil.which(checker[shell][0]):
                path = self.folder / shell
                path.write_text(text)
                run(*checker[shell], path)

    def manual(self):
        """a manual page for each command"""
        pages = self.folder / "man"
        run(self.binary, "man", "--output", pages)
        names = {path.name for path in pages.iterdir()}
        assert {"paceline.1", "paceline-run.1", "paceline-mapreduce-sort.1"} <= names, names
        for path in pages.iterdir():
            assert path.read_text().count(".TH ") == 1, path

    def packages_(self):
        """packages are made twice with the same bytes, and the program in them runs"""
        for out in (self.packages, self.folder / "again"):
            print(run(sys.executable, ROOT / "packaging/make.py", "--binary", self.binary, "--out", out))
        sums = [{path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in out.iterdir()}
                for out in (self.packages, self.folder / "again")]
        assert sums[0] == sums[1], sums
        deb = next(self.packages.glob("*.deb"), None)
        if deb is None:
            raise Skip("dpkg-deb is not installed")
        unpacked = self.folder / "deb"
        run("dpkg-deb", "-x", deb, unpacked)
        assert run(unpacked / "usr/bin/paceline", "version").startswith("paceline ")
        for path in ("share/man/man1/paceline-up.1.gz", "lib/libpaceline_c.so", "include/paceline.h",
                     "share/bash-completion/completions/paceline"):
            assert (unpacked / "usr" / path).is_file(), path

    def c_groups(self):
        """a C program: two ranks"""
        program = self.compiled("ranks")
        sockets = [socket.socket() for _ in range(2)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        addrs = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
        for each in sockets:
            each.close()
        ranks = [subprocess.Popen([program, str(rank), *addrs], stdout=subprocess.PIPE, text=True,
                                  stderr=subprocess.STDOUT) for rank in range(2)]
        for rank in ranks:
            said, _ = rank.communicate(timeout=LIMIT)
            assert rank.returncode == 0 and "all right" in said, said

    def c_model(self):
        """a C program: an answer with the bits of `paceline run`"""
        if self.model is None:
            raise Skip("no model")
        said = run(self.compiled("answer"), self.model, "Name three colours.")
        assert said.strip() == (own := self.answer()).strip(), (said, own)

    def answer(self) -> str:
        command = [self.binary, "run", self.model, "Name three colours.", "--temperature", "0",
                   "--max-tokens", "24"]
        done = subprocess.run([str(word) for word in command], text=True, timeout=LIMIT,
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
        return done.stdout

    def header(self):
        """paceline.h is what cbindgen makes of the crate"""
        need("cbindgen")
        made = run("cbindgen", "--config", ROOT / "crates/capi/cbindgen.toml", ROOT / "crates/capi",
                   stderr=subprocess.DEVNULL)
        assert made == (ROOT / "crates/capi/include/paceline.h").read_text(), "make it anew"

    def compiled(self, name: str) -> Path:
        need("cc")
        library = self.binary.parent
        assert any(library.glob("libpaceline_c.*")), f"no libpaceline_c in {library}"
        program = self.folder / name
        run("cc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-I", ROOT / "crates/capi/include",
            ROOT / f"crates/capi/tests/{name}.c", "-o", program, "-L", library, "-lpaceline_c",
            f"-Wl,-rpath,{library}")
        return program

    def units(self):
        """units of systemd and launchd"""
        unit = run(self.binary, "service", "install", "--print", "--", "smollm2", "--alias", "a b%c")
        assert "ExecStart=" in unit, unit
        if sys.platform == "darwin":
            assert plistlib.loads(unit.encode())["ProgramArguments"][1] == "up"
            return
        path = self.folder / "paceline.service"
        path.write_text(unit)
        need("systemd-analyze")
        run("systemd-analyze", "verify", "--man=no", path)

    def kubernetes(self):
        """Kubernetes manifests against published schemas"""
        try:
            import kubernetes_validate
            import yaml
        except ImportError as error:
            raise Skip(f"{error.name} is not installed") from None
        for path in sorted((ROOT / "packaging/kubernetes").glob("*.yaml")):
            for document in yaml.safe_load_all(path.read_text()):
                kubernetes_validate.validate(document, "1.30", strict=True)

    def compose(self):
        """the compose file"""
        try:
            import yaml
        except ImportError as error:
            raise Skip(f"{error.name} is not installed") from None
        services = yaml.safe_load((ROOT / "packaging/compose.yaml").read_text())["services"]
        assert len(services) == 3, services
        if shutil.which("docker"):
            run("docker", "compose", "-f", ROOT / "packaging/compose.yaml", "config")

    def scripts(self):
        """the scripts for Slurm and Ray parse"""
        run("bash", "-n", ROOT / "packaging/slurm/paceline.sbatch")
        py_compile.compile(str(ROOT / "packaging/ray/paceline_ray.py"), doraise=True,
                           cfile=str(self.folder / "ray.pyc"))

    def rendezvous(self):
        """three nodes meet as Slurm's script starts them"""
        if self.model is None:
            raise Skip("no model")
        run("bash", ROOT / "packaging/slurm/try.sh", self.binary, self.model, timeout=300)


class LongChecks(Checks):
    """What takes minutes."""

    def fresh_root(self):
        """the package answers in a fresh Debian"""
        need("debootstrap")
        if os.geteuid() != 0 or self.model is None:
            raise Skip("this user is not root, or there is no model")
        root = self.folder / "debian"
        run("debootstrap", "--variant=minbase", "stable", root, timeout=900)
        deb = next(self.packages.glob("*.deb"))
        shutil.copy(deb, root / "paceline.deb")
        shutil.copy(self.model, root / "model.gguf")
        run("chroot", root, "dpkg", "-i", "/paceline.deb")
        said = run("chroot", root, "paceline", "run", "/model.gguf", "Name three colours.",
                   "--max-tokens", "8", "--temperature", "0")
        assert said.strip(), "no answer"


def cases(kind):
    order = [*vars(Checks), *(name for name in vars(kind) if name not in vars(Checks))]
    for name in order:
        method = getattr(kind, name)
        if callable(method) and method.__doc__ and not name.startswith("__"):
            yield name, method.__doc__


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("binary", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--long", action="store_true")
    arguments = parser.parse_args()
    kind = LongChecks if arguments.long else Checks
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        checks = kind(arguments.binary.resolve(), arguments.model, Path(folder))
        for name, title in cases(kind):
            try:
                getattr(checks, name)()
                print(f"ok {title}", flush=True)
            except Skip as skip:
                print(f"SKIPPED {title}: {skip}", flush=True)
            except Exception as error:  # noqa: BLE001
                failed = True
                print(f"FAILED {title}: {error!r}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
