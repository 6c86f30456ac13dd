"""Inputs: what an adapter's parts add to `forward`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mrv2.errors import RequestError
from mrv2.state.view import StepView
from mrv2.testing.bench import TOKENS, Bench, Fed, run_alone
from mrv2.testing.compare import Pair, describe, require_close, right_alone
from mrv2.testing.results import NO_REFERENCE, ConformanceFailure, Level, NotApplicable, NotRun, check
from mrv2.testing.subject import Case

GARBAGE = 1e4


def _bench(case: Case, lens: tuple[int, ...] = (9, 1, 14, 5)) -> tuple[Bench, list[Fed]]:
    """Requests with different options, each on the row of its place in the batch."""
    bench = Bench(case.loaded, device=case.device, poison=False)
    requests = [Fed(p, case.option(i)) for i, p in enumerate(case.prompts(lens, seed=7))]
    for row, request in enumerate(requests):
        bench.add(request, row)
    return bench, requests


def _inputs(bench: Bench, view: StepView) -> dict[str, Tensor]:
    with torch.inference_mode():
        found: dict[str, Tensor] = bench.state.prepare_inputs(view)
    return found


def require_inputs(case: Case) -> None:
    """Whether there is anything here to check."""
    bench, requests = _bench(case)
    if not _inputs(bench, bench.view([(requests[0], 1)])):
        raise NotApplicable("the model has no inputs of its own")


def _facts(inputs: Mapping[str, Tensor]) -> dict[str, tuple[Any, ...]]:
    return {key: (list(x.shape), str(x.dtype), x.data_ptr()) for key, x in inputs.items()}


@check(Level.CPU, Level.GPU)
def buffers_stay(case: Case) -> None:
    """Real and dummy inputs of a size have the same keys, shapes, dtypes and addresses, in every step (B1, B2).

    A graph reads the addresses it was captured with. Allocate in the constructor, for the largest step, and return
    slices of that buffer from both `fill` and `fill_dummy`.
    """
    require_inputs(case)
    bench, requests = _bench(case)
    seen: dict[tuple[int, int], dict[str, tuple[Any, ...]]] = {}
    for takes, padding in (((9, 1, 7), (1, 3)), ((4, 1, 1), (2, 5)), ((9, 1, 7), (1, 3)), ((9, 1, 14, 5), (0, 0))):
        view = bench.view(list(zip(requests, takes, strict=False)), padding=padding)
        size = (view.num_reqs, view.num_tokens)
        dummy = _facts(bench.state.prepare_dummy_inputs(*size))
        for what, facts in (("real", _facts(_inputs(bench, view))), ("dummy", dummy)):
            want = seen.setdefault(size, facts)
            for key in want.keys() | facts.keys():
                if want.get(key) != facts.get(key):
                    _raise_moved(key, what, size, want.get(key), facts.get(key))
    largest = bench.state.prepare_dummy_inputs(bench.limits.max_rows, TOKENS)
    for key, value in largest.items():
        if len(value) not in (bench.limits.max_rows, TOKENS):
            _raise_moved(
                key, "dummy", (bench.limits.max_rows, TOKENS), "one entry per token or request", list(value.shape)
            )


def _raise_moved(key: str, what: str, size: tuple[int, int], want: object, got: object) -> None:
    raise ConformanceFailure(
        "real and dummy inputs of several steps (shape, dtype, address)",
        f"tensor {key}, {what}, {size[0]} requests and {size[1]} tokens: {got}, before {want}",
        [
            "fill returns a new tensor: copy into the persistent buffer and return a slice of that",
            "fill and fill_dummy use different buffers",
            "the buffer is allocated anew, or for less than Limits says",
        ],
    )


@check(Level.CPU, Level.GPU)
def padding_is_neutral(case: Case) -> None:
    """Padded tokens and requests hold the neutral value, whatever the buffer held before (B3).

    Rows of padding are -1, so what is gathered by row has to be deselected with `where`, over the whole slice.
    """
    require_inputs(case)
    bench, requests = _bench(case)
    view = bench.view([(requests[2], 6), (requests[1], 1), (requests[3], 4)], padding=(2, 5))
    for value in _inputs(bench, view).values():
        value.fill_(GARBAGE if value.is_floating_point() else 1)  # the buffer itself
    real = {key: value.clone() for key, value in _inputs(bench, view).items()}
    dummy = bench.state.prepare_dummy_inputs(view.num_reqs, view.num_tokens)
    for key, value in real.items():
        start = 11 if len(value) == view.num_tokens else 3
        wrong = (value[start:] != dummy[key][start:]).reshape(len(value) - start, -1).any(1)
        if bool(wrong.any()):
            at = int(wrong.nonzero()[0, 0])
            raise ConformanceFailure(
                "padding of real inputs with what fill_dummy puts there",
                f"tensor {key}, padding {at}: {value[start + at]}, neutral is {dummy[key][start + at]}",
                [
                    "a negative row or position was used as an index: clamp it, and deselect with torch.where",
                    "fill writes the real tokens only, and leaves what an earlier step put behind them",
                ],
            )


@check(Level.CPU, runs=True)
def every_input_matters(case: Case) -> None:
    """Every input reaches `forward`, and changes what comes out (M3).

    An input that is computed, stored and not used is a feature that is missing in silence.
    """
    require_inputs(case)
    for key in _inputs(*_one_view(case)):
        plain, changed = (_hidden(case, key if change else None) for change in (False, True))
        if torch.equal(plain, changed):
            raise ConformanceFailure(
                "hidden states with one input as it is, and changed",
                f"tensor {key}: no token differs",
                ["forward takes it and doesn't use it", "it is multiplied by zero, or used where nothing follows"],
            )


def _hidden(case: Case, key: str | None) -> Tensor:
    """Hidden states of whole prompts, with the input `key` changed."""
    bench, requests = _bench(case)
    prepare = bench.state.prepare_inputs

    def changed(view: StepView) -> dict[str, Tensor]:
        inputs: dict[str, Tensor] = prepare(view)
        if key is not None:
            value = inputs[key]
            value.add_(torch.rand_like(value) + 0.5 if value.is_floating_point() else 1)
        return inputs

    bench.state.prepare_inputs = changed  # type: ignore[method-assign]
    return bench.step([(r, len(r.ids)) for r in requests]).clone()


def _one_view(case: Case) -> tuple[Bench, StepView]:
    bench, requests = _bench(case)
    return bench, bench.view([(requests[0], 3)])


@check(Level.CPU, Level.GPU, runs=True)
def chunks_dont_matter(case: Case) -> None:
    """A token's inputs are the same, whether its prompt is computed whole or in pieces.

    A position in the step means nothing: use `view.positions` for where a token is, `view.token_to_i` for whose it is.
    """
    require_inputs(case)
    case.require_chunks()
    # Two steps, in both of which all requests take part in the order of their rows.
    bench, requests = _bench(case, (9, 7, 14, 5))
    whole = _whole(case, requests)
    got: list[dict[str, list[Tensor]]] = [{} for _ in requests]
    for takes in ((4, 3, 6, 2), (5, 4, 8, 3)):
        step = list(zip(requests, takes, strict=True))
        view, start = bench.view(step, padding=(1, 2)), 0
        inputs = {key: value.clone() for key, value in _inputs(bench, view).items() if len(value) == view.num_tokens}
        for found, take in zip(got, takes, strict=True):
            for key, value in inputs.items():
                found.setdefault(key, []).append(value[start : start + take])
            start += take
        bench.step(step, padding=(1, 2))
    for key in whole[0]:
        pairs = [
            Pair(request=describe(i, r.ids, r.options), got=torch.cat(got[i][key]), want=whole[i][key])
            for i, r in enumerate(requests)
        ]
        require_close(
            pairs,
            compared=f"input {key} of prompts computed in pieces with that of whole prompts",
            tolerance=0,
            causes=[
                "the place in the step is used where the position in the request is meant (view.positions)",
                "something of another request of the batch is used",
            ],
            quantity="values",
        )


def _whole(case: Case, requests: list[Fed]) -> list[dict[str, Tensor]]:
    """Inputs per token of each request, all of them whole in one step, in the order of their rows."""
    bench, others = _bench(case, tuple(len(r.ids) for r in requests))
    view = bench.view([(r, len(r.ids)) for r in others], padding=(1, 0))
    inputs = {key: value.clone() for key, value in _inputs(bench, view).items() if len(value) == view.num_tokens}
    sizes = [len(r.ids) for r in requests]
    parts = {key: torch.split(value, sizes) for key, value in inputs.items()}
    return [{key: values[k] for key, values in parts.items()} for k in range(len(sizes))]


@check(Level.CPU)
def options_are_checked(case: Case) -> None:
    """Requests' options are accepted or refused when a request arrives (O1).

    What no part knows is refused by itself; a part's own are described by its pydantic model, `InputPart.options`.
    """
    bench = Bench(case.loaded, device=case.device)
    for option in case.options:
        bench.state.check_options(option)
    for wrong in (*case.subject.target.wrong_options, {"an_option_that_nobody_has": 1}):
        try:
            bench.state.check_options(wrong)
        except RequestError:
            continue
        raise ConformanceFailure(
            "wrong options with what check_options says of them",
            f"extra_args={dict(wrong)!r} is accepted",
            ["the part's options model converts or ignores it: strict=True, and a bound where there is one",
             "check_options is overridden and doesn't call the base class"],
        )  # fmt: skip


@check(Level.CPU, Level.GPU, runs=True)
def answer(case: Case) -> None:
    """Requests with options are computed as the reference computes them.

    The reference gets the options as its second argument. What differs here and not in the suite attention is the
    meaning of an input: its scale, its start, where it is added.
    """
    require_inputs(case)
    if case.answer is None:
        raise NotApplicable(NO_REFERENCE)
    pairs = []
    for i, option in enumerate(case.options[1:]):
        for ids in case.prompts((9, 2), seed=20 + i):
            if not right_alone(case, ids):
                raise NotRun("requests without options aren't right either: see the suite attention")
            want = case.answer.logprobs(ids, option)
            if want is not None:
                got = run_alone(case.loaded, ids, option, device=case.device, poison=False)
                pairs.append(Pair(request=describe(i, ids, option), got=got, want=want))
    if not pairs:
        raise NotApplicable(f"{NO_REFERENCE} for options")
    require_close(
        pairs,
        compared=f"whole prompts with options, alone, with the reference ({case.answer.name})",
        tolerance=case.tolerance,
        causes=["an offset of one in positions", "another default, or another scale of the option",
                "the input is added at another place than in the reference"],
    )  # fmt: skip
