"""`mrv2.LLM`: load a model and generate, in a batch or as a stream."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from numbers import Integral
from types import TracebackType
from typing import Any

import numpy as np

from mrv2.errors import RequestError, TokenizerError
from mrv2.frontend.build import EngineParts, LoadedModel, assemble, load
from mrv2.frontend.courier import Courier, PieceQueue
from mrv2.frontend.driver import Driver
from mrv2.frontend.engine_config import EngineConfig
from mrv2.frontend.results import RequestOutput, StreamOutput
from mrv2.frontend.ticket import ResultFuture, Ticket
from mrv2.runner.request import FinishReason
from mrv2.sample.params import SamplingParams

Prompt = str | Sequence[int]
"""Text, or token ids."""

Message = Mapping[str, str]
"""One chat message: `role` and `content`."""

MAX_TIMEOUT = 1e9
"""Seconds, some thirty years: longer is taken for a mistake."""


class LLM:
    """A loaded model.

        llm = LLM("smollm2")
        outputs = llm.generate(["Once upon a time"], SamplingParams(max_tokens=32))

    Args:
        model: folder, GGUF file, bundled name (`smollm2`) or hub id.
        adapters: an adapter's file, package folder or project folder, or several, beside the installed ones; or names
            of installed ones, to be preferred.
        settings: fields of `EngineConfig`.

    Raises:
        Mrv2Error: the model, its adapter, its weights or the settings are wrong; each with its own code.
    """

    def __init__(self, model: str, *, adapters: str | Sequence[str] = (), **settings: Any) -> None:
        known = EngineConfig.__dataclass_fields__
        for name in settings:
            if name not in known:
                raise TypeError(f"LLM() has no setting {name!r}; there are: {', '.join(known)}")
        config = EngineConfig(**settings)
        loaded = load(model, config, [adapters] if isinstance(adapters, str) else adapters)
        self._take(loaded, config, assemble(loaded, config))

    @classmethod
    def from_parts(cls, model: LoadedModel, config: EngineConfig, parts: EngineParts) -> LLM:
        """Around an engine that is there already, with a model that others may share.

        Args:
            model: as loaded.
            config: what `parts` were made with.
            parts: idle, and not to be driven by anyone else until `close`.
        """
        llm = cls.__new__(cls)
        llm._take(model, config, parts)
        return llm

    def _take(self, model: LoadedModel, config: EngineConfig, parts: EngineParts) -> None:
        self.config, self.model = config, model
        self.limits = parts.limits
        self.stats = parts.engine.scheduler.stats
        self.graph_stats = parts.graphs
        self._intake = parts.intake
        self._driver = Driver(
            parts.engine, self.model.tokenizer, device=parts.limits.device, max_queue=self.config.max_queue
        )
        self._ids = itertools.count()
        self._couriers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Courier] = weakref.WeakKeyDictionary()
        self._close = weakref.finalize(self, self._driver.close)

    # -- use ---------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        timeout: float | None = None,
        on_done: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Generate for all prompts as one batch; results come in the prompts' order.

        More prompts than the queue has room for (`max_queue`) are fed in as room appears.

        Args:
            prompts: texts or lists of token ids.
            params: one for all, or one per prompt.
            timeout: seconds from now. What isn't done then ends with `finish_reason="timeout"` and what it has, at
                the end of the step that is running. None: as long as it takes.
            on_done: called with each result as it ends, in the calling thread; for progress. If it raises, the
                rest is aborted.

        Raises:
            RequestError: a prompt is wrong, or `timeout`. Nothing has been started then.
            EngineError: the engine failed.
        """
        tickets = self._tickets(_as_list(prompts), params, timeout)
        futures = [ticket.future for ticket in tickets]
        with self._aborting(futures):
            for future in self._as_they_end(tickets):
                result = future.result()
                if on_done is not None:
                    on_done(result)
            return [future.result() for future in futures]

    def submit(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        timeout: float | None = None,
        block: bool = False,
    ) -> list[ResultFuture]:
        """Start generating and return at once. `wait` collects.

        Args:
            prompts: texts or lists of token ids.
            params: one for all, or one per prompt.
            timeout: as in `generate`.
            block: wait until the queue has taken all prompts, instead of refusing them when it is full.

        Raises:
            RequestError: a prompt is wrong, or `timeout`. Nothing has been started then.
            QueueFullError: the queue has no room for all of them. Nothing has been started then.
        """
        tickets = self._tickets(prompts, params, timeout)
        futures = [ticket.future for ticket in tickets]
        if not block:
            self._driver.submit(tickets)
            return futures
        waiting = deque(tickets)
        with self._aborting(futures):
            while waiting:
                self._driver.feed(waiting)
        return futures

    def wait(self, futures: Sequence[ResultFuture]) -> list[RequestOutput]:
        """Results of `submit`, in order. If the wait is interrupted, all of them are aborted."""
        with self._aborting(futures):
            return [future.result() for future in futures]

    @contextlib.contextmanager
    def _aborting(self, futures: Sequence[ResultFuture]) -> Iterator[None]:
        """Abort what is not done when the block is left by an exception, Ctrl-C included."""
        try:
            yield
        except BaseException:
            for future in futures:
                if not future.done():
                    self._driver.end(future.request_id, FinishReason.ABORT)
            raise

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, timeout: float | None = None
    ) -> AsyncIterator[StreamOutput]:
        """Yield pieces as they are generated; the last one carries the whole result.

        A piece is what has come since the one before: with few streams a token or so, with hundreds some more.
        Leaving the loop early, or cancelling the task, aborts the request.

        Args:
            prompt: a text or a list of token ids.
            params: how to generate.
            timeout: as in `generate`.

        Raises:
            RequestError: the prompt is wrong, or `timeout`.
            QueueFullError: too many requests wait already.
        """
        loop = asyncio.get_running_loop()
        pieces = PieceQueue(loop, self._couriers.setdefault(loop, Courier(loop)))

        def pass_on_failure(future: Future[RequestOutput]) -> None:
            if (error := future.exception()) is not None:
                pieces.post(error)
                pieces.courier.ring()

        ticket = self._ticket(prompt, params or SamplingParams(), deadline=_deadline(timeout), pieces=pieces)
        ticket.future.add_done_callback(pass_on_failure)
        self._driver.submit([ticket])
        try:
            while True:
                piece = await pieces.get()
                yield piece
                if piece.finished is not None:
                    return
        finally:
            if not ticket.future.done():
                self._driver.end(ticket.request.req_id, FinishReason.ABORT)

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation under the model's chat template, ready for the answer.

        Raises:
            TokenizerError: there is no tokenizer, or it has no chat template.
        """
        if self.model.tokenizer is None:
            raise _no_tokenizer("a chat")
        return self.model.tokenizer.apply_chat_template(messages, add_generation_prompt=True)

    def close(self) -> None:
        """Abort what runs and stop the engine's threads."""
        self._close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- helpers -----------------------------------------------------------------------------------------

    def _encode(self, text: str, req_id: str) -> list[int]:
        assert self.model.tokenizer is not None
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the prompt is no Unicode text: {error.reason} at position {error.start}",
                where=f"request {req_id}",
                fix="replace lone surrogates",
            ) from error
        return self.model.tokenizer.encode(text)

    def _as_they_end(self, tickets: Sequence[Ticket]) -> Iterator[ResultFuture]:
        """Feed the engine, and yield futures in the order in which they are resolved."""
        ended: queue.SimpleQueue[ResultFuture] = queue.SimpleQueue()
        waiting = deque(tickets)
        for ticket in tickets:
            ticket.future.add_done_callback(ended.put)  # type: ignore[arg-type]
        for _ in tickets:
            while waiting and ended.empty():
                self._driver.feed(waiting)
            yield ended.get()

    def _tickets(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        timeout: float | None,
    ) -> list[Ticket]:
        each, deadline = self._spread(params, len(prompts)), _deadline(timeout)
        return [self._ticket(prompt, p, deadline=deadline) for prompt, p in zip(prompts, each, strict=True)]

    def _spread(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * count
        if len(params) != count:
            raise RequestError(
                f"{count} prompts, but {len(params)} sets of parameters",
                where="LLM.generate",
                fix="give one SamplingParams for all prompts, or one per prompt",
            )
        return list(params)

    def _ticket(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        deadline: float | None,
        pieces: PieceQueue | None = None,
    ) -> Ticket:
        tokenizer = self.model.tokenizer
        for needed, what in ((isinstance(prompt, str), "a text prompt"), (bool(params.stop), "a stop string")):
            if needed and tokenizer is None:
                raise _no_tokenizer(what)
        req_id = str(next(self._ids))
        text = prompt if isinstance(prompt, str) else None
        ids = self._encode(prompt, req_id) if isinstance(prompt, str) else prompt
        request = self._intake.request(req_id, ids, params, watched=pieces is not None)
        request.deadline = deadline
        return Ticket(request=request, prompt=text, future=ResultFuture(req_id), pieces=pieces)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as many."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence | np.ndarray):
        raise RequestError(
            f"prompts are {type(prompts).__name__}",
            where="LLM.generate",
            fix="give a text, token ids, or a list of these",
        )
    one = len(prompts) > 0 and isinstance(prompts[0], Integral)
    return [prompts] if one else list(prompts)  # type: ignore[list-item, arg-type]


def _deadline(timeout: float | None) -> float | None:
    """The time when `timeout` is over."""
    if timeout is None:
        return None
    if not isinstance(timeout, int | float) or isinstance(timeout, bool) or not 0 < timeout <= MAX_TIMEOUT:
        raise RequestError(
            f"timeout={timeout!r} is out of range: more than 0 and at most {MAX_TIMEOUT:g} seconds, or None",
            where="LLM",
            fix="set timeout accordingly",
        )
    return time.monotonic() + timeout


def _no_tokenizer(what: str) -> TokenizerError:
    return TokenizerError(
        f"{what} needs a tokenizer, and the model has none",
        where="LLM",
        fix="give token ids, or add the tokenizer's files to the model's folder",
    )
