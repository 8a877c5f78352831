"""Ctrl-C while a model generates: taken at once inside llama.cpp, but not in the middle of a write.

In: SIGINT. Out: KeyboardInterrupt where it can do no harm. A record that is half written, or handed over but not counted, would make
a trace that nobody can read on; the few milliseconds until it is whole do not matter. Knows neither models nor files.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, Self


class Interrupts:
    """Context manager that defers SIGINT while ``held``. Leaves alone a handler that is not Python's own, and other threads."""

    def __init__(self) -> None:
        self._held = self._pending = False
        self._previous: Any = None

    def __enter__(self) -> Self:
        ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if ours:
            self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None
        self._held = False
        if exc is None:
            self.release()

    def hold(self) -> None:
        """Defer what comes from now on until ``release``."""
        self._held = True

    def release(self) -> None:
        """Raise KeyboardInterrupt if one was deferred; from now on it comes at once again."""
        self._held = False
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Defer within the ``with``, and raise at its end, unless it ends with another exception."""
        self.hold()
        try:
            yield
        except BaseException:
            self._held = self._pending = False
            raise
        self.release()

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        # A second Ctrl-C does not wait: the write may hang.
        if self._held and not self._pending:
            self._pending = True
            return
        self._held = self._pending = False
        raise KeyboardInterrupt
