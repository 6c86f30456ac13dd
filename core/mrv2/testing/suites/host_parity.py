"""Host parity: the same package runs in the other host, in stages, and says the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mrv2.bridge.checks import check_native_only
from mrv2.context import AdapterContext
from mrv2.layers.base import Stream
from mrv2.layers.context import NativeContext
from mrv2.loading import describe, raised_at
from mrv2.manifest import Capability
from mrv2.model_state.default import DefaultModelState
from mrv2.testing.bench import Bench, Fed
from mrv2.testing.compare import Pair, require_close
from mrv2.testing.compare import describe as describe_request
from mrv2.testing.results import ConformanceFailure, Level, NotApplicable, check
from mrv2.testing.subject import Case, Subject
from mrv2.testing.vllm_runs import VllmRun, check_in_vllm


@check(Level.STATIC, whole=True)
def the_state_fits_both_hosts(subject: Subject) -> None:
    """With anything declared for vLLM, the state overrides nothing that only the native host calls.

    `attn_extras` adds to attention metadata in both hosts.
    """
    if not any(s.on("vllm") for s in subject.adapter.manifest.capabilities.values()):
        raise NotApplicable("nothing is declared for vLLM")
    for architecture in subject.adapter.manifest.architectures:
        state = subject.adapter.model_state_class(AdapterContext(architecture=architecture, host="vllm"))
        check_native_only(state or DefaultModelState)


class _Carried:
    """What a stage that isn't the last gives to the next one. Nothing may be done to it."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream


class StageContext(NativeContext):
    """One of two pipeline stages, with the layers of both in this process."""

    carried: _Carried | None = None
    is_last = True

    def embed(self, table: nn.Module, input_ids: Tensor, then: Callable[[Tensor], Tensor] | None = None) -> Stream:
        """See `StepContext.embed`."""
        return super().embed(table, input_ids, then) if self.carried is None else self.carried._stream

    def run(self, layers: nn.ModuleList, h: Stream, positions: Tensor) -> Stream:
        """See `StepContext.run`: half of them."""
        half = len(layers) // 2
        return super().run(layers[half:] if self.is_last else layers[:half], h, positions)

    def finish(self, norm: nn.Module, h: Stream, then: Callable[[Tensor], Tensor] | None = None) -> Any:
        """See `StepContext.finish`."""
        return super().finish(norm, h, then) if self.is_last else _Carried(h)


@check(Level.CPU, runs=True)
def stages(case: Case) -> None:
    """Cut into two pipeline stages, the model computes the same.

    What is done to embeddings goes into `ctx.embed(…, then)`, what follows the last layer into `ctx.finish(…, then=…)`,
    and the loop over layers is `ctx.run`'s: each stage runs `forward` from its start to its end (M4).
    """
    prompts = case.prompts((9, 4), seed=31)
    option = case.options[-1]
    got, want = ([Fed(p, option) for p in prompts] for _ in range(2))
    staged, whole = (Bench(case.loaded, device=case.device) for _ in range(2))
    for row in range(2):
        staged.add(got[row], row)
        whole.add(want[row], row)
    for take in (3, 1):
        _stage_step(staged, [(r, take) for r in got])
        whole.step([(r, take) for r in want])
    require_close(
        [
            Pair(
                request=describe_request(i, a.ids[:4], a.options),
                got=staged.logprobs(torch.cat(a.hidden)),
                want=whole.logprobs(torch.cat(b.hidden)),
            )
            for i, (a, b) in enumerate(zip(got, want, strict=True))
        ],
        compared="the model in two pipeline stages with the whole model",
        tolerance=case.tolerance,
        causes=[
            "embeddings are changed outside of ctx.embed(…, then), so every stage does it again",
            "the model loops over its layers instead of calling ctx.run, so every stage runs all of them",
            "something is computed in an early layer and used in a later one without being in the stream",
        ],
    )


@torch.inference_mode()
def _stage_step(bench: Bench, step: Sequence[tuple[Fed, int]]) -> None:
    """As `Bench.step`, each stage a forward of its own with the same inputs."""
    hidden = bench.forward.hidden
    view = bench.view(step)
    state, forward = bench.state, bench.forward
    state.before_forward(view)
    metadata, inputs = state.prepare_attn(view), state.prepare_inputs(view)
    out: Any = None
    for is_last in (False, True):
        ctx = StageContext(
            attn=metadata,
            caches=forward._caches,
            group_of=forward._group_of,
            backend=forward._backend,
            prompt_lens=lambda: view.table.prompt_len[view.rows.clamp(min=0).long()],
        )
        ctx.is_last, ctx.carried = is_last, out
        try:
            out = bench.module(view.input_ids, view.positions, ctx, **inputs)
        except Exception as error:
            raise ConformanceFailure(
                f"forward on the {'last' if is_last else 'first'} of two pipeline stages",
                f"{describe(error)}, raised at {raised_at(error.__traceback__)}",
                ["code after ctx.finish touches what it returned: give it as ctx.finish(…, then=…)",
                 "something that only one stage has is used on every stage"],
            ) from error  # fmt: skip
        if not is_last and not isinstance(out, _Carried):
            raise ConformanceFailure(
                "what forward returns on the first of two stages with what ctx.finish gave it",
                f"a {type(out).__name__}",
                ["forward returns something else than ctx.finish does"],
            )
    bench.forward.hidden = lambda view: out  # type: ignore[method-assign]
    try:
        bench.step(step)
    finally:
        bench.forward.hidden = hidden  # type: ignore[method-assign]


# -- the real one --------------------------------------------------------------------------------------------

MANY = (1, 3, 70, 17, 33, 12)


@check(Level.VLLM)
def in_vllm(case: Case) -> None:
    """Inside vLLM: a ragged batch, its prompts again with cached prefixes, and the reference's tokens.

    `mrv2 doctor NAME --vllm` says what vLLM makes of the adapter before a model is loaded.
    """
    caching = case.subject.offers(Capability.PREFIX_CACHING, "vllm")
    check_in_vllm(case, VllmRun(lens=MANY, repeat=2, settings={"enable_prefix_caching": caching}))


@check(Level.VLLM)
def in_vllm_in_chunks(case: Case) -> None:
    """Inside vLLM: prompts computed in chunks of at most 16 tokens, beside others that decode."""
    if not case.subject.offers(Capability.CHUNKED_PREFILL, "vllm"):
        raise NotApplicable("chunked_prefill isn't declared for vLLM")
    settings = {"max_num_batched_tokens": 16, "enable_prefix_caching": False}
    check_in_vllm(case, VllmRun(lens=(60, 61, 50, 33), n=24, settings=settings))


def _with(case: Case, capability: Capability, settings: Mapping[str, Any]) -> None:
    if not case.subject.offers(capability, "vllm"):
        raise NotApplicable(f"{capability} isn't declared for vLLM")
    caching = case.subject.offers(Capability.PREFIX_CACHING, "vllm")
    check_in_vllm(case, VllmRun(lens=MANY, settings={"enable_prefix_caching": caching, **settings}))


@check(Level.VLLM)
def in_vllm_on_two_ranks(case: Case) -> None:
    """Inside vLLM: every layer divided over two ranks (C5). Heads of both kinds have to divide."""
    _with(case, Capability.TENSOR_PARALLEL, {"tensor_parallel_size": 2})


@check(Level.VLLM)
def in_vllm_in_two_stages(case: Case) -> None:
    """Inside vLLM: the stack cut into two stages."""
    _with(case, Capability.PIPELINE_PARALLEL, {"pipeline_parallel_size": 2})


@check(Level.VLLM)
def in_vllm_with_drafts(case: Case) -> None:
    """Inside vLLM: n-gram drafts, some kept and some not, change no token."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    _with(case, Capability.SPECULATION, {"speculative_config": drafts})
