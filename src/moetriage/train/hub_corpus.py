"""Texts of a Hugging Face dataset, as far as the network allows: ``owner/name[:config]`` in, a ``Corpus`` out.

Rows are streamed and counted up to a size, so that a large dataset costs no more disk than what is taken of it. The client is imported only
here; it reads HF_ENDPOINT, HF_HOME and HF_TOKEN itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from moetriage.errors import UsageError
from moetriage.train.corpus import Corpus, Document, without_duplicates

#: Columns that hold the text, in the order of preference.
COLUMNS = ("text", "content", "code")
MB = 1_000_000


def dataset_corpus(spec: str, *, max_mb: int) -> Corpus:
    """Return the first ``max_mb`` megabytes (10^6 bytes) of text of a dataset's training split; a row is a file.

    Raises UsageError if the client is missing, the dataset cannot be had, or it has no column of text.
    """
    if max_mb < 1:
        raise UsageError(f"--max-mb {max_mb}: must be at least 1")
    name, _, config = spec.partition(":")
    client = _client(spec)
    try:
        rows = client.load_dataset(name, config or None, split="train", streaming=True)
        documents, duplicates = without_duplicates(_documents(spec, rows, max_mb * MB))
    except UsageError:
        raise
    except Exception as error:  # the client passes on what its HTTP libraries raise, and those share no base class
        reason = str(error).strip().split("\n", 1)[0].rstrip(".") or type(error).__name__
        raise UsageError(f"--hf-dataset {spec}: cannot be had: {reason}; without it, --text takes files") from error
    facts: dict[str, object] = {
        "source": f"Hugging Face dataset {spec}, split train, at most {max_mb} MB",
        "licence": "that of the dataset: see its page",
        "duplicates_left_out": duplicates,
    }
    return Corpus(documents=documents, facts=facts)


def _client(spec: str) -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise UsageError(f"--hf-dataset {spec}: needs the datasets package: pip install datasets, or give files with --text") from error


def _documents(spec: str, rows: Any, limit: int) -> Iterator[Document]:
    taken = 0
    for number, row in enumerate(rows):
        column = next((name for name in COLUMNS if isinstance(row.get(name), str)), None)
        if column is None:
            raise UsageError(f"--hf-dataset {spec}: has no column {', '.join(COLUMNS[:-1])} or {COLUMNS[-1]} of text, but {', '.join(row)}")
        if not row[column]:
            continue  # held out alone it would be a text without bytes
        document = Document(f"{spec}/{number:08d}", row[column])
        taken += document.n_bytes
        if taken > limit:
            return
        yield document
