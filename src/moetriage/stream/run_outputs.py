"""The files a run writes beside its text: metrics per token and the routing trace.

In: paths, then steps and routing records as they come. Out: files that are whole up to the last step, whatever ends the run. Knows the
session's shape for the trace's header; prints nothing and does not generate.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moetriage.errors import TraceError, UsageError
from moetriage.stream.output_files import OutputFiles
from moetriage.stream.routing import RENORM_KEY
from moetriage.stream.telemetry import TokenCsvWriter
from moetriage.types import TokenMetrics

if TYPE_CHECKING:
    from moetriage.stream.session import Session
    from moetriage.trace.io import RouteWriter
    from moetriage.trace.schema import TraceMeta

_BLOCK = re.compile(r"blk\.(\d+)\.")


class RunOutputs:
    """The open files of a run. A failing file is reported once through ``notify`` and left at that, or ends the run, by ``on_error``.

    Raises UsageError or TraceError if a file cannot be opened.
    """

    def __init__(self, files: OutputFiles, session: Session, preamble: Mapping[str, object], notify: Callable[[str], None]) -> None:
        self._stops = files.on_error == "stop"
        self._notify = notify
        self._csv = TokenCsvWriter(files.csv, preamble) if files.csv is not None else None
        self._trace: RouteWriter | None = None
        if files.route_trace is not None:
            try:
                self._trace = _open_trace(files.route_trace, session, str(preamble["version"]))
            except UsageError:
                self.close()
                raise

    @property
    def wants_routes(self) -> bool:
        return self._trace is not None

    def step(self, metrics: TokenMetrics) -> None:
        """Add a step to the metrics."""
        if self._csv is not None:
            self._attempt(self._csv.write, metrics)

    def routes(self, columns: Mapping[str, Any], turn: int) -> None:
        """Add the routing records of one evaluation, as the session hands them over."""
        if self._trace is not None:
            self._attempt(self._trace.append, {**columns, "turn": np.full(len(columns["step"]), turn, np.int32)})

    def close(self) -> None:
        """Put the files under their final names. A trace may find only now that the disk is full."""
        if self._csv is not None:
            self._csv.close()
        if self._trace is not None:
            self._attempt(self._trace.close)

    def _attempt(self, write: Callable[..., None], *args: Any) -> None:
        try:
            write(*args)
        except UsageError as error:
            if self._stops:
                raise
            self._notify(f"{error}. The generation goes on without it")


def _open_trace(path: Path, session: Session, version: str) -> RouteWriter:
    from moetriage.trace.io import RouteWriter

    return RouteWriter(path, _trace_meta(path, session, version))


def _trace_meta(path: Path, session: Session, version: str) -> TraceMeta:
    from moetriage.trace.schema import TraceMeta

    layout = session.layout
    widths = {layer.top_k for layer in session.layers}
    if len(widths) > 1:
        raise TraceError(str(path), f"the model's layers use {sorted(widths)} experts a token, a route trace has one number for all")
    dense: dict[int, int] = {}
    for span in layout.dense:
        if match := _BLOCK.match(span.name):
            dense[int(match[1])] = dense.get(int(match[1]), 0) + span.nbytes
    return TraceMeta(
        model=str(layout.paths[0]),
        arch=layout.arch,
        n_layer=layout.n_layer,
        n_expert=layout.n_expert,
        n_expert_used=session.top_k,
        layer_expert_bytes={layer.block: session.layer_expert_bytes(layer) for layer in session.layers},
        layer_dense_bytes={layer: nbytes for layer, nbytes in dense.items() if layer < layout.n_layer},
        extra={
            "moetriage": version,
            "config": json.dumps(session.config.as_dict()),
            "budget_bytes": str(session.budget.bytes),
            RENORM_KEY: json.dumps(_renorm(session)),
        },
    )


def _renorm(session: Session) -> bool:
    """Tell how the run rescales survivors; a replayed drop does it as the run that was recorded."""
    config = session.config
    if config.replay_drops is not None:
        from moetriage.trace.io import read_meta

        return bool(json.loads(read_meta(config.replay_drops).extra.get(RENORM_KEY, "true")))
    return config.drop is None or config.drop.renorm
