"""What only some commands need and is not installed with moetriage: named in one line before anything is done.

In: the command and the packages that it is about to import. Out: nothing, or an error that says what to install.
"""

from __future__ import annotations

import importlib.util

from moetriage.errors import UsageError


def need_train_extra(command: str, *packages: str) -> None:
    """Raise UsageError, which names the extra, unless all packages are installed; imports none of them."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise UsageError(f"moetriage {command} needs {', '.join(missing)}, not installed here: pip install 'moetriage[train]'")
