"""Files are there whole or not at all, damaged JSON is one line that names it, and one process writes in a folder."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moetriage.errors import UsageError
from moetriage.train.files import beside, damaged, read_object, remove_leftovers, replace_folder, sole_writer, write_whole


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is damaged (Expecting value"),
        (b'{"a": 1', "is damaged ("),
        (b'{"a": NaN}', "is damaged (NaN is no number)"),
        (b'{"a": -Infinity}', "is damaged (-Infinity is no number)"),
        (b"[" * 200_000, "is damaged (nested too deep)"),
        (b"[1]", "is damaged (not an object)"),
        (b'{"a": "\xff"}', "is damaged ('utf-8' codec"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is damaged (Exceeds the limit"),
    ],
    ids=["empty", "cut", "nan", "inf", "deep", "list", "bytes", "digits"],
)
def test_json_that_is_damaged_is_one_line_with_file_and_next_step(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        read_object(path, hint="make it again")
    assert str(caught.value).startswith(f"{path}: {message}")
    assert str(caught.value).endswith("; make it again")


def test_json_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        read_object(tmp_path, hint="")


def _usage() -> None:
    raise UsageError("top_k 9: too many")


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda: {}["step"], "is damaged ('step' is missing); again"),
        (lambda: int("x"), "is damaged (invalid literal"),
        (lambda: int(float("inf")), "is damaged (cannot convert float infinity"),
        (lambda: len(None), "is damaged (object of type"),  # type: ignore[arg-type]
        (lambda: [][0], "is damaged (list index"),
        (_usage, "top_k 9: too many"),
    ],
)
def test_what_wrong_content_raises_becomes_one_error_with_the_path(action: Callable[[], Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught, damaged(tmp_path, hint="again"):
        action()
    assert str(caught.value).startswith(f"{tmp_path}: {message}")


def test_a_file_is_replaced_whole_or_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_whole(path, "old")

    def full(_number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match="cannot be written: No space left on device"):
        write_whole(path, "new")
    assert [(found.name, found.read_text()) for found in tmp_path.iterdir()] == [("a.json", "old")]


def test_a_folder_is_put_back_if_the_new_one_cannot_take_its_place(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "old").touch()
    with pytest.raises(OSError, match="No such file"):
        replace_folder(tmp_path / "absent", folder)
    assert [found.name for found in tmp_path.rglob("*")] == ["data", "old"]


def test_leftovers_of_killed_processes_go_and_those_of_running_ones_stay(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    path = tmp_path / "a[1].x"
    ours, theirs = beside(path), tmp_path / f".{path.name}.{ended.pid}.tmp"
    old = theirs.with_name(f"{theirs.name}.old")
    for folder in (ours, theirs, old):
        folder.mkdir()
        (folder / "part").touch()
    (tmp_path / ".a1.x.0.tmp").touch()
    remove_leftovers(path)
    stay = [ours.name, ".a1.x.0.tmp"]
    # What a process that ended between its two renames has moved away is the only copy.
    assert sorted(found.name for found in tmp_path.iterdir()) == sorted([*stay, old.name])
    path.mkdir()
    remove_leftovers(path)
    assert sorted(found.name for found in tmp_path.iterdir()) == sorted([*stay, path.name])


def test_a_link_that_a_folder_replaces_leaves_nothing(tmp_path: Path) -> None:
    for name in ("real", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    (tmp_path / "link").symlink_to("real")
    replace_folder(tmp_path / "new", tmp_path / "link")
    assert sorted(str(found.relative_to(tmp_path)) for found in tmp_path.rglob("*")) == ["link", "link/new", "real", "real/real"]


def test_a_folder_without_a_name_of_its_own_has_a_place_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert beside(Path()).parent == tmp_path.parent


def test_one_process_writes_in_a_folder(tmp_path: Path) -> None:
    with sole_writer(tmp_path):
        with pytest.raises(UsageError, match="another process is writing there"), sole_writer(tmp_path):
            pass
        assert list(tmp_path.iterdir()) == []
    with sole_writer(tmp_path):
        pass
