"""Exceptions of paceline.

Every failure of a group is a `CommError`; its text names the call and the rank. A group that has
failed is poisoned: later calls raise the first cause again. Drop it and build a new one.
"""

from __future__ import annotations

__all__ = [
    "CommError", "DeadlineExceeded", "FunctionError", "Invalid", "JobError", "JoinError", "Mismatch",
    "PeerLost", "PeerSilent", "ServerError", "Unsupported",
]


class CommError(RuntimeError):
    """A call on a group failed.

    `rank` is the rank at fault as far as this rank can tell, or None.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class JoinError(CommError):
    """The ranks did not become a group."""


class PeerLost(CommError):
    """A rank ended, was killed or dropped its group."""


class PeerSilent(PeerLost):
    """A rank gave no sign of life for longer than the group allows."""


class DeadlineExceeded(CommError, TimeoutError):
    """A rank did not take part before the deadline."""


class Mismatch(CommError):
    """A rank made another call than the others, or with another type or length."""


class Invalid(CommError, ValueError):
    """An argument does not fit the group."""


class Unsupported(CommError, NotImplementedError):
    """The backend has no such call. The group is not poisoned."""


class ServerError(RuntimeError):
    """The paceline server did not start, ended, or refused a request.

    `status` is the HTTP status, or None when there was no answer.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class JobError(RuntimeError):
    """An array job or a training failed; the text is what the program said."""


class FunctionError(JobError):
    """An own function raised an exception, which is the cause where it can be sent.

    `part` and `item` are the numbers of the part and the item, `item` None where it is unknown;
    `machine` is the machine's name, `traceback` the text of the exception there.
    """

    part: int = 0
    item: int | None = None
    machine: str = ""
    traceback: str = ""
