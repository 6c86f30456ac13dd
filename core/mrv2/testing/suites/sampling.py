"""Sampling: tokens depend on a request's own logits, parameters and seed, and on nothing beside it."""

from __future__ import annotations

from typing import Any

import torch

from mrv2.sample.params import SamplingParams
from mrv2.testing.bench import Bench, Fed
from mrv2.testing.generated import Generated, engine, generate
from mrv2.testing.results import ConformanceFailure, Level, check
from mrv2.testing.subject import Case

DRAWN = (
    SamplingParams(temperature=0.9, seed=11, ignore_eos=True),
    SamplingParams(temperature=1.3, top_k=7, seed=12, ignore_eos=True),
    SamplingParams(temperature=0, ignore_eos=True),
    SamplingParams(temperature=0.7, top_p=0.8, min_p=0.02, seed=13, ignore_eos=True),
)


@check(Level.CPU, Level.GPU, runs=True)
def logits(case: Case) -> None:
    """Logits have one entry per token of the vocabulary, and all of them are finite."""
    bench, requests = Bench(case.loaded, device=case.device), [Fed(p) for p in case.prompts((4, 9), seed=22)]
    for row, request in enumerate(requests):
        bench.add(request, row)
    bench.run(requests)
    head: Any = case.loaded.module.lm_head
    with torch.inference_mode():
        found = head(torch.cat([r.hidden[-1] for r in requests]))
    want = [sum(len(r.ids) for r in requests), case.vocab_size]
    if list(found.shape) != want or not bool(found.isfinite().all()):
        raise ConformanceFailure(
            "the head's logits with one finite entry per token and vocabulary entry",
            f"shape {list(found.shape)}, expected {want}; {int((~found.isfinite()).sum())} not finite",
            ["lm_head's size isn't the config's vocab_size", "hidden states overflow"],
        )


@check(Level.CPU, Level.GPU, runs=True)
def neighbours_dont_matter(case: Case) -> None:
    """A seeded request draws the same tokens alone, beside others, on another row, and after a preemption.

    The host's sampler sees to it. An adapter's own (`custom_sampler`) reads parameters through `rows`, and draws from
    (seed, position) instead of a generator that all share.
    """
    prompts = case.prompts((6, 11, 3, 8), seed=23)
    alone: list[Generated] = []
    for i, prompt in enumerate(prompts):
        alone += generate(_drawing(case), [prompt], options=[case.option(i)], params=[DRAWN[i]])
    options = [case.option(i) for i in range(4)]
    runs = {
        "together": generate(_drawing(case), prompts, options=options, params=DRAWN),
        "together, two steps in flight": generate(_drawing(case), prompts, options=options, params=DRAWN, depth=2),
        "preempted": generate(_drawing(case), prompts, options=options, params=DRAWN, preempt={4: [1, 2]}),
    }
    turned = [3, 1, 0, 2]
    other = generate(
        _drawing(case), [prompts[k] for k in turned], options=[options[k] for k in turned],
        params=[DRAWN[k] for k in turned],
    )  # fmt: skip
    runs["in another order"] = [other[turned.index(k)] for k in range(4)]
    for how, results in runs.items():
        for k, (got, want) in enumerate(zip(results, alone, strict=True)):
            _same_tokens(case, got, want, f"request {k} ({len(got.prompt)} tokens, {_shown(DRAWN[k])})", how)


def _drawing(case: Case) -> Any:
    return engine(case.loaded, case, prefix_caching=False)  # which the suite end-to-end looks at


def _shown(params: SamplingParams) -> str:
    return f"temperature {params.temperature:g}, seed {params.seed}"


def _same_tokens(case: Case, got: Generated, want: Generated, name: str, how: str) -> None:
    bad = [t for t in got.tokens if not 0 <= t < case.vocab_size]
    if got.tokens == want.tokens and not bad:
        return
    at = next((i for i, (a, b) in enumerate(zip(got.tokens, want.tokens, strict=False)) if a != b), 0)
    position = len(got.prompt) + at
    raise ConformanceFailure(
        f"tokens drawn {how} with those drawn alone",
        f"{name}, position {position}: token {got.tokens[at]}, alone {want.tokens[at]}",
        [
            "a sampler of the adapter's own draws from a shared generator, or reads parameters by batch position",
            "logits depend on the batch: see the suite attention",
        ],
    )
