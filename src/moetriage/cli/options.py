"""The options of commands that run a model, and what they become: StreamConfig, Sampling, OutputFiles.

In: values as typer parsed them. Out: validated settings; defaults are those of the settings themselves. A flag that would do nothing is
refused here, because only here is it known that it was given.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from moetriage.config import MAX_IO_THREADS, DropConfig, StreamConfig
from moetriage.errors import UsageError
from moetriage.stream.output_files import OutputFiles
from moetriage.stream.sampling import Sampling

#: Beyond every size; Python refuses to read numbers of some thousand digits.
_MAX_DIGITS = 40
_CACHE = "Cache and reads"
_LOSSY = "Lossy: fewer experts"
_ROUTING = "Recorded routing"
_CONTEXT = "Context and threads"
_TOKENS = "Choosing tokens"
_FILES = "Files and progress"

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on the last line of standard output (docs/telemetry.md).")]
Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="GGUF file (of a split one the first part), hf:owner/repo[:file-glob], or 'bundled' for the small one that is here.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How experts are streamed."""

    cache_mb: Annotated[
        str,
        typer.Option(
            metavar="auto|0|N",
            rich_help_panel=_CACHE,
            help="Expert cache in MiB; auto takes what memory and cgroup leave, 0 reads every expert each time.",
        ),
    ] = str(StreamConfig.cache_mb)
    cache_ceil_mb: Annotated[
        int | None, typer.Option(metavar="N", rich_help_panel=_CACHE, help="Upper bound for --cache-mb auto, in MiB.")
    ] = StreamConfig.cache_ceil_mb
    force_cache: Annotated[
        bool,
        typer.Option("--force-cache", rich_help_panel=_CACHE, help="Accept a cache that cannot hit, or one larger than free memory."),
    ] = StreamConfig.force_cache
    io_threads: Annotated[
        int, typer.Option(metavar="N", rich_help_panel=_CACHE, help=f"Reads at the same time, 1 to {MAX_IO_THREADS}.")
    ] = StreamConfig.io_threads
    no_odirect: Annotated[
        bool, typer.Option("--no-odirect", rich_help_panel=_CACHE, help="Read through the page cache instead of past it.")
    ] = not StreamConfig.odirect
    mmap: Annotated[
        bool, typer.Option("--mmap", rich_help_panel=_CACHE, help="Do not stream: plain llama.cpp with the file mapped, as a baseline.")
    ] = StreamConfig.mmap
    dense_weights: Annotated[
        Literal["anon", "mmap"],
        typer.Option(rich_help_panel=_CACHE, help="Keep what is no expert in own memory, or leave it to the page cache."),
    ] = StreamConfig.dense_weights
    prefetch: Annotated[
        int,
        typer.Option(
            metavar="N",
            rich_help_panel=_CACHE,
            help="While lanes are idle, read what the token before used in the next N layers; 0 is off. Lossless without dropping.",
        ),
    ] = StreamConfig.prefetch
    no_staged: Annotated[
        bool,
        typer.Option("--no-staged", rich_help_panel=_CACHE, help="Wait for all of an expert before its first product is computed."),
    ] = not StreamConfig.staged
    n_expert_used: Annotated[
        int | None,
        typer.Option(metavar="K", rich_help_panel=_LOSSY, help="Use K experts per token and layer instead of the model's own number."),
    ] = StreamConfig.n_expert_used
    drop_cold_experts: Annotated[
        float | None,
        typer.Option(
            metavar="F",
            rich_help_panel=_LOSSY,
            help="Skip an expert that is not cached if its share of the routing is below F / top-k; above 0, at most 1. "
            "Depends on the cache, so the output can differ between runs.",
        ),
    ] = None
    drop_in_prefill: Annotated[
        bool, typer.Option("--drop-in-prefill", rich_help_panel=_LOSSY, help="Drop while the prompt is read, too.")
    ] = DropConfig.in_prefill
    drop_no_renorm: Annotated[
        bool, typer.Option("--drop-no-renorm", rich_help_panel=_LOSSY, help="Do not give the dropped weight to the other experts.")
    ] = not DropConfig.renorm
    drop_raw_weight: Annotated[
        bool,
        typer.Option(
            "--drop-raw-weight",
            rich_help_panel=_LOSSY,
            help="Compare the router's weight itself instead of its share; differs where weights do not sum to one.",
        ),
    ] = DropConfig.raw_weight
    replay_drops: Annotated[
        Path | None,
        typer.Option(metavar="TRACE", rich_help_panel=_ROUTING, help="Drop what the run that wrote TRACE dropped, whatever is cached."),
    ] = StreamConfig.replay_drops
    force_routing: Annotated[
        Path | None,
        typer.Option(metavar="TRACE", rich_help_panel=_ROUTING, help="Route as TRACE says, step by step, instead of as the router says."),
    ] = StreamConfig.force_routing

    def stream_config(self) -> StreamConfig:
        """Return the validated settings. Raises UsageError."""
        config = StreamConfig(
            cache_mb=_cache_mb(self.cache_mb),
            cache_ceil_mb=self.cache_ceil_mb,
            force_cache=self.force_cache,
            io_threads=self.io_threads,
            odirect=not self.no_odirect,
            dense_weights=self.dense_weights,
            prefetch=self.prefetch,
            n_expert_used=self.n_expert_used,
            drop=self._drop(),
            mmap=self.mmap,
            staged=not self.no_staged,
            force_routing=self.force_routing,
            replay_drops=self.replay_drops,
        )
        config.validate()
        if self.mmap:
            self._refuse_with_mmap()
        return config

    def _drop(self) -> DropConfig | None:
        flags = {
            "--drop-in-prefill": self.drop_in_prefill,
            "--drop-no-renorm": self.drop_no_renorm,
            "--drop-raw-weight": self.drop_raw_weight,
        }
        if self.drop_cold_experts is None:
            for flag, is_set in flags.items():
                if is_set:
                    raise UsageError(f"{flag} does nothing without --drop-cold-experts F: give both, or neither")
            return None
        return DropConfig(
            threshold=self.drop_cold_experts,
            in_prefill=self.drop_in_prefill,
            renorm=not self.drop_no_renorm,
            raw_weight=self.drop_raw_weight,
        )

    def _refuse_with_mmap(self) -> None:
        """A baseline whose flags did nothing would be published as what the flags say."""
        for name in (*("cache_mb", "cache_ceil_mb", "force_cache", "io_threads", "no_odirect", "dense_weights", "no_staged"),):
            value = getattr(self, name)
            if value != getattr(EngineOptions, name):
                flag = f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
                raise UsageError(f"{flag} does nothing with --mmap, which does not stream: leave one of them out")


def _cache_mb(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS):
        raise UsageError(f"--cache-mb {text[:_MAX_DIGITS]}: must be auto, 0 (off) or a number of MiB")
    return int(text)


@dataclass(frozen=True, kw_only=True)
class ContextOptions:
    """What llama.cpp's context needs."""

    ctx_size: Annotated[
        int | None,
        typer.Option(
            "--ctx-size", "-c", metavar="N", rich_help_panel=_CONTEXT, help="Context in tokens (default: 4096, or the model's own if less)."
        ),
    ] = None
    threads: Annotated[
        int | None,
        typer.Option("--threads", "-t", metavar="N", rich_help_panel=_CONTEXT, help="Computing threads (default: all processors)."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen."""

    temp: Annotated[float, typer.Option(metavar="T", rich_help_panel=_TOKENS, help="Temperature; 0 takes the likeliest token.")] = (
        Sampling.temperature
    )
    top_k: Annotated[int, typer.Option(metavar="N", rich_help_panel=_TOKENS, help="Choose among the N likeliest; 0 is all.")] = (
        Sampling.top_k
    )
    top_p: Annotated[float, typer.Option(metavar="P", rich_help_panel=_TOKENS, help="Choose among the likeliest that make up P.")] = (
        Sampling.top_p
    )
    min_p: Annotated[
        float, typer.Option(metavar="P", rich_help_panel=_TOKENS, help="Leave out what is less likely than P times the likeliest.")
    ] = Sampling.min_p
    repeat_penalty: Annotated[float, typer.Option(metavar="R", rich_help_panel=_TOKENS, help="Penalty for repetition; 1 is off.")] = (
        Sampling.repeat_penalty
    )
    seed: Annotated[
        int | None, typer.Option(metavar="N", rich_help_panel=_TOKENS, help="Makes the choice repeatable (default: another each time).")
    ] = None
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", rich_help_panel=_TOKENS, help="End the answer before this text; may be repeated.")
    ] = None

    def sampling(self, max_tokens: int | None) -> Sampling:
        """Return the validated settings, with a seed chosen if none was given. Raises UsageError."""
        sampling = Sampling(
            max_tokens=max_tokens,
            temperature=self.temp,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repeat_penalty=self.repeat_penalty,
            seed=secrets.randbits(31) if self.seed is None else self.seed,
            stop=tuple(self.stop or ()),
        )
        sampling.validate()
        return sampling


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """What is recorded beside the text."""

    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", rich_help_panel=_FILES, help="Write a row of metrics for each step (docs/telemetry.md).")
    ] = None
    route_trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", rich_help_panel=_FILES, help="Write what the router chose, was cached and was dropped, as .csv or .parquet."
        ),
    ] = None
    trace_errors: Annotated[
        Literal["continue", "stop"],
        typer.Option(rich_help_panel=_FILES, help="When the disk is full: go on without the file, or stop. It stays readable either way."),
    ] = OutputFiles.on_error
    progress: Annotated[
        bool, typer.Option("--progress", rich_help_panel=_FILES, help="Print a line of JSON for each step on standard error.")
    ] = False

    def output_files(self) -> OutputFiles:
        """Return where to write."""
        return OutputFiles(csv=self.csv, route_trace=self.route_trace, on_error=self.trace_errors)
