#!/usr/bin/env python3
"""Issue 63: a read error by a file system in user space, while a server answers. As root; one minute, 2 GB.

    bar63_fuse.py PACELINE [--work /tmp/bar63]

The file system passes everything to a folder. Once, a read of a packed file answers EIO: the server
names the file and gives the answer that it gave before. Needs libfuse 3 and `pip install mfusepy`.
"""
import argparse, errno, json, os, shutil, subprocess, sys, time

import mfusepy

from bar63_memory import make, packed_files
from common import Server


class Faulty(mfusepy.Operations):
    def __init__(self, folder, trigger):
        self.folder, self.trigger = folder, trigger

    def at(self, path):
        return self.folder + path

    def getattr(self, path, fh=None):
        facts = os.lstat(self.at(path))
        names = ("mode", "nlink", "uid", "gid", "size", "atime", "mtime", "ctime")
        return {f"st_{name}": getattr(facts, f"st_{name}") for name in names}

    def readdir(self, path, fh):
        return [".", "..", *os.listdir(self.at(path))]

    def statfs(self, path):
        facts = os.statvfs(self.at(path))
        names = ("bsize", "frsize", "blocks", "bfree", "bavail", "files", "ffree", "favail", "namemax")
        return {f"f_{name}": getattr(facts, f"f_{name}") for name in names}

    def mkdir(self, path, mode):
        os.mkdir(self.at(path), mode)

    def unlink(self, path):
        os.unlink(self.at(path))

    def rmdir(self, path):
        os.rmdir(self.at(path))

    def rename(self, old, new):
        os.rename(self.at(old), self.at(new))

    def chmod(self, path, mode):
        os.chmod(self.at(path), mode)

    def utimens(self, path, times=None):
        os.utime(self.at(path), times)

    def truncate(self, path, length, fh=None):
        os.truncate(self.at(path), length)

    def create(self, path, mode, fi=None):
        return os.open(self.at(path), os.O_RDWR | os.O_CREAT | os.O_TRUNC, mode)

    def open(self, path, flags):
        return os.open(self.at(path), flags & ~os.O_DIRECT)

    def read(self, path, size, offset, fh):
        if path.endswith(".packed") and os.path.exists(self.trigger):
            os.remove(self.trigger)
            raise mfusepy.FuseOSError(errno.EIO)
        return os.pread(fh, size, offset)

    def write(self, path, data, offset, fh):
        return os.pwrite(fh, data, offset)

    def flush(self, path, fh):
        pass

    def fsync(self, path, datasync, fh):
        os.fsync(fh)

    def release(self, path, fh):
        os.close(fh)


def check(args):
    model, base = make(args, "qwen3-dense", 12), f"{args.work}/fuse"
    home, below, trigger = f"{base}/home", f"{base}/below", f"{base}/trigger"
    packed = f"{home}/packed"
    shutil.rmtree(base, ignore_errors=True)
    [os.makedirs(path) for path in (packed, below)]
    mounted = subprocess.Popen([sys.executable, __file__, "mount", below, packed, trigger])
    until = time.time() + 10
    while not os.path.ismount(packed) and time.time() < until:
        time.sleep(0.05)
    try:
        server = Server(args.binary, model, "--memory", "700M", "--context", "512", home=home)
        name = server.call("GET", "/v1/models")["data"][0]["id"]
        ask = {"model": name, "prompt": "One disk", "max_tokens": 8, "temperature": 0}
        before = server.call("POST", "/v1/completions", ask)["choices"][0]["text"]
        open(trigger, "w").close()
        text = server.call("POST", "/v1/completions", ask)["choices"][0]["text"]
        told = [line.strip() for line in server.log if ".packed" in line]
        print(json.dumps({"packed": bool(packed_files(home)), "equal": text == before,
                          "failed": not os.path.exists(trigger), "told": told[-1:]}), flush=True)
        server.end()
    finally:
        subprocess.run(["umount", packed])
        mounted.wait(10)


def main():
    if sys.argv[1] == "mount":
        folder, mount, trigger = sys.argv[2:]
        mfusepy.FUSE(Faulty(folder, trigger), mount, foreground=True, nothreads=True)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--work", default="/tmp/bar63")
    args = parser.parse_args()
    os.makedirs(args.work, exist_ok=True)
    check(args)


if __name__ == "__main__":
    main()
