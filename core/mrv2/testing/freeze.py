"""The freeze test: does a captured step still do what a fresh build of it would do, once everything has changed?

Device-side code runs in Python once, when it is captured. Whatever it computes on the host then (a length, a maximum, a
counter, a tensor made from a Python number) stays as it was in every later step, without an error.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from mrv2.attn.triton import TritonAttention
from mrv2.errors import GraphCaptureError
from mrv2.frontend.build import EngineParts, LoadedModel, assemble
from mrv2.frontend.engine_config import EngineConfig
from mrv2.kernels.cuda_graph import CudaRecorder
from mrv2.model_state.graphs import GraphPlan
from mrv2.runner.graphs import Recorder, StepGraphs
from mrv2.runner.runner import Runner
from mrv2.sample.params import SamplingParams
from mrv2.state.view import StepView
from mrv2.testing.recorder import RecordedOps, RunAgain

T = TypeVar("T")

ROWS = 4
LENGTHS = ((5, 9), (1, 14), (17, 4), (30, 8), (3, 12), (11, 3), (2, 10))
"""Prompt and generated tokens of each request: more than there are rows, so that rows and order change."""


def check_frozen(
    loaded: LoadedModel,
    *,
    device: str = "auto",
    params: Sequence[SamplingParams] = (SamplingParams(temperature=0),),
    seed: int = 0,
) -> None:
    """Run requests twice, with steps captured once and replayed, and with steps built anew each time; both have to
    give the same inputs, hidden states and tokens.

    On a GPU the steps are captured as CUDA graphs. On a CPU their operations are recorded and done again, which finds
    what would freeze without a GPU.

    Args:
        loaded: the model; small ones do.
        device: that it was loaded to.
        params: of the requests, in turn; for options that an adapter reads. `max_tokens` is set here.
        seed: of the prompts.

    Raises:
        AssertionError: something is frozen, or is read on the host. The message says what differs.
    """
    config = EngineConfig(
        device=device, dtype="auto", graphs=False, depth=1, max_num_seqs=ROWS, max_num_tokens=64, max_model_len=64
    )
    fresh, captured = (_Side(loaded, config) for _ in range(2))
    fresh.use(RunAgain())
    captured.use(CudaRecorder(fresh.device) if fresh.device.type == "cuda" else RecordedOps())
    rng, vocab = random.Random(seed), loaded.config.vocab_size
    for i, (length, new) in enumerate(LENGTHS):
        prompt = [rng.randrange(vocab) for _ in range(length)]
        for side in (fresh, captured):
            side.add(f"r{i}", prompt, params[i % len(params)], new)
    step = 0
    while fresh.has_work:
        step += 1
        try:
            fresh.step()
            captured.step()
        except GraphCaptureError as error:
            raise AssertionError(f"step {step} can't be captured: {error.__cause__}") from error
        captured.compare(fresh, step)
    assert captured.tokens() == fresh.tokens(), "hidden states are the same and tokens aren't: see the sampler"


def replay_steps(parts: EngineParts, recorder: Recorder, plan: GraphPlan | None = None) -> StepGraphs:
    """Have an engine replay its steps with any recorder, on a CPU too. It must not have run one.

    Args:
        parts: the engine, assembled with `graphs=False`.
        recorder: makes the replays.
        plan: sizes; None: one, for the largest step of decodes, and one for that of prompts.
    """
    runner = parts.engine._runner
    assert isinstance(runner, Runner)
    if parts.limits.device.type == "cpu":
        # What is quick on a CPU reads tensors on the host; on a GPU it is the kernels that run.
        runner._forward._backend, runner._forward._one_token = TritonAttention(), None
        runner._forward.greedy = lambda hidden, view: None  # type: ignore[method-assign]
    limits = parts.limits
    largest = GraphPlan(
        num_reqs=(limits.max_rows,), max_seq_lens=(limits.max_model_len,), num_tokens=(limits.max_num_tokens,)
    )
    return runner.use_graphs(plan or largest, recorder)


class _Side:
    """One engine, and what the replays of its last step made."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig) -> None:
        self._parts = assemble(loaded, config)
        self.device = self._parts.limits.device
        self._requests: list[Any] = []
        self._waiting: list[Any] = []
        self._made: dict[str, Tensor] = {}  # by the step that runs, or is captured
        self._seen: list[dict[str, Tensor]] = []  # by the last step: its decodes, its prompts, if they were replayed
        forward = self._parts.engine._runner._forward
        self._watch(forward.state, "prepare_inputs", lambda view, inputs: dict(inputs))
        self._watch(forward, "hidden", self._named)

    @staticmethod
    def _named(view: StepView, hidden: Tensor) -> dict[str, Tensor]:
        return {"rows": view.rows, "tokens' requests": view.token_to_i, "hidden states": hidden}

    def _watch(self, owner: Any, name: str, named: Callable[[StepView, Any], dict[str, Tensor]]) -> None:
        method = getattr(owner, name)

        def watched(view: StepView) -> Any:
            result = method(view)
            self._made |= named(view, result)
            return result

        setattr(owner, name, watched)

    def use(self, recorder: Recorder) -> None:
        replay_steps(self._parts, _Watched(recorder, self))

    def watched(self, run: Callable[[], T]) -> tuple[T, dict[str, Tensor]]:
        self._made = {}
        result, made = run(), self._made
        self._made = {}
        return result, made

    def note(self, made: dict[str, Tensor]) -> None:
        """Keep what a replay has made: another may follow in the same buffers."""
        self._seen.append({name: tensor.clone() for name, tensor in made.items()})

    def add(self, req_id: str, prompt: list[int], params: SamplingParams, new: int) -> None:
        request = self._parts.intake.request(req_id, prompt, replace(params, max_tokens=new, ignore_eos=True, seed=new))
        self._requests.append(request)
        self._waiting.append(request)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting) or self._parts.engine.has_work

    def step(self) -> None:
        """One step; a request arrives in each, so that some join others that decode."""
        self._seen = []
        self._parts.engine.add(self._waiting[:1])
        del self._waiting[:1]
        self._parts.engine.step()

    def tokens(self) -> list[list[int]]:
        return [request.tokens_np.tolist() for request in self._requests]

    def compare(self, fresh: _Side, step: int) -> None:
        """With what a fresh build has made; padding doesn't count."""
        assert len(self._seen) == len(fresh._seen), f"step {step}: {len(self._seen)} replays, not {len(fresh._seen)}"
        for mine, theirs in zip(self._seen, fresh._seen, strict=True):
            self._compare(mine, theirs, step)

    def _compare(self, mine: dict[str, Tensor], theirs: dict[str, Tensor], step: int) -> None:
        assert mine.keys() == theirs.keys(), f"step {step}: {set(mine) ^ set(theirs)} is missing"
        for name, want in theirs.items():
            got = mine[name]
            for real in (theirs["tokens' requests"] >= 0, theirs["rows"] >= 0):
                if len(want) == len(real):
                    got, want = got[real], want[real]
                    break
            if want.is_floating_point():
                same = torch.allclose(got, want, rtol=1e-3, atol=1e-4, equal_nan=True)
            else:
                same = torch.equal(got, want)
            assert same, (
                f"step {step}, replayed: {name} differ from what a fresh build of the step gives. Something that was "
                "computed on the host when the step was captured has stayed as it was: a Python number, a length, a "
                "counter, a tensor made from such values. Compute it on the device, from the view's tensors, or keep "
                "it in a persistent buffer that the host side fills"
            )


class _Watched:
    """A recorder that also keeps what the step made on its way."""

    def __init__(self, recorder: Recorder, side: _Side) -> None:
        self._recorder, self._side = recorder, side

    def record(self, run: Callable[[], T]) -> Callable[[], T]:
        replay = self._recorder.record(lambda: self._side.watched(run))

        def noted() -> T:
            result, made = replay()
            self._side.note(made)
            return result

        return noted
