"""The sample model at two sizes of pages, engines around it with poisoned caches, and the comparison."""

import sys
from collections import deque
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from mrv2.frontend.build import assemble, load
from mrv2.frontend.engine_config import EngineConfig
from mrv2.runner.request import FinishReason
from mrv2.runner.sync import SyncRunner
from mrv2.sample.params import SamplingParams
from recurrent import reference
from recurrent.config import TidalConfig

CONFIGS = {
    "hybrid": {},
    "states-only": {"mixers": ["decay", "average"]},
    "own-only": {"mixers": ["decay", "biased", "average", "biased"]},
    # A state larger than a block of attention, and layers enough for groups of two.
    "big-state": {"mixers": ["decay", "attention", "average", "attention"], "decay_key": 31, "decay_value": 33},
}


def poison(parts):
    """Fill the caches, and every block that is handed out, with bits that are NaN in every dtype."""
    pool, pages = parts.engine.scheduler.kv.pool, parts.engine._runner._forward.pages
    take = pool.allocate

    def allocate(count):
        blocks = take(count)
        for page in pages:
            page[blocks] = 0xFF
        return blocks

    for page in pages:
        page.fill_(0xFF)
    pool.allocate = allocate


@dataclass
class Result:
    prompt: list
    tokens: list
    logprobs: list
    cached: int


class Sample:
    def __init__(self, folder, loaded):
        self.folder, self.loaded = folder, loaded
        model = reference.Reference(folder)
        self.logprobs = lru_cache(maxsize=None)(lambda ids: model(ids).log_softmax(-1))

    def engine(self, **settings):
        settings = {"max_num_seqs": 4, "max_num_tokens": 64, "block_size": 4, "device": "cpu"} | settings
        parts = assemble(self.loaded, EngineConfig(**settings))
        poison(parts)
        return parts

    def run(self, parts, prompts, n=10, *, depth=1, preempt=None, abort=None, stop=()):
        """Generate greedily. `preempt`, `abort`: before which step and whom, by order of arrival."""
        scheduler, runner = parts.engine.scheduler, parts.engine._runner
        params = SamplingParams(temperature=0, max_tokens=n, logprobs=0, stop_token_ids=tuple(stop))
        requests = [parts.intake.request(f"{scheduler._step_id}-{i}", p, params) for i, p in enumerate(prompts)]
        got = {r.number: [] for r in requests}
        for r in requests:
            scheduler.add(r)
        in_flight, step = deque(), 0
        while scheduler.has_work:
            for k in sorted((preempt or {}).get(step, ()), reverse=True):
                if k < scheduler.num_running:
                    scheduler._preempt(scheduler._running[k])
            for k in sorted((abort or {}).get(step, ()), reverse=True):
                if k < scheduler.num_running:
                    scheduler.end(scheduler._request_at(scheduler._running[k]).req_id, FinishReason.ABORT)
            step += 1
            plan = scheduler.plan() if len(in_flight) < depth else None
            if plan is not None:
                sync = isinstance(runner, SyncRunner)
                in_flight.append((plan, runner.step(plan) if sync else runner.finish(runner.begin(plan))))
            assert in_flight or not scheduler.has_work, "requests wait, and no step can run"
            if in_flight and (plan is None or len(in_flight) == depth):
                plan, output = in_flight.popleft()
                events = scheduler.update(plan, output if isinstance(runner, SyncRunner) else output.wait())
                for i, number in enumerate(events.numbers_np.tolist()):
                    got[number].append(float(events.logprobs.logprobs_np[i, 0]))
        pool = scheduler.kv.pool
        scheduler.release_drained()
        assert pool.num_free == pool.num_usable, "blocks were lost"
        return [
            Result(p, r.tokens_np[len(p) :].tolist(), got[r.number], r.num_cached_tokens)
            for p, r in zip(prompts, requests, strict=True)
        ]

    def worst(self, results):
        """Largest difference of a log-probability from the reference's; NaN counts as infinite."""
        worst = 0.0
        for r in results:
            if not r.tokens:  # aborted
                continue
            ids = (*r.prompt, *r.tokens)
            want = self.logprobs(ids)[len(r.prompt) - 1 : -1]
            assert len(r.logprobs) == len(r.tokens)
            # The sampled token's, and the best token's: a wrong choice shows in the second.
            for best in (want.gather(1, torch.tensor(r.tokens)[:, None])[:, 0], want.max(1).values):
                gap = (torch.tensor(r.logprobs) - best).abs().nan_to_num(nan=float("inf")).max().item()
                worst = max(worst, gap)
        return worst


@pytest.fixture(scope="session")
def sample(tmp_path_factory):
    """sample(name) -> Sample."""

    @cache
    def make(name, dtype="float32"):
        folder = tmp_path_factory.mktemp(name) / "model"
        reference.make_checkpoint(folder, TidalConfig(**CONFIGS[name]), seed=3)
        adapter = str(Path(__file__).parents[1])
        return Sample(folder, load(str(folder), EngineConfig(device="cpu", dtype=dtype), [adapter]))

    return make


@pytest.fixture(params=CONFIGS)
def any_sample(request, sample):
    """Each configuration in turn."""
    return sample(request.param)
