"""State: what is kept per request follows the request, from its first row to its last."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import torch
from torch import Tensor, nn

from mrv2.attn.specs import PerRequest
from mrv2.manifest import Capability
from mrv2.model_state.default import DefaultModelState
from mrv2.testing.bench import Bench, Fed, run_alone
from mrv2.testing.compare import OF_THE_STEP, Pair, describe, errors, require_close, right_alone
from mrv2.testing.results import ConformanceFailure, Level, NotApplicable, NotRun, check
from mrv2.testing.subject import Case

ENTRIES = {"new": (None, 0), "with a cached prefix": (None, 6), "resumed": (4, 0), "resumed with all but one": (4, 9)}
"""How a request may come to a row: length of its prompt (the rest was generated before), and tokens computed."""


def _inputs_on(bench: Bench, request: Fed, entry: str) -> dict[str, Tensor]:
    prompt_len, computed = ENTRIES[entry]
    request.computed = computed
    bench.add(request, 2, prompt_len=prompt_len)
    with torch.inference_mode():
        inputs = bench.state.prepare_inputs(bench.view([(request, len(request.ids) - computed)]))
        return {key: value.clone() for key, value in inputs.items()}


@check(Level.CPU, Level.GPU)
def a_row_that_is_used_again(case: Case) -> None:
    """A request on a row that another had before has its own inputs only, however it comes there (R2, R4).

    `add_request` sets every field kept for the row, whatever the request's computed length, its options, or whether
    it was there before.
    """
    (old, ids) = case.prompts((12, 10), seed=8)
    for before, own in permutations(case.options, 2) if len(case.options) > 1 else [({}, {})]:
        for entry in ENTRIES:
            want = _inputs_on(Bench(case.loaded, device=case.device), Fed(ids, own), entry)
            if not want:
                raise NotApplicable("the model has no inputs of its own")
            bench = Bench(case.loaded, device=case.device)
            former, request = Fed(old, before), Fed(ids, own)
            _inputs_on(bench, former, "new")
            bench.remove(former)
            got = _inputs_on(bench, request, entry)
            stranger = Fed(old, before)
            for leaving, coming in ((request, stranger), (stranger, request)):
                bench.remove(leaving)
                again = _inputs_on(bench, coming, entry)  # requests known by their ids
            _compare_inputs(got, want, f"request {entry}, options {dict(own)}, after one with {dict(before)}")
            _compare_inputs(again, want, f"a request that was there before, {entry}, options {dict(own)}")


def _compare_inputs(got: dict[str, Tensor], want: dict[str, Tensor], name: str) -> None:
    for key in want:
        require_close(
            [Pair(request=name, got=got[key], want=want[key])],
            compared=f"input {key} on a row that another request had before with that on a new row",
            tolerance=0,
            causes=[
                "add_request leaves a field as it was when an option is absent, or when tokens are computed already",
                "add_request skips a request that it has seen before: a preempted one comes back",
            ],
            quantity="values",
        )


@check(Level.CPU, Level.GPU)
def adding_only_stages(case: Case) -> None:
    """`add_request` changes nothing that a step under way may still read (P1).

    It runs while the device is busy with an earlier step. Only `apply_staged_writes` (a part's `flush`) may touch the
    device.
    """
    bench = Bench(case.loaded, device=case.device)
    prompts = case.prompts((8, 8), seed=9)
    request, other = Fed(prompts[0], case.options[-1]), Fed(prompts[1], case.options[0])
    bench.add(request, 0)
    view = bench.view([(request, 8)])
    with torch.inference_mode():
        want = {key: value.clone() for key, value in bench.state.prepare_inputs(view).items()}
        if not want:
            raise NotApplicable("the model has no inputs of its own")
        bench.state.remove_request(0, request.data().req_id)
        bench.state.add_request(0, other.data())
        got = bench.state.prepare_inputs(view)
        for key in want:
            require_close(
                [Pair(request="request 0", got=got[key], want=want[key])],
                compared=f"input {key} of a step before and after another request was staged for its row",
                tolerance=0,
                causes=["add_request or remove_request writes to a tensor that fill reads: stage, and copy in flush"],
                quantity="values",
            )
        bench.state.remove_request(5, "a request that never was")  # legal (R3)


@check(Level.CPU, Level.GPU, runs=True)
def rows_are_not_batch_positions(case: Case) -> None:
    """Requests on any rows, in any order of the batch, are computed as each of them alone (R1).

    State, if there is any, follows the row (`view.rows`), or the slot (`meta.state_slots`), never the position in the
    batch, which is another one in the next step.
    """
    prompts = case.prompts((7, 3, 12, 5), seed=10)
    _require_right(case, prompts[2])
    if keeps_nothing := _keeps_nothing(case):
        _require_steps(case, prompts[2])
    requests = [Fed(p, case.option(i)) for i, p in enumerate(prompts)]
    bench = Bench(case.loaded, device=case.device)
    for request, row in zip(requests, (5, 0, 7, 2), strict=True):
        bench.add(request, row)
    turn = 0
    while waiting := [r for r in requests if r.computed < len(r.ids)]:
        turn += 1
        order = waiting[turn % len(waiting) :] + waiting[: turn % len(waiting)]
        bench.step([(r, _take(r)) for r in order])
    pairs = []
    for i, request in enumerate(requests):
        alone, twin = Bench(case.loaded, device=case.device), Fed(request.ids, request.options)
        alone.add(twin, 0)
        while twin.computed < len(twin.ids):
            alone.step([(twin, _take(twin))])
        got, want = (bench.logprobs(torch.cat(r.hidden)) for r in (request, twin))
        pairs.append(Pair(request=describe(i, request.ids, request.options), got=got, want=want))
    require_close(
        pairs,
        compared="requests on scattered rows, in an order that changes from step to step, with each alone",
        tolerance=case.tolerance,
        causes=[OF_THE_STEP]
        if keeps_nothing
        else [
            "something kept per request is indexed by its position in the batch: use view.rows",
            "a kernel finds its state by position: use meta.state_slots (load_state, store_state)",
            "a state isn't the one after the step's last token, or a new request's isn't started anew",
            OF_THE_STEP,
        ],
    )


def _take(request: Fed) -> int:
    """Most of the prompt first, then a token at a time."""
    return len(request.ids) - 4 if request.computed == 0 and len(request.ids) > 4 else 1


def _require_right(case: Case, ids: Sequence[int]) -> None:
    if not right_alone(case, ids):
        raise NotRun("whole prompts alone aren't right either: see the suite attention")


def _require_steps(case: Case, ids: Sequence[int]) -> None:
    """Of a model without state, a prompt that depends on how it is cut is the suite attention's to explain."""
    if not case.subject.offers(Capability.CHUNKED_PREFILL):
        return
    bench, request = Bench(case.loaded, device=case.device), Fed(ids)
    bench.add(request, 0)
    (got,) = bench.run([request], chunks=(_take(request), 1))
    gap = errors(Pair(request="", got=got, want=run_alone(case.loaded, ids, {}, device=case.device)))
    if float(gap.max()) > case.tolerance:
        raise NotRun("a prompt in chunks, alone, isn't right either: see the suite attention")


def _has_states(case: Case) -> bool:
    return any(isinstance(spec, PerRequest) for spec in case.loaded.caches.values())


def _keeps_nothing(case: Case) -> bool:
    """Whether the model has neither state nor inputs of its own: caches of tokens are the host's to address."""
    module: nn.Module = case.loaded.module
    return case.loaded.state_class is DefaultModelState and not module.parts and not _has_states(case)


def _require_states(case: Case) -> None:
    if not _has_states(case):
        raise NotApplicable("no layer keeps a state per request")


@check(Level.CPU, Level.GPU, runs=True)
def states_start_anew(case: Case) -> None:
    """A new request starts from nothing, whatever its slot holds: NaN here (B5, C2).

    `load_state` and `fresh` select with `where(meta.computed > 0, state, 0)`; a product with zero keeps a NaN.
    """
    _require_states(case)
    for i, ids in enumerate(case.prompts((1, 9), seed=11)):
        found = run_alone(case.loaded, ids, {}, device=case.device)
        if not bool(found.isfinite().all()):
            at = int((~found.isfinite()).any(1).nonzero()[0, 0])
            raise ConformanceFailure(
                "log-probabilities of a new request whose slot holds NaN",
                f"{describe(i, ids)}, position {at}: NaN",
                ["the kernel reads the slot without load_state or fresh", "it multiplies the state by zero"],
            )


@check(Level.CPU, Level.GPU, runs=True)
def states_go_on(case: Case) -> None:
    """A state taken up in the next chunk or token is the one that was left (C2).

    A slot holds the state after `computed` tokens on entry and has to hold that after `seq_lens` on exit.
    """
    _require_states(case)
    case.require_chunks()
    _require_right(case, case.prompts((17,), seed=12)[0])
    for chunks in ((7,), (1,), (1, 5, 2)):
        requests = [Fed(p, case.option(i)) for i, p in enumerate(case.prompts((9, 1, 17), seed=12))]
        bench = Bench(case.loaded, device=case.device)
        for row, request in enumerate(requests):
            bench.add(request, row)
        got = bench.run(requests, chunks=chunks)
        pairs = [
            Pair(request=describe(i, r.ids), got=g, want=run_alone(case.loaded, r.ids, r.options, device=case.device))
            for i, (r, g) in enumerate(zip(requests, got, strict=True))
        ]
        require_close(
            pairs,
            compared=f"prompts computed in chunks of {', '.join(map(str, chunks))} tokens with whole prompts",
            tolerance=case.tolerance,
            causes=[
                "the state is stored a token too early or too late: call store_state after each token of steps(meta)",
                "requests of other lengths in the batch overwrite it: select by `live`",
            ],
        )
