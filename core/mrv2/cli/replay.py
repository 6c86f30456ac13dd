"""`mrv2 replay`."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mrv2.cli.options import Adapters, Json

if TYPE_CHECKING:
    from mrv2.loader.tokenizer import Tokenizer
    from mrv2.testing.identity import Difference
    from mrv2.testing.replay import Parting, Replayed
    from mrv2.testing.runs import Run

SHOWN = 6
"""Differences of a kind, and requests, that are named; `--json` has all."""

NEAR = {"float32": 1e-3}
"""Gap of log-probabilities that rounding alone explains; of dtypes not named here, `NEAR_16`."""

NEAR_16 = 0.1

RunFile = Annotated[Path, typer.Argument(metavar="RUN", help="A file of `mrv2 generate … --record RUN`.")]
Model = Annotated[
    str | None, typer.Option("--model", metavar="MODEL", help="In place of the recorded one: folder, GGUF file, name.")
]
Dtype = Annotated[str | None, typer.Option("--dtype", help="In place of the recorded one.")]
Device = Annotated[str | None, typer.Option("--device", help="In place of the recorded one.")]
MaxModelLen = Annotated[int | None, typer.Option("--max-model-len", help="Most tokens of one request.")]
MaxNumSeqs = Annotated[int | None, typer.Option("--max-num-seqs", help="Most requests at once; 1: each alone.")]
MaxNumTokens = Annotated[int | None, typer.Option("--max-num-tokens", help="Most tokens in one step.")]
KvMemory = Annotated[int | None, typer.Option("--kv-memory", help="Bytes for the KV cache.")]
PrefixCaching = Annotated[bool | None, typer.Option("--prefix-caching/--no-prefix-caching")]
Eager = Annotated[bool | None, typer.Option("--eager/--graphs", help="Without or with CUDA graphs of decode steps.")]
Sync = Annotated[bool, typer.Option("--sync", help="The runner's plain twin: one step at a time, no graphs.")]
DebugRunner = Annotated[
    bool | None, typer.Option("--debug-runner/--no-debug-runner", help="As of `mrv2 generate`; without graphs.")
]


def command(
    run: RunFile,
    model: Model = None,
    dtype: Dtype = None,
    device: Device = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = None,
    max_num_tokens: MaxNumTokens = None,
    kv_memory: KvMemory = None,
    prefix_caching: PrefixCaching = None,
    eager: Eager = None,
    sync: Sync = False,
    debug_runner: DebugRunner = None,
    adapter: Adapters = None,
    json: Json = False,
) -> int:
    """Run again; exit code 1 when tokens differ."""
    from mrv2.testing.runs import read_run

    recorded = read_run(run)
    given = {
        "dtype": dtype,
        "device": device,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_tokens": max_num_tokens,
        "kv_memory": kv_memory,
        "prefix_caching": prefix_caching,
        "graphs": None if eager is None else not eager,
        "runner": "sync" if sync else None,
        "debug": debug_runner,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    found, tokenizer, now = _replay(recorded, model, adapter, changes)
    if json:
        from mrv2.cli.output import print_json
        from mrv2.testing.replay import to_dict

        print_json(to_dict(found))
    else:
        _print(found, recorded, tokenizer, now)
    return 0 if found.equal else 1


def _replay(
    recorded: Run, model: str | None, adapters: list[str] | None, changes: dict[str, Any]
) -> tuple[Replayed, Tokenizer | None, str]:
    from mrv2.cli.batch import progress
    from mrv2.frontend.build import load
    from mrv2.loading import stdout_to_stderr
    from mrv2.testing.replay import replay, settings_of

    config = settings_of(recorded, changes)
    adapters = adapters or _recorded_adapters(recorded)
    with stdout_to_stderr():
        loaded = load(model or recorded.model, config, adapters)
        with progress(len(recorded.requests), "replaying") as advance:
            found = replay(recorded, loaded, config, on_end=advance)
    return found, loaded.tokenizer, config.dtype


def _recorded_adapters(recorded: Run) -> list[str]:
    """Names of installed adapters that were preferred.

    Raises:
        CommandLineError: local ones were used. A file from elsewhere must not decide which code runs here.
    """
    from mrv2.errors import CommandLineError
    from mrv2.local import is_path

    local = [adapter for adapter in recorded.adapters if is_path(adapter)]
    if local:
        raise CommandLineError(
            f"the run used the local adapter {', '.join(local)}, which runs only when it is named",
            where="mrv2 replay",
            fix="add " + " ".join(f"--adapter {path}" for path in local),
        )
    return list(recorded.adapters)


def _print(found: Replayed, run: Run, tokenizer: Tokenizer | None, dtype: str) -> None:
    count = f"{found.num_requests} request{'s' if found.num_requests != 1 else ''}, {found.num_tokens} tokens"
    if found.equal:
        print(f"equal: {count}")
    else:
        print(f"tokens part in {len(found.partings)} of {count}\n")
        for n, parting in enumerate(found.partings[:SHOWN]):
            print(f"{'first: ' if n == 0 else '       '}{_where(parting)}: {_what(parting, tokenizer)}")
        if len(found.partings) > SHOWN:
            print(f"       and {len(found.partings) - SHOWN} more")
        _print_logprobs(found, dtype)
    if found.worst_logprob is not None:
        print(f"log-probabilities of equal tokens differ by up to {found.worst_logprob:.3g}")
    print(f"\nsteps: {'' if found.same_steps else 'not '}of as many requests and tokens as recorded")
    if not found.differences:
        print("environment, adapter, checkpoint, settings: as recorded")
    for kind, items in groupby(found.differences, key=lambda d: d.kind):
        _print_differences(kind, list(items), run)


def _print_logprobs(found: Replayed, dtype: str) -> None:
    from mrv2.sample.params import MAX_LOGPROBS

    both = found.logprobs
    if both is None:
        return
    low = f"none of the {MAX_LOGPROBS} likeliest"
    recorded, now = (low if value is None else f"{value:.4f}" for value in (both.recorded, both.now))
    print(
        f"\nlog-probabilities there, run alone without cache and graphs: recorded token {recorded}, now {now}", end=""
    )
    print("" if both.gap is None else f", gap {both.gap:.2g}")
    if (before := found.partings[0].recorded_logprob) is not None:
        print(f"the recorded token's when it was recorded: {before:.4f}")
    if both.gap is not None and both.gap < NEAR.get(dtype, NEAR_16):
        print("so near to each other, either may come out by rounding alone")


def _where(parting: Parting) -> str:
    own = "" if parting.id is None else f", id {parting.id!r}"
    return f"request {parting.number} (line {parting.line}{own}), token {parting.position}"


def _what(parting: Parting, tokenizer: Tokenizer | None) -> str:
    if parting.finish is not None:
        return f"the end: recorded {parting.finish[0]}, now {parting.finish[1]}"

    def show(token: int | None) -> str:
        if token is None:
            return "the end"
        text = "" if tokenizer is None else f" {tokenizer.decode([token], skip_special_tokens=False)!r}"
        return f"{token}{text}"

    return f"recorded {show(parting.recorded)}, now {show(parting.now)}"


def _print_differences(kind: str, items: list[Difference], run: Run) -> None:
    print(f"{kind}: differs from the recorded one")
    if kind == "checkpoint" and len(items) == len(run.identity.checkpoint):
        print("  in everything")
        return
    for item in items[:SHOWN]:
        before, after = ("absent" if value is None else value for value in (item.recorded, item.now))
        print(f"  {item.name}: recorded {before}, now {after}")
    if len(items) > SHOWN:
        print(f"  and {len(items) - SHOWN} more")
