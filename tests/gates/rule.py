"""The drop rule and its edit once more, in numpy and from a trace alone: what a gate holds the engine's decisions against."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import polars as pl

from moetriage.types import Phase

Bools = npt.NDArray[np.bool_]


def decode_rows(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.filter(pl.col("phase") == int(Phase.DECODE))


def cells(frame: pl.DataFrame, column: str, top_k: int) -> npt.NDArray[np.generic]:
    """Return a column as [cells, top_k]: one row per token and layer."""
    return frame[column].to_numpy().reshape(-1, top_k)


def dropped_by_rule(frame: pl.DataFrame, *, threshold: float, top_k: int, raw: bool = False) -> Bools:
    """A routing goes if it is cold and its share of the mass is below ``threshold`` of the uniform one; the top one never goes."""
    weight = cells(frame, "weight", top_k).astype(np.float64)
    share = weight if raw else weight / weight.sum(axis=1, keepdims=True)
    dropped = (cells(frame, "residency", top_k) == 0) & (share < threshold / top_k)
    dropped[np.arange(len(weight)), weight.argmax(axis=1)] = False
    return dropped


def edited_weights(frame: pl.DataFrame, *, top_k: int, renorm: bool) -> npt.NDArray[np.float32]:
    """Return the weights after the recorded drops: zero for the dropped, and the original mass on the survivors if ``renorm``."""
    weight, dropped = cells(frame, "weight", top_k), cells(frame, "dropped", top_k) == 1
    mass = weight.astype(np.float64).sum(axis=1)
    kept = np.where(dropped, 0, weight).astype(np.float64).sum(axis=1)
    scale = (mass / kept).astype(np.float32) if renorm else np.ones(len(weight), np.float32)
    scaled = np.where(dropped.any(axis=1, keepdims=True), weight * scale[:, None], weight)
    return np.where(dropped, np.float32(0), scaled).astype(np.float32)
