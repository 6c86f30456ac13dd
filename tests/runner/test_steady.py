"""What a step of decodes costs the host: the same for few requests and for many, as long as nothing changes."""

import sys
from collections import Counter

import pytest

from mrv2.runner.request import FinishReason
from mrv2.sample.params import SamplingParams
from mrv2.testing.null_model import null_engine, null_replays

BLOCK = 16


def decoding(num_reqs, *, make=null_replays, watched=False, new=200, **settings):
    parts = make(max_num_seqs=num_reqs, max_model_len=400, block_size=BLOCK, **settings)
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    requests = [parts.intake.request(str(i), [1] * (1 + i % 50), params, watched=watched) for i in range(num_reqs)]
    parts.engine.add(requests)
    while parts.engine.scheduler.stats.generated_tokens < 2 * num_reqs:
        parts.engine.step()
    return parts, requests


def calls_per_step(parts, steps=2 * BLOCK):
    calls = Counter()
    sys.setprofile(lambda frame, event, arg: calls.update([event]))
    for _ in range(steps):
        parts.engine.step()
    sys.setprofile(None)
    return calls["call"] / steps, calls["c_call"] / steps


@pytest.mark.parametrize("watched", [False, True])
def test_calls_per_step_do_not_grow_with_the_batch(watched):
    (few, few_c), (many, many_c) = (calls_per_step(decoding(n, watched=watched)[0]) for n in (4, 256))
    assert few < 80
    assert many < few + 8
    # Blocks are handed out one by one, and each request needs one in a block of steps.
    assert many_c - few_c < 2 * 256 / BLOCK
    assert few_c < 80


def test_rows_get_their_blocks_together_where_blocks_are_plenty():
    parts, _ = decoding(16, num_blocks=1000)
    scheduler = parts.engine.scheduler
    plans = [scheduler.plan() for _ in range(3 * BLOCK)]
    assert sum(len(plan.block_writes[0].rows) > 0 for plan in plans) <= 3
    kv = scheduler.kv
    lens_np = scheduler.columns.scheduled_ub_np
    assert (kv.num_cols_np * BLOCK >= lens_np).all()
    assert (kv.num_cols_np * BLOCK <= lens_np + 2 * BLOCK).all()


def test_no_row_gets_more_than_it_needs_where_blocks_are_few():
    parts, _ = decoding(4, num_blocks=14, prefix_caching=False)
    scheduler = parts.engine.scheduler
    for _ in range(2 * BLOCK):
        scheduler.plan()
        needed_np = -(-scheduler.columns.scheduled_ub_np // BLOCK)
        assert (scheduler.kv.num_cols_np <= needed_np).all()


@pytest.mark.parametrize("make", [null_replays, null_engine])
def test_every_token_is_told_and_kept(make):
    parts, requests = decoding(8, make=make, watched=True, new=70)
    told = Counter()
    told.update({request.number: int(parts.engine.scheduler.columns.known_np[request.row]) for request in requests})
    for request in requests:
        told[request.number] -= len(request.prompt_np)
    first = requests[3]
    while parts.engine.has_work:
        if told[first.number] == 40 and first.finish_reason is None:
            parts.engine.end(first.req_id, FinishReason.ABORT)
        events = parts.engine.step()
        told.update(events.numbers_np.tolist())
    for request in requests:
        assert told[request.number] == len(request.tokens_np) - len(request.prompt_np)
        assert told[request.number] == (40 if request is first else 70)
        assert (request.tokens_np[len(request.prompt_np) :] == 1).all()
