"""Generation by the real engine under conditions of one's choice, and the comparison with a model run alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from mrv2.frontend.build import EngineParts, LoadedModel, assemble
from mrv2.frontend.engine_config import EngineConfig
from mrv2.runner.request import Request
from mrv2.runner.sync import SyncRunner
from mrv2.sample.params import SamplingParams
from mrv2.testing.bench import run_alone
from mrv2.testing.compare import describe, greedy_pair, require_close
from mrv2.testing.results import ConformanceFailure
from mrv2.testing.subject import Case

GREEDY = SamplingParams(temperature=0, logprobs=0, ignore_eos=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """What became of one request."""

    prompt: list[int]
    options: Mapping[str, Any]
    tokens: list[int]
    logprobs: list[float]  # of the sampled token
    cached: int


class OnDevice(Protocol):
    """What `engine` needs to know of a `Case`."""

    @property
    def device(self) -> str:
        """Where the model is: "cpu" or "cuda"."""
        ...


def engine(loaded: LoadedModel, case: OnDevice, **settings: Any) -> EngineParts:
    """An engine for a few small requests, whose cache holds NaN wherever nobody has written since it was handed out."""
    defaults = {"max_num_seqs": 4, "max_num_tokens": 64, "max_model_len": 64, "block_size": 4, "graphs": False}
    defaults["kv_memory"] = 1 << 26  # so that nothing is measured
    parts = assemble(loaded, EngineConfig(**(defaults | {"device": case.device} | settings)))
    if not settings.get("debug"):
        _poison(parts)
    return parts


def _poison(parts: EngineParts) -> None:
    pool, pages = parts.engine.scheduler.kv.pool, parts.engine._runner._forward.pages
    take = pool.allocate

    def allocate(count: int) -> list[int]:
        blocks: list[int] = take(count)
        for page in pages:
            page[blocks] = 0xFF
        return blocks

    for page in pages:
        page.fill_(0xFF)
    pool.allocate = allocate  # type: ignore[method-assign]


def generate(
    parts: EngineParts,
    prompts: Sequence[Sequence[int]],
    n: int | Sequence[int] = 8,
    *,
    options: Sequence[Mapping[str, Any]] = ({},),
    params: Sequence[SamplingParams] = (GREEDY,),
    depth: int = 1,
    preempt: Mapping[int, Sequence[int]] | None = None,
) -> list[Generated]:
    """Generate `n` tokens for each prompt.

    Args:
        parts: from `engine`; may have run before.
        prompts: token ids.
        n: tokens of each, in turn if there are several numbers.
        options: `extra_args`, in turn.
        params: in turn.
        depth: steps in flight.
        preempt: before which step, and whom, by order of arrival.

    Raises:
        ConformanceFailure: requests don't end.
    """
    scheduler, runner = parts.engine.scheduler, parts.engine._runner
    requests: list[Request] = []
    lens = (n,) if isinstance(n, int) else n
    for i, prompt in enumerate(prompts):
        chosen = replace(params[i % len(params)], max_tokens=lens[i % len(lens)], extra_args=options[i % len(options)])
        requests.append(parts.intake.request(f"{scheduler._step_id}-{i}", list(prompt), chosen))
    got: dict[int, list[float]] = {r.number: [] for r in requests}
    parts.engine.add(requests)
    flying: deque[Any] = deque()
    step, most = 0, 100 + 4 * sum(r.len_limit for r in requests)
    while scheduler.has_work:
        if step > most:
            raise ConformanceFailure(
                "requests with their lengths",
                f"request {min(r.number for r in requests if r.ended is None)} hasn't ended after {step} steps",
                ["the device counts other tokens than the host: rows taken for places in the batch"],
            )
        for k in sorted((preempt or {}).get(step, ()), reverse=True):
            if k < scheduler.num_running:
                scheduler._preempt(scheduler._running[k])
        step += 1
        plan = scheduler.plan() if len(flying) < depth else None
        if plan is not None:
            done = runner.step(plan) if isinstance(runner, SyncRunner) else runner.finish(runner.begin(plan))
            flying.append((plan, done))
        if flying and (plan is None or len(flying) == depth):
            plan, output = flying.popleft()
            events = scheduler.update(plan, output if isinstance(runner, SyncRunner) else output.wait())
            for i, number in enumerate(events.numbers_np.tolist()):
                if events.logprobs is not None:
                    got[number].append(float(events.logprobs.logprobs_np[i, 0]))
    return [
        Generated(
            prompt=list(prompt),
            options=request.sampling.extra_args,
            tokens=request.tokens_np[len(prompt) :].tolist(),
            logprobs=got[request.number],
            cached=request.num_cached_tokens,
        )
        for prompt, request in zip(prompts, requests, strict=True)
    ]


def check_generated(
    case: Case, results: Sequence[Generated], *, compared: str, causes: Sequence[str], answer: bool = False
) -> float:
    """Greedy tokens are the likeliest ones, ties aside, and log-probabilities those of the same sequences run alone
    (or, with `answer`, of the reference, as far as it knows them).
    """
    pairs = []
    for i, result in enumerate(results):
        ids = [*result.prompt, *result.tokens[:-1]]
        if answer:
            assert case.answer is not None
            want = case.answer.logprobs(ids, result.options)
            if want is None:
                continue
        else:
            want = run_alone(case.loaded, ids, result.options, device=case.device)
        want = want[len(result.prompt) - 1 :]
        name, start = describe(i, result.prompt, result.options), len(result.prompt)
        pairs.append(greedy_pair(name, want, result.tokens, result.logprobs, start=start))
    return require_close(pairs, compared=compared, tolerance=2 * case.tolerance, causes=causes)
