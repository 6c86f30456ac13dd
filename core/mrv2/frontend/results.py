"""What a caller gets back."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mrv2.runner.request import FinishReason


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one generated position, under the model's own distribution."""

    token_id: int
    logprob: float
    rank: int  # 1: the most likely token
    top: tuple[tuple[int, float], ...]  # (token id, log-probability), most likely first


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One generated sequence."""

    index: int
    text: str | None  # None: the model has no tokenizer
    token_ids: tuple[int, ...]  # with the end token, if one was generated
    finish_reason: FinishReason
    stop_reason: str | int | None  # the stop string or stop token id that ended it
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Times of one request, in seconds since it arrived."""

    time_to_first_token: float | None
    total_time: float
    tokens_per_second: float | None  # generated tokens after the first, over the time since the first


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Counts of one request."""

    prompt_tokens: int
    cached_tokens: int  # prompt tokens taken from the prefix cache
    generated_tokens: int
    preemptions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A finished request."""

    request_id: str
    prompt: str | None  # None: given as token ids
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    timing: Timing
    usage: Usage

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOutput:
    """One piece of a stream. The texts of all pieces make the final text."""

    text: str
    token_ids: tuple[int, ...]
    finished: RequestOutput | None = None  # in the last piece only
