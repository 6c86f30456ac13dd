"""`DefaultModelState`: composes the parts that a model class lists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

from pydantic import ValidationError
from torch import Tensor, nn

from mrv2.api import RequestData
from mrv2.errors import ForwardInputError, RequestError
from mrv2.model_state.base import ModelState
from mrv2.model_state.parts import InputPart
from mrv2.state.view import AttnMetadata, CacheMeta, Limits, StepView

if TYPE_CHECKING:
    from mrv2.attn.groups import KVGroup

FORWARD_KEYS = frozenset({"input_ids", "positions", "ctx"})
"""What every model's `forward` takes; no part may have one of these keys."""


class DefaultModelState(ModelState):
    """Builds each class in `type(model).parts` with the limits; the parts supply the extra inputs.

    Since a part fills one buffer both for real and for dummy steps, the two can't diverge. Most adapters
    add parts and override nothing here.

    Raises:
        ForwardInputError: two parts share a key, or a part's key is one of `forward`'s own.
    """

    def __init__(self, model: nn.Module, limits: Limits, groups: tuple[KVGroup, ...]) -> None:
        super().__init__(model, limits, groups)
        classes: tuple[type[InputPart], ...] = tuple(getattr(type(model), "parts", ()))
        _check_keys(type(model), classes)
        self.parts: tuple[InputPart, ...] = tuple(part(limits) for part in classes)

    # -- host side ---------------------------------------------------------------------------------------

    def check_options(self, extra_args: Mapping[str, Any]) -> None:
        """Validate each part's options by its own model; what no part knows is refused.

        Raises:
            RequestError: naming the option.
        """
        rest = dict(extra_args)
        for part in self.parts:
            rest = take_options(part, extra_args, rest)
        super().check_options(rest)

    def add_request(self, row: int, request: RequestData) -> None:
        """Let each part stage what it keeps for `row`."""
        for part in self.parts:
            part.add_request(row, request)

    def remove_request(self, row: int, req_id: str) -> None:
        """Let each part forget `row`."""
        for part in self.parts:
            part.remove_request(row, req_id)

    def apply_staged_writes(self) -> None:
        """Flush each part."""
        for part in self.parts:
            part.flush()

    # -- device side -------------------------------------------------------------------------------------

    def prepare_attn(self, view: StepView) -> AttnMetadata:
        """One `CacheMeta` per KV group, tensors shared with the view, plus that group's `attn_extras`.

        Raises:
            ForwardInputError: `attn_extras` names a group that doesn't exist.
        """
        extras = self.attn_extras(view)
        if unknown := sorted(set(extras) - {group.name for group in self.groups}):
            raise ForwardInputError(
                f"attn_extras gives tensors for {', '.join(unknown)}; the KV groups are "
                f"{', '.join(group.name for group in self.groups) or 'none'}",
                where=f"{type(self).__module__}.{type(self).__qualname__}.attn_extras",
                fix="use the names in self.groups",
            )
        return {
            group.name: CacheMeta(
                num_reqs=view.num_reqs,
                num_tokens=view.num_tokens,
                max_query_len=view.max_query_len,
                max_seq_len=view.max_seq_len,
                num_decodes=view.num_decodes,
                query_start_loc=view.query_start_loc,
                seq_lens=view.seq_lens,
                slot_mapping=view.slot_mappings[group.index],
                block_table=view.block_tables[group.index],
                block_size=group.block_size,
                extras=extras.get(group.name, {}),
                state_slots=view.block_tables[group.index] if group.states else None,
            )
            for group in self.groups
        }

    def prepare_inputs(self, view: StepView) -> dict[str, Tensor]:
        """Each part's value under its key."""
        return {part.key: part.fill(view) for part in self.parts}

    @final
    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Tensor]:
        """Each part's neutral value under its key. Final: override the part's `fill_dummy`."""
        return {part.key: part.fill_dummy(num_reqs, num_tokens) for part in self.parts}


def _check_keys(model: type, classes: tuple[type[InputPart], ...]) -> None:
    seen: dict[str, type[InputPart]] = {}
    for part in classes:
        if part.key in FORWARD_KEYS:
            raise ForwardInputError(
                f"part {part.__qualname__} has the key {part.key!r}, which every forward already takes",
                where=f"{part.__module__}.{part.__qualname__}.key",
                fix="rename the key, and the keyword in the model's forward with it",
            )
        if part.key in seen:
            raise ForwardInputError(
                f"parts {seen[part.key].__qualname__} and {part.__qualname__} both have the key {part.key!r}",
                where=f"{model.__module__}.{model.__qualname__}.parts",
                fix="give each part a key of its own",
            )
        seen[part.key] = part


def take_options(owner: Any, extra_args: Mapping[str, Any], rest: Mapping[str, Any]) -> dict[str, Any]:
    """`rest` without what `owner.options` knows of `extra_args`, which is validated.

    Raises:
        RequestError: naming the option.
    """
    known = owner.options.model_fields if owner.options is not None else ()
    own = {name: extra_args[name] for name in known if name in extra_args}
    try:
        if owner.options is not None:
            owner.options.model_validate(own)
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise RequestError(
            f"extra_args: {'; '.join(faults)}",
            where=f"SamplingParams.extra_args, read by {type(owner).__qualname__}",
            fix="see the adapter's documentation",
        ) from error
    return {name: value for name, value in rest.items() if name not in own}
