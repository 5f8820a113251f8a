"""Namespaces on one network whose links delay, limit, lose or drop frames: a switch in user space over TAP devices.

    delay_net.py MILLISECONDS NAMESPACE..       the switch: makes `eth0` in each namespace, prints `ready`

The kernel's netem is not everywhere. A line `FROM TO MILLISECONDS LOSS KBIT_S` on standard input sets a link, in one direction:
numbers of namespaces, a loss from 0 to 1 (1 cuts the link), and a rate (0 for no limit). The switch ends with its input.

`paceline chaos --namespaces` runs this program. For scripts, `DelayNet(count, ms)` has the machines 10.77.0.1 and on, as
common31.Net, for common31.Machine. Frames of up to 9,000 bytes; the delay is that of the wire alone (20 to 60 microseconds of
Python come on top). Wants root and /dev/net/tun.
"""
import ctypes, fcntl, heapq, os, random, select, struct, subprocess, sys, time

FRAMES_MAX = 100_000  # on their way; further ones are lost
QUEUE_S = 0.1  # of frames before a link with a rate, as in a switch of 128 KB at 10 Mbit/s; further ones are lost


def tap(namespace):
    """A TAP device `eth0` of a namespace; this process stays in its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    own, other = os.open("/proc/self/ns/net", os.O_RDONLY), os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    try:
        if libc.setns(other, 0):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(fd, 0x400454CA, struct.pack("16sH22x", b"eth0", 0x0002 | 0x1000))  # TUNSETIFF, IFF_TAP | IFF_NO_PI
        return fd
    finally:
        libc.setns(own, 0)
        os.close(own)
        os.close(other)


class Link:
    def __init__(self, delay_s, loss=0.0, kbit_s=0.0):
        self.delay_s, self.loss, self.byte_s, self.free_at = delay_s, loss, kbit_s * 125, 0.0

    def arrival(self, now, size):
        """When a frame of `size` bytes arrives; None if it is lost."""
        if self.loss and random.random() < self.loss:
            return None
        if self.byte_s:
            if self.free_at > now + QUEUE_S:
                return None
            self.free_at = now = max(now, self.free_at) + size / self.byte_s
        return now + self.delay_s


def switch(delay_s, fds):
    known, waiting, number, said = {}, [], 0, b""
    links = {(a, b): Link(delay_s) for a in fds for b in fds if a != b}
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, fd, frame = heapq.heappop(waiting)
            try:
                os.write(fd, frame)
            except OSError:
                pass  # its queue is full, or it is down
        left = max(0, waiting[0][0] - time.monotonic()) if waiting else None
        for fd in select.select([0, *fds], [], [], left)[0]:
            if fd == 0:
                more = os.read(0, 4096)
                if not more:
                    return
                *lines, said = (said + more).split(b"\n")
                for line in lines:
                    a, b, ms, loss, kbit_s = map(float, line.split())
                    links[fds[int(a)], fds[int(b)]] = Link(ms / 1e3, loss, kbit_s)
                continue
            for _ in range(64):
                try:
                    frame = os.read(fd, 16384)
                except OSError:
                    break
                known[frame[6:12]] = fd
                to, now = known.get(frame[:6]) if not frame[0] & 1 else None, time.monotonic()
                for each in [to] if to is not None else fds:
                    if each != fd and len(waiting) < FRAMES_MAX:
                        at = links[fd, each].arrival(now, len(frame))
                        if at is not None:
                            number += 1
                            heapq.heappush(waiting, (at, number, each, frame))


class DelayNet:
    def __init__(self, count, ms):
        from common31 import ip
        from common32 import start
        self.ip, self.bridge, self.child = ip, None, None
        self.hosts = [f"b39x{os.getpid()}n{n}" for n in range(count)]
        try:
            self.make(ms, start)
        except BaseException:
            self.end()
            raise

    def make(self, ms, start):
        ip = self.ip
        for ns in self.hosts:
            ip("netns", "add", ns)
            ip("-n", ns, "link", "set", "lo", "up")
        self.child = start([sys.executable, os.path.abspath(__file__), ms, *self.hosts],
                           stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self.child.stdout.readline().strip() != "ready":
            sys.exit("no TAP devices: root and /dev/net/tun are needed")
        for n, ns in enumerate(self.hosts):
            ip("-n", ns, "link", "set", "eth0", "mtu", 9000)
            ip("-n", ns, "addr", "add", f"10.77.0.{n + 1}/24", "dev", "eth0")
            ip("-n", ns, "link", "set", "eth0", "up")

    def end(self):
        if self.child:
            self.child.kill()
            self.child.wait()
        for ns in self.hosts:
            self.ip("netns", "del", ns, check=False)


if __name__ == "__main__":
    delay, taps = float(sys.argv[1]) / 1e3, [tap(name) for name in sys.argv[2:]]
    print("ready", flush=True)
    switch(delay, taps)
