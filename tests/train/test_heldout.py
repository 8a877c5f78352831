"""What is held out: a choice by name that stays, is never trained on, and leaves most of the text to train on."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest

from moetriage.errors import UsageError
from moetriage.train.corpus import Document
from moetriage.train.heldout import split


def distinct_lines(number: int) -> str:
    return "".join(f"a line of file {number} that no other file has: {number * 1000 + line}\n" for line in range(20))


def some_documents(count: int) -> list[Document]:
    return [Document(f"folder/file{number}.py", distinct_lines(number)) for number in range(count)]


def copy_of(document: Document, name: str) -> Document:
    return Document(name, document.text + "one line more than the file it was copied from\n")


def names(documents: Iterable[Document]) -> set[str]:
    return {document.name for document in documents}


def test_every_file_is_on_one_side_and_the_choice_stays_when_files_come_and_go() -> None:
    documents = some_documents(400)
    parts = split(documents, fraction=0.1)
    trained, held = ({document.name for document in side} for side in (parts.train, parts.heldout))
    assert trained | held == {document.name for document in documents}
    assert not trained & held
    assert 20 < len(held) < 65
    fewer = split(documents[::2], fraction=0.1)
    assert {document.name for document in fewer.heldout} == held & {document.name for document in documents[::2]}


def test_a_heldout_file_that_repeats_a_training_file_is_trained_on_instead() -> None:
    documents = some_documents(400)
    victim = split(documents, fraction=0.1).heldout[0].name
    source = split(documents, fraction=0.1).train[0].text
    changed = [Document(victim, source + distinct_lines(999)[:200]) if document.name == victim else document for document in documents]
    parts = split(changed, fraction=0.1)
    assert parts.moved == [victim]
    assert victim in {document.name for document in parts.train}
    assert victim not in {document.name for document in parts.heldout}


def test_of_two_files_one_is_held_out() -> None:
    parts = split(some_documents(2))
    assert len(parts.train) == len(parts.heldout) == 1


@pytest.mark.parametrize("text", ["".join(map(distinct_lines, range(9))), "one line without an end " * 90])
def test_of_one_file_the_end_is_held_out(text: str) -> None:
    parts = split([Document("input.txt", text)])
    (train,), (heldout,) = parts.train, parts.heldout
    assert train.text + heldout.text == text
    assert 0.04 < len(heldout.text) / len(text) < 0.1
    assert "\n" not in text or train.text.endswith("\n")
    assert (train.name, heldout.name) == (f"input.txt[:{len(train.text)}]", f"input.txt[{len(train.text)}:]")
    assert parts.copies == []


def test_of_one_file_that_repeats_itself_the_end_is_a_near_copy() -> None:
    parts = split([Document("input.txt", distinct_lines(1) * 40)])
    assert parts.copies == [parts.heldout[0].name]


@pytest.mark.parametrize("documents", [[], [Document("a.txt", "x")]])
def test_what_cannot_be_divided_is_refused(documents: list[Document]) -> None:
    with pytest.raises(UsageError, match="characters: too small to train on a part and hold out another"):
        split(documents)


def first_choice(documents: list[Document]) -> Document:
    """The file that is held out where none has a copy."""
    (document,) = split(documents).heldout
    return document


def test_where_the_chosen_file_has_a_copy_the_next_clean_one_is_held_out() -> None:
    documents = some_documents(12)
    chosen = first_choice(documents)
    second = first_choice([document for document in documents if document != chosen])
    parts = split([*documents, copy_of(chosen, "copy.py")])
    assert parts.moved
    assert set(parts.moved) <= {chosen.name, "copy.py"}
    assert names(parts.heldout) == {second.name}
    assert parts.copies == []


def test_what_moves_takes_its_own_near_copies_along() -> None:
    documents = some_documents(200)
    before = split(documents, fraction=0.1)
    first, second = sorted(names(before.heldout))[:2]
    trained, other, third = (distinct_lines(number).splitlines() for number in (1001, 1002, 1003))
    texts = {
        before.train[0].name: trained,
        first: trained[:12] + other[:8],  # mostly in a training file
        second: trained[:8] + other[:8] + third[:4],  # mostly in the first, not in that file
    }
    changed = [Document(document.name, "\n".join(texts.get(document.name, [document.text]))) for document in documents]
    assert split(changed, fraction=0.1).moved == [first, second]


def test_of_a_corpus_of_copies_one_is_held_out_and_named() -> None:
    original = some_documents(1)[0]
    parts = split([copy_of(original, f"{number}.py") for number in range(20)])
    assert len(parts.heldout) == 1
    assert parts.copies == [parts.heldout[0].name]
    assert len(parts.moved) == 19


def test_a_chosen_file_of_hardly_any_bytes_gets_company() -> None:
    documents = some_documents(60)
    chosen = split(documents).heldout
    tiny = [Document(document.name, "x = 1\n") if document in chosen else document for document in documents]
    parts = split(tiny)
    assert names(chosen) < names(parts.heldout)
    assert sum(document.n_bytes for document in parts.heldout) >= 0.005 * sum(document.n_bytes for document in documents)


@pytest.mark.parametrize("pair", list(itertools.permutations(["a.txt", "b.txt", "c.txt", "d.txt"], 2)))
def test_most_of_the_text_is_trained_on_whatever_the_names(pair: tuple[str, str]) -> None:
    large, small = pair
    parts = split([Document(large, "a long line of text, again and again\n" * 1000), Document(small, "little\n" * 10)])
    assert names(parts.train) == {large}


def test_most_of_the_text_is_trained_on_where_many_names_are_chosen() -> None:
    documents = some_documents(20)
    parts = split(documents, fraction=0.99)
    assert 5 < len(parts.heldout) <= 10
