"""``moetriage export``: a trained checkpoint as a GGUF file that the engine streams, as a Hugging Face folder, or both.

In: a checkpoint and where to write. Out: the files, and what was written on standard output. How is the business of ``moetriage.train``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moetriage.cli import terminal
from moetriage.cli.extras import need_train_extra
from moetriage.cli.options import Json
from moetriage.errors import UsageError


def export(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CKPT", help="Folder that `moetriage train` wrote (its newest checkpoint), or one of its checkpoints.")
    ],
    out: Annotated[Path | None, typer.Argument(metavar="[OUT.gguf]", help="GGUF file to write.")] = None,
    ggml_type: Annotated[
        str | None, typer.Option("--type", metavar="f32|f16|q8_0|q4_0", help="Type of the matrices in OUT.gguf (default: q8_0).")
    ] = None,
    hf: Annotated[
        Path | None, typer.Option("--hf", metavar="DIR", help="Folder to write config.json, model.safetensors and the tokenizer to.")
    ] = None,
    name: Annotated[str | None, typer.Option(metavar="TEXT", help="Name of the model in OUT.gguf (default: that of the file).")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what exists already.")] = False,
    json_output: Json = False,
) -> None:
    """Write a trained model for llama.cpp and `moetriage run` (GGUF), or for Hugging Face transformers (--hf)."""
    if out is None and hf is None:
        raise UsageError("nothing to write: give OUT.gguf, --hf DIR, or both")
    for flag, value in (("--type", ggml_type), ("--name", name)):
        if out is None and value is not None:
            raise UsageError(f"{flag} {value} is about a GGUF file and does nothing with --hf alone: name OUT.gguf, too")
    need_train_extra("export", "torch", "safetensors", "tokenizers")
    from moetriage.gguf.weights_file import check_target
    from moetriage.train.export import DEFAULT_TYPE, open_trained, write_gguf
    from moetriage.train.hf_export import check_folder, write_hf

    # Before minutes are spent on the one, what would refuse the other is found.
    if out is not None:
        check_target(out, force=force)
    if hf is not None:
        check_folder(hf, force=force)
    if out is not None and hf is not None:
        _check_apart(out, hf)
    with terminal.spinner(f"reading {checkpoint}") as update:
        trained = open_trained(checkpoint)
        written: dict[str, int] = {}
        if out is not None:
            update(f"writing {out.name}")
            written[str(out)] = write_gguf(trained, out, ggml_type=ggml_type or DEFAULT_TYPE, name=name or out.stem, force=force)
        if hf is not None:
            update(f"writing {hf.name}")
            written[str(hf)] = write_hf(trained, hf, force=force)
    if json_output:
        terminal.print_json({"written": [{"path": path, "bytes": nbytes} for path, nbytes in written.items()]})
        return
    for path, nbytes in written.items():
        print(path)
        terminal.note(f"{terminal.size(nbytes)} written to {path}")
    if out is not None:
        terminal.note(f"try it: moetriage run {out} -p 'def '")
    if hf is not None:
        terminal.note(f"try it: transformers.AutoModelForCausalLM.from_pretrained({str(hf)!r})")


def _check_apart(out: Path, hf: Path) -> None:
    """Raise UsageError if the GGUF file would be what the folder replaces, or lie in it."""
    file, folder = out.resolve(), hf.resolve()
    if folder in (file, *file.parents):
        raise UsageError(f"{out}: lies where --hf {hf} would write; name another place for one of them")
