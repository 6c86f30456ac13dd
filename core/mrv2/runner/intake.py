"""The front door: turns a prompt and parameters into a request, or says what is wrong with them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mrv2.errors import RequestError, UnsupportedError
from mrv2.runner.kv_cache import hash_root
from mrv2.runner.request import Request
from mrv2.sample.params import MAX_STOP_TOKEN_IDS, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What every request must fit."""

    vocab_size: int
    max_model_len: int
    cache_capacity: int  # tokens that one request alone can hold in the KV cache
    eos_token_ids: tuple[int, ...]
    rope_fixed_up_to: int | None = None  # longer prompts have keys of their own; see `NativeLayers`


class Intake:
    """Checks requests and completes them with what only the engine knows.

    Args:
        limits: of the loaded model and its cache.
        seed: of the generator that draws the seeds of requests without one.
        check_options: the adapter's check of `extra_args`.

    Raises:
        UnsupportedError: the model has more end tokens than the stop column is wide.
    """

    def __init__(
        self, limits: RequestLimits, *, seed: int | None, check_options: Callable[[Mapping[str, Any]], None]
    ) -> None:
        room = MAX_STOP_TOKEN_IDS // 2
        if len(limits.eos_token_ids) > room:
            raise UnsupportedError(
                f"the model has {len(limits.eos_token_ids)} end tokens; {room} are supported",
                where="eos_token_id of the checkpoint's config",
                fix=f"list at most {room}",
            )
        self._limits = limits
        self._check_options = check_options
        self._random = random.Random(seed)
        self._numbers = itertools.count()

    def request(
        self, req_id: str, prompt_ids: Sequence[int], sampling: SamplingParams, *, watched: bool = False
    ) -> Request:
        """Build a request.

        Raises:
            RequestError: empty prompt, id out of range, no room to generate even one token, or an option that
                the adapter doesn't know.
        """
        self._check_options(sampling.extra_args)
        prompt_np = self._checked_prompt(req_id, prompt_ids)
        limits = self._limits
        bound = min(limits.max_model_len, limits.cache_capacity)
        wanted = bound if sampling.max_tokens is None else len(prompt_np) + sampling.max_tokens
        for token in sampling.stop_token_ids:
            if token >= limits.vocab_size:
                raise RequestError(
                    f"stop token id {token} is out of range [0, {limits.vocab_size})",
                    where=f"request {req_id}",
                    fix="give ids of this model's vocabulary",
                )
        fixed = limits.rope_fixed_up_to
        rope_len = len(prompt_np) if fixed is not None and len(prompt_np) > fixed else None
        stops = sampling.stop_token_ids + (() if sampling.ignore_eos else limits.eos_token_ids)
        return Request(
            req_id=req_id,
            number=next(self._numbers),
            prompt_np=prompt_np,
            tokens_np=prompt_np,
            sampling=sampling,
            seed=self._random.getrandbits(63) if sampling.seed is None else sampling.seed,
            len_limit=min(wanted, bound),
            stop_token_ids=tuple(dict.fromkeys(stops)),
            hash_root=hash_root(sampling, rope_len=rope_len),
            watched=watched or sampling.logprobs is not None or bool(sampling.stop),
        )

    def _checked_prompt(self, req_id: str, prompt_ids: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        where, limits = f"request {req_id}", self._limits
        if not isinstance(prompt_ids, Sequence | np.ndarray):
            raise RequestError(
                f"the prompt is {type(prompt_ids).__name__}", where=where, fix="give a text or a list of token ids"
            )
        if not len(prompt_ids):
            raise RequestError("the prompt is empty", where=where, fix="give at least one token")
        try:
            wide_np = np.asarray(prompt_ids)
        except (ValueError, OverflowError):  # lists in lists
            wide_np = np.empty((0, 0))
        if wide_np.ndim != 1 or not np.issubdtype(wide_np.dtype, np.integer):
            raise RequestError("the prompt's token ids are not integers", where=where, fix="give a list of integers")
        bad = np.nonzero((wide_np < 0) | (wide_np >= limits.vocab_size))[0]
        if len(bad):
            raise RequestError(
                f"token id {wide_np[bad[0]]} at position {bad[0]} is out of range [0, {limits.vocab_size})",
                where=where,
                fix="give ids of this model's vocabulary",
            )
        for bound, name, fix in (
            (
                limits.max_model_len,
                "the model's context (max_model_len)",
                "shorten the prompt or raise --max-model-len",
            ),
            (limits.cache_capacity, "the KV cache", "shorten the prompt or give more memory with --kv-memory"),
        ):
            if len(wide_np) >= bound:
                raise RequestError(
                    f"the prompt has {len(wide_np)} tokens; {name} holds {bound}, and one must be left to generate",
                    where=where,
                    fix=fix,
                )
        return wide_np.astype(np.int32)
