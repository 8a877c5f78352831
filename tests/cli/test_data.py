"""``moetriage data build`` as a user meets it: what it prints, and one line for each thing that is wrong."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from cli.support import Command

if importlib.util.find_spec("tokenizers") is None:
    pytest.skip("needs the extra train", allow_module_level=True)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder of 40 files, 200 kB, no two lines the same."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(40):
        lines = [
            f"line {line} of file {number}: {number * line} and {number + 7 * line} and {number * 13 + line * line}" for line in range(100)
        ]
        (folder / f"{number}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def test_texts_become_data_and_the_last_line_says_what(command: Command, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "data"
    result = command("data", "build", out, "--text", texts, "--vocab-size", 300, "--json")
    assert result.code == 0
    assert result.errors == []
    assert result.json["folder"] == str(out)
    assert result.json["train_files"] + result.json["heldout_files"] == 40
    assert result.json["vocab_size"] == 300
    assert (out / "manifest.json").is_file()
    assert sum(shard["tokens"] for shard in result.json["train"]["shards"]) == result.json["train"]["tokens"]


def test_people_get_a_table_and_the_next_step(command: Command, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "data"
    result = command("data", "build", out, "--text", texts, "--vocab-size", 300)
    assert result.code == 0
    for part in ("to train on", "held out", "300 tokens"):
        assert part in result.out
    assert result.errors == [f"moetriage: {out} is ready: moetriage train {out} RUN"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--text", "absent.txt"), "--text absent.txt: cannot be read"),
        (("--text", ""), '--text "": names no file or folder; "." is the current folder'),
        (("--text", "TEXTS", "--hf-dataset", "a/b"), "give one of them"),
        (("--text", "TEXTS", "--max-mb", "3"), "--max-mb 3 does nothing without --hf-dataset"),
        (("--hf-dataset", "a/b", "--max-mb", "0"), "--max-mb 0: must be at least 1"),
        (("--text", "TEXTS", "--vocab-size", "100"), "--vocab-size 100: must be 257"),
        (("--text", "TEXTS", "--vocab-size", "60000"), "corpus too small"),
        (("--text", "TEXTS/0.txt"), "corpus too small"),
        (("TEXTS/0.txt",), "TEXTS/0.txt: a second folder to write? Texts follow --text"),
        (("--text", "TEXTS/0.txt", "--text", "TEXTS/1.txt"), "corpus too small"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_is_wrong_is_one_line(arguments: tuple[str, ...], message: str, command: Command, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "data"
    result = command("data", "build", out, *(argument.replace("TEXTS", str(texts)) for argument in arguments))
    assert result.code == 2
    assert len(result.errors) == 1
    assert message.replace("TEXTS", str(texts)) in result.err
    assert not out.exists()


def test_one_option_takes_several_texts_and_folders_may_hold_markdown(command: Command, texts: Path, tmp_path: Path) -> None:
    (texts / "1.txt").rename(texts / "1.md")
    single = tmp_path / "single.txt"
    single.write_text("a text of its own, in no folder\n")
    result = command("data", "build", tmp_path / "data", "--text", texts, single, "--vocab-size", 300, "--json")
    assert result.code == 0, result.err
    assert result.json["train_files"] + result.json["heldout_files"] == 41


def test_existing_data_is_kept_unless_told_otherwise(command: Command, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "data"
    arguments = ("data", "build", out, "--text", texts, "--vocab-size")
    assert command(*arguments, 300).code == 0
    refused = command(*arguments, 280)
    assert refused.code == 2
    assert "exists already; name another folder, or replace it with --force" in refused.err
    assert command(*arguments, 280, "--force", "--json").json["vocab_size"] == 280


def test_what_was_left_out_is_one_line_and_in_the_result(command: Command, texts: Path, tmp_path: Path) -> None:
    (texts / "latin.txt").write_bytes(b"caf\xe9")
    (texts / "empty.py").touch()
    result = command("data", "build", tmp_path / "data", "--text", texts, "--vocab-size", 300, "--json")
    assert result.errors == ["moetriage: 2 files left out: 1 empty, 1 not UTF-8"]
    assert result.json["corpus"]["left_out"] == {"empty": 1, "not UTF-8": 1}


def test_data_below_the_texts_is_never_trained_on(command: Command, texts: Path) -> None:
    arguments = ("data", "build", texts / "DATA", "--text", texts, "--json", "--vocab-size")
    first = command(*arguments, 300)
    again = command(*arguments, 280, "--force")
    assert again.errors == ["moetriage: 1 file left out: 1 in data folders"]
    assert [again.json[part]["bytes"] for part in ("train", "heldout")] == [first.json[part]["bytes"] for part in ("train", "heldout")]


def test_copies_alone_are_said_to_be_such(command: Command, texts: Path, tmp_path: Path) -> None:
    folder, text = tmp_path / "copies", "".join(path.read_text() for path in sorted(texts.iterdir()))
    folder.mkdir()
    for name in ("a.txt", "b.txt"):
        (folder / name).write_text(text + f"the last line of {name}\n")
    result = command("data", "build", tmp_path / "data", "--text", folder, "--vocab-size", 300, "--json")
    held = result.json["corpus"]["heldout_near_copies"]
    assert result.errors == [
        f"moetriage: every file is a near copy of others: {held[0]} is held out all the same, which measures memory; give other texts, too"
    ]


def test_a_full_disk_is_one_line_and_leaves_nothing(command: Command, texts: Path, small_disk: Path) -> None:
    result = command("data", "build", small_disk / "data", "--text", texts, "--vocab-size", 300)
    assert result.code == 2
    assert len(result.errors) == 1
    assert "cannot be written: No space left on device" in result.err
    assert list(small_disk.iterdir()) == []


def test_a_missing_package_names_the_extra(command: Command, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "tokenizers" else find(name, *rest))
    result = command("data", "build", tmp_path / "data", "--text", texts)
    assert result.code == 2
    assert result.errors == ["moetriage: moetriage data build needs tokenizers, not installed here: pip install 'moetriage[train]'"]
