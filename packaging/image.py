"""Makes an image for podman, docker and Kubernetes out of an archive of paceline, without a daemon.

    python3 packaging/image.py ARCHIVE.tar.gz x86_64|aarch64 OUT.oci.tar

The image has the program, the C and C++ libraries of Debian 12 by pinned hashes, a user and nothing else: no
shell. It is an OCI layout in one file, which `podman load` and `skopeo copy oci-archive:` read. The same
archive gives the same bytes.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from pathlib import Path

import make

#: Packages of Debian 12.14.
PACKAGES = {
    "x86_64": {
        "pool/main/g/glibc/libc6_2.36-9+deb12u14_amd64.deb":
            "ba4f88f73dbc3ae9055f3c20f4523bfdbaf1ad13ff95e258924f77d20b4fbedf",
        "pool/main/g/gcc-12/libgcc-s1_12.2.0-14+deb12u1_amd64.deb":
            "3016e62cb4b7cd8038822870601f5ed131befe942774d0f745622cc77d8a88f7",
        "pool/main/g/gcc-12/libstdc++6_12.2.0-14+deb12u1_amd64.deb":
            "5cd3171216d4ab0fc911cfe9c35509bf2dd8f47761c43b7f6a4296701551a24d",
    },
    "aarch64": {
        "pool/main/g/glibc/libc6_2.36-9+deb12u14_arm64.deb":
            "01f4330719fd4f65580e16ea5a0527f372fca750e8f588d26deaf09f2d3b1cf4",
        "pool/main/g/gcc-12/libgcc-s1_12.2.0-14+deb12u1_arm64.deb":
            "576926b283613db80168ddf76380a3bd877602778cf0d226caa7bfbfa71eacf3",
        "pool/main/g/gcc-12/libstdc++6_12.2.0-14+deb12u1_arm64.deb":
            "26e138c677a985775331373828a6c286c551ff397cb735d00e2383cb273d1cb2",
    },
}

#: Of the packages, what a program does not read; copyright files stay.
UNUSED = ("usr/share/locale", "usr/share/lintian", "usr/share/gdb", "usr/share/gcc")

#: The user that nodes run as: no system gives this number to another.
USER = 10001


class Skip(Exception):
    """A tool or the network is missing."""


def mirrors() -> list[str]:
    """Servers of Debian's packages: `DEBIAN_MIRROR`, a URL such as that of an archive, then those of apt here."""
    named = [url for url in [os.environ.get("DEBIAN_MIRROR")] if url]
    for path in [Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*")]:
        if path.is_file():
            named += re.findall(r"(?:deb |URIs: *)(?:\[[^]]*\] *)?(https?://\S+)", path.read_text())
    urls = dict.fromkeys(url.rstrip("/") + "/" for url in named)
    return [url for url in urls if "debian" in url]


def fetched(path: str, digest: str) -> Path:
    """A package of Debian, kept in `target/debian`."""
    target = make.ROOT / "target/debian" / Path(path).name
    target.parent.mkdir(parents=True, exist_ok=True)
    errors = []
    for mirror in mirrors():
        if not target.is_file():
            try:
                with urllib.request.urlopen(mirror + path, timeout=60) as answer:
                    target.write_bytes(answer.read())
            except OSError as error:
                errors.append(f"{mirror}: {error}")
                continue
        if hashlib.sha256(target.read_bytes()).hexdigest() == digest:
            return target
        target.unlink()
        errors.append(f"{mirror}: another hash")
    raise Skip(f"{path}: {'; '.join(errors)}")


def root(archive: Path, arch: str, folder: Path) -> None:
    """Lays the files of the image out in `folder`."""
    if not shutil.which("dpkg-deb"):
        raise Skip("dpkg-deb is not installed")
    for path, digest in PACKAGES[arch].items():
        subprocess.run(["dpkg-deb", "-x", fetched(path, digest), folder], check=True)
    for unused in UNUSED:
        shutil.rmtree(folder / unused, ignore_errors=True)
    for conversions in folder.glob("usr/lib/*/gconv"):
        shutil.rmtree(conversions)
    with tarfile.open(archive) as files:
        for entry in files:
            entry.name = entry.name.partition("/")[2]
            if entry.name.startswith(("bin/", "lib/paceline/")) and entry.isfile():
                files.extract(entry, folder / "usr", filter="data")
    for name in ("tmp", "data", "etc"):
        (folder / name).mkdir(exist_ok=True)
    (folder / "etc/passwd").write_text(f"root:x:0:0::/:\npaceline:x:{USER}:{USER}::/data:\n")


def layer(folder: Path) -> bytes:
    """A tar archive of `folder`, without traces of this machine."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for path in sorted(folder.rglob("*")):
            entry = archive.gettarinfo(path, str(path.relative_to(folder)))
            entry.uid = entry.gid = USER if entry.name == "data" else 0
            entry.uname = entry.gname = ""
            entry.mtime = make.epoch()
            entry.mode = {"tmp": 0o1777}.get(entry.name, 0o755 if entry.mode & 0o111 else 0o644)
            if entry.isdir():
                entry.mode |= 0o111
            with open(path, "rb") if entry.isfile() else io.BytesIO() as file:
                archive.addfile(entry, file if entry.isfile() else None)
    return buffer.getvalue()


def image(archive: Path, arch: str, target: Path) -> Path:
    """Writes the image.

    Raises:
        Skip: dpkg-deb or Debian's server is missing.
    """
    with tempfile.TemporaryDirectory() as folder:
        root(archive, arch, Path(folder))
        plain = layer(Path(folder))
    blobs: dict[str, bytes] = {}

    def blob(data: bytes, kind: str) -> dict:
        digest = hashlib.sha256(data).hexdigest()
        blobs[digest] = data
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}",
                "size": len(data)}

    def text(content: dict) -> bytes:
        return json.dumps(content, sort_keys=True).encode()

    packed = blob(gzip.compress(plain, mtime=0), "layer.v1.tar+gzip")
    config = blob(text({
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}[arch], "os": "linux",
        "config": {"User": str(USER), "Env": ["PATH=/usr/bin", "HOME=/data", "PACELINE_HOME=/data"],
                   "Entrypoint": ["/usr/bin/paceline"], "Cmd": ["up"], "WorkingDir": "/data",
                   "Volumes": {"/data": {}}, "ExposedPorts": {"52415/tcp": {}, "52416/tcp": {}},
                   "Labels": {"org.opencontainers.image.version": make.version(),
                              "org.opencontainers.image.licenses": "Apache-2.0"}},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(plain).hexdigest()}"]},
    }), "config.v1+json")
    manifest = blob(text({"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
                          "config": config, "layers": [packed]}), "manifest.v1+json")
    manifest["annotations"] = {"org.opencontainers.image.ref.name": f"paceline:{make.version()}"}
    files = {"oci-layout": text({"imageLayoutVersion": "1.0.0"}),
             "index.json": text({"schemaVersion": 2, "manifests": [manifest]}),
             **{f"blobs/sha256/{digest}": data for digest, data in blobs.items()}}
    with tarfile.open(target, "w", format=tarfile.GNU_FORMAT) as out:
        for name, data in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime = len(data), make.epoch()
            out.addfile(entry, io.BytesIO(data))
    return target


def check(target: Path, folder: Path) -> None:
    """The image's program states its version, in a root that has nothing else.

    Raises:
        Skip: this user is not root.
    """
    if os.geteuid() != 0:
        raise Skip("this user is not root")
    with tarfile.open(target) as image_:
        data = {entry.name: image_.extractfile(entry).read() for entry in image_ if entry.isfile()}
    (manifest,) = json.loads(data["index.json"])["manifests"]
    at = "blobs/sha256/"
    (packed,) = json.loads(data[at + manifest["digest"][7:]])["layers"]
    with tarfile.open(fileobj=io.BytesIO(data[at + packed["digest"][7:]])) as files:
        files.extractall(folder, filter="fully_trusted")
    done = subprocess.run([shutil.which("chroot"), folder, "/usr/bin/paceline", "version"], text=True, check=True,
                          stdout=subprocess.PIPE, timeout=120, env={})
    assert done.stdout == f"paceline {make.version()}\n", done.stdout


if __name__ == "__main__":
    print(image(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])))
