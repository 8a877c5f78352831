"""Bits per byte: of a model window by window, and of what it is measured against."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from train.running import begin, make_data, small_model, train_config

from moetriage.errors import UsageError
from moetriage.train import loop
from moetriage.train.baselines import gzip_bits_per_byte, trigram_bits_per_byte
from moetriage.train.checkpoint import save_checkpoint
from moetriage.train.data import Data
from moetriage.train.evaluate import bits_per_byte, evaluate_heldout, windows
from moetriage.train.lm import NanoMoE
from moetriage.train.loop import fit
from moetriage.train.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return make_data(tmp_path_factory.mktemp("data") / "d")


@pytest.mark.parametrize("length", [1, 5, 8, 9, 31, 100])
@pytest.mark.parametrize("context", [1, 2, 7, 8])
def test_windows_score_every_token_once_with_what_came_before(length: int, context: int) -> None:
    ids = np.arange(1, length + 1, dtype=np.int64)
    scored = []
    for tokens, targets, end in windows(ids, context, batch=3):
        for row in range(len(tokens)):
            for position in range(context):
                if targets[row, position] >= 0:
                    # Here a token is its own place in the text, and 0 stands before the text.
                    assert targets[row, position] == tokens[row, position] + 1
                    scored.append(int(targets[row, position]))
                    assert position >= min(int(targets[row, position]) - 1, context - max(1, context // 2))
        assert max(scored) == end
    assert scored == ids.tolist()


def test_bits_per_byte_are_the_tokens_nats(data: Data) -> None:
    model = NanoMoE(small_model()).eval()
    ids = data.heldout.read(0, 32)
    row = torch.from_numpy(np.concatenate([[0], ids]))[None]
    logits = model(row[:, :-1]).logits_BSV
    assert logits is not None
    nats = -logits.log_softmax(-1)[0, torch.arange(32), row[0, 1:]].sum()
    assert bits_per_byte(model, ids, 50) == pytest.approx(float(nats.detach()) / 50 / math.log(2), rel=1e-5)


def test_a_loss_that_is_no_number_is_refused(data: Data, tmp_path: Path) -> None:
    """Its weights are finite, and what is computed from them is not."""
    model = NanoMoE(small_model(moe={"check_finite": False}))
    with torch.no_grad():
        model.get_parameter("model.norm.weight").fill_(3e38)
    with pytest.raises(UsageError, match=r"the held-out loss is (nan|inf) nats: the training diverged"):
        bits_per_byte(model, data.heldout.read(0, 32), 50)
    save_checkpoint(
        tmp_path,
        1,
        config=model.config,
        weights={name: tensor.clone() for name, tensor in model.state_dict().items()},
        trainer_state={},
        tokenizer=data.tokenizer_path.read_bytes(),
        about={},
    )
    with pytest.raises(UsageError, match="checkpoint-00000001: the held-out loss is"):
        evaluate_heldout(tmp_path, data)


def test_another_tokenizer_is_refused(data: Data, tmp_path: Path) -> None:
    run = begin(tmp_path / "run", data, steps=1)
    fit(run, data)
    with pytest.raises(UsageError, match="was trained with another tokenizer"):
        evaluate_heldout(run.path, make_data(tmp_path / "other", word="price"))


def test_the_training_text_comes_back_from_its_tokens(data: Data) -> None:
    tokenizer = load_tokenizer(data.tokenizer_path)
    ids = data.train.read(0, 4000).tolist()
    assert tokenizer.bytes_of(ids).decode() == tokenizer.decode(ids).replace("<|endoftext|>", "")


def brute_force_trigram(train: bytes, text: bytes) -> float:
    history = b"\n\n" + train
    cost = 0.0
    for place in range(len(text)):
        context = (b"\n\n" + text)[place : place + 2]
        prob = 1 / 256
        for order in range(3):
            suffix = context[2 - order :]
            follow = [history[at] for at in range(2, len(history)) if history[at - order : at] == suffix]
            kinds = len(set(follow))
            if follow:
                prob = (follow.count(text[place]) + kinds * prob) / (len(follow) + kinds)
        cost -= math.log2(prob)
    return cost / len(text)


def test_trigrams_cost_what_counting_by_hand_says() -> None:
    train, text = b"the cat sat on the mat, the dog sat on the log\n" * 3, b"the dog on the mat saw xylophones\n\xff"
    pieces = [train[:1], train[1:50], train[50:]]
    assert trigram_bits_per_byte(pieces, text) == pytest.approx(brute_force_trigram(train, text), rel=1e-12)


def test_gzip_costs_its_size() -> None:
    import gzip

    text = b"over and over " * 100
    assert gzip_bits_per_byte(text) == 8 * len(gzip.compress(text, 9)) / len(text)


def test_the_sample_of_the_heldout_text_is_bounded(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(loop, "_SAMPLE_TOKENS", 100)
    monkeypatch.setattr(loop, "bits_per_byte", lambda _model, ids, _bytes, **_options: asked.append(len(ids)) or 1.0)
    loop._sampled(NanoMoE(small_model()), train_config(), data)
    assert asked == [100]
