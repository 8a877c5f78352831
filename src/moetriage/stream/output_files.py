"""Where a run may write: paths checked before anything is loaded.

In: paths as the user gave them. Out: nothing, or an error that names the path. Writes no rows (``run_outputs``) and needs no model.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moetriage.errors import TraceError, UsageError

#: Enough to notice a full disk: the smallest a file takes.
_PROBE_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class OutputFiles:
    """Where a run writes. ``on_error``: what to do when a disk takes no more; the files stay readable either way."""

    csv: Path | None = None
    route_trace: Path | None = None
    on_error: Literal["continue", "stop"] = "continue"

    def check(self, inputs: Iterable[Path]) -> None:
        """Refuse, before a model is loaded, what cannot be written or would replace one of ``inputs``. Leaves no file behind.

        Raises UsageError and TraceError, each with the path.
        """
        taken = {path.resolve(): "a file this run reads" for path in inputs}
        for flag, path in (("--csv", self.csv), ("--route-trace", self.route_trace)):
            if path is None:
                continue
            if (what := taken.get(path.resolve())) is not None:
                raise UsageError(f"{flag} {path}: is {what}; name another file")
            taken[path.resolve()] = f"the file of {flag}"
        if self.route_trace is not None and self.route_trace.suffix.lower() not in (".csv", ".parquet"):
            raise TraceError(str(self.route_trace), "a route trace is written as .csv or .parquet")
        for path in (self.csv, self.route_trace):
            if path is not None:
                _probe(path)


def _probe(path: Path) -> None:
    target = path.resolve()
    try:
        if target.is_dir():
            raise IsADirectoryError(None, "Is a directory")
        if target.exists() and not os.access(target, os.W_OK):
            raise PermissionError(None, "Permission denied")
        if target.is_file() or not target.exists():
            with tempfile.TemporaryFile(dir=target.parent, buffering=0) as file:
                file.write(bytes(_PROBE_BYTES))
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from error
