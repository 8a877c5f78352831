"""moetriage: which experts run when memory, disk bandwidth or expert capacity is scarce, and what each decision costs.

``Llama`` is imported at its first use: reading settings or catching an error needs neither llama.cpp nor the native extension.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moetriage.config import DropConfig, StreamConfig
from moetriage.errors import (
    AccountingError,
    BudgetError,
    GraphError,
    ModelFileError,
    MoetriageError,
    NotMoeError,
    OutOfMemoryError,
    ReadError,
    TraceError,
    UsageError,
)

if TYPE_CHECKING:
    from moetriage.stream.llama import Llama

__version__ = "0.1.0"

__all__ = [
    "AccountingError",
    "BudgetError",
    "DropConfig",
    "GraphError",
    "Llama",
    "ModelFileError",
    "MoetriageError",
    "NotMoeError",
    "OutOfMemoryError",
    "ReadError",
    "StreamConfig",
    "TraceError",
    "UsageError",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name == "Llama":
        from moetriage.stream.llama import Llama

        return Llama
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
