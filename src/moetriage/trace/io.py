"""The door to route traces: reading (``reader``) and writing (``writer``) under one name.

In and out: files. What a trace means to the engine is ``steps``' job, what it predicts is ``moetriage.replay``'s.
"""

from __future__ import annotations

from moetriage.trace.reader import Trace, TraceReader, read_meta, read_trace, scan_batches
from moetriage.trace.writer import RouteWriter

__all__ = ["RouteWriter", "Trace", "TraceReader", "read_meta", "read_trace", "scan_batches"]
