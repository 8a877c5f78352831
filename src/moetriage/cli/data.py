"""``moetriage data``: texts to train on, made ready.

In: where the texts come from. Out: a folder of token shards, and what it holds on standard output. How it is made is the business of
``moetriage.train``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moetriage.cli import terminal
from moetriage.cli.extras import need_train_extra
from moetriage.cli.options import Json
from moetriage.errors import UsageError
from moetriage.train.model_config import DEFAULT_VOCAB

if TYPE_CHECKING:
    from moetriage.train.corpus import Corpus

app = typer.Typer(help="Make texts ready to train on.", no_args_is_help=True)

_MAX_MB = 64


@app.command("build")
def build(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write.")],
    text: Annotated[
        list[str] | None,
        typer.Option(
            "--text",
            metavar="FILE [FILE]...",
            help="UTF-8 files, or folders of .py, .rst, .txt and .md files, 100 kB in all at least (default: Python's library).",
        ),
    ] = None,
    more: Annotated[list[str] | None, typer.Argument(metavar="FILE", help="More of --text.", show_default=False)] = None,
    hf_dataset: Annotated[
        str | None, typer.Option("--hf-dataset", metavar="NAME[:CONFIG]", help="Hugging Face dataset to read the texts from (network).")
    ] = None,
    max_mb: Annotated[
        int | None, typer.Option(metavar="N", help=f"Text to take of --hf-dataset, in 10^6 bytes (default: {_MAX_MB}).")
    ] = None,
    vocab_size: Annotated[int, typer.Option(metavar="N", help="Tokens of the vocabulary, 257 to 65536.")] = DEFAULT_VOCAB,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing folder of data.")] = False,
    json_output: Json = False,
) -> None:
    """Turn texts into token shards with a vocabulary of their own, about 2 % of the files held out.

    Without --text or --hf-dataset the texts are the running Python's standard library: sources, tests where installed, and documentation.
    """
    need_train_extra("data build", "tokenizers")
    from moetriage.train.data_build import build as build_data

    with terminal.spinner("reading texts") as update:
        corpus = _corpus(_texts(text, more), hf_dataset, max_mb)
        manifest = build_data(corpus, out, vocab_size=vocab_size, force=force, progress=update)
    for line in _warnings(manifest):
        terminal.note(line)
    if json_output:
        terminal.print_json({"folder": str(out), **_summary(manifest)})
        return
    terminal.print_facts(_facts(manifest))
    terminal.note(f"{out} is ready: moetriage train {out} RUN")


def _texts(text: list[str] | None, more: list[str] | None) -> list[str] | None:
    if more and not text:
        raise UsageError(f"{more[0]}: a second folder to write? Texts follow --text")
    return None if text is None else text + (more or [])


def _corpus(text: list[str] | None, dataset: str | None, max_mb: int | None) -> Corpus:
    from moetriage.train.corpus import files_corpus, stdlib_corpus

    if text and dataset:
        raise UsageError("--text and --hf-dataset both say where the texts come from: give one of them")
    if "" in (text or ()):
        raise UsageError('--text "": names no file or folder; "." is the current folder')
    if max_mb is not None and dataset is None:
        raise UsageError(f"--max-mb {max_mb} does nothing without --hf-dataset: give both, or neither")
    if dataset is not None:
        from moetriage.train.hub_corpus import dataset_corpus

        return dataset_corpus(dataset, max_mb=_MAX_MB if max_mb is None else max_mb)
    return files_corpus([Path(name) for name in text]) if text else stdlib_corpus()


def _warnings(manifest: dict[str, Any]) -> list[str]:
    from moetriage.train.corpus import left_out_line

    corpus, lines = manifest["corpus"], []
    if "left_out" in corpus:
        lines.append(left_out_line(corpus["left_out"]))
    if "heldout_near_copies" in corpus:
        names = ", ".join(corpus["heldout_near_copies"])
        lines.append(f"every file is a near copy of others: {names} is held out all the same, which measures memory; give other texts, too")
    return lines


def _summary(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest without its lists of files."""
    parts = {name: {key: value for key, value in manifest[name].items() if key != "files"} for name in ("train", "heldout")}
    counts = {f"{name}_files": len(manifest[name]["files"]) for name in parts}
    return {key: value for key, value in manifest.items() if key not in parts} | parts | counts


def _facts(manifest: dict[str, Any]) -> list[tuple[str, str]]:
    def part(name: str) -> str:
        found = manifest[name]
        each = found["bytes"] / max(found["tokens"], 1)
        return f"{len(found['files'])} files, {found['bytes'] / 1e6:.2f} MB, {found['tokens']} tokens of {each:.2f} bytes"

    corpus = manifest["corpus"]
    tests = corpus.get("bytes_in_tests")
    facts = [("texts", str(corpus["source"])), ("to train on", part("train")), ("held out", part("heldout"))]
    if tests is not None:
        found = f"{tests / 1e6:.1f} MB of it" if tests else "not installed with this Python: the corpus is smaller by about half"
        facts.append(("tests", found))
    if "licence" in corpus:
        facts.append(("licence", str(corpus["licence"])))
    return [*facts, ("vocabulary", f"{manifest['vocab_size']} tokens")]
