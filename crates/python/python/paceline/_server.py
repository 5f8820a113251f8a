"""The `paceline` program of this wheel, and servers that end with this process."""

from __future__ import annotations

import collections
import os
import pathlib
import shutil
import subprocess
import sysconfig
import tempfile
import threading
import time
import weakref
from typing import TYPE_CHECKING

from .errors import ServerError

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Runs its arguments until standard input ends, which it does however this process ends; then
#: ends them, at last by force. The shell lets go of stderr, whose end says that the server is gone.
_UNTIL_STDIN_ENDS = """
"$@" & server=$!
exec 2>/dev/null
cat >/dev/null
kill "$server"
(sleep 10; kill -9 "$server") & late=$!
wait "$server"
status=$?
kill "$late"
exit "$status"
"""

#: Seconds between the end of the server's input and its own, in which answers under way end.
_END = 15.0


def binary() -> str:
    """The path of the `paceline` program: `$PACELINE_BINARY`, else that of this wheel, else `PATH`.

    Raises:
        ServerError: there is none.
    """
    given = os.environ.get("PACELINE_BINARY")
    if given:
        return given
    package = pathlib.Path(__file__).resolve().parent
    places = [
        pathlib.Path(sysconfig.get_path("scripts")),
        *(parent / "bin" for parent in package.parents[1:5]),  # --prefix, --target, --user
    ]
    for place in places:
        if os.access(place / "paceline", os.X_OK):
            return str(place / "paceline")
    found = shutil.which("paceline")
    if found is None:
        raise ServerError(f"the program paceline is not in {places[0]}; set PACELINE_BINARY")
    return found


class Server:
    """`paceline up` on a free port of this machine, with a key that only this process has.

    Its home is a folder of its own that shares the models of the user's.

    Attributes:
        url: `http://127.0.0.1:PORT`.
        key: what requests must bring.
    """

    def __init__(self, arguments: Sequence[str], deadline: float) -> None:
        program = binary()
        self._home = tempfile.TemporaryDirectory(prefix="paceline-")
        try:
            env = {**os.environ, "PACELINE_HOME": self._home.name}
            _share(pathlib.Path(self._home.name))
            self.key = _key(program, env)
            command = ["sh", "-c", _UNTIL_STDIN_ENDS, "sh", program, "up", "--no-beacons",
                       "--control-port", "0", "--port", "0", *arguments]
            self._shell = subprocess.Popen(command, env=env, stdin=subprocess.PIPE,
                                           stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                           text=True, errors="replace", start_new_session=True)
        except BaseException:
            self._home.cleanup()
            raise
        self._finish = weakref.finalize(self, _end, self._shell, self._home)
        self._said: collections.deque[str] = collections.deque(maxlen=30)
        self.url = ""
        self._known = threading.Event()
        threading.Thread(target=self._listen, args=(weakref.ref(self), self._shell.stderr),
                         name="paceline-server", daemon=True).start()
        self._wait(deadline)

    @staticmethod
    def _listen(owner: weakref.ref[Server], lines: object) -> None:
        """Reads what the server says to its end, so that it never waits for a reader."""
        for line in lines:  # type: ignore[attr-defined]
            server = owner()
            if server is None:
                continue
            server._said.append(line.rstrip())
            if line.startswith("listening on ") and not server.url:
                server.url = line.split()[2]
                server._known.set()
            del server
        server = owner()
        if server is not None:
            server._known.set()

    def _wait(self, deadline: float) -> None:
        if self._known.wait(deadline) and self.url:
            return
        self.close()
        words = " / ".join(line for line in self._said if line)
        if self._known.is_set():
            raise ServerError(f"paceline up ended: {words or 'it said nothing'}")
        raise ServerError(f"paceline up does not listen after {deadline} s: {words}")

    def last_words(self) -> str:
        """The last lines that the server wrote to stderr."""
        return "\n".join(self._said)

    def close(self) -> None:
        """Ends the server, after the answers that are under way; the second time does nothing."""
        self._finish()


def _share(home: pathlib.Path) -> None:
    """Links the user's models and engines into `home`."""
    own = os.environ.get("PACELINE_HOME") or os.path.expanduser("~/.paceline")
    for name in ("models", "engines"):
        folder = pathlib.Path(own, name).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        (home / name).symlink_to(folder)


def _key(program: str, env: dict[str, str]) -> str:
    command = [program, "key", "api", "new", "python"]
    try:
        made = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60,
                              stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServerError(f"cannot run {program}: {error}") from None
    if made.returncode:
        raise ServerError(f"{' '.join(command)}: {made.stderr.strip()}")
    return made.stdout.strip()


def _end(shell: subprocess.Popen[str], home: tempfile.TemporaryDirectory[str]) -> None:
    """Also run when the interpreter ends, or the last reference goes."""
    if shell.stdin is not None:
        shell.stdin.close()
    until = time.monotonic() + _END
    while shell.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    if shell.poll() is None:
        shell.kill()
        shell.wait()
    home.cleanup()
