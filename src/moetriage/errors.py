"""Every error a user can meet, with the values that explain it as fields.

The CLI prints ``str(error)`` as one line and exits with ``error.exit_code``; the server picks a status code by type. Messages say
what happened, the value, the limit and the next step. This module imports nothing.
"""

from __future__ import annotations


class MoetriageError(Exception):
    """Base of all errors that are ours; ``exit_code`` is what the CLI exits with."""

    exit_code = 1


class UsageError(MoetriageError):
    """Report a bad value, a bad combination of settings or a bad file: the user can mend it."""

    exit_code = 2


class ModelFileError(UsageError):
    """Report a model file that cannot be used; names the file and, where one is known, the byte offset."""

    def __init__(self, path: str, reason: str, *, offset: int | None = None) -> None:
        where = path if offset is None else f"{path} (byte {offset})"
        super().__init__(f"{where}: {reason}")
        self.path = path
        self.reason = reason
        self.offset = offset


class NotMoeError(ModelFileError):
    """Report a valid GGUF file whose model has no routed experts."""


class BudgetError(UsageError):
    """Report a cache budget that cannot work, with the limit it violates (both in bytes)."""

    def __init__(self, message: str, *, budget_bytes: int, limit_bytes: int) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.limit_bytes = limit_bytes


class TraceError(UsageError):
    """Report a routing trace that cannot be used; ``row`` is the 1-based line or row, if one is at fault."""

    def __init__(self, path: str, reason: str, *, row: int | None = None) -> None:
        where = path if row is None else f"{path}, row {row}"
        super().__init__(f"{where}: {reason}")
        self.path = path
        self.reason = reason
        self.row = row


class ReadError(MoetriageError):
    """Report an expert that could not be read; the token that needed it was not computed."""

    def __init__(self, *, path: str, offset: int, nbytes: int, layer: int, expert: int, reason: str) -> None:
        super().__init__(
            f"{path}: reading {nbytes} bytes at byte {offset} (layer {layer}, expert {expert}) failed: {reason}. "
            "No token was computed from it; the session can go on once the file can be read."
        )
        self.path = path
        self.offset = offset
        self.nbytes = nbytes
        self.layer = layer
        self.expert = expert
        self.reason = reason


class GraphError(MoetriageError):
    """Report a compute graph that the engine cannot stream; names the node."""

    def __init__(self, node: str, reason: str) -> None:
        super().__init__(f"graph node {node!r}: {reason}")
        self.node = node
        self.reason = reason


class OutOfMemoryError(MoetriageError):
    """Report that the engine itself found no memory in the middle of an evaluation; the session can go on with an empty cache."""

    def __init__(self) -> None:
        super().__init__(
            "the system gave no memory in the middle of an evaluation. No token was computed from it and the expert cache was emptied; "
            "free memory, or give a smaller --cache-mb"
        )


class AccountingError(MoetriageError):
    """Report a run whose own counters contradict each other (a fault of ours, never of the user)."""
