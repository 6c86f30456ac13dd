"""Attention: what each token sees of those before it, in any batch and any cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mrv2.errors import CacheWriteError, PoisonReadError, StaleStepError, TargetError
from mrv2.layers.base import Stream
from mrv2.manifest import Capability
from mrv2.testing.bench import CONTEXT, Bench, Fed, run_alone
from mrv2.testing.compare import OF_THE_STEP, Pair, describe, errors, require_close
from mrv2.testing.generated import engine, generate
from mrv2.testing.results import NO_REFERENCE, TOKEN_BY_TOKEN, ConformanceFailure, Level, NotApplicable, check
from mrv2.testing.subject import Case

LENS = (1, 5, 23, 8, 13, 2)

ROTATION = (
    "rotation: which share of each head is rotated (partial_rotary_factor), interleaved pairs or halves (how q and k "
    "are stored), base or scaling"
)


def _hints(case: Case) -> list[tuple[int, str]]:
    """What a first difference at a certain position tells: the size of a window, in the config or in the layers."""
    declared = list(case.windows) or "none"
    hints = [
        (value - 1, f"a window: {key} = {value} in the config, {declared} in the layers (the current token counts)")
        for key, value in case.model_config.raw.items()
        if type(value) is int and 5 <= value < CONTEXT and not key.startswith("num_") and not key.endswith("_size")
    ]
    return hints + [
        (w - 1, f"the window of {w} tokens that layers declare (the current token counts)") for w in case.windows
    ]


def _check_window(case: Case) -> None:
    if case.windows and max(case.windows) > CONTEXT - 8:
        raise TargetError(
            f"config {case.name!r} has a window of {max(case.windows)} tokens, which requests of {CONTEXT} don't fill",
            where=case.subject.entry.where,
            fix="make the small config's window small, for example 9",
        )


@check(Level.CPU, Level.GPU, runs=True)
def answer(case: Case) -> dict[str, Any] | None:
    """Prompts of all lengths, up to the whole context, are computed as the reference computes them.

    Where the first difference lies tells most: at the second token, rotation, scale, norms of q and k, or the heads'
    order; at the window's size, the window (M5).
    """
    _check_window(case)
    if case.answer is None:
        raise NotApplicable(NO_REFERENCE)
    pairs = []
    for i, ids in enumerate(case.prompts((*LENS, CONTEXT - 1), seed=14, known=True)):
        want = case.answer.logprobs(ids, {})
        if want is not None:
            got = run_alone(case.loaded, ids, {}, device=case.device)
            pairs.append(Pair(request=describe(i, ids), got=got, want=want))
    worst = require_close(
        pairs,
        compared=f"whole prompts, alone, with the reference ({case.answer.name})",
        tolerance=case.tolerance,
        causes=[
            ROTATION,
            "the scale of scores, a soft cap, or norms of queries and keys (left out, or exchanged)",
            "query heads paired with other key heads, or q, k and v in another order in a packed tensor",
            "a window, forgotten or counted differently",
        ],
        hints=[(0, "a token sees what comes after it, or what lies beyond the request's length"), *_hints(case)],
    )
    return {"largest difference": worst}


@check(Level.CPU, Level.GPU, runs=True)
def layers(case: Case) -> dict[str, Any]:
    """The stream after each layer is the reference's; without one, that of the prompt computed token by token.

    The first layer that is beyond the bound is where to look. Differences grow with depth by themselves, slowly.
    """
    (ids,) = case.prompts((31,), seed=16)
    with _watched(case.loaded.module) as seen:
        run_alone(case.loaded, ids, {}, device=case.device)
        whole = {name: torch.cat(parts) for name, parts in seen.items()}
    if case.answer is not None and case.answer.layers is not None:
        what, others = f"the reference ({case.answer.name})", case.answer.layers(ids)
    else:
        what = TOKEN_BY_TOKEN
        with _watched(case.loaded.module) as seen:
            bench, request = Bench(case.loaded, device=case.device), Fed(ids)
            bench.add(request, 0)
            bench.run([request], chunks=(1,))
            others = [torch.cat(parts) for parts in seen.values()]
    gaps = {
        name: errors(Pair(request=name, got=got, want=want)) / max(float(want.abs().max()), 1e-9)
        for (name, got), want in zip(whole.items(), others, strict=False)
        if got.shape == want.shape
    }
    figures = [(name, float(gap.max())) for name, gap in gaps.items()]
    if not figures:
        raise NotApplicable("the model has no stack of layers whose streams could be compared")
    bound = 10 * case.tolerance
    details = {"layers": [n for n, _ in figures], "errors": [e for _, e in figures], "bound": bound, "against": what}
    wrong = [n for n, e in figures if not e <= bound]
    if wrong:
        raise ConformanceFailure(
            f"the residual stream after each layer, whole prompt, with {what}",
            f"layer {wrong[0]}, position {int((~(gaps[wrong[0]] <= bound)).nonzero()[0, 0])}: relative difference "
            f"{dict(figures)[wrong[0]]:.3g}, allowed is {bound:g}; {len(wrong)} of {len(figures)} layers differ",
            [
                *([OF_THE_STEP] if what == TOKEN_BY_TOKEN else []),
                "what this layer does, or what comes before it if it is the first",
                "its cache: an entry written in another token's slot, or read beyond the request's length",
            ],
            details,
        )
    return details


@contextmanager
def _watched(module: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Streams after each layer of the largest stack, by the layer's name, in the order of calls."""
    stacks = [(n, m) for n, m in module.named_modules() if isinstance(m, nn.ModuleList)]
    seen: dict[str, list[Tensor]] = {}
    handles = []
    if stacks:
        stack, layers = max(stacks, key=lambda item: len(item[1]))
        for i, layer in enumerate(layers):

            def note(_: nn.Module, args: object, out: object, name: str = f"{stack}.{i}") -> None:
                if isinstance(out, Stream):
                    h = out.x if out.residual is None else out.x + out.residual
                    seen.setdefault(name, []).append(h.detach().cpu().clone())

            handles.append(layer.register_forward_hook(note))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@check(Level.CPU, Level.GPU, runs=True)
def batches(case: Case) -> None:
    """Prompts computed together, in chunks or token by token, with padding, equal each prompt whole and alone.

    Whatever differs between a chunk and a whole prompt is in the metadata: lengths, query starts, slots, tables.
    """
    chunked = case.subject.offers(Capability.CHUNKED_PREFILL)
    for chunks, padding in (((), (2, 5)), ((7,), (1, 1)), ((1,), (0, 0)), ((7, 1, 3), (2, 3))):
        if chunks and not chunked:
            continue
        prompts = case.prompts((*LENS, 30), seed=17)
        requests = [Fed(p, case.option(i)) for i, p in enumerate(prompts)]
        bench = Bench(case.loaded, device=case.device, seed=len(chunks))
        for row, request in enumerate(requests):
            bench.add(request, row)
        got = bench.run(requests, chunks=chunks, padding=padding)
        _compare(case, requests, got, chunks, padding)


def _compare(
    case: Case, requests: Sequence[Fed], got: Sequence[Tensor], chunks: Sequence[int], padding: tuple[int, int]
) -> None:
    how = f"in chunks of {', '.join(map(str, chunks))}" if chunks else "whole"
    pairs = [
        Pair(
            request=describe(i, r.ids, r.options),
            got=g,
            want=run_alone(case.loaded, r.ids, r.options, device=case.device),
        )
        for i, (r, g) in enumerate(zip(requests, got, strict=True))
    ]
    require_close(
        pairs,
        compared=f"prompts {how}, together, with padding of {padding[0]} requests and {padding[1]} tokens, with each "
        "whole and alone",
        tolerance=case.tolerance,
        causes=[
            OF_THE_STEP,
            "a kernel takes its tokens' positions from the step instead of from meta.computed",
            "entries past seq_lens are read, or those of another request (block_table of another row)",
            "a padded token's slot of -1 is used as an index and hits the last slot",
        ],
        hints=[*((n, OF_THE_STEP) for n in chunks[:1]), *_hints(case)],
    )


@check(Level.CPU, Level.GPU, runs=True)
def cache_accesses(case: Case) -> None:
    """Kernels write their own entries only, and read what has been written.

    The runner's debug mode watches the whole cache, and has NaN wherever a step must not read. `write_tokens`,
    `read_tokens`, `load_state` and `store_state` keep these rules (B4, B5, C1, C4).
    """
    try:
        for _ in range(2):
            parts = engine(case.loaded, case, debug=True, max_num_tokens=64)
            generate(parts, case.prompts((3, 17, 1, 9, 30), seed=18), 6, options=case.options)
    except (CacheWriteError, PoisonReadError, StaleStepError) as error:
        raise ConformanceFailure(
            "what a step read and wrote with what it had to", f"{error.what} ({error.where})", [error.fix]
        ) from error


@check(Level.CPU, runs=True)
def padding_is_written(case: Case) -> None:
    """What a kernel leaves of its output for padding is finite (C4).

    `out` comes uninitialised, NaN here. Write all of it, `out.zero_()` first if need be.
    """
    bench = Bench(case.loaded, device=case.device)
    requests = [Fed(p, case.option(i)) for i, p in enumerate(case.prompts((5, 3), seed=19))]
    for row, request in enumerate(requests):
        bench.add(request, row)
    with _nan_when_new():
        for step in ([(requests[0], 4), (requests[1], 2)], [(requests[0], 1), (requests[1], 1)]):
            hidden = bench.step(step, padding=(2, 4))
            bad = (~hidden.flatten(1).isfinite()).any(1).nonzero()
            if len(bad):
                real = sum(n for _, n in step)
                what = "padding" if int(bad[0, 0]) >= real else "a request"
                raise ConformanceFailure(
                    "hidden states of a step with padding, where new memory holds NaN",
                    f"token {int(bad[0, 0])} of {len(hidden)} ({real} real), {what}: NaN",
                    [
                        "a kernel leaves rows of `out` that belong to padding unwritten",
                        "an input's padding isn't neutral",
                    ],
                )


@contextmanager
def _nan_when_new() -> Iterator[None]:
    """Memory that `torch.empty` gives holds NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
