"""Recording a run, running it again in the same order of events, and where tokens part."""

from __future__ import annotations

import gc
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from mrv2.errors import RunFileError
from mrv2.frontend.build import EngineParts, LoadedModel, assemble
from mrv2.frontend.engine_config import EngineConfig
from mrv2.frontend.results import RequestOutput
from mrv2.local import is_path
from mrv2.runner.device import on_device
from mrv2.runner.engine import Engine
from mrv2.runner.outputs import Pending, StepEvents
from mrv2.runner.request import FinishReason, Request
from mrv2.sample.params import MAX_LOGPROBS, SamplingParams
from mrv2.state.plan import StepPlan
from mrv2.testing.identity import Difference, differences, identify
from mrv2.testing.runs import FORMAT, Ending, RecordedRequest, Run, write_run
from mrv2.version import __version__


class WatchedEngine(Engine):
    """An engine that notes when requests come, when they are ended from outside, and what its steps hold.

    Attributes:
        turn: calls of `step`.
        arrivals: each request, with the turn it came before.
        endings: of those ended from outside, by id.
        steps: (requests, tokens) of each.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.scheduler, engine._runner, depth=engine._depth)
        self.turn = 0
        self.arrivals: dict[str, tuple[Request, int]] = {}
        self.endings: dict[str, Ending] = {}
        self.steps: list[tuple[int, int]] = []

    def add(self, requests: Iterable[Request]) -> None:
        """As `Engine.add`."""
        requests = list(requests)
        self.arrivals |= {request.req_id: (request, self.turn) for request in requests}
        super().add(requests)

    def end(self, req_id: str, reason: FinishReason) -> Request | None:
        """As `Engine.end`."""
        request = super().end(req_id, reason)
        if request is not None:
            self.endings[req_id] = Ending(turn=self.turn, reason=reason)
        return request

    def step(self) -> StepEvents | None:
        """As `Engine.step`."""
        self.turn += 1
        return super().step()

    def _launch(self, plan: StepPlan) -> Pending:
        self.steps.append((plan.num_reqs, plan.num_tokens))
        return super()._launch(plan)


# ---- recording ---------------------------------------------------------------------------------------------


class Recorder:
    """Collects what a run needs to be run again. Until it is over, that costs a call and a tuple a step.

    Args:
        loaded: the model.
        config: of the engine.
        parts: the engine; what drives it has to use `parts` of this object in their place.
        adapters: local ones and preferred names, as given.
    """

    def __init__(
        self, loaded: LoadedModel, config: EngineConfig, parts: EngineParts, *, adapters: Sequence[str]
    ) -> None:
        self._loaded, self._adapters = loaded, adapters
        self._identity = identify(loaded, config, parts)
        self._engine = WatchedEngine(parts.engine)
        self.parts = replace(parts, engine=self._engine)
        self._results: dict[str, tuple[int, Any, RequestOutput]] = {}

    def note(self, line: int, id: Any, result: RequestOutput) -> None:
        """Keep the result of a request, with its line of the input and its caller's id."""
        self._results[result.request_id] = (line, id, result)

    def write(self, path: Path) -> int:
        """Write the run; returns how many requests it holds. With none there is no file.

        Raises:
            RunFileError: it can't be written, or the file exists.
        """
        arrivals = [(r, turn) for r, turn in self._engine.arrivals.values() if r.req_id in self._results]
        if not arrivals:
            return 0
        start = min(request.arrived for request, _ in arrivals)
        run = Run(
            format=FORMAT,
            mrv2=__version__,
            model=_absolute(self._loaded.name),
            path=str(self._loaded.config.path.absolute()),
            adapters=tuple(_absolute(a) if is_path(a) else a for a in self._adapters),
            identity=self._identity,
            requests=tuple(self._recorded(request, turn, start) for request, turn in arrivals),
            steps=tuple(self._engine.steps),
        )
        write_run(path, run)
        return len(run.requests)

    def _recorded(self, request: Request, turn: int, start: float) -> RecordedRequest:
        line, id, result = self._results[request.req_id]
        completion, ending = result.outputs[0], self._engine.endings.get(request.req_id)
        num_made = len(request.tokens_np) - len(request.prompt_np)
        return RecordedRequest(
            line=line,
            id=id,
            prompt=result.prompt_token_ids,
            sampling=asdict(replace(request.sampling, seed=request.seed)),
            turn=turn,
            arrived=request.arrived - start,
            first_token=result.timing.time_to_first_token,
            total=result.timing.total_time,
            tokens=completion.token_ids,
            complete=ending is None and num_made == len(completion.token_ids),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            ending=ending,
            logprobs=None
            if completion.logprobs is None
            else tuple((one.logprob, one.rank, one.top) for one in completion.logprobs),
            cached_tokens=result.usage.cached_tokens,
            preemptions=result.usage.preemptions,
        )


def _absolute(path: str) -> str:
    """A path that means the same from anywhere; a name that is none stays."""
    expanded = os.path.expanduser(path)
    return os.path.abspath(expanded) if os.path.exists(expanded) else path


# ---- replaying ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """Where a request's tokens differ from the recorded ones."""

    number: int  # of the request, in the order in which they came
    line: int
    id: Any
    position: int  # of the token, from 0 after the prompt
    recorded: int | None  # None: it had ended
    now: int | None  # the same
    recorded_logprob: float | None  # as recorded, of the recorded token
    finish: tuple[str, str] | None = None  # tokens are equal, and this is what differs: recorded, now


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """What the model says about both tokens of a parting, when the request runs alone, without cache and graphs.

    None: the token isn't among the `MAX_LOGPROBS` most likely ones.
    """

    recorded: float | None
    now: float | None

    @property
    def gap(self) -> float | None:
        """Of the two."""
        return None if self.recorded is None or self.now is None else abs(self.recorded - self.now)


@dataclass(slots=True, kw_only=True)
class Replayed:
    """What came of a replay."""

    num_requests: int
    num_tokens: int  # recorded ones
    partings: list[Parting] = field(default_factory=list)  # one a request at most, in the order in which they came
    logprobs: Logprobs | None = None  # about the first parting, if both have a token there
    worst_logprob: float | None = None  # largest difference before tokens part; None: none were recorded
    differences: list[Difference] = field(default_factory=list)  # in what the run depends on
    same_steps: bool  # whether steps held as many requests and tokens as recorded

    @property
    def equal(self) -> bool:
        """Whether all tokens are."""
        return not self.partings


def settings_of(run: Run, changes: dict[str, Any]) -> EngineConfig:
    """The recorded settings, with changes; what was measured or chosen for another device or dtype is chosen anew.

    Raises:
        RunFileError: the run names settings that there are none of.
        UnsupportedError: a setting can't be.
    """
    settings: dict[str, Any] = dict(run.identity.settings)
    if unknown := sorted(set(settings) - {f.name for f in fields(EngineConfig)}):
        raise RunFileError(
            f"the run has settings unknown here: {', '.join(unknown)}",
            where="identity.settings",
            fix="replay it with the version that recorded it",
        )
    moved = str(changes.get("device", settings["device"])).partition(":")[0] != settings["device"].partition(":")[0]
    if moved:
        dropped = {"num_blocks", "block_size", "depth", "graphs"}
    else:
        dropped = (
            {"num_blocks", "block_size"} if changes.get("dtype", settings["dtype"]) != settings["dtype"] else set()
        )
        dropped |= {"num_blocks"} if {"kv_memory", "block_size"} & set(changes) else set()
        dropped |= {"graphs"} if changes.get("debug") else set()
        dropped |= {"graphs", "depth"} if changes.get("runner") == "sync" else set()
    return EngineConfig(**({k: v for k, v in settings.items() if k not in dropped} | changes))


def replay(
    run: Run, loaded: LoadedModel, config: EngineConfig, *, on_end: Callable[[int], None] = lambda count: None
) -> Replayed:
    """Run it again and compare.

    Requests come before the same turns of the engine's loop, and those ended from outside end after the same, so
    that with the recorded settings every step holds the same requests.

    Args:
        run: as recorded.
        loaded: the model.
        config: from `settings_of`.
        on_end: told how many requests have ended in each step.

    Raises:
        RequestError: a request doesn't fit this model or these settings.
        EngineError: the engine failed.
    """
    parts = assemble(loaded, config)
    engine = WatchedEngine(parts.engine)
    now = identify(loaded, config, parts)
    requests = [
        parts.intake.request(str(k), one.prompt, one.params(), watched=one.ending is not None)
        for k, one in enumerate(run.requests)
    ]
    with on_device(parts.limits.device):
        logprobs = _drive(engine, run, requests, on_end)
    found = Replayed(
        num_requests=len(requests),
        num_tokens=sum(len(one.tokens) for one in run.requests),
        differences=differences(run.identity, now),
        same_steps=engine.steps == list(run.steps),
    )
    for k, (one, request) in enumerate(zip(run.requests, requests, strict=True)):
        parting = _part(k, one, request)
        if parting is not None:
            found.partings.append(parting)
        if one.logprobs is not None:
            end = len(one.tokens) if parting is None else parting.position
            pairs = zip(one.logprobs[:end], logprobs[request.number], strict=False)
            gaps = [abs(before[0] - after) for before, after in pairs if before[0] != after]
            found.worst_logprob = max([found.worst_logprob or 0.0, *gaps])
    del engine, parts
    if found.partings:
        gc.collect()  # gives back the memory of the cache and of graphs, which the next engine needs
        found.logprobs = _both_logprobs(run, loaded, config, found.partings[0])
    return found


def _drive(
    engine: WatchedEngine, run: Run, requests: Sequence[Request], on_end: Callable[[int], None]
) -> dict[int, list[float]]:
    """Run all; log-probabilities of the tokens of those that ask for them, by number."""
    waiting = deque(zip(requests, run.requests, strict=True))
    outside = {request.number: (request, one) for request, one in waiting if one.ending is not None}
    counts = dict.fromkeys(outside, 0)
    logprobs: dict[int, list[float]] = {request.number: [] for request in requests}
    while waiting or engine.has_work:
        if not engine.has_work:
            engine.turn = max(engine.turn, waiting[0][1].turn)
        due = []
        while waiting and waiting[0][1].turn <= engine.turn:
            due.append(waiting.popleft()[0])
        engine.add(due)
        for number, (request, one) in list(outside.items()):
            # Elsewhere steps may come in another order: as many tokens are needed as there are to compare.
            assert one.ending is not None
            known = request.req_id in engine.arrivals and counts[number] >= len(one.tokens)
            if known and engine.turn >= one.ending.turn:
                del outside[number]
                engine.end(request.req_id, FinishReason(one.ending.reason))
        events = engine.step()
        if events is None:
            continue
        for i, number in enumerate(events.numbers_np.tolist()):
            counts[number] = counts.get(number, 0) + 1
            if events.logprobs is not None:
                logprobs[number].append(float(events.logprobs.logprobs_np[i, 0]))
        for request in events.ended:
            outside.pop(request.number, None)
        on_end(len(events.ended))
    return logprobs


def _part(number: int, one: RecordedRequest, request: Request) -> Parting | None:
    tokens = request.tokens_np[len(request.prompt_np) :].tolist()
    if not one.complete:
        tokens = tokens[: len(one.tokens)]
    at = next((i for i, (a, b) in enumerate(zip(one.tokens, tokens, strict=False)) if a != b), None)
    finish = None
    if at is None:
        at = min(len(one.tokens), len(tokens))
        if len(one.tokens) == len(tokens):
            if not one.complete or request.finish_reason == one.finish_reason:
                return None
            finish = (one.finish_reason, str(request.finish_reason))
    return Parting(
        number=number,
        line=one.line,
        id=one.id,
        position=at,
        recorded=one.tokens[at] if at < len(one.tokens) else None,
        now=tokens[at] if at < len(tokens) else None,
        recorded_logprob=one.logprobs[at][0] if one.logprobs is not None and at < len(one.tokens) else None,
        finish=finish,
    )


def _both_logprobs(run: Run, loaded: LoadedModel, config: EngineConfig, parting: Parting) -> Logprobs | None:
    if parting.recorded is None or parting.now is None:
        return None
    one = run.requests[parting.number]
    ids = [*one.prompt, *one.tokens[: parting.position]]
    plain = replace(
        config,
        max_num_seqs=1,
        max_model_len=len(ids) + 1,
        num_blocks=None,
        prefix_caching=False,
        graphs=False,
        debug=False,
    )
    parts = assemble(loaded, plain)
    params = SamplingParams(
        temperature=0, max_tokens=1, logprobs=MAX_LOGPROBS, ignore_eos=True, extra_args=one.params().extra_args
    )
    parts.engine.add([parts.intake.request("0", ids, params)])
    with on_device(parts.limits.device):
        while parts.engine.has_work:
            events = parts.engine.step()
            if events is not None and events.logprobs is not None and len(events.numbers_np):
                ids, values = events.logprobs.token_ids_np[0].tolist(), events.logprobs.logprobs_np[0].tolist()
                likely = dict(zip(ids, values, strict=True))
                return Logprobs(recorded=likely.get(parting.recorded), now=likely.get(parting.now))
    return None


def to_dict(found: Replayed) -> dict[str, Any]:
    """For `--json`."""
    return {
        "equal": found.equal,
        **asdict(found),
        "logprobs": None if found.logprobs is None else {**asdict(found.logprobs), "gap": found.logprobs.gap},
    }
