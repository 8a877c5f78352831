"""How well a model predicts a whole text: a model, or a run's folder, and held-out ids in; bits per byte out.

A byte is the same for every model and tokenizer, and for gzip; a token is not. Nothing is stored.

Legend: B sequences, S positions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moetriage.errors import UsageError
from moetriage.train.baselines import gzip_bits_per_byte, trigram_bits_per_byte
from moetriage.train.checkpoint import load_model, open_checkpoint
from moetriage.train.cross_entropy import IGNORE
from moetriage.train.data import Data
from moetriage.train.files import damaged
from moetriage.train.lm import NanoMoE
from moetriage.train.tokenizer import END_OF_TEXT_ID, load_tokenizer
from moetriage.train.trainer import precision

Ids = NDArray[np.int64]
#: Training tokens that are turned back into text at a time.
_PIECE = 1_000_000


def evaluate_heldout(
    path: Path, data: Data, *, batch: int = 16, progress: Callable[[int, int], None] = lambda _done, _total: None
) -> dict[str, Any]:
    """Return the bits per byte of the held-out text: by a folder's newest checkpoint, by gzip, by a trigram model of the training text.

    Computed in float32. Raises UsageError for a folder without a checkpoint, one whose tokenizer is not the data's, and a model that has
    diverged.
    """
    checkpoint = open_checkpoint(path)
    tokenizer = load_tokenizer(data.tokenizer_path)
    if checkpoint.tokenizer != json.loads(tokenizer.as_json()):
        raise UsageError(
            f"{checkpoint.folder}: was trained with another tokenizer than that of {data.folder}; name the data it was trained on"
        )
    model = load_model(checkpoint)
    ids, text = data.heldout.read(0, len(data.heldout)), data.heldout_text
    with damaged(checkpoint.folder, hint="take an earlier one"):
        bits = bits_per_byte(model, ids, len(text), batch=batch, progress=progress)
    pieces = (tokenizer.bytes_of(piece.tolist()) for piece in data.train.pieces(_PIECE))
    return {
        "checkpoint": str(checkpoint.folder),
        "step": checkpoint.step,
        "bytes": len(text),
        "tokens": len(ids),
        "model_bits_per_byte": bits,
        "gzip_bits_per_byte": gzip_bits_per_byte(text),
        "trigram_bits_per_byte": trigram_bits_per_byte(pieces, text),
    }


def bits_per_byte(
    model: NanoMoE,
    ids: Ids,
    n_bytes: float,
    *,
    batch: int = 16,
    compute: str = "fp32",
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> float:
    """Return the loss of a model on a text, in bits for each of its bytes.

    ids: the whole text, with <|endoftext|> after each file, which counts too. n_bytes: length of the text. batch: sequences at a time.
    compute: "fp32" or "bf16". progress: told the tokens scored so far and all.
    Every token is scored once, with at least half a context before it except at the start. Each gets the experts its policy asks for, as if
    capacity had no end: admission may look at later tokens, and a text's bits must not. Raises UsageError for a loss that is not finite.
    """
    was_training = model.training
    model.eval()
    nats = 0.0
    for tokens_BS, targets_BS, scored in windows(ids, model.config.context, batch):
        with torch.no_grad(), precision(compute):
            loss = model(tokens_BS, targets_BS, drop_free=True).loss
        assert loss is not None
        nats += float(loss) * int((targets_BS >= 0).sum())
        progress(scored, len(ids))
    model.train(was_training)
    if not math.isfinite(nats):
        raise UsageError(f"the held-out loss is {nats} nats: the training diverged; take an earlier checkpoint, or train with a lower --lr")
    return nats / n_bytes / math.log(2)


def windows(ids: Ids, context: int, batch: int) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield (tokens_BS, targets_BS, tokens scored so far); windows overlap by half, and targets that were scored before do not count."""
    row = np.concatenate([[END_OF_TEXT_ID], ids])
    stride = max(1, context // 2)
    starts = range(0, max(1, len(ids) - (context - stride)), stride)
    for first in range(0, len(starts), batch):
        tokens = np.full((len(starts[first : first + batch]), context), END_OF_TEXT_ID, dtype=np.int64)
        targets = np.full_like(tokens, IGNORE)
        end = 0
        for index, start in enumerate(starts[first : first + batch]):
            end = min(start + context, len(ids))
            skipped = 0 if start == 0 else context - stride
            tokens[index, : end - start] = row[start:end]
            targets[index, skipped : end - start] = row[start + skipped + 1 : end + 1]
        yield torch.from_numpy(tokens), torch.from_numpy(targets), end
