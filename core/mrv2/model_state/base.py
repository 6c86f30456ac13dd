"""`ModelState`: everything in which one model's step differs from the common one.

Two phases. Host-side methods run when something changes and may only *stage* writes. Device-side methods
get a `StepView` and may run once only, at graph capture: whatever they compute on the host would freeze.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from mrv2.api import RequestData
from mrv2.errors import RequestError
from mrv2.model_state.graphs import CaptureContext, GraphPlan, GraphSupport
from mrv2.state.view import AttnMetadata, Limits, StepView

if TYPE_CHECKING:
    from mrv2.attn.groups import BoundCache, KVGroup
    from mrv2.state.plan import StepPlan


class ModelState(ABC):
    """One instance per runner of a loaded model. `row` is a request's stable table index; `i` a position in one batch.

    Order within a step: `remove_request`, `add_request`, `stage_step`, `apply_staged_writes` (host), then
    `before_forward`, `prepare_attn`, `get_mm_embeddings`, `prepare_inputs`, the forward, sampling,
    `after_sample` (device).
    """

    def __init__(self, model: nn.Module, limits: Limits, groups: tuple[KVGroup, ...]) -> None:
        self.model = model
        self.limits = limits
        self.groups = groups

    # -- host side ---------------------------------------------------------------------------------------

    def check_options(self, extra_args: Mapping[str, Any]) -> None:
        """Validate a request's `SamplingParams.extra_args` when it arrives, before any row exists.

        Raises:
            RequestError: an option is unknown or wrong; the default knows none.
        """
        if extra_args:
            raise RequestError(
                f"extra_args has {', '.join(map(repr, extra_args))}, which the model's adapter doesn't know",
                where="SamplingParams.extra_args",
                fix="leave them out",
            )

    @abstractmethod
    def add_request(self, row: int, request: RequestData) -> None:
        """Stage everything kept for `row`. A freed row is reused at once, and the prompt may be computed
        already, so set every field. Adding a row again is legal.
        """

    @abstractmethod
    def remove_request(self, row: int, req_id: str) -> None:
        """Forget `row`. An unknown id is legal."""

    def stage_step(self, plan: StepPlan) -> None:  # noqa: B027 - rare; most families need no per-step host work
        """Stage per-step host work. Must not read device values."""

    @abstractmethod
    def apply_staged_writes(self) -> None:
        """Bring everything staged to the device, in one go."""

    # -- device side -------------------------------------------------------------------------------------

    def before_forward(self, view: StepView) -> None:  # noqa: B027
        """Device work before metadata is built (moving states over block edges, for one)."""

    @abstractmethod
    def prepare_attn(self, view: StepView) -> AttnMetadata:
        """Attention metadata per KV group name. Overriding it as a whole is native only."""

    def attn_extras(self, view: StepView) -> Mapping[str, Mapping[str, Tensor]]:
        """Tensors to add to the metadata, per KV group name; carried by both hosts' builders."""
        return {}

    def get_mm_embeddings(self, view: StepView, media: Any) -> Tensor | None:
        """Embeddings [num_tokens, hidden] that replace the table look-up; None: there is no media."""
        return None

    @abstractmethod
    def prepare_inputs(self, view: StepView) -> dict[str, Tensor]:
        """Extra keywords of the model's `forward`, slices of persistent buffers."""

    @abstractmethod
    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Tensor]:
        """Same keys, shapes, dtypes and addresses as `prepare_inputs`, with neutral values."""

    def after_sample(self, view: StepView, num_sampled: Tensor) -> None:  # noqa: B027
        """Device work after write-back. `num_sampled` [num_reqs] int32: tokens each request gained."""

    # -- graphs ------------------------------------------------------------------------------------------

    def graph_support(self) -> GraphSupport:
        """Which steps may be captured. The default trusts that the device side keeps its rules (P2)."""
        return GraphSupport.ALWAYS

    def graph_plan(self, default: GraphPlan) -> GraphPlan:
        """The sizes to capture: the runner's choice, or part of it. Steps of sizes left out run eagerly."""
        return default

    def capture_inner(self, ctx: CaptureContext) -> None:  # noqa: B027
        """Capture graphs of one's own (of an encoder, for one); called once, before the runner captures steps."""

    # -- once --------------------------------------------------------------------------------------------

    def bind_kv_cache(self, caches: Mapping[str, BoundCache]) -> None:  # noqa: B027
        """Layer name to its cache, once, after allocation: a tensor, or an adapter's own tensors by name."""

    def custom_sampler(self, default: Any) -> Any:
        """The sampler to use, given the host's own; called once."""
        return default
