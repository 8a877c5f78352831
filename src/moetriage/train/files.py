"""Files and folders that are there whole or not at all, JSON that is damaged, and folders that one process writes in.

In: paths and what should be there. Out: it is there, or a UsageError names the path. Knows nothing of what the files mean; needs no torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moetriage.errors import UsageError


def read_object(path: Path, *, hint: str) -> dict[str, Any]:
    """Return the JSON object in a file. hint: the next step, for a file that is damaged.

    Raises UsageError, with the path, for one that cannot be read, is no JSON (NaN and Infinity are none), nested without end, no object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from error
    except RecursionError as error:
        raise UsageError(f"{path}: is damaged (nested too deep); {hint}") from error
    except ValueError as error:
        raise UsageError(f"{path}: is damaged ({error}); {hint}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path}: is damaged (not an object); {hint}")
    return value


@contextlib.contextmanager
def damaged(path: Path, *, hint: str) -> Iterator[None]:
    """Turn what wrong types, sizes and missing keys raise inside into one UsageError that names the path; UsageErrors get it, too."""
    try:
        yield
    except UsageError as error:
        if str(path) in str(error):
            raise
        raise UsageError(f"{path}: {error}") from error
    except KeyError as error:
        raise UsageError(f"{path}: is damaged ({error} is missing); {hint}") from error
    except (ValueError, TypeError, AttributeError, IndexError, OverflowError) as error:
        raise UsageError(f"{path}: is damaged ({error}); {hint}") from error


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file that is there completely or not at all. Raises UsageError if it cannot be written."""
    temporary = beside(path)
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}; what was finished before is kept") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def beside(path: Path) -> Path:
    """Return where to write what will be ``path``: in the same folder, another name for each process, hidden."""
    # abspath, as "." has no name of its own.
    absolute = Path(os.path.abspath(path))  # resolve() would follow a link that should be replaced
    return absolute.with_name(f".{absolute.name}.{os.getpid()}.tmp")


def remove_leftovers(path: Path) -> None:
    """Remove what processes that were killed left ``beside`` this path; a folder that was being replaced stays while nothing is there."""
    own = beside(path)
    name = own.name.removesuffix(f".{os.getpid()}.tmp")
    for leftover in own.parent.glob(f"{glob.escape(name)}.*"):
        found = re.fullmatch(r"\.(\d+)\.tmp(\.old)?", leftover.name.removeprefix(name))
        if found is not None and not _runs(int(found[1])) and (found[2] is None or path.exists()):
            _remove(leftover)


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):  # rmtree leaves files and links
        path.unlink()


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass  # somebody else's
    return True


def replace_folder(temporary: Path, folder: Path) -> None:
    """Put a new folder in the place of the old one or of a link; two renames, as one cannot replace a full folder. Raises OSError."""
    if not folder.exists():
        temporary.rename(folder)
        return
    old = temporary.with_name(f"{temporary.name}.old")
    folder.rename(old)
    try:
        temporary.rename(folder)
    except OSError:
        old.rename(folder)
        raise
    _remove(old)


@contextlib.contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Hold a folder for this process; the kernel lets go of it when the process ends, however it does. Raises UsageError if it is held."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"{folder}: another process is writing there; wait for it, stop it, or name another folder") from error
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(descriptor)


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is no number")
