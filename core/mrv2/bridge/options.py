"""Per-request options of adapters, checked where vLLM checks the rest of a request: before it reaches an engine.

vLLM has no place for a model's own checks there. An error later, in a worker, would end the engine with all other
requests. So `SamplingParams.verify` is wrapped; for models that aren't ours the wrapper only calls the original.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from mrv2.bridge.names import MODULE_PREFIX
from mrv2.errors import RequestError

VLLM_OWN = frozenset({"kv_transfer_params"})
"""Entries of `extra_args` that vLLM itself reads."""

_MARK = "mrv2_checks_options"


def check_requests() -> None:
    """Wrap vLLM's check. May be called again."""
    from vllm import SamplingParams

    original, from_tokenizer = SamplingParams.verify, SamplingParams.update_from_tokenizer
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def verify(self: Any, model_config: Any, *args: Any, **kwargs: Any) -> Any:
        known = _state_of(getattr(model_config, "architecture", ""))
        if known is not None:
            _check_grammar(self, model_config)
        result = original(self, model_config, *args, **kwargs)
        if known is not None:
            _check(known, self.extra_args or {})
        return result

    @functools.wraps(from_tokenizer)
    def update_from_tokenizer(self: Any, tokenizer: Any) -> Any:
        _stop_at(self, getattr(tokenizer, "end_token_ids", ()))
        return from_tokenizer(self, tokenizer)

    setattr(verify, _MARK, True)
    SamplingParams.verify = verify
    SamplingParams.update_from_tokenizer = update_from_tokenizer


def _check(known: Any, extra_args: Mapping[str, Any]) -> None:
    """Raise what vLLM answers as the caller's mistake."""
    from vllm.exceptions import VLLMValidationError

    try:
        state, processors = known
        asked = {name: value for name, value in extra_args.items() if name not in VLLM_OWN}
        processors.check_options(state.check_options, asked)
    except RequestError as error:
        raise VLLMValidationError(str(error), parameter="extra_args") from error


def _check_grammar(params: Any, model_config: Any) -> None:
    """A grammar is made of the tokens' strings, which an adapter's tokenizer needn't have."""
    from vllm.exceptions import VLLMValidationError
    from vllm.tokenizers import cached_tokenizer_from_config

    if params.structured_outputs is None or not model_config.tokenizer_mode.startswith("mrv2_"):
        return
    if hasattr(cached_tokenizer_from_config(model_config), "end_token_ids"):  # a `HostedTokenizer`
        raise VLLMValidationError(
            "structured outputs need a tokenizer of transformers', and this adapter brings another (mrv2_tokenizer)",
            parameter="structured_outputs",
        )


def _stop_at(params: Any, end_token_ids: tuple[int, ...]) -> None:
    """Of a tokenizer's end tokens vLLM knows the first; these are the others."""
    params._all_stop_token_ids.update(end_token_ids)
    if not params.ignore_eos and len(end_token_ids) > 1:
        params.stop_token_ids = [*(params.stop_token_ids or ()), *end_token_ids[1:]]


@functools.cache
def _state_of(architecture: str) -> Any:
    """The adapter's state and processors, as small as they get, to ask about options; None: not a model of ours.

    The process that takes requests holds no model, so the state gets one without contents. An adapter that can't be
    loaded is reported when its model is built.
    """
    from vllm import ModelRegistry

    registered = ModelRegistry.models.get(architecture)
    if not getattr(registered, "module_name", "").startswith(MODULE_PREFIX):
        return None
    hosted = registered.load_model_cls()
    bridged = getattr(hosted, "mrv2_state", None)
    if bridged is None:
        return None
    from mrv2.sample.processors import Processors
    from mrv2.state.view import Limits

    model, limits = hosted.__new__(hosted), Limits(max_rows=1, max_num_tokens=1, max_model_len=1)
    return bridged.mrv2_state_class(model, limits, ()), Processors(bridged.mrv2_processors, limits)
