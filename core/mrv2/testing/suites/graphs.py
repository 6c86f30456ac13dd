"""Graphs: a step that is captured once does in every later step what a new build of it would do."""

from __future__ import annotations

from mrv2.frontend.build import LoadedModel
from mrv2.layers.custom import CacheHandle
from mrv2.manifest import Capability
from mrv2.model_state.graphs import GraphSupport
from mrv2.sample.params import SamplingParams
from mrv2.testing.bench import Bench
from mrv2.testing.freeze import check_frozen
from mrv2.testing.recorder import HostReadError
from mrv2.testing.results import ConformanceFailure, Level, NotApplicable, NotRun, check
from mrv2.testing.subject import Case

CAUSES = (
    "a Python number, length, counter or list that the step's code reads: it is what it was at capture",
    "a tensor made from such values in fill or in a kernel: fill a persistent buffer from the host side instead",
    "a branch on the host: both sides have to be computed, and selected on the device",
)


def refuses_graphs(loaded: LoadedModel, device: str) -> str:
    """What of the model says that its steps can't be captured; empty: nothing."""
    state = Bench(loaded, device=device).state
    if state.graph_support() is GraphSupport.NEVER:
        return f"{type(state).__qualname__}.graph_support() says NEVER"
    kernels = (m for m in loaded.module.modules() if isinstance(m, CacheHandle))
    return next((f"the kernel of {m.name} has capturable=False" for m in kernels if not m.capturable), "")


@check(Level.CPU, Level.GPU, runs=True)
def replayed_steps(case: Case) -> None:
    """Steps captured once and replayed equal steps built anew, while rows, lengths and order change (P2).

    On a CPU the operations are recorded and done again; on a GPU they are CUDA graphs.
    """
    if not case.subject.offers(Capability.CUDA_GRAPHS):
        raise NotApplicable("cuda_graphs isn't declared")
    if reason := refuses_graphs(case.loaded, case.device):
        raise ConformanceFailure(
            "what adapter.toml declares with what the model says",
            f"cuda_graphs is declared, and {reason}",
            ["take the capability back, or make the step capturable"],
        )
    frozen(case)


def frozen(case: Case) -> None:
    """`check_frozen`, its finding in our form."""
    params = [SamplingParams(temperature=0, extra_args=option) for option in case.options]
    try:
        check_frozen(case.loaded, device=case.device, params=params)
    except AssertionError as error:
        if isinstance(error, HostReadError) or "on the host, at" in str(error):
            raise NotRun("the step needs the device's values on the host: see the suite no-sync") from error
        raise ConformanceFailure("replayed steps with steps built anew", str(error), CAUSES) from error
