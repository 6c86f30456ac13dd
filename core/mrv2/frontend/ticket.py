"""The front end's side of a request, from its arrival to its result."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, field

from mrv2.frontend.courier import PieceQueue
from mrv2.frontend.results import CompletionOutput, RequestOutput, Timing, TokenLogprobs, Usage
from mrv2.frontend.text_stream import TextStream
from mrv2.runner.request import FinishReason, Request


class ResultFuture(Future[RequestOutput]):
    """A result to come, with the id of its request."""

    def __init__(self, request_id: str) -> None:
        super().__init__()
        self.request_id = request_id


@dataclass(slots=True, kw_only=True, eq=False)
class Ticket:
    """What is known of a request here."""

    request: Request
    prompt: str | None
    future: ResultFuture
    pieces: PieceQueue | None = None  # where a stream's reader waits
    text: TextStream | None = None  # of a request that is watched, or has ended
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_seen: int = 0  # generated tokens up to and with the one that completed a stop string

    def result(self) -> RequestOutput:
        """The result of a request that has ended."""
        request = self.request
        generated = request.tokens_np[len(request.prompt_np) :].tolist()
        stop = None if self.text is None else self.text.found
        if stop is not None:
            # Tokens that came after the stop string was complete were never seen by anyone.
            generated = generated[: self.num_seen]
        reason, stop_reason = (FinishReason.STOP, stop) if stop is not None else _why(request, generated)
        completion = CompletionOutput(
            index=0,
            text=None if self.text is None else self.text.text,
            token_ids=tuple(generated),
            finish_reason=reason,
            stop_reason=stop_reason,
            logprobs=None if request.sampling.logprobs is None else tuple(self.logprobs[: len(generated)]),
        )
        return RequestOutput(
            request_id=request.req_id,
            prompt=self.prompt,
            prompt_token_ids=tuple(request.prompt_np.tolist()),
            outputs=(completion,),
            timing=_timing(request, len(generated)),
            usage=Usage(
                prompt_tokens=len(request.prompt_np),
                cached_tokens=request.num_cached_tokens,
                generated_tokens=len(generated),
                preemptions=request.num_preemptions,
            ),
        )


def _why(request: Request, generated: list[int]) -> tuple[FinishReason, int | None]:
    assert request.finish_reason is not None
    stopped = request.finish_reason is FinishReason.STOP
    return request.finish_reason, generated[-1] if stopped else None


def _timing(request: Request, num_generated: int) -> Timing:
    ended = request.ended if request.ended is not None else time.monotonic()
    first = request.first_token
    rate = (num_generated - 1) / (ended - first) if first is not None and num_generated > 1 and ended > first else None
    return Timing(
        time_to_first_token=None if first is None else first - request.arrived,
        total_time=ended - request.arrived,
        tokens_per_second=rate,
    )
