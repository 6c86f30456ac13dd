"""Capabilities: what `adapter.toml` declares is there and proven, and what passes is declared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mrv2.attn.groups import AttentionCache
from mrv2.attn.specs import PerRequest
from mrv2.manifest import Capability, Support
from mrv2.testing.bench import Bench, Fed, run_alone
from mrv2.testing.compare import Pair, require_close
from mrv2.testing.results import ConformanceFailure, Level, NotApplicable, NotRun, check
from mrv2.testing.subject import Case, Subject
from mrv2.testing.suites.end_to_end import cached
from mrv2.testing.suites.graphs import frozen, refuses_graphs

NATIVE = frozenset(
    {
        Capability.CHUNKED_PREFILL,
        Capability.PREFIX_CACHING,
        Capability.SLIDING_WINDOW,
        Capability.RECURRENT,
        Capability.CUDA_GRAPHS,
        Capability.GGUF,
        Capability.LOGITS_PROCESSORS,
    }
)
"""What this core's native host offers at all."""


@check(Level.STATIC, whole=True)
def declared_is_offered(subject: Subject) -> None:
    """Nothing is declared for the native host that this core's native host doesn't have."""
    for capability, support in subject.adapter.manifest.capabilities.items():
        if support.on("native") and capability not in NATIVE:
            raise ConformanceFailure(
                "adapter.toml with what the native host offers",
                f'{capability} = "{support}": the native host of this mrv2 has no such thing',
                [f'declare {capability} = "vllm" or "no"'],
            )


PROVEN = {
    "native": NATIVE - {Capability.GGUF, Capability.LOGITS_PROCESSORS},
    "vllm": frozenset(
        {
            Capability.CHUNKED_PREFILL,
            Capability.PREFIX_CACHING,
            Capability.SLIDING_WINDOW,
            Capability.RECURRENT,
            Capability.SPECULATION,
            Capability.TENSOR_PARALLEL,
            Capability.PIPELINE_PARALLEL,
        }
    ),
}
"""What the suites run, by host. The rest of what is declared is named in the report."""


@check(Level.CPU, whole=True)
def declared_is_used(subject: Subject) -> dict[str, Any] | None:
    """What is declared about layers is used by one of the configs, or nothing here could prove it.

    Add a config to the target that uses it, or take the declaration back.
    """
    specs = [spec for case in subject.cases() for spec in case.loaded.caches.values()]
    uses = {
        Capability.SLIDING_WINDOW: any(isinstance(s, AttentionCache) and s.window is not None for s in specs),
        Capability.RECURRENT: any(isinstance(s, PerRequest) for s in specs),
    }
    for capability, used in uses.items():
        if subject.offers(capability) and not used:
            raise ConformanceFailure(
                "adapter.toml with what the layers of the configs declare",
                f"{capability} is declared, and no layer of {', '.join(subject.names)} uses it",
                ["the model file forgets to pass it on to the layer", "the target has no config with it"],
            )
    declared = subject.adapter.manifest.capabilities.items()
    unproven = [
        f"{c} ({host})" for c, s in declared for host in PROVEN if s in (host, "both") and c not in PROVEN[host]
    ]
    return {"unproven": ", ".join(unproven)} if unproven else None


def _undeclared(case: Case, capability: Capability) -> None:
    """Whether it is left open; `no` is an answer."""
    if capability in case.subject.adapter.manifest.capabilities:
        raise NotApplicable(f"adapter.toml says {capability} = {case.subject.adapter.manifest.support(capability)!s}")


def _must_fail(case: Case, capability: Capability, run: Callable[[], None]) -> None:
    try:
        run()
    except (ConformanceFailure, NotRun):
        return
    raise ConformanceFailure(
        f"what passes with what adapter.toml declares, config {case.name}",
        f"{capability} isn't declared, and its checks pass",
        [f'declare {capability} = "{Support.NATIVE}" (or "{Support.BOTH}"), or say {capability} = "{Support.NO}"'],
    )


@check(Level.CPU, runs=True)
def chunks_that_pass_are_declared(case: Case) -> None:
    """`chunked_prefill` is declared if prompts may be cut, or stated as `no`."""
    _undeclared(case, Capability.CHUNKED_PREFILL)

    def run() -> None:
        (ids,) = case.prompts((23,), seed=30)
        bench, request = Bench(case.plain, device=case.device), Fed(ids)
        bench.add(request, 0)
        (got,) = bench.run([request], chunks=(7, 3))
        want = run_alone(case.plain, ids, {}, device=case.device)
        pair = Pair(request="request 0", got=got, want=want)
        require_close([pair], compared="chunks", tolerance=case.tolerance, causes=())

    _must_fail(case, Capability.CHUNKED_PREFILL, run)


@check(Level.CPU, runs=True)
def prefixes_that_pass_are_declared(case: Case) -> None:
    """`prefix_caching` is declared if cached prefixes are right, or stated as `no`."""
    _undeclared(case, Capability.PREFIX_CACHING)
    _must_fail(case, Capability.PREFIX_CACHING, lambda: cached(case, case.plain))


@check(Level.CPU, runs=True)
def graphs_that_pass_are_declared(case: Case) -> None:
    """`cuda_graphs` is declared if steps may be replayed, or stated as `no`."""
    _undeclared(case, Capability.CUDA_GRAPHS)
    if reason := refuses_graphs(case.loaded, case.device):
        raise NotApplicable(reason)
    _must_fail(case, Capability.CUDA_GRAPHS, lambda: frozen(case))
