"""Token shards, the folder that holds them, and batches that seed and step determine."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from moetriage.errors import UsageError
from moetriage.train import shards
from moetriage.train.corpus import Corpus, Document
from moetriage.train.data import Batches, Data, open_data
from moetriage.train.data_build import build
from moetriage.train.data_folder import MANIFEST
from moetriage.train.shards import TokenStream, write_shards
from moetriage.train.tokenizer import has_endless_word, load_tokenizer


def small_corpus(files: int = 60) -> Corpus:
    """120 kB of text whose files differ."""
    generator = np.random.Generator(np.random.PCG64(7))
    words = ["".join(chr(97 + letter) for letter in generator.integers(0, 26, 2 + number % 5)) for number in range(400)]
    texts = [" ".join(words[word] for word in generator.integers(0, 400, 600)) + "\n" for _ in range(files)]
    return Corpus(documents=[Document(f"{number:03d}.txt", text) for number, text in enumerate(texts)], facts={"source": "a test"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data") / "d"
    build(small_corpus(), out, vocab_size=400)
    return out


@pytest.fixture
def data(folder: Path) -> Data:
    return open_data(folder)


def test_ids_of_several_shards_read_as_one_row(tmp_path: Path) -> None:
    ids = np.arange(1000, dtype=np.uint16)
    stream = TokenStream(tmp_path, write_shards(tmp_path, "x", ids, shard_tokens=300))
    assert len(list(tmp_path.iterdir())) == 4
    assert len(stream) == 1000
    for start, count in [(0, 1000), (0, 1), (299, 2), (250, 700), (300, 300), (999, 1), (899, 1), (500, 0)]:
        assert stream.read(start, count).tolist() == ids[start : start + count].tolist()


def test_the_manifest_names_every_file_and_digest(folder: Path, data: Data) -> None:
    corpus = {document.name: document for document in small_corpus().documents}
    listed = [entry for part in ("train", "heldout") for entry in data.manifest[part]["files"]]
    assert {entry["name"] for entry in listed} == set(corpus)
    for entry in listed:
        assert entry["sha256"] == hashlib.sha256(corpus[entry["name"]].text.encode()).hexdigest()
        assert entry["bytes"] == corpus[entry["name"]].n_bytes
    for shard in data.manifest["train"]["shards"]:
        assert shard["sha256"] == hashlib.sha256((folder / shard["file"]).read_bytes()).hexdigest()
    data.verify()


def test_shards_and_text_hold_their_files_and_no_others(data: Data) -> None:
    corpus = {document.name: document.text for document in small_corpus().documents}
    tokenizer = load_tokenizer(data.tokenizer_path)
    for part, stream in (("train", data.train), ("heldout", data.heldout)):
        texts = [corpus[entry["name"]] for entry in data.manifest[part]["files"]]
        assert tokenizer.decode(stream.read(0, len(stream)).tolist()) == "".join(text + "<|endoftext|>" for text in texts)
        assert len(stream) == data.manifest[part]["tokens"]
    assert data.heldout_text.decode() == "".join(corpus[entry["name"]] for entry in data.manifest["heldout"]["files"])


def test_the_same_corpus_gives_the_same_bytes(folder: Path, data: Data, tmp_path: Path) -> None:
    build(small_corpus(), tmp_path / "again", vocab_size=400)
    assert {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()} == {
        path.name: path.read_bytes() for path in folder.iterdir()
    }
    assert open_data(tmp_path / "again").digest == data.digest
    assert build(small_corpus(59), tmp_path / "other", vocab_size=400)
    assert open_data(tmp_path / "other").digest != data.digest


def test_targets_are_the_tokens_that_follow(data: Data) -> None:
    tokens, targets = Batches(stream=data.train, batch=3, context=16, seed=1).at(5)
    assert tokens.shape == targets.shape == (3, 16)
    assert tokens.dtype == np.int64
    assert np.array_equal(tokens[:, 1:], targets[:, :-1])


def test_a_batch_depends_on_seed_and_step_alone(data: Data) -> None:
    def batches(seed: int) -> Batches:
        return Batches(stream=data.train, batch=4, context=32, seed=seed)

    in_order = [batches(3).at(step)[0] for step in range(40)]
    again = batches(3)
    for step in (39, 7, 0, 21):
        assert np.array_equal(again.at(step)[0], in_order[step])
    assert not np.array_equal(batches(4).at(0)[0], in_order[0])


def test_an_epoch_shows_every_sequence_once_and_the_next_cuts_elsewhere(tmp_path: Path) -> None:
    stream = TokenStream(tmp_path, write_shards(tmp_path, "x", np.arange(1000, dtype=np.uint16)))
    batches = Batches(stream=stream, batch=3, context=10, seed=2)
    assert batches.per_epoch == 99
    starts = [batches.at(step)[0][:, 0] for step in range(66)]
    first, second = np.sort(np.concatenate(starts[:33])), np.sort(np.concatenate(starts[33:]))
    for epoch in (first, second):
        assert np.array_equal(np.diff(epoch), np.full(98, 10))
    assert first[0] != second[0]
    assert not np.array_equal(np.concatenate(starts[:33]), first)


def test_a_stream_shorter_than_a_batch_is_refused(tmp_path: Path) -> None:
    stream = TokenStream(tmp_path, write_shards(tmp_path, "x", np.arange(49, dtype=np.uint16)))
    Batches(stream=stream, batch=3, context=12, seed=0).validate()
    with pytest.raises(UsageError, match="corpus too small: 49 training tokens do not make a batch of 4 sequences of 12"):
        Batches(stream=stream, batch=4, context=12, seed=0).validate()
    with pytest.raises(UsageError, match="--batch 0"):
        Batches(stream=stream, batch=0, context=12, seed=0).validate()


def test_a_corpus_too_small_names_what_is_held_out(tmp_path: Path) -> None:
    documents = [Document("a.txt", "a line of words to train on\n" * 2000), Document("b.txt", "another line\n" * 10)]
    with pytest.raises(
        UsageError, match=r"56000 bytes to train on, at least 100000 are needed \(held out: b\.txt with 130\); give more text"
    ):
        build(Corpus(documents=documents), tmp_path / "d")


def test_a_corpus_too_small_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"corpus too small: \d+ bytes to train on, at least 100000"):
        build(small_corpus(3), tmp_path / "d")
    with pytest.raises(UsageError, match="corpus too small: its texts give a vocabulary of"):
        build(small_corpus(), tmp_path / "d", vocab_size=60_000)
    assert list(tmp_path.iterdir()) == []


def test_only_data_is_replaced_and_only_if_asked(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exists already"):
        build(small_corpus(), folder, vocab_size=400)
    with pytest.raises(UsageError, match="nothing that moetriage data build wrote"):
        build(small_corpus(), tmp_path, vocab_size=400, force=True)
    out = tmp_path / "d"
    build(small_corpus(), out, vocab_size=400)
    build(small_corpus(), out, vocab_size=300, force=True)
    assert open_data(out).vocab_size == 300


def tree(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["mywork.js", "RUN/config.json", ".hidden", "train-00001.bin"])
def test_a_folder_with_something_of_others_in_it_is_not_replaced(name: str, tmp_path: Path) -> None:
    out = tmp_path / "d"
    build(small_corpus(), out, vocab_size=300)
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).write_text("x")
    before = tree(tmp_path)
    with pytest.raises(UsageError) as caught:
        build(small_corpus(), out, vocab_size=300, force=True)
    assert str(caught.value).startswith(f"{out / Path(name).parts[0]}: is nothing that moetriage data build wrote, so --force does not")
    assert tree(tmp_path) == before


def test_a_file_that_is_a_link_or_a_folder_is_not_ours(tmp_path: Path) -> None:
    out = tmp_path / "d"
    build(small_corpus(), out, vocab_size=300)
    (out / "heldout.txt").rename(tmp_path / "moved.txt")
    for make in (lambda path: path.symlink_to("../moved.txt"), lambda path: path.mkdir()):
        make(out / "heldout.txt")
        with pytest.raises(UsageError, match=r"heldout\.txt: is nothing that moetriage data build wrote"):
            build(small_corpus(), out, vocab_size=300, force=True)
        if (out / "heldout.txt").is_symlink():
            (out / "heldout.txt").unlink()


@pytest.mark.parametrize("manifest", ['{"manifest_version": 3}', '{"format": 1}', "{", "", '{"format": 1, "train": []}'])
def test_a_manifest_of_another_kind_makes_no_data_folder(manifest: str, tmp_path: Path) -> None:
    out = tmp_path / "ext"
    out.mkdir()
    (out / MANIFEST).write_text(manifest)
    (out / "a.js").write_text("x")
    with pytest.raises(UsageError, match=r"ext/manifest\.json: is nothing that moetriage data build wrote"):
        build(small_corpus(), out, vocab_size=300, force=True)
    assert len(tree(out)) == 2


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("target", ["d", "absent"])
def test_a_link_is_refused_with_where_it_leads(target: str, force: bool, tmp_path: Path) -> None:
    build(small_corpus(), tmp_path / "d", vocab_size=300)
    (tmp_path / "link").symlink_to(target)
    before = tree(tmp_path)
    with pytest.raises(UsageError, match=f"link: is a link; name the folder it leads to, {target}, or another"):
        build(small_corpus(), tmp_path / "link", vocab_size=300, force=force)
    assert tree(tmp_path) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "link"]


def test_a_place_that_cannot_be_looked_at_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: File name too long"):
        build(small_corpus(), tmp_path / ("x" * 300))


def test_the_manifest_says_that_all_files_are_copies(tmp_path: Path) -> None:
    text = small_corpus(120).documents
    long = "".join(document.text.replace(" ", "\n") + document.text for document in text)
    documents = [Document(f"{number}.txt", f"{long}a line of copy number {number}\n") for number in range(3)]
    manifest = build(Corpus(documents=documents), tmp_path / "d", vocab_size=300)
    assert manifest["corpus"]["heldout_near_copies"] == [manifest["heldout"]["files"][0]["name"]]


def test_a_disk_that_fills_up_leaves_what_was_there(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "d"
    build(small_corpus(), out, vocab_size=400)
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def full(_number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shards.os, "fsync", full)
    with pytest.raises(UsageError, match="cannot be written: No space left on device"):
        build(small_corpus(), out, vocab_size=300, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["d"]
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_word_without_end_is_refused_in_time(tmp_path: Path) -> None:
    corpus = small_corpus()
    endless = Document("endless.txt", "x" * 300_000)
    documents = [*corpus.documents, endless, Document("again.txt", "y" * 300_000)]
    with pytest.raises(UsageError, match=r"(endless|again)\.txt: holds a word of more than 20000 characters"):
        build(Corpus(documents=documents), tmp_path / "d", vocab_size=300)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "endless"),
    [("a" * 20_000, False), ("a" * 20_001, True), (" " * 20_002, True), ("a1" * 20_000, False), ("x = 1;" * 20_000, False)],
    ids=["just", "letters", "blanks", "mixed", "one line"],
)
def test_a_long_line_is_no_endless_word(text: str, endless: bool) -> None:
    assert has_endless_word(text) is endless
