"""Checks what `packaging` makes and holds; prints `ok NAME`, `FAILED NAME: why` or `SKIPPED NAME: why`.

    python3 packaging/check.py BINARY [--model FILE] [--samples|--long]

BINARY is a built paceline with libpaceline_c beside it. `--samples` is what takes seconds: completions,
manual, units, and the samples for schedulers. `--long` also installs package, wheel and program into
fresh roots (`fresh.py`) and answers there, and starts the sample for Ray under real Ray.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import plistlib
import py_compile
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from unittest import mock

import fresh
import make
import release
from fresh import Skip, need, run

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 120


#: What the long run takes from pip.
RAY, UV = "ray==2.60.0", "uv==0.13.9"


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

    def wheels(self):
        """a wheel for other machines is packed the same twice, and wrong ones are refused"""
        elf = self.elf("x86_64", "2.17")
        made = self.folder / "paceline-0-cp311-abi3-manylinux_2_28_x86_64.whl"
        with zipfile.ZipFile(made, "w") as archive:
            for name, data in {"paceline/_native.abi3.so": elf, "paceline-0.dist-info/RECORD": b"",
                               "paceline-0.dist-info/METADATA": f"Version: {make.version()}\n".encode(),
                               "paceline-0.dist-info/sboms/x.json": b"{}"}.items():
                archive.writestr(name, data)
        out, program = self.folder / "with", self.folder / "program"
        out.mkdir()

        def packed(program_: bytes) -> Path:
            program.write_bytes(program_)
            return release.with_program(made, program, out)

        one = packed(elf).read_bytes()
        assert packed(elf).read_bytes() == one, "the second has other bytes"
        release.check_wheel(packed(elf), "x86_64")
        for why, arch, program_ in (("expected the tag", "aarch64", elf),
                                    ("asks for glibc 2.34", "x86_64", self.elf("x86_64", "2.34")),
                                    ("is for 183", "x86_64", self.elf("aarch64", "2.17"))):
            try:
                release.check_wheel(packed(program_), arch)
            except AssertionError as error:
                assert why in str(error), error
            else:
                raise AssertionError(f"not refused: {why}")

    # As much of an ELF file as the checks read.
    def elf(self, arch: str, glibc: str) -> bytes:
        head = b"\x7fELF" + bytes(14) + release.MACHINES[arch].to_bytes(2, "little")
        return head + f"\0GLIBC_{glibc}\0".encode()

    def formula(self):
        """Homebrew's formula names the archives and their hashes"""
        systems = ("darwin-arm64", "linux-x86_64", "linux-aarch64")
        for system in systems:
            (self.folder / f"paceline-{make.version()}-{system}.tar.gz").write_text(system)
        text = make.formula(self.folder, "https://example.com/releases/download/v1").read_text()
        assert not re.search(r"@[A-Z0-9]+@", text), text
        assert 'homepage "https://example.com"' in text and f'"{make.version()}"' in text, text
        for system in systems:
            assert re.search(rf'v1/paceline-[0-9.]+-{system}.tar.gz"\n +sha256 "'
                             + hashlib.sha256(system.encode()).hexdigest(), text), text
        if shutil.which("ruby"):
            run("ruby", "-c", self.folder / "paceline.rb")

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

    def header_alone(self):
        """paceline.h stands alone, in C and in C++"""
        path = ROOT / "crates/capi/include/paceline.h"
        for compiler, language, standard in (("cc", "c", "c11"), ("c++", "c++", "c++17")):
            need(compiler)
            run(compiler, "-x", language, f"-std={standard}", "-Wall", "-Wextra", "-Werror", "-fsyntax-only",
                path)

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

    def service(self):
        """the service is installed, tells its state and is removed"""
        if sys.platform == "darwin":
            raise Skip("launchctl has no stand-in here")
        with tempfile.TemporaryDirectory() as folder:
            # A manager that notes its orders and says that the node runs.
            manager, orders = Path(folder, "systemctl"), Path(folder, "orders")
            manager.write_text(f'#!/bin/sh\necho "$*" >>{orders}\n[ "$2" != show ] || printf '
                               "'ActiveState=active\\nMainPID=7\\nUnitFileState=enabled\\n'\n")
            manager.chmod(0o755)
            env = {"PATH": f"{folder}:/usr/bin:/bin", "HOME": folder}
            unit = Path(folder, ".config/systemd/user/paceline.service")

            def service(*words: str) -> str:
                return run(self.binary, "service", *words, env=env)

            assert "not installed" in service("status")
            service("install", "--", "--port", "8080")
            assert '"up" "--port" "8080"' in unit.read_text(), unit.read_text()
            assert json.loads(service("status", "--json")) == {
                "installed": True, "state": "active", "pid": 7, "enabled": True, "unit": str(unit)}
            service("remove")
            assert not unit.exists()
            told = [line.removeprefix("--user ") for line in orders.read_text().splitlines()]
            name = "paceline.service"
            assert [line.split()[0] for line in told] == [
                "daemon-reload", "enable", "restart", "show", "disable"], told
            assert all(name in line or line == "daemon-reload" for line in told), told

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
        path = ROOT / "packaging/compose.yaml"
        file = yaml.safe_load(path.read_text())
        services = file["services"]
        assert len(services) == 3, services
        ports = [self.up(" ".join(service["command"])) for service in services.values()]
        assert len(set(ports)) == 3, f"nodes of one machine share ports: {ports}"
        for name, service in services.items():
            assert set(service["secrets"]) <= set(file["secrets"]), name
            assert {volume.partition(":")[0] for volume in service["volumes"]} <= set(file["volumes"]), name
            assert (path.parent / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        if shutil.which("docker") and subprocess.run(["docker", "compose", "version"], check=False,
                                                     capture_output=True).returncode == 0:
            run("docker", "compose", "-f", path, "config")

    # Has the program itself read the options of `paceline up` in a line of a sample; gives its port.
    def up(self, line: str) -> str:
        found = re.search(r"paceline up\b(.*)", line)
        assert found, f"no `paceline up` in {line}"
        run(self.binary, "service", "install", "--print", "--", *found[1].split())
        port = re.search(r"--control-port (\d+)", found[1])
        return port[1] if port else "52416"

    def commands(self):
        """options of paceline in the samples are options of this paceline"""
        for path in ("kubernetes/paceline.yaml", "compose.yaml"):
            for line in (ROOT / "packaging" / path).read_text().splitlines():
                if "exec paceline up" in line:
                    self.up(line)
        last = (ROOT / "packaging/Containerfile").read_text().splitlines()[-1]
        assert last == 'CMD ["up"]', last
        run(self.binary, "service", "install", "--print")

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

    def actors(self):
        """two nodes meet as Ray's script starts them"""
        self.ray(sys.executable, "try.py")

    def ray(self, python, script: str):
        if self.model is None:
            raise Skip("no model")
        with tempfile.TemporaryDirectory() as home:
            said = run(python, ROOT / "packaging/ray" / script, self.model, "--nodes", "2",
                       "--ask", "Name three colours.", timeout=300,
                       env={**os.environ, "PACELINE": str(self.binary), "PACELINE_HOME": home})
        assert "answers, on" in said and "decode" in said, said[-800:]


#: What `--samples` checks.
SAMPLES = ("completions", "manual", "units", "service", "wheels", "formula", "kubernetes", "compose",
           "commands", "scripts", "rendezvous", "actors")


class LongChecks(Checks):
    """What takes minutes."""

    def real_ray(self):
        """two nodes meet under real Ray"""
        self.ray(self.environment(RAY) / "python", "paceline_ray.py")

    def uvx(self):
        """uvx runs the wheel's command"""
        wheel = self.made(f"*_{fresh.ARCH}.whl")
        env = {**os.environ, "UV_CACHE_DIR": str(self.folder / "uv"),
               "UV_TOOL_DIR": str(self.folder / "uv-tools")}
        said = run(self.environment(UV) / "uvx", "--python", sys.executable, "--from", wheel, "paceline",
                   "version", env=env, timeout=300)
        assert "paceline " in said.splitlines()[-1], said

    # The programs of a new environment that has one package of pip's.
    def environment(self, requirement: str) -> Path:
        folder = self.folder / requirement.partition("=")[0]
        run(sys.executable, "-m", "venv", folder)
        try:
            run(folder / "bin/python", "-m", "pip", "install", "--quiet", "--only-binary", ":all:",
                requirement, timeout=600)
        except AssertionError as error:
            raise Skip(str(error)[-200:]) from None
        return folder / "bin"

    def fresh_debian(self):
        """the Debian package answers in a fresh Debian"""
        fresh.debian(self.made(f"*_{fresh.DEBIAN_ARCH}.deb"), self.needed(), self.folder)

    def fresh_wheel(self):
        """the wheel answers in a fresh root, without Rust"""
        fresh.wheel(self.made(f"*_{fresh.ARCH}.whl"), self.needed(), self.folder)

    def fresh_program(self):
        """the archive's program answers in a fresh root"""
        fresh.archive(self.made(f"*-{fresh.ARCH}.tar.gz"), self.needed(), self.folder)

    def fresh_engine(self):
        """the archive's program installs MLX in a fresh root, without Python and a compiler"""
        given = self.made(f"*-{fresh.ARCH}.tar.gz")
        with tarfile.open(given) as archive:
            if not any(name.endswith("/libmlxc.so") for name in archive.getnames()):
                raise Skip("the archive has no C layer: `cargo xtask release` adds it")
        fresh.engine(given, self.needed(), self.folder)

    def bare_debian(self):
        """install.sh, an answer, an upgrade and a removal in a bare Debian, without Rust"""
        fresh.life("debian", self.releases(), self.needed(), self.folder)

    def bare_rpm(self):
        """the same in a root that has rpm alone"""
        fresh.life("rpm", self.releases(), self.needed(), self.folder)

    # This program's release and a later one, signed.
    def releases(self) -> dict[str, Path]:
        need("minisign")
        out = {name: self.folder / name for name in ("former", "next")}
        if out["next"].is_dir():
            return out
        key = self.folder / "release.pub"
        run("minisign", "-G", "-W", "-p", key, "-s", self.folder / "release.key")
        later = fresh.next_release(self.binary, self.folder / "later")
        for name, program, version in (("former", self.binary, make.version()), ("next", later, fresh.NEXT)):
            out[name].mkdir()
            stage = self.folder / "stage"
            with mock.patch.multiple(make, KEY=key, version=lambda: version):
                make.stage(program, program, stage)
                make.installed_tarball(stage, fresh.ARCH, out[name])
                release.finish(out[name], None, self.folder / "release.key")
        return out

    def needed(self) -> Path:
        if self.model is None:
            raise Skip("no model")
        return Path(self.model)

    # What other machines get, if `cargo xtask release` has made it, else what is made here.
    def made(self, pattern: str) -> Path:
        for folder in (ROOT / "target/publish", self.packages, ROOT / "target/wheels"):
            for found in sorted(folder.glob(pattern)):
                return found
        raise Skip(f"no {pattern} was made")


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
    parser.add_argument("--samples", action="store_true")
    parser.add_argument("--long", action="store_true")
    arguments = parser.parse_args()
    kind = LongChecks if arguments.long else Checks
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        checks = kind(arguments.binary.resolve(), arguments.model, Path(folder))
        for name, title in cases(kind):
            if arguments.samples and name not in SAMPLES:
                continue
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
