"""From step events to text and results, in a thread beside the step loop that keeps out of its way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from mrv2.errors import OutputError
from mrv2.frontend.batch_decoder import BatchDecoder, Texts
from mrv2.frontend.courier import Courier
from mrv2.frontend.detokenize import CONTEXT_TOKENS
from mrv2.frontend.pending import PendingTokens
from mrv2.frontend.results import StreamOutput, TokenLogprobs
from mrv2.frontend.text_stream import TextStream
from mrv2.frontend.ticket import Ticket
from mrv2.loader.tokenizer import Tokenizer
from mrv2.runner.outputs import LogprobsOutput, StepEvents
from mrv2.runner.request import Request

SHARE = 0.025
"""Of one processor, at most, for making pieces of text and bringing them to their readers: they need the interpreter
that the engine's thread needs too, so this is what it loses. With a few streams every step gives a piece; with
hundreds, a piece is what some steps gave."""

MAX_REST = 0.15
"""Seconds between pieces, at most. A text that is renewed less often looks as if it stood still."""


class OutputProcessor:
    """Detokenises, finds stop strings, builds results, resolves futures.

    Requests that nobody watches cost nothing until their end. Tokens of the others wait for each other: they become
    text together, after a rest in proportion to what the last time cost. A request's end doesn't wait.

    Args:
        tokenizer: None: results carry token ids only.
        stop_request: called with the id of a request that hit a stop string.
        drop_request: called with the id of a request whose output failed.

    Attributes:
        rest_until: when tokens may become text again, by `time.monotonic`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        stop_request: Callable[[str], None],
        drop_request: Callable[[str], None],
    ) -> None:
        self._tokenizer = tokenizer
        self._decode = None if tokenizer is None else BatchDecoder(tokenizer)
        self._stop_request = stop_request
        self._drop_request = drop_request
        self._tickets: dict[int, Ticket] = {}
        self._silent: set[int] = set()  # streams that have shown nothing yet
        self._pending = PendingTokens()
        self._couriers: set[Courier] = set()  # that were rung last
        self.rest_until = 0.0

    @property
    def waiting(self) -> bool:
        """Whether there are tokens that shall become text after the rest."""
        return bool(self._pending)

    def open(self, ticket: Ticket) -> None:
        """Register a request before its first step. Any thread."""
        if ticket.request.watched and self._tokenizer is not None:
            ticket.text = self._text(ticket.request)
        if ticket.pieces is not None:
            self._silent.add(ticket.request.number)
        self._tickets[ticket.request.number] = ticket

    def _text(self, request: Request) -> TextStream:
        assert self._tokenizer is not None
        return TextStream(
            self._tokenizer,
            request.prompt_np[-CONTEXT_TOKENS:].tolist(),
            stops=request.sampling.stop,
            skip_special_tokens=request.sampling.skip_special_tokens,
        )

    def process(self, events: Iterable[StepEvents | Request]) -> None:
        """Handle steps, and requests that were ended from outside."""
        ended: list[Request] = []
        for event in events:
            if isinstance(event, Request):
                ended.append(event)
                continue
            if event.logprobs is not None:
                self._take_logprobs(event.numbers_np.tolist(), event.logprobs)
            self._pending.add(event.numbers_np, event.tokens_np)
            ended += event.ended
        couriers: set[Courier] = set()
        if self._pending and time.monotonic() >= self.rest_until:
            self._push_all(couriers)
        elif ended:
            # Being awake, it may as well begin the streams that wait for their first piece.
            self._push(self._pending.take([*self._silent, *(request.number for request in ended)]), couriers)
        self._finish(ended, couriers)
        for courier in couriers:
            courier.ring()

    def _take_logprobs(self, numbers: list[int], logprobs: LogprobsOutput) -> None:
        for i, number in enumerate(numbers):
            ticket = self._tickets.get(number)
            if ticket is not None and ticket.request.sampling.logprobs is not None:
                ticket.logprobs.append(_token_logprobs(logprobs, i, ticket.request.sampling.logprobs))

    # -- pieces ------------------------------------------------------------------------------------------

    def _push_all(self, couriers: set[Courier]) -> None:
        """Turn all tokens into pieces, and rest for it."""
        decoded = 0.0 if self._decode is None else self._decode.seconds
        began = time.thread_time()
        self._push(self._pending.take(), couriers)
        cost = time.thread_time() - began + sum(courier.take_cost() for courier in self._couriers)
        if self._decode is not None:  # it takes what the tokens take, in however many pieces
            cost -= self._decode.seconds - decoded
        self._couriers = set(couriers)
        self.rest_until = time.monotonic() + min(MAX_REST, cost * (1 / SHARE - 1))

    def _push(self, tokens_of: dict[int, list[int]], couriers: set[Courier]) -> None:
        """Turn new tokens into pieces."""
        self._silent.difference_update(tokens_of)
        # Without a ticket it has failed; after a stop string, these were sampled before the engine learnt of it.
        found = [(self._tickets.get(number), tokens) for number, tokens in tokens_of.items()]
        work = [(t, tokens, _shown(t.request, tokens)) for t, tokens in found if t is not None and not _stopped(t)]
        texts: list[Texts] = [[] for _ in work]
        if self._decode is not None:
            texts = self._decode([(t.request, t.text.windows(shown)) for t, _, shown in work if t.text is not None])
        for (ticket, tokens, shown), decoded in zip(work, texts, strict=True):
            try:
                self._push_one(ticket, tokens, shown, decoded)
            except Exception as error:
                self._drop(ticket, error)
            if ticket.pieces is not None:
                couriers.add(ticket.pieces.courier)

    def _push_one(self, ticket: Ticket, tokens: list[int], shown: list[int], decoded: Texts) -> None:
        text = ""
        if ticket.text is not None:
            text, num_seen = ticket.text.push(shown, _checked(decoded))
            if ticket.text.found is not None:
                tokens = tokens[:num_seen]
                self._stop_request(ticket.request.req_id)
        ticket.num_seen += len(tokens)
        if ticket.pieces is not None:
            ticket.pieces.post(StreamOutput(text=text, token_ids=tuple(tokens)))

    # -- ends --------------------------------------------------------------------------------------------

    def _finish(self, ended: Iterable[Request], couriers: set[Courier]) -> None:
        """Resolve requests that have ended, whatever ended them."""
        numbers = [request.number for request in ended]
        self._silent.difference_update(numbers)
        tickets = [t for number in numbers if (t := self._tickets.pop(number, None)) is not None]
        whole = self._whole(tickets)
        for ticket in tickets:
            try:
                tail = ""
                if ticket in whole:
                    ids, decoded = whole[ticket]
                    ticket.text = self._text(ticket.request)
                    ticket.text.push_whole(ids, _checked(decoded))
                elif ticket.text is not None:
                    tail = ticket.text.flush()
                result = ticket.result()
            except Exception as error:
                self._drop(ticket, error)
                continue
            if ticket.pieces is not None:
                ticket.pieces.post(StreamOutput(text=tail, token_ids=(), finished=result))
                couriers.add(ticket.pieces.courier)
            if not ticket.future.done():
                ticket.future.set_result(result)

    def _whole(self, tickets: Iterable[Ticket]) -> dict[Ticket, tuple[list[int], Texts]]:
        """All tokens of requests that nobody watched, and what they say."""
        if self._decode is None:
            return {}
        unwatched = [ticket for ticket in tickets if ticket.text is None]
        ids = [_shown(t.request, t.request.tokens_np[len(t.request.prompt_np) :].tolist()) for t in unwatched]
        # By the same path as a watched request takes, so that watching never changes the text.
        work = [(t.request, self._text(t.request).windows(mine)) for t, mine in zip(unwatched, ids, strict=True)]
        return dict(zip(unwatched, zip(ids, self._decode(work), strict=True), strict=True))

    def _drop(self, ticket: Ticket, error: Exception) -> None:
        """A tokenizer that fails on one request's tokens ends that request, and no other."""
        request = ticket.request
        self._tickets.pop(request.number, None)
        self._drop_request(request.req_id)
        failure = OutputError(
            f"{type(error).__name__}: {error}",
            where=f"text of request {request.req_id}",
            fix="see the cause above; the tokenizer can't decode these tokens",
        )
        failure.__cause__ = error
        if not ticket.future.done():
            ticket.future.set_exception(failure)

    def fail(self, error: BaseException) -> None:
        """Give `error` to everyone who waits."""
        tickets, self._tickets = list(self._tickets.values()), {}
        for ticket in tickets:
            if not ticket.future.done():
                ticket.future.set_exception(error)


def _stopped(ticket: Ticket) -> bool:
    return ticket.text is not None and ticket.text.found is not None


def _shown(request: Request, tokens: list[int]) -> list[int]:
    """The tokens that have a text: all but a stop token, which can only be the last."""
    return tokens[:-1] if tokens and tokens[-1] in request.stop_token_ids else tokens


def _checked(texts: Texts) -> list[str]:
    if isinstance(texts, Exception):
        raise texts
    return texts


def _token_logprobs(logprobs: LogprobsOutput, i: int, k: int) -> TokenLogprobs:
    ids, values = logprobs.token_ids_np[i].tolist(), logprobs.logprobs_np[i].tolist()
    return TokenLogprobs(
        token_id=ids[0],
        logprob=values[0],
        rank=int(logprobs.ranks_np[i]),
        top=tuple(zip(ids[1 : 1 + k], values[1 : 1 + k], strict=True)),
    )
