"""Where texts come from, and what is left out."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moetriage.errors import UsageError
from moetriage.train import corpus as module
from moetriage.train.corpus import SKIPPED, files_corpus, left_out_line, stdlib_corpus
from moetriage.train.heldout import split
from moetriage.train.hub_corpus import dataset_corpus


def write(root: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def test_the_library_of_this_interpreter_is_megabytes_of_text_in_a_fixed_order() -> None:
    corpus = stdlib_corpus()
    names = [document.name for document in corpus.documents]
    assert sum(document.n_bytes for document in corpus.documents) > 8_000_000
    assert names == sorted(names)
    assert {"argparse.py", "json/decoder.py", "pydoc_data/topics/lambda.txt"} <= set(names)
    assert not [name for name in names if "site-packages" in name or "sysconfigdata" in name]
    assert "Python Software Foundation License" in str(corpus.facts["licence"])


def test_what_is_no_text_not_the_library_or_there_already_is_left_out(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "b.py": "b = 1\n",
            "a/c.txt": "some text\n",
            "a/copy.py": "b = 1\n",
            "test/t.py": "assert True\n",
            "latin.py": b"# caf\xe9\n",
            "zeros.txt": b"a\0b",
            "empty.py": "",
            "data.json": "{}",
            "site-packages/other.py": "x = 1\n",
            "__pycache__/p.py": "x = 2\n",
            "_sysconfigdata_linux.py": "build_time_vars = {}\n",
            "pydoc_data/topics.py": "topics = {'if': 'The if statement\\n', 'and': 'Both\\n'}\n",
        },
    )
    corpus = stdlib_corpus(root)
    assert {document.name: document.text for document in corpus.documents} == {
        "a/c.txt": "some text\n",
        "a/copy.py": "b = 1\n",
        "pydoc_data/topics/and.txt": "Both\n",
        "pydoc_data/topics/if.txt": "The if statement\n",
        "test/t.py": "assert True\n",
    }
    assert corpus.facts["duplicates_left_out"] == 1
    assert corpus.facts["left_out"] == {"empty": 1, "not UTF-8": 1, "with NUL": 1}
    assert corpus.facts["bytes_in_tests"] == len("assert True\n")


def test_a_library_without_tests_says_so(tmp_path: Path) -> None:
    assert stdlib_corpus(write(tmp_path, {"a.py": "a = 1\n"})).facts["bytes_in_tests"] == 0


def test_named_files_are_taken_whatever_they_are_called_and_folders_are_searched(tmp_path: Path) -> None:
    write(tmp_path, {"poem": "Rose\n", "more/poem": "Lily\n", "more/a.txt": "Tulip\n", "more/b.bin": "no\n"})
    corpus = files_corpus([tmp_path / "poem", tmp_path / "more" / "poem", tmp_path / "more"])
    assert [(document.name, document.text) for document in corpus.documents] == [
        ("poem", "Rose\n"),
        ("poem#2", "Lily\n"),
        ("more/a.txt", "Tulip\n"),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        (b"ok so far \xff", "is no UTF-8 text (byte 10)"),
        (b"ok so far \0", "is no text, character 10 is NUL"),
        (b"", "is empty; leave it out"),
    ],
    ids=["none", "bytes", "nul", "empty"],
)
def test_a_named_file_that_is_no_text_is_refused(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        files_corpus([path])
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_what_has_no_end_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, large = tmp_path / "pipe.txt", tmp_path / "large.txt"
    os.mkfifo(pipe)
    large.write_text("x" * 1001)
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 1000)
    for path, message in (
        (pipe, "is no regular file"),
        (Path("/dev/zero"), "is no regular file"),
        (large, "has 1001 bytes, 1000 at most are read"),
        (tmp_path, r"no file in it is text of the kinds \.py, \.rst, \.txt"),
    ):
        with pytest.raises(UsageError, match=message):
            files_corpus([path])


def test_a_name_that_is_no_utf8_is_a_name(tmp_path: Path) -> None:
    for number in range(3):
        Path(os.fsdecode(bytes(tmp_path) + b"/\xff%d.txt" % number)).write_text(f"text {number}")
    parts = split(files_corpus([tmp_path]).documents)
    assert len(parts.train) + len(parts.heldout) == 3


LEFT_OUT = {
    "latin.py": b"# caf\xe9\n",
    "utf16.txt": "words".encode("utf-16"),
    "deep/zeros.rst": b"a\0b",
    "empty.py": b"",
    "site-packages/other/x.py": b"x = 1\n",
    "config-guide.txt": b"settings\n",
    "data.json": b"{}",
}


def test_what_a_folder_holds_beside_texts_is_counted(tmp_path: Path) -> None:
    folder = write(tmp_path / "texts", {"a.txt": "some text\n"} | LEFT_OUT)
    os.mkfifo(folder / "pipe.txt")
    (folder / "gone.txt").symlink_to("nowhere")
    (folder / "elsewhere").symlink_to(write(tmp_path / "other", {"b.txt": "b"}))
    corpus = files_corpus([folder])
    assert [document.name for document in corpus.documents] == ["texts/a.txt"]
    counts = {"not UTF-8": 2, SKIPPED: 2, "with NUL": 1, "empty": 1, "no regular file": 1, "unreadable": 1, "linked folder": 1}
    assert corpus.facts["left_out"] == counts
    assert left_out_line({"empty": 1, "not UTF-8": 21}) == "22 files left out: 21 not UTF-8, 1 empty"
    assert left_out_line({"empty": 1}) == "1 file left out: 1 empty"


def test_a_folder_that_cannot_be_listed_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path, {"a.txt": "some text\n", "closed/b.txt": "b"})
    scandir = os.scandir

    def closed(path: str) -> Any:
        if path.endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", closed)
    assert files_corpus([folder]).facts["left_out"] == {"unreadable": 1}


def test_where_nothing_is_left_out_nothing_is_said(tmp_path: Path) -> None:
    assert "left_out" not in files_corpus([write(tmp_path, {"a.txt": "a", "b.bin": "b"})]).facts


def test_a_folder_without_texts_says_what_it_holds(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no file in it is text of the kinds .* \(2 files left out: 1 empty, 1 not UTF-8\)"):
        files_corpus([write(tmp_path, {"a.txt": "", "b.txt": b"\xff"})])


@pytest.mark.parametrize("beside", ["manifest.json", "tokenizer.json", "train-00000.bin", "heldout-00000.bin"])
def test_data_folders_among_the_texts_are_not_read(beside: str, tmp_path: Path) -> None:
    data = {"heldout.txt": "held out\n", beside: "", "RUN/notes.txt": "n"}
    write(tmp_path / "texts" / "DATA", data)
    folder = write(tmp_path / "texts", {"a.txt": "some text\n", "own/heldout.txt": "a name is no data folder\n"})
    corpus = files_corpus([folder])
    assert [document.name for document in corpus.documents] == ["texts/a.txt", "texts/own/heldout.txt"]
    assert corpus.facts["left_out"] == {"in data folders": 2}
    with pytest.raises(UsageError, match="2 in data folders"):
        files_corpus([folder / "DATA"])


class Hub:
    """Stands for the ``datasets`` package."""

    def __init__(self, rows: Any) -> None:
        self.rows, self.calls = rows, []

    def load_dataset(self, *arguments: Any, **options: Any) -> Any:
        self.calls.append((arguments, options))
        if isinstance(self.rows, Exception):
            raise self.rows
        return iter(self.rows)


def test_rows_of_a_dataset_are_taken_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub({"content": f"{number} " + "x" * 400_000} for number in range(10**9))
    monkeypatch.setitem(sys.modules, "datasets", hub)
    corpus = dataset_corpus("owner/texts:python", max_mb=1)
    assert hub.calls == [(("owner/texts", "python"), {"split": "train", "streaming": True})]
    assert [document.name for document in corpus.documents] == ["owner/texts:python/00000000", "owner/texts:python/00000001"]


@pytest.mark.parametrize(
    ("hub", "message"),
    [
        (None, "pip install datasets"),
        (Hub(ConnectionError("no route\nto host")), "cannot be had: no route; without it, --text takes files"),
        (Hub([{"image": 1, "label": 2}]), "has no column text, content or code of text, but image, label"),
        (SimpleNamespace(), "cannot be had"),
    ],
    ids=["missing", "offline", "pictures", "odd"],
)
def test_a_dataset_that_cannot_be_had_is_one_line(hub: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", hub)
    with pytest.raises(UsageError) as caught:
        dataset_corpus("owner/texts", max_mb=1)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
