"""Holds what the docs promise: their Python runs as pasted, and the commands and flags that they name exist.

The Python blocks of a page run in order, in one namespace. A block that opens ``model.gguf`` gets a tiny synthetic model of that name, and
a context that such a model fills in a moment.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from moetriage.cli.main import app

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MODEL = "model.gguf"
#: A model of random weights never says that it has finished: it writes until its context is full.
CONTEXT, SHORT_CONTEXT = "n_ctx=4096", "n_ctx=64"


def blocks(page: Path, *languages: str) -> Iterator[tuple[int, str]]:
    """Yield (line of its first line, counted from 0; text) of each block in one of ``languages``; "" is a block that names none."""
    text = page.read_text()
    for block in re.finditer(r"^```([^`\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if block[1] in languages:
            yield text.count("\n", 0, block.start(2)), block[2]


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each line that calls ``moetriage``, without it and without comments."""
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith("moetriage "):
            yield shlex.split(line, comments=True)[1:]


def fault(words: list[str]) -> str | None:
    """Return what is wrong with a command, given as its words after ``moetriage``: a command or a flag that does not exist."""
    command: Any = typer.main.get_command(app)
    words = list(words)
    while hasattr(command, "commands"):
        name = words.pop(0) if words else "nothing"
        if name not in command.commands:
            return f"no command {name}"
        command = command.commands[name]
    known = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
    flags = [word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)]
    return next((f"{command.name} has no {flag}" for flag in flags if flag not in known), None)


def skip_unless_importable(tree: ast.AST) -> None:
    """Skip the test if a block imports torch or transformers, which are extras, and they are missing. Torch gets a seed and one thread."""
    names = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    if any(re.match(r"(torch|transformers|moetriage\.train)\b", name) for name in names):
        torch = pytest.importorskip("torch", reason="the extra train is not installed")
        torch.set_num_threads(1)
        torch.manual_seed(0)
    if any(name.partition(".")[0] == "transformers" for name in names):
        pytest.importorskip("transformers", reason="the extra train-test is not installed")


@pytest.mark.filterwarnings("ignore:--drop-cold-experts .* with top-k")  # the tiny model uses fewer experts than the README's reader will
@pytest.mark.parametrize("page", [page for page in PAGES if any(blocks(page, "python"))], ids=lambda page: page.stem)
def test_python_blocks_run_as_pasted(page: Path, tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for line, code in blocks(page, "python"):
        if MODEL in code:
            Path(MODEL).symlink_to(tiny("tiny-qwen3moe"))
            assert CONTEXT in code
            code = code.replace(CONTEXT, SHORT_CONTEXT)
        tree = ast.parse(code)
        skip_unless_importable(tree)
        ast.increment_lineno(tree, line)  # so that a traceback shows the page's own lines
        exec(compile(tree, page, "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_and_flags_exist(page: Path) -> None:
    found = [(words, fault(words)) for _, text in blocks(page, "sh", "") for words in commands(text)]
    assert [(words, wrong) for words, wrong in found if wrong] == []


def test_the_readme_has_blocks_of_both_kinds() -> None:
    readme = PAGES[0]
    assert len(list(blocks(readme, "python"))) == 2
    assert sum(len(list(commands(text))) for _, text in blocks(readme, "sh")) >= 8


@pytest.mark.parametrize(
    ("command", "wrong"),
    [
        ("run model.gguf -p Hello --cache-mb auto", None),
        ("data build DATA", None),
        ("walk model.gguf", "no command walk"),
        ("data", "no command nothing"),
        ("data burn DATA", "no command burn"),
        ("run model.gguf --cash-mb=4", "run has no --cash-mb"),
    ],
)
def test_a_wrong_command_is_found(command: str, wrong: str | None) -> None:
    assert fault(shlex.split(command)) == wrong
