"""Data that were damaged, cut short or mixed up are refused in one line before anything is trained on them."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
from train.running import make_data

from moetriage.errors import UsageError
from moetriage.train.data import open_data
from moetriage.train.data_folder import MANIFEST


def change(out: Path, **values: object) -> None:
    (out / MANIFEST).write_text(json.dumps(json.loads((out / MANIFEST).read_text()) | values))


def change_heldout(out: Path, **values: object) -> None:
    change(out, heldout=json.loads((out / MANIFEST).read_text())["heldout"] | values)


def forge(out: Path, name: str, content: bytes) -> None:
    """Give a file another content, and the manifest the sha256 and number of tokens of that."""
    (out / name).write_bytes(content)
    manifest = json.loads((out / MANIFEST).read_text())
    files = [manifest["tokenizer"], manifest["heldout"]["text"], *manifest["train"]["shards"], *manifest["heldout"]["shards"]]
    (about,) = (file for file in files if file["file"] == name)
    about |= {"sha256": hashlib.sha256(content).hexdigest()} | ({"tokens": len(content) // 2} if "tokens" in about else {})
    (out / MANIFEST).write_text(json.dumps(manifest))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def other_tokenizer(out: Path) -> bytes:
    content = json.loads((out / "tokenizer.json").read_text())
    content["model"]["vocab"]["漢"] = content["model"]["vocab"].pop("!")
    content["model"]["merges"] = []
    return json.dumps(content).encode()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda out: change_heldout(out, bytes=1), "the held-out text's 2760 bytes are not the heldout.bytes of manifest.json"),
        (lambda out: change_heldout(out, bytes=10**400), "are not the heldout.bytes of manifest.json"),
        (lambda out: forge(out, "heldout.txt", b""), "the held-out text's 0 bytes are not the heldout.bytes"),
        (lambda out: forge(out, "heldout.txt", bytes((out / "heldout.txt").stat().st_size)), "ids are not those of the held-out text"),
        (lambda out: forge(out, "heldout-00000.bin", b"\0\0"), "ids are not those of the held-out text"),
        (lambda out: forge(out, "tokenizer.json", b"{}"), "tokenizer.json: is no tokenizer"),
        (lambda out: forge(out, "tokenizer.json", other_tokenizer(out)), "tokenizer.json: not every token is bytes"),
        (lambda out: change(out, vocab_size=65_536), "tokenizer.json: holds 300 tokens, and vocab_size is 65536 in manifest.json"),
        (lambda out: pipe(out / "tokenizer.json"), "tokenizer.json: is no regular file"),
        (lambda out: pipe(out / "heldout.txt"), "heldout.txt: is no regular file"),
    ],
)
def test_files_that_do_not_belong_together_are_found_before_training(damage, message: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    out = tmp_path / "d"
    make_data(out)
    damage(out)
    data = open_data(out)
    with pytest.raises(UsageError) as caught:
        data.verify()
    assert str(out) in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda out: (out / MANIFEST).unlink(), "no data there"),
        (lambda out: (out / MANIFEST).write_text("{"), "is damaged"),
        (lambda out: (out / MANIFEST).write_text(json.dumps({"format": 99})), "is not in format 1"),
        (lambda out: change(out, vocab_size="x"), "vocab_size 'x' is no number from 1 to 65536"),
        (lambda out: change(out, train={"shards": [], "tokens": 0}), "is damaged (index -1"),
        (lambda out: change(out, train=[]), "is damaged ("),
        (lambda out: change(out, tokenizer={"file": "tokenizer.json"}), "is damaged ('sha256' is missing)"),
        (lambda out: change(out, tokenizer={"file": "../x", "sha256": "00"}), "'../x' is no name of a file in the folder"),
        (lambda out: change(out, tokenizer={"file": "a\0b", "sha256": "00"}), r"'a\x00b' is no name of a file in the folder"),
        (lambda out: change(out, tokenizer={"file": "a\ud800", "sha256": "00"}), r"'a\ud800' is no name of a file in the folder"),
        (lambda out: change(out, tokenizer={"file": "a\nb", "sha256": "00"}), r"'a\nb' is no name of a file in the folder"),
        (lambda out: change_heldout(out, bytes=0), "heldout.bytes is no number of bytes"),
        (lambda out: change_heldout(out, bytes=1.5), "heldout.bytes is no number of bytes"),
        (lambda out: forge(out, "heldout-00000.bin", b""), "heldout holds no tokens"),
        (lambda out: forge(out, "train-00000.bin", b""), "train holds no tokens"),
        (lambda out: pipe(out / "manifest.json"), "manifest.json: is no regular file"),
        (lambda out: pipe(out / "heldout-00000.bin"), "heldout-00000.bin: is no regular file"),
        (lambda out: (out / "train-00000.bin").unlink(), "train-00000.bin: cannot be read"),
        (lambda out: (out / "train-00000.bin").write_bytes(b"abc"), "has 3 bytes"),
    ],
)
def test_damaged_data_is_refused_with_the_file(damage, message: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    out = tmp_path / "d"
    make_data(out)
    damage(out)
    with pytest.raises(UsageError) as caught:
        open_data(out)
    assert str(out) in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["train-00000.bin", "heldout-00000.bin", "tokenizer.json", "heldout.txt"])
def test_a_changed_file_is_found(name: str, tmp_path: Path) -> None:
    out = tmp_path / "d"
    make_data(out)
    open_data(out).verify()
    (out / name).write_bytes(b"\1\0" + (out / name).read_bytes()[2:])
    with pytest.raises(UsageError, match=f"{name}: is not what moetriage data build wrote .sha256 differs"):
        open_data(out).verify()


def test_tokens_beyond_the_vocabulary_are_found(tmp_path: Path) -> None:
    out = tmp_path / "d"
    make_data(out)
    change(out, vocab_size=260)
    with pytest.raises(UsageError, match=r"holds token \d+, and its vocabulary ends at 259; build the data again"):
        open_data(out).verify()
