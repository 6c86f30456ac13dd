"""The host's view of one request from arrival to its end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum, StrEnum

import numpy as np
from numpy.typing import NDArray

from mrv2.api import RequestData
from mrv2.sample.params import SamplingParams


class Status(Enum):
    """Where a request is."""

    WAITING = "waiting"  # owns nothing, or is preempted and draining
    RUNNING = "running"  # owns a row and blocks
    ENDED = "ended"  # finished or aborted; may still be draining


class FinishReason(StrEnum):
    """Why generation ended."""

    STOP = "stop"  # an end token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, the context, or the whole KV cache is used up
    ABORT = "abort"  # cancelled by the caller
    TIMEOUT = "timeout"  # the caller's deadline has passed


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """Mutable, owned by the scheduler. Per-token facts of a running request live in the row's columns."""

    req_id: str
    number: int  # the same as a number, for columns
    prompt_np: NDArray[np.int32]  # [prompt_len]
    sampling: SamplingParams
    seed: int
    len_limit: int
    stop_token_ids: tuple[int, ...]
    hash_root: bytes
    watched: bool  # the front end wants every step's tokens, not only the end
    status: Status = Status.WAITING
    row: int | None = None
    tokens_np: NDArray[np.int32]  # prompt and generated; current only while the request owns no row
    hashes: list[bytes] = field(default_factory=list)  # of full blocks of known tokens
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0  # prefix-cache hit at first admission
    num_preemptions: int = 0
    deadline: float | None = None  # seconds, of `time.monotonic`
    arrived: float = field(default_factory=time.monotonic)  # seconds
    first_token: float | None = None  # seconds
    ended: float | None = None  # seconds

    def data(self, num_computed_tokens: int) -> RequestData:
        """What adapters and device columns are told at (re-)admission."""
        return RequestData(
            req_id=self.req_id,
            prompt_token_ids=self.prompt_np,
            prefill_token_ids=self.tokens_np,
            num_computed_tokens=num_computed_tokens,
            sampling=self.sampling,
            seed=self.seed,
            len_limit=self.len_limit,
            stop_token_ids=self.stop_token_ids,
        )
