"""Holds which part of moetriage may import which, by reading the source; and what `import moetriage` must not load, by running it.

One way only: errors, types, config <- gguf, trace <- replay, stream <- quality, serve, study, demo <- cli. Parts of one layer do not know
each other. Imports inside functions and under TYPE_CHECKING count too: they are dependencies all the same.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

BASE = {"errors", "types", "config"}
#: Lowest first. The base three may use each other; any other part uses lower layers only.
LAYERS = (BASE | {"_native"}, {"gguf", "trace"}, {"replay", "stream"}, {"quality", "serve", "study", "demo"}, {"cli"})
#: train stands aside: it uses the base three and gguf (export has no writer of its own); what lies above replay and stream may use it.
TRAIN = "train"
#: The package's own __init__ gives out names of the base three, and Llama (lazily).
ROOT_MAY_USE = BASE | {"stream"}
#: Third-party packages that must stay where they are, because they are heavy or because they are the edge to somebody else's API.
OWNERS = {
    "llama_cpp": {"stream"},
    "polars": {"trace", "replay"},
    "rich": {"cli"},
    "torch": {"train", "study"},
    "typer": {"cli"},
}
#: Loaded by nothing that merely reads settings or catches an error.
HEAVY = ("torch", "llama_cpp", "polars", "numpy", "rich", "typer", "fastapi", "uvicorn", "nicegui", "moetriage._native")


def allowed(part: str) -> set[str]:
    """Return the parts that ``part`` (a module or package right below moetriage) may import, itself included."""
    if part == TRAIN:
        return BASE | {TRAIN, "gguf"}
    depth = next(i for i, layer in enumerate(LAYERS) if part in layer)
    lower = set().union(*LAYERS[:depth])
    return lower | (BASE if part in BASE else {part}) | ({TRAIN} if depth > 2 else set())


def imported_modules(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield (dotted name, line) of all imports; ``from a import b`` gives a.b, as b may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((f"{'.' * node.level}{node.module or ''}.{alias.name}", node.lineno) for alias in node.names)


def faults(part: str, source: str) -> list[str]:
    """Return what is wrong with the imports of one source text that belongs to ``part`` ("" is the package's __init__)."""
    may_use = allowed(part) if part else ROOT_MAY_USE
    found = []
    for name, line in imported_modules(ast.parse(source)):
        top, _, rest = name.partition(".")
        target = rest.partition(".")[0]
        if top == "":
            found.append(f"line {line}: relative import {name}")
        elif top == "moetriage" and target != "__version__" and target not in may_use:
            found.append(f"line {line}: {part or 'moetriage'} imports moetriage.{target}")
        elif part not in OWNERS.get(top, {part}):
            found.append(f"line {line}: {part or 'moetriage'} imports {top}, which only {', '.join(sorted(OWNERS[top]))} may")
    return found


def source_files(repo_root: Path) -> Iterator[tuple[str, Path]]:
    package = repo_root / "src" / "moetriage"
    for path in sorted(package.rglob("*.py")):
        part = path.relative_to(package).parts[0].removesuffix(".py")
        yield ("" if part == "__init__" else part), path


def test_every_part_has_a_place_in_the_layers(repo_root: Path) -> None:
    parts = {part for part, _ in source_files(repo_root)} - {""}
    assert parts >= BASE
    assert parts <= set().union(*LAYERS) | {TRAIN}


def test_imports_go_one_way(repo_root: Path) -> None:
    found = [f"{path.relative_to(repo_root)} {fault}" for part, path in source_files(repo_root) for fault in faults(part, path.read_text())]
    assert found == []


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("config", "import moetriage.stream.llama"),
        ("gguf", "from moetriage.trace import schema"),
        ("trace", "from moetriage import stream"),
        ("replay", "def f():\n    from moetriage.stream.llama import Llama"),
        ("stream", "from ..trace import io"),
        ("stream", "import torch.nn"),
        ("quality", "from moetriage.cli import main"),
        ("serve", "import llama_cpp.llama_cpp as low"),
        ("train", "from moetriage.stream import telemetry"),
        ("train", "from moetriage.trace import schema"),
        ("", "from moetriage.cli import main"),
    ],
)
def test_a_wrong_import_is_found(part: str, source: str) -> None:
    assert len(faults(part, source)) == 1


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("config", "from moetriage.errors import UsageError\nimport math"),
        ("stream", "from moetriage import _native, types\nfrom moetriage.gguf.layout import read_layout\nimport llama_cpp"),
        ("study", "from moetriage.train.loop import fit\nfrom moetriage.replay import engine"),
        ("train", "import torch\nfrom moetriage.config import DropConfig\nfrom moetriage.gguf.writer import Writer"),
        ("cli", "from moetriage import __version__\nimport rich\nimport moetriage.serve.api"),
    ],
)
def test_a_right_import_is_not_found(part: str, source: str) -> None:
    assert faults(part, source) == []


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def test_import_moetriage_loads_nothing_heavy() -> None:
    code = f"import sys, moetriage; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert run_python(code) == "[]"


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert run_python("import moetriage; print(hasattr(moetriage, 'Lama'), 'Llama' in dir(moetriage))") == "False True"
