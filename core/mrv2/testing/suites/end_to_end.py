"""End to end: requests through scheduler, cache, runner and sampler."""

from __future__ import annotations

from typing import Any

import torch

from mrv2.frontend.llm import LLM
from mrv2.manifest import Capability
from mrv2.model_state.default import DefaultModelState
from mrv2.sample.params import SamplingParams
from mrv2.testing.bench import run_alone
from mrv2.testing.compare import right_alone
from mrv2.testing.generated import check_generated, engine, generate
from mrv2.testing.results import NO_REFERENCE, ConformanceFailure, Level, NotApplicable, NotRun, check
from mrv2.testing.subject import Case

LENS = (5, 1, 23, 38, 12, 16, 30)


@check(Level.CPU, Level.GPU)
def the_classes_that_run(case: Case) -> None:
    """What the architecture's name leads to is the adapter's model and state class.

    A state that hangs on another class than the one that runs is left out in silence.
    """
    ctx = case.model_config.context()
    wanted = case.subject.adapter.model_class(ctx), case.subject.adapter.model_state_class(ctx) or DefaultModelState
    found = type(case.loaded.module), case.loaded.state_class
    if wanted != found:
        raise ConformanceFailure(
            "classes that run with those that the hooks give for this checkpoint",
            f"{found[0].__qualname__} and {found[1].__qualname__}, expected {wanted[0].__qualname__} and "
            f"{wanted[1].__qualname__}",
            ["a hook answers differently from call to call"],
        )


def _require_right(case: Case) -> None:
    """What is wrong of one prompt alone was said before."""
    if not right_alone(case, case.prompts((40,), seed=24, known=True)[0]):
        raise NotRun("whole prompts alone aren't right either: see the suite attention")


@check(Level.CPU, Level.GPU, runs=True)
def answer(case: Case) -> dict[str, Any] | None:
    """Generated tokens and their log-probabilities are the reference's, at every position."""
    if case.answer is None:
        raise NotApplicable(NO_REFERENCE)
    _require_right(case)
    n, prompts = 1 if case.answer.recorded else 10, case.prompts(LENS, seed=24, known=True)
    results = generate(engine(case.loaded, case), prompts, n, options=case.options, depth=2)
    worst = check_generated(
        case,
        results,
        compared=f"greedy generation, requests of all lengths on reused rows, with the reference ({case.answer.name})",
        causes=["see the first suite that fails: what is left here is how requests are brought to the model"],
        answer=True,
    )
    return {"largest difference": worst}


@check(Level.CPU, Level.GPU, runs=True)
def schedules(case: Case) -> None:
    """Steps in flight, small budgets, and the plain runner change nothing.

    Each request's tokens and log-probabilities equal those of its whole sequence in one forward, alone.
    """
    prompts = case.prompts(LENS, seed=25)
    whole = not case.subject.offers(Capability.CHUNKED_PREFILL)
    settings: tuple[tuple[int, dict[str, Any]], ...] = (
        (3, {}), (1, {"runner": "sync"}), (2, {} if whole else {"max_num_tokens": 7}),
    )  # fmt: skip
    for depth, setting in settings:
        results = generate(engine(case.loaded, case, **setting), prompts, options=case.options, depth=depth)
        check_generated(
            case,
            results,
            compared=f"generation, {depth} steps in flight, {setting or 'usual settings'}, with each sequence alone",
            causes=["work is deferred and reads a later step's values: snapshot what it needs (R5)",
                    "a state or an input isn't the request's own: see the suites state and attention"],
        )  # fmt: skip


@check(Level.CPU, Level.GPU, runs=True)
def preempted_requests_come_back(case: Case) -> None:
    """Requests that are preempted, at any step, and resumed go on as if nothing had been (R4).

    A preempted request comes back as a new one: another row, `prefill_token_ids` with what it generated, nothing
    computed.
    """
    prompts = case.prompts((9, 22, 5), seed=13)
    for at in (1, 3, 6):
        parts = engine(case.loaded, case, prefix_caching=False)
        results = generate(parts, prompts, options=case.options, depth=1 + at % 2, preempt={at: [0, 2], at + 2: [1]})
        check_generated(
            case,
            results,
            compared=f"requests preempted before steps {at} and {at + 2} with the same sequences alone",
            causes=["add_request keeps something of the row's former owner, or skips a request that it knows",
                    "a state isn't started anew when computed is 0 again"],
        )  # fmt: skip


@check(Level.CPU, Level.GPU, runs=True)
def cached_prefixes(case: Case) -> None:
    """A prompt whose beginning is cached, at any block edge, goes on as if it had been computed.

    What a request keeps beside its cache blocks doesn't come with a hit: everything that later tokens need has to be
    in caches that the layers declared. With states, `prefix_caching` promises that a state can be copied whole (C7), to
    another slot (C3).
    """
    if not case.subject.offers(Capability.PREFIX_CACHING):
        raise NotApplicable("prefix_caching isn't declared")
    cached(case, case.loaded)


def cached(case: Case, loaded: Any) -> None:
    """Cold, hot, and the next turn of a conversation."""
    parts = engine(loaded, case)
    option = case.options[-1]
    prompts = case.prompts((7, 8, 9, 21), seed=26)
    cold = generate(parts, prompts, options=[option])
    hot = generate(parts, [[*p, p[0]] for p in prompts], options=[option], depth=2)
    turns = generate(parts, [[*g.prompt, *g.tokens, 1, 2] for g in cold], options=[option])
    # Others begin alike, with other options: their entries are others.
    strangers = generate(parts, prompts, options=[case.options[0]]) if option else []
    if not any(g.cached for g in hot):
        raise ConformanceFailure(
            "cached tokens of prompts that were computed before",
            "no request has any",
            ["the block size is larger than the prompts"],
        )
    for what, results in (("cold", cold), ("hot", hot), ("the next turn", turns), ("with other options", strangers)):
        check_generated(
            case,
            results,
            compared=f"generation, {what}, with prefix caching, with each sequence alone",
            causes=[
                "something of the prefix is kept outside of the declared caches: a module's buffer, by row or slot",
                "add_request counts from 0 though tokens are computed already",
            ],
        )


@check(Level.CPU, Level.GPU, runs=True)
def a_small_cache(case: Case) -> None:
    """Requests that the cache can't hold at once take turns, and lose nothing."""
    groups = engine(case.loaded, case).engine.scheduler.kv.groups
    parts = engine(case.loaded, case, num_blocks=1 + 14 * len(groups))
    results = generate(parts, case.prompts((9, 22, 15, 30, 3), seed=27), 16, options=case.options, depth=2)
    if not parts.engine.scheduler.stats.preemptions:
        return
    check_generated(
        case,
        results,
        compared="generation in a cache that is too small, with each sequence alone",
        causes=["see the suite state: requests are preempted and resumed here"],
    )


@check(Level.CPU, Level.GPU, runs=True)
def bfloat16(case: Case) -> dict[str, Any]:
    """In bfloat16 the model says nearly the same: bounds on log-probabilities, and mostly the same likeliest token.

    Ties flip, so tokens aren't compared. `Target.tolerances` states the bounds; deep models may need wider ones.
    """
    _require_right(case)
    bounds, loaded = case.subject.target.tolerances, case.load("bfloat16")
    gaps, same = [], []
    for i, ids in enumerate(case.prompts((31, 12, 40), seed=28)):
        option = case.option(i)
        want = case.answer.logprobs(ids, option) if case.answer is not None else None
        want = run_alone(case.loaded, ids, option, device=case.device) if want is None else want
        got = run_alone(loaded, ids, option, device=case.device)
        best = want.max(1)
        gaps.append((got.gather(1, best.indices[:, None])[:, 0] - best.values).abs())
        same.append(want.gather(1, got.argmax(1)[:, None])[:, 0] >= best.values - bounds.bf16)
    gap, agree = torch.cat(gaps), float(torch.cat(same).float().mean())
    figures = {"largest difference": float(gap.max()), "mean difference": float(gap.mean()), "top-1 agreement": agree}
    bad = gap > bounds.bf16
    if bool(bad.any()) or not float(gap.mean()) <= bounds.bf16_mean or agree < bounds.bf16_top1:
        raise ConformanceFailure(
            "log-probabilities of the likeliest token, bfloat16 with float32",
            ", ".join(f"{name} {value:.3g}" for name, value in figures.items())
            + f"; bounds {bounds.bf16}, {bounds.bf16_mean}, {bounds.bf16_top1}",
            ["a sum, a softmax or a state that has to be float32 is kept in the model's dtype",
             "a constant is rounded (rotary tables, scales)"],
            figures,
        )  # fmt: skip
    return figures


@check(Level.CPU, runs=True)
def the_front_door(case: Case) -> None:
    """`mrv2.LLM` loads the checkpoint by its architecture and generates the same tokens."""
    prompts = case.prompts((5, 17, 2), seed=29)
    want = generate(engine(case.loaded, case), prompts, 6, options=case.options)
    params = [SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, extra_args=g.options) for g in want]
    settings = {"max_num_seqs": 4, "max_num_tokens": 64, "max_model_len": 64, "kv_memory": 1 << 24}
    with LLM(str(case.folder), adapters=case.subject.adapters, device=case.device, dtype="float32", **settings) as llm:
        found = [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params)]
    for i, (got, one) in enumerate(zip(found, want, strict=True)):
        if got != one.tokens:
            at = next((k for k, (a, b) in enumerate(zip(got, one.tokens, strict=False)) if a != b), 0)
            raise ConformanceFailure(
                "tokens from mrv2.LLM with those from the engine",
                f"request {i}, position {len(one.prompt) + at}",
                ["tokenizer or config name end tokens that stop it"],
            )
