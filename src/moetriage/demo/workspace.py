"""A place on a disk for the demo's model file, which goes away however the demo ends.

In: folders to choose from. Out: the path of a model file, written once. A folder in memory is no place for it: nothing would be read from a
disk. What a killed demo left behind is removed by the next one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from moetriage.errors import ModelFileError, UsageError
from moetriage.gguf.layout import read_layout
from moetriage.gguf.synth import write_model

_PREFIX = "moetriage-demo-"
_IN_MEMORY = ("tmpfs", "ramfs")
_STALE_SECONDS = 60.0


def choose_folder(candidates: Sequence[Path]) -> Path:
    """Return the candidate on a disk with the most free space, the first one among equals; it is made if it does not exist.

    Raises UsageError, with the fault of each, where none can be written to.
    """
    usable: list[tuple[int, Path]] = []
    faults: list[str] = []
    for folder in candidates:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            faults.append(f"{there} is not a folder that can be written to")
        elif (kind := file_system(there)) in _IN_MEMORY:
            faults.append(f"{there} is in memory ({kind})")
        else:
            usable.append((shutil.disk_usage(there).free, folder))
    if not usable:
        raise UsageError(f"no folder for the demo's file: {'; '.join(faults)}; name one on a disk with --dir")
    chosen = max(usable, key=lambda entry: entry[0])[1]
    try:
        chosen.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{chosen}: cannot be made: {error.strerror}; name a folder on a disk with --dir") from error
    return chosen


def file_system(folder: Path) -> str:
    """Return the type of the file system that holds the folder as the mount table names it, "" if it is not there."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
            fields = line.split()
            if fields[2] == number and "-" in fields:
                return fields[fields.index("-") + 1]
    return ""


@contextlib.contextmanager
def model_file(folder: Path, *, shape: str, layers: int | None, keep: bool, progress: Callable[[int, int], None]) -> Iterator[Path]:
    """Write the model and yield its path. With ``keep`` it stays in ``folder``, and one that an earlier demo kept there is used again.

    Raises UsageError where it does not fit or cannot be written, and for a file of its name that is another model.
    """
    name = f"{_PREFIX}{shape}-{'all' if layers is None else layers}-layers.gguf"
    if keep:
        kept = folder / name
        if not kept.exists():
            write_model(kept, shape, layers=layers, progress=progress)
        _check_kept(kept, shape, layers)
        yield kept
        return
    _remove_stale(folder)
    with _locked_folder(folder) as own:
        yield write_model(own / name, shape, layers=layers, progress=progress)[0]


def _check_kept(path: Path, shape: str, layers: int | None) -> None:
    try:
        layout = read_layout(path)
        right = layout.name == f"moetriage synthetic {shape}" and layers in (None, layout.n_layer)
    except ModelFileError:
        right = False
    if not right:
        raise UsageError(f"{path}: is not the demo's file; remove it, or name another folder with --dir")


@contextlib.contextmanager
def _locked_folder(parent: Path) -> Iterator[Path]:
    """Make a folder that is locked while its owner lives, and remove it with all that is in it."""
    own = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    try:
        with _locked(own):
            yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; the kernel lets go of it when the process dies, however it dies. Raises OSError if another one holds it."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def _remove_stale(parent: Path) -> None:
    for path in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            # One that is just being made is not locked yet.
            if path.is_dir() and not path.is_symlink() and time.time() - path.stat().st_mtime > _STALE_SECONDS:
                with _locked(path):
                    shutil.rmtree(path)
