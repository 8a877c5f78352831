"""Every bad input of a run: exit code 2, nothing on standard output, one line on standard error that says what, and what would do."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.support import Command

from moetriage.cli.main import invoke
from moetriage.stream import memory_plan, session
from moetriage.stream.memory_limit import MemoryLimit
from moetriage.types import MIB

EXCERPT = Path(__file__).parents[2] / "src" / "moetriage" / "data" / "qwen-excerpt.route.parquet"
PROMPT = ("-p", "Hello there", "-n", "4")


def assert_refused(command: Command, arguments: tuple[object, ...], *parts: str) -> None:
    result = command(*arguments)
    assert result.code == 2, result.err
    assert result.out == ""
    assert len(result.errors) == 1, result.err
    for part in ("moetriage: ", *parts):
        assert part in result.err


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ("--drop-cold-experts 0", ("--drop-cold-experts 0", "above 0 and at most 1")),
        ("--drop-cold-experts 1.01", ("--drop-cold-experts 1.01", "above 0 and at most 1")),
        ("--drop-cold-experts nan", ("--drop-cold-experts nan", "above 0 and at most 1")),
        ("--drop-cold-experts -inf", ("--drop-cold-experts -inf", "above 0 and at most 1")),
        ("--drop-cold-experts 0.5 --cache-mb 0", ("--drop-cold-experts", "--cache-mb 0", "give the cache memory")),
        ("--drop-cold-experts 0.5 --mmap", ("--drop-cold-experts", "--mmap", "leave one of them out")),
        ("--drop-in-prefill", ("--drop-in-prefill", "--drop-cold-experts F")),
        ("--drop-no-renorm", ("--drop-no-renorm", "--drop-cold-experts F")),
        ("--drop-raw-weight", ("--drop-raw-weight", "--drop-cold-experts F")),
        ("--prefetch 2 --cache-mb 0", ("--prefetch 2", "--cache-mb 0")),
        ("--prefetch 2 --mmap", ("--prefetch", "--mmap")),
        ("--prefetch -1", ("--prefetch -1", "0 (off)")),
        ("--n-expert-used 17", ("--n-expert-used 17", "16 experts")),
        ("--n-expert-used 0", ("--n-expert-used 0", "at least 1")),
        ("--cache-mb 1", ("--cache-mb 1", "1327104 bytes", "at least 2 MiB")),
        ("--cache-mb -1", ("--cache-mb -1", "auto, 0 (off) or a number of MiB")),
        ("--cache-mb 3.5", ("--cache-mb 3.5", "auto, 0 (off) or a number of MiB")),
        ("--cache-mb many", ("--cache-mb many", "auto, 0 (off) or a number of MiB")),
        ("--cache-ceil-mb 0", ("--cache-ceil-mb 0", "at least 1 MiB")),
        ("--cache-ceil-mb 4 --cache-mb 3", ("--cache-ceil-mb 4", "--cache-mb 3")),
        ("--cache-mb " + 5000 * "9", ("--cache-mb 999", "number of MiB")),
        ("--io-threads 0", ("--io-threads 0", "between 1 and 32")),
        ("--io-threads 33", ("--io-threads 33", "between 1 and 32")),
        ("--io-threads 8 --mmap", ("--io-threads 8", "does nothing with --mmap")),
        ("--cache-mb 3 --mmap", ("--cache-mb 3", "does nothing with --mmap")),
        ("--dense-weights disk", ("--dense-weights", "disk", "anon")),
        ("--replay-drops a.csv --drop-cold-experts 0.5", ("--replay-drops", "--drop-cold-experts")),
        ("--force-routing a.csv --n-expert-used 2", ("--force-routing", "--n-expert-used")),
        (f"--force-routing {EXCERPT}", (str(EXCERPT), "128 experts per layer", "which has 16")),
        (f"--replay-drops {EXCERPT}", (str(EXCERPT), "128 experts per layer", "the model 16")),
        ("--force-routing none.csv", ("none.csv", "No such file")),
        ("--csv none/metrics.csv", ("none/metrics.csv", "cannot be written: No such file or directory")),
        ("--csv .", (".", "cannot be written: Is a directory")),
        ("--csv /dev/full", ("/dev/full", "No space left on device")),
        ("--route-trace none/t.csv", ("none/t.csv", "cannot be written: No such file or directory")),
        ("--route-trace t.txt", ("t.txt", ".csv or .parquet")),
        ("--route-trace t.csv --csv t.csv", ("t.csv", "is the file of --csv")),
        ("--temp nan", ("--temp nan", "at least 0")),
        ("--temp -0.5", ("--temp -0.5", "at least 0")),
        ("--top-p 0", ("--top-p 0", "above 0 and at most 1")),
        ("--min-p 2", ("--min-p 2", "between 0 and 1")),
        ("--top-k -1", ("--top-k -1", "at least 1, or 0")),
        ("--repeat-penalty 0", ("--repeat-penalty 0", "above 0")),
        ("--seed 4294967295", ("--seed 4294967295", "between 0 and 4294967294")),
        ("--stop=", ("--stop", "at least one character")),
        ("-n 0", ("-n 0", "at least 1")),
        ("-c 0", ("-c 0", "at least 1")),
        ("-c 2000000000", ("-c 2000000000", "KV cache takes 3906250 MiB", "MiB are available")),
        ("-t 0", ("-t 0", "between 1 and 512")),
        ("-f prompt.txt", ("-p", "-f")),
        ("--no-such-option", ("--no-such-option",)),
    ],
)
def test_a_setting_that_cannot_work_is_refused_in_one_line(
    flags: str, parts: tuple[str, ...], command: Command, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(command, ("run", model, *PROMPT, *flags.split()), *parts)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (None, ("cannot be opened: No such file or directory",)),
        (b"", ("is empty",)),
        (b"not a model at all", ("byte 0", "is not a GGUF file")),
        ("cut", ("byte ", "truncated")),
        ("directory", ("is a directory",)),
    ],
)
def test_a_file_that_is_no_model_is_refused_in_one_line(
    content: bytes | str | None, parts: tuple[str, ...], command: Command, model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    if content == "directory":
        path.mkdir()
    elif content is not None:
        path.write_bytes(model.read_bytes()[:3_000_000] if isinstance(content, str) else content)
    for arguments in (("run", path, *PROMPT), ("chat", path), ("inspect", path)):
        assert_refused(command, arguments, str(path), *parts)


def test_a_missing_shard_is_named(command: Command, tiny: Callable[..., Path], tmp_path: Path) -> None:
    first = tiny("tiny-qwen3moe", split=2)
    shutil.copy(first, tmp_path)
    missing = str(tmp_path / first.name.replace("00001-of", "00002-of"))
    assert_refused(command, ("run", tmp_path / first.name, *PROMPT), missing)


def test_a_prompt_longer_than_the_context_is_refused_with_both_sizes(command: Command, model: Path) -> None:
    assert_refused(command, ("run", model, "-p", "x" * 1000, "-c", "256"), "1000 tokens", "the context 256", "(-c)")


@pytest.mark.parametrize("arguments", [(), ("-p", ""), ("-p", "\udcff")])
def test_a_run_needs_a_prompt_that_is_text(arguments: tuple[str, ...], command: Command, model: Path) -> None:
    assert_refused(command, ("run", model, *arguments), "prompt")


@pytest.mark.parametrize("name", ["none.txt", "latin1.txt"])
def test_a_prompt_file_that_cannot_be_read_is_named(name: str, command: Command, model: Path, tmp_path: Path) -> None:
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9")
    assert_refused(command, ("run", model, "-f", tmp_path / name), str(tmp_path / name))


def test_an_output_never_replaces_what_the_run_reads(command: Command, model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "m.gguf"
    shutil.copy(model, copy)
    link = tmp_path / "link.csv"
    link.symlink_to(copy)
    for path in (copy, link):
        assert_refused(command, ("run", copy, *PROMPT, "--csv", path), f"--csv {path}", "a file this run reads")
    assert copy.read_bytes() == model.read_bytes()


@pytest.fixture
def cgroup(monkeypatch: pytest.MonkeyPatch) -> str:
    """A memory limit of which 4 MiB are left beside what this model needs."""
    source = "/sys/fs/cgroup/memory.max"
    limit = MemoryLimit(30 * MIB, source, 40 * MIB)
    monkeypatch.setattr(session, "memory_limit", lambda: limit)
    monkeypatch.setattr(memory_plan, "memory_limit", lambda: limit)
    return source


def test_a_budget_above_the_cgroup_limit_is_refused_even_if_forced(command: Command, model: Path, cgroup: str) -> None:
    for extra in ((), ("--force-cache",)):
        assert_refused(command, ("run", model, *PROMPT, "-c", "4096", "--cache-mb", "5", *extra), "--cache-mb 5", "40 MiB", cgroup)


def test_a_context_above_the_cgroup_limit_is_refused(command: Command, model: Path, cgroup: str) -> None:
    assert_refused(command, ("run", model, *PROMPT, "-c", "20000"), "-c 20000", "30 MiB are available", cgroup)


def test_dropping_without_room_for_a_cache_is_refused(command: Command, model: Path, cgroup: str) -> None:
    assert_refused(command, ("run", model, *PROMPT, "--drop-cold-experts", "0.5"), "--drop-cold-experts needs an expert cache", cgroup)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("run",), ("MODEL",)),
        (("nonsense",), ("nonsense",)),
        (("inspect", "{model}", "--hit-fraction", "1.5"), ("1.5", "between 0 and 1")),
        (("inspect", "{model}", "--disk-mb-s", "0"), ("--disk-mb-s 0", "above 0")),
        (("iobench", "none"), ("none", "No such file")),
        (("iobench", "{model}", "--lanes", "0"), ("0 lanes", "between 1 and 32")),
        (("iobench", "{model}", "--lanes", "two"), ("--lanes two", "numbers with commas")),
        (("iobench", "{model}", "--read-kib", "0"), ("--read-kib 0", "at least 1")),
        (("iobench", "{model}", "--seconds", "nan"), ("nan seconds", "above 0")),
        (("synth", "x.gguf", "--like", "huge"), ("'huge'", "tiny-qwen3moe")),
        (("synth", "x.gguf", "--like", "tiny-olmoe", "--layers", "0"), ("--layers 0", "between 1 and")),
        (("synth", "x.gguf", "--like", "tiny-olmoe", "--type", "q9"), ("q9",)),
        (("synth", "none/x.gguf", "--like", "tiny-olmoe"), ("none", "does not exist")),
        (("run", "hf:nobody", "-p", "x"), ("hf:nobody", "hf:owner/repo")),
    ],
)
def test_the_other_commands_refuse_in_one_line_too(
    arguments: tuple[str, ...], parts: tuple[str, ...], command: Command, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(command, tuple(argument.format(model=model) for argument in arguments), *parts)
    assert list(tmp_path.iterdir()) == []


def test_a_fault_of_ours_is_one_line_and_exit_code_1(command: Command, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object, **_kwargs: object) -> None:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr("moetriage.gguf.inspect.inspect_model", fail)
    result = command("inspect", model, "--disk-mb-s", "1000")
    assert result.code == 1
    assert "unexpected RuntimeError: first line second line" in result.err
    assert len(result.errors) == 1
    monkeypatch.setenv("MOETRIAGE_TRACEBACK", "1")
    with pytest.raises(RuntimeError):
        invoke(["inspect", str(model), "--disk-mb-s", "1000"])
