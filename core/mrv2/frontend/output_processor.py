"""From step events to text and results, in a thread beside the step loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from mrv2.errors import OutputError
from mrv2.frontend.detokenize import IncrementalDetokenizer, StopStrings
from mrv2.frontend.results import CompletionOutput, RequestOutput, StreamOutput, Timing, TokenLogprobs, Usage
from mrv2.loader.tokenizer import Tokenizer
from mrv2.runner.outputs import LogprobsOutput, StepOutput
from mrv2.runner.request import FinishReason, Request
from mrv2.runner.scheduler import StepEvents


class ResultFuture(Future[RequestOutput]):
    """A result to come, with the id of its request."""

    def __init__(self, request_id: str) -> None:
        super().__init__()
        self.request_id = request_id


@dataclass(slots=True, kw_only=True, eq=False)
class Ticket:
    """The front end's side of a request."""

    request: Request
    prompt: str | None
    future: ResultFuture
    on_piece: Callable[[StreamOutput], None] | None = None
    detokenizer: IncrementalDetokenizer | None = None
    stops: StopStrings | None = None
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_seen: int = 0  # generated tokens up to and with the one that completed a stop string


class OutputProcessor:
    """Detokenises, finds stop strings, builds results, resolves futures.

    Requests that nobody watches cost nothing until their end.

    Args:
        tokenizer: None: results carry token ids only.
        stop_request: called with the id of a request that hit a stop string.
        drop_request: called with the id of a request whose output failed.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        stop_request: Callable[[str], None],
        drop_request: Callable[[str], None],
    ) -> None:
        self._tokenizer = tokenizer
        self._stop_request = stop_request
        self._drop_request = drop_request
        self._tickets: dict[str, Ticket] = {}

    def open(self, ticket: Ticket) -> None:
        """Register a request before its first step."""
        request = ticket.request
        if request.watched and self._tokenizer is not None:
            ticket.detokenizer = IncrementalDetokenizer(
                self._tokenizer, request.prompt_np.tolist(), skip_special_tokens=request.sampling.skip_special_tokens
            )
            ticket.stops = StopStrings(request.sampling.stop)
        self._tickets[request.req_id] = ticket

    def process(self, events: StepEvents) -> None:
        """Handle one step."""
        for request, i, count in events.watched:
            ticket = self._tickets.get(request.req_id)
            if ticket is not None:
                self._guarded(ticket, self._push, ticket, events.output, i, count)
        for request in events.ended:
            self.end(request)

    def end(self, request: Request) -> None:
        """Resolve a request that has ended, whatever ended it."""
        ticket = self._tickets.pop(request.req_id, None)
        if ticket is not None:
            self._guarded(ticket, self._finish, ticket)

    def _guarded(self, ticket: Ticket, handle: Callable[..., None], *args: object) -> None:
        """A tokenizer that fails on one request's tokens ends that request, and no other."""
        try:
            handle(*args)
        except Exception as error:
            self._tickets.pop(ticket.request.req_id, None)
            self._drop_request(ticket.request.req_id)
            failure = OutputError(
                f"{type(error).__name__}: {error}",
                where=f"text of request {ticket.request.req_id}",
                fix="see the cause above; the tokenizer can't decode these tokens",
            )
            failure.__cause__ = error
            if not ticket.future.done():
                ticket.future.set_exception(failure)

    def _finish(self, ticket: Ticket) -> None:
        tail = ""
        if ticket.detokenizer is not None and ticket.stops is not None:
            if ticket.stops.found is None:
                tail = ticket.stops.push(ticket.detokenizer.flush()) + ticket.stops.flush()
            ticket.pieces.append(tail)
        result = self._result(ticket)
        if ticket.on_piece is not None:
            ticket.on_piece(StreamOutput(text=tail, token_ids=(), finished=result))
        if not ticket.future.done():
            ticket.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        """Give `error` to everyone who waits."""
        tickets, self._tickets = list(self._tickets.values()), {}
        for ticket in tickets:
            if not ticket.future.done():
                ticket.future.set_exception(error)

    def _push(self, ticket: Ticket, output: StepOutput, i: int, count: int) -> None:
        if ticket.stops is not None and ticket.stops.found is not None:
            return  # sampled before the engine learnt of the stop string
        token_ids, k = output.tokens_np[i, :count].tolist(), ticket.request.sampling.logprobs
        if output.logprobs is not None and k is not None:
            ticket.logprobs.append(_token_logprobs(output.logprobs, i, k))
        ticket.num_seen += len(token_ids)
        text = ""
        if ticket.detokenizer is not None and ticket.stops is not None:
            shown = [t for t in token_ids if t not in ticket.request.stop_token_ids]
            text = ticket.stops.push(ticket.detokenizer.push(shown))
            ticket.pieces.append(text)
            if ticket.stops.found is not None:
                self._stop_request(ticket.request.req_id)
        if ticket.on_piece is not None:
            ticket.on_piece(StreamOutput(text=text, token_ids=tuple(token_ids)))

    def _result(self, ticket: Ticket) -> RequestOutput:
        request = ticket.request
        generated = request.tokens_np[len(request.prompt_np) :].tolist()
        if ticket.stops is not None and ticket.stops.found is not None:
            # Tokens that came after the stop string was complete were never seen by anyone.
            generated = generated[: ticket.num_seen]
        reason, stop_reason = _why(ticket, generated)
        completion = CompletionOutput(
            index=0,
            text=self._text(ticket, generated),
            token_ids=tuple(generated),
            finish_reason=reason,
            stop_reason=stop_reason,
            logprobs=None if request.sampling.logprobs is None else tuple(ticket.logprobs[: len(generated)]),
        )
        return RequestOutput(
            request_id=request.req_id,
            prompt=ticket.prompt,
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

    def _text(self, ticket: Ticket, generated: list[int]) -> str | None:
        if self._tokenizer is None:
            return None
        if ticket.detokenizer is not None:
            return "".join(ticket.pieces)
        request = ticket.request
        # The same path as a watched request takes, so that watching never changes the text.
        detokenizer = IncrementalDetokenizer(
            self._tokenizer, request.prompt_np.tolist(), skip_special_tokens=request.sampling.skip_special_tokens
        )
        shown = generated[:-1] if generated and generated[-1] in request.stop_token_ids else generated
        return detokenizer.whole(shown)


def _why(ticket: Ticket, generated: list[int]) -> tuple[FinishReason, str | int | None]:
    request = ticket.request
    if ticket.stops is not None and ticket.stops.found is not None:
        return FinishReason.STOP, ticket.stops.found
    assert request.finish_reason is not None
    stopped = request.finish_reason is FinishReason.STOP
    return request.finish_reason, generated[-1] if stopped else None


def _token_logprobs(logprobs: LogprobsOutput, i: int, k: int) -> TokenLogprobs:
    ids, values = logprobs.token_ids_np[i].tolist(), logprobs.logprobs_np[i].tolist()
    return TokenLogprobs(
        token_id=ids[0],
        logprob=values[0],
        rank=int(logprobs.ranks_np[i]),
        top=tuple(zip(ids[1 : 1 + k], values[1 : 1 + k], strict=True)),
    )


def _timing(request: Request, num_generated: int) -> Timing:
    ended = request.ended if request.ended is not None else time.monotonic()
    first = request.first_token
    rate = (num_generated - 1) / (ended - first) if first is not None and num_generated > 1 and ended > first else None
    return Timing(
        time_to_first_token=None if first is None else first - request.arrived,
        total_time=ended - request.arrived,
        tokens_per_second=rate,
    )
