"""From the plainest way to run a model to the way it is served, one switch a rung: the first at which tokens part.

At the bottom: twins in place of kernels, the synchronous runner, each request alone, its prompt whole, nothing cached.
Each rung keeps what those below have switched, so that a rung that holds explains nothing of one that doesn't.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch

from mrv2.attn.reference import ReferenceAttention
from mrv2.errors import Mrv2Error
from mrv2.frontend.build import EngineParts, LoadedModel
from mrv2.kernels.registry import Kernel
from mrv2.testing.bench import run_alone
from mrv2.testing.freeze import replay_steps
from mrv2.testing.generated import GREEDY, Generated, engine, generate
from mrv2.testing.recorder import RecordedOps
from mrv2.testing.results import ConformanceFailure, NotApplicable, NotRun, Outcome
from mrv2.testing.suites.graphs import refuses_graphs
from mrv2.testing.vllm_runs import VllmRun, run_in_child

LENS, NEW = (5, 23, 11, 1, 18), (12, 7, 10, 13, 9)
"""Prompts, and tokens generated: all different, so that requests come to rows that aren't their places in the batch."""

ROWS, CONTEXT = 3, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Climbed:
    """What came of one rung."""

    rung: str
    switch: str
    outcome: Outcome
    message: str = ""
    seconds: float = 0.0


@dataclass(slots=True, kw_only=True)
class Ladder:
    """A model on its way up.

    Args:
        loaded: the model.
        device: that it was loaded to.
        adapters: local ones, for vLLM.
        tolerance: of log-probabilities.
        prompts: token ids.
        want: what came of them at the bottom.
    """

    loaded: LoadedModel
    device: str
    adapters: Sequence[str] = ()
    tolerance: float = 2e-4
    prompts: list[list[int]] = field(default_factory=list)
    want: list[Generated] = field(default_factory=list)

    def engine(self, **settings: Any) -> EngineParts:
        """An engine with everything off that isn't asked for. A prompt fits in one step."""
        plain = {"max_num_seqs": ROWS, "max_num_tokens": 96, "max_model_len": CONTEXT, "prefix_caching": False}
        return engine(self.loaded, self, **(plain | settings))


def climb(
    loaded: LoadedModel,
    *,
    device: str,
    adapters: Sequence[str] = (),
    seed: int = 0,
    on_rung: Callable[[Climbed], None] = lambda climbed: None,
) -> list[Climbed]:
    """All rungs, to the first at which tokens part; those above it are not run, since they would part too.

    Args:
        loaded: the model, in float32 if equal tokens are to be expected.
        device: that it was loaded to.
        adapters: local ones, for vLLM.
        seed: of the prompts.
        on_rung: told of each.
    """
    dtype = next(loaded.module.parameters()).dtype
    tolerance = {torch.float32: 2e-4 if device == "cpu" else 2e-3}.get(dtype, 0.35)
    ladder = Ladder(loaded=loaded, device=device, adapters=adapters, tolerance=tolerance)
    generator = torch.Generator().manual_seed(seed)
    vocab = loaded.config.vocab_size
    ladder.prompts = [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in LENS]
    found: list[Climbed] = []
    fell = ""
    for name, switch, run in RUNGS:
        started = time.perf_counter()
        outcome, message = (Outcome.NOT_RUN, f"tokens part at {fell}") if fell else _step(ladder, run)
        seconds = time.perf_counter() - started
        climbed = Climbed(rung=name, switch=switch, outcome=outcome, message=message, seconds=seconds)
        fell = fell or (name if outcome is Outcome.FAILED else "")
        found.append(climbed)
        on_rung(climbed)
    return found


def _step(ladder: Ladder, run: Callable[[Ladder], Any]) -> tuple[Outcome, str]:
    try:
        return Outcome.PASSED, run(ladder) or ""
    except NotRun as reason:
        return Outcome.NOT_RUN, str(reason)
    except NotApplicable as reason:
        return Outcome.NOT_APPLICABLE, str(reason)
    except ConformanceFailure as failure:
        return Outcome.FAILED, failure.first
    except (Mrv2Error, AssertionError, RuntimeError, IndexError, ValueError) as error:
        return Outcome.FAILED, f"it ends with {type(error).__name__}: {error}"


# -- rungs ------------------------------------------------------------------------------------------------------------


def _twins(ladder: Ladder) -> str:
    """The bottom: what all others are compared with."""
    with _only_twins() if ladder.device != "cpu" else nullcontext():
        for prompt, n in zip(ladder.prompts, NEW, strict=True):
            parts = ladder.engine(runner="sync", max_num_seqs=1)
            forward = parts.engine._runner._forward
            forward._backend, forward._one_token = ReferenceAttention(), None
            ladder.want += generate(parts, [prompt], n)
    return f"{sum(NEW)} tokens of {len(ladder.prompts)} requests"


@contextmanager
def _only_twins() -> Iterator[None]:
    with mock.patch.object(Kernel, "__call__", lambda kernel, *args, **kwargs: kernel.twin(*args, **kwargs)):
        yield


def _cpu_code(ladder: Ladder) -> None:
    if ladder.device != "cpu":
        raise NotApplicable(f"the model runs on {ladder.device}")
    _alone(ladder, runner="sync")


def _kernels(ladder: Ladder) -> None:
    if ladder.device == "cpu":
        raise NotRun("Triton kernels need a GPU")
    _alone(ladder, runner="sync")


def _async(ladder: Ladder) -> None:
    _alone(ladder, depth=2)


def _alone(ladder: Ladder, depth: int = 1, **settings: Any) -> None:
    results = []
    for prompt, n in zip(ladder.prompts, NEW, strict=True):
        results += generate(ladder.engine(max_num_seqs=1, **settings), [prompt], n, depth=depth)
    _compare(ladder, results)


def _graphs(ladder: Ladder) -> str:
    if reason := refuses_graphs(ladder.loaded, ladder.device):
        raise NotApplicable(reason)
    plain = [replace(GREEDY, logprobs=None)]  # with log-probabilities a graph would hold less
    results = []
    for prompt, n in zip(ladder.prompts, NEW, strict=True):
        if ladder.device == "cpu":
            parts = ladder.engine(max_num_seqs=1)
            replay_steps(parts, RecordedOps())
        else:
            parts = ladder.engine(max_num_seqs=1, graphs=True)
        results += generate(parts, [prompt], n, params=plain, depth=2)
    _compare(ladder, results)
    return "operations recorded and done again: CUDA graphs need a GPU" if ladder.device == "cpu" else "CUDA graphs"


def _graphs_of(ladder: Ladder) -> dict[str, Any]:
    """From here on graphs stay on where they are real."""
    return {"graphs": ladder.device != "cpu" and not refuses_graphs(ladder.loaded, ladder.device)}


def _batched(ladder: Ladder) -> None:
    _compare(ladder, generate(ladder.engine(**_graphs_of(ladder)), ladder.prompts, NEW, depth=2))


def _chunked(ladder: Ladder) -> None:
    if not ladder.loaded.chunked_prefill:
        raise NotApplicable("chunked_prefill isn't declared")
    _compare(ladder, generate(_chunking(ladder), ladder.prompts, NEW, depth=2))


def _chunking(ladder: Ladder, **settings: Any) -> EngineParts:
    chunk = {"max_num_tokens": 7} if ladder.loaded.chunked_prefill else {}
    return ladder.engine(**(chunk | _graphs_of(ladder) | settings))


def _hot(ladder: Ladder) -> str:
    if not ladder.loaded.prefix_caching:
        raise NotApplicable("prefix_caching isn't declared")
    parts = _chunking(ladder, prefix_caching=True)
    for _ in range(2):
        results = generate(parts, ladder.prompts, NEW, depth=2)
        _compare(ladder, results)
    hits = sum(r.cached for r in results)
    if not hits:
        raise ConformanceFailure("a second turn of the same prompts", "nothing of them came from the cache")
    return f"{hits} tokens came from the cache"


def _preempted(ladder: Ladder) -> None:
    parts = _chunking(ladder)
    results = generate(parts, ladder.prompts, NEW, depth=2, preempt={3: (0,), 6: (1,), 9: (0, 1), 12: (0,), 16: (0,)})
    if not parts.engine.scheduler.stats.preemptions:
        raise NotRun("no request was running when it was to be preempted")
    _compare(ladder, results)


def _vllm(ladder: Ladder) -> None:
    if importlib.util.find_spec("vllm") is None:
        raise NotRun("vLLM isn't installed")
    config = ladder.loaded.config
    run = VllmRun(lens=LENS, n=max(NEW))
    options: list[dict[str, Any]] = [{} for _ in ladder.prompts]
    turns = run_in_child(
        str(config.path), config.architecture, run, ladder.prompts, options, local=list(ladder.adapters)
    )
    results = [
        replace(want, tokens=tokens[: len(want.tokens)], logprobs=logprobs[: len(want.tokens)])
        for want, (tokens, logprobs) in zip(ladder.want, turns[0], strict=True)
    ]
    _compare(ladder, results, factor=10)


RUNGS: tuple[tuple[str, str, Callable[[Ladder], Any]], ...] = (
    ("twins", "the bottom: twins, synchronous, alone, whole, nothing cached", _twins),
    ("cpu code", "the CPU's own attention and code for single tokens in place of twins", _cpu_code),
    ("kernels", "Triton kernels in place of twins", _kernels),
    ("async", "two steps in flight in place of the synchronous runner", _async),
    ("graphs", "decodes captured and replayed", _graphs),
    ("batched", "requests together, on few rows", _batched),
    ("chunked", "prompts cut into chunks", _chunked),
    ("hot cache", "the same prompts again, their prefixes cached", _hot),
    ("preempted", "requests interrupted and resumed", _preempted),
    ("vllm", "vLLM in place of the native host", _vllm),
)


# -- comparison -------------------------------------------------------------------------------------------------------


def _compare(ladder: Ladder, results: Sequence[Generated], factor: float = 1) -> None:
    """Equal tokens, ties aside, and log-probabilities as far as there are any."""
    tolerance = ladder.tolerance * factor
    for i, (got, want) in enumerate(zip(results, ladder.want, strict=True)):
        name = f"request {i} ({len(want.prompt)} tokens)"
        same = next((k for k, (a, b) in enumerate(zip(got.tokens, want.tokens, strict=False)) if a != b), None)
        for k, (a, b) in enumerate(zip(got.logprobs[:same], want.logprobs[:same], strict=False)):
            if not abs(a - b) <= tolerance:
                raise ConformanceFailure(
                    "log-probabilities",
                    f"{name}, generated token {k} of {len(want.tokens)}: its log-probability is {a:.5g}, {b:.5g} at "
                    f"the bottom (allowed is {tolerance:g}), its text is the same",
                )
        if len(got.tokens) != len(want.tokens) and same is None:
            raise ConformanceFailure("tokens", f"{name}: {len(got.tokens)} tokens, {len(want.tokens)} at the bottom")
        if same is not None and not _is_tie(ladder, want, got.tokens[same], same, tolerance):
            raise ConformanceFailure(
                "tokens",
                f"{name}, generated token {same} of {len(want.tokens)}: {got.tokens[same]}, {want.tokens[same]} at the "
                "bottom",
            )


def _is_tie(ladder: Ladder, want: Generated, token: int, k: int, tolerance: float) -> bool:
    """Whether `token` is as likely as the one that was generated there."""
    if not 0 <= token < ladder.loaded.config.vocab_size:
        return False
    ids = [*want.prompt, *want.tokens[:k]]
    logprobs = run_alone(ladder.loaded, ids, want.options, device=ladder.device)[-1]
    return float(logprobs[want.tokens[k]] - logprobs[token]) <= 2 * tolerance
