"""A reused row is what a fresh table holds, whatever was there before."""

import numpy as np
import pytest
import torch

from mrv2.kernels import update_after_sample
from mrv2.state.request_states import RequestStates
from mrv2.state.view import Limits

LIMITS = Limits(max_rows=6, max_num_tokens=32, max_model_len=24)
ROW_FIELDS = ("prompt_len", "prefill_len", "total_len", "num_computed", "active")


def columns(states):
    named = {name: getattr(states.table, name) for name in (*ROW_FIELDS, "all_token_ids")}
    return {**named, "len_limit": states.len_limit, "stop_token_ids": states.stop_token_ids}


def poison(states, seed):
    generator = torch.Generator().manual_seed(seed)
    for column in columns(states).values():
        column.copy_(torch.randint(-99, 99, column.shape, generator=generator))


ENTRIES = {
    "fresh": {},
    "prefix hit": {"prompt": range(10, 20), "computed": 8},
    "all but one computed": {"prompt": range(10, 20), "computed": 9},
    "resumed": {"generated": (8, 9, 4), "computed": 0, "stop": (1, 2)},
    "resumed with a hit": {"generated": (8, 9, 4), "computed": 5, "stop": (1, 2, 3, 4)},
    "as long as can be": {"prompt": range(24), "len_limit": 24},
}


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
@pytest.mark.parametrize("row", [0, 3, 5])
def test_add_request_sets_every_field_of_a_poisoned_row(make_request, entry, row):
    request = make_request("new", **entry)
    fresh = RequestStates(LIMITS, max_stop_ids=4)
    fresh.add_request(row, request)
    fresh.flush()
    for seed in range(3):
        reused = RequestStates(LIMITS, max_stop_ids=4)
        reused.add_request(row, make_request("old", prompt=range(1, 22), stop=(9,)))
        reused.flush()
        reused.remove_request(row, "old")
        poison(reused, seed)
        reused.add_request(row, request)
        reused.flush()
        known = len(request.prefill_token_ids)
        for name, column in columns(reused).items():
            want = columns(fresh)[name][row]
            if name == "all_token_ids":  # past the known tokens nothing is read
                assert column[row, :known].tolist() == want[:known].tolist()
            else:
                assert column[row].tolist() == want.tolist(), name


def test_values(make_request):
    states = RequestStates(LIMITS, max_stop_ids=3)
    request = make_request(prompt=(5, 6, 7), generated=(8, 9), computed=4, stop=(2, 1), len_limit=17)
    states.add_request(4, request)
    states.flush()
    table = states.table
    got = [int(table.prompt_len[4]), int(table.prefill_len[4]), int(table.total_len[4]), int(table.num_computed[4])]
    assert got == [3, 5, 5, 4]
    assert (bool(table.active[4]), int(states.len_limit[4])) == (True, 17)
    assert states.stop_token_ids[4].tolist() == [2, 1, -1]
    assert table.all_token_ids[4, :5].tolist() == [5, 6, 7, 8, 9]
    assert table.active.tolist() == [False] * 4 + [True, False]
    dtypes = {name: column.dtype for name, column in columns(states).items()}
    assert dtypes.pop("active") == torch.bool
    assert set(dtypes.values()) == {torch.int32}
    assert all(column.is_contiguous() for column in columns(states).values())


def test_nothing_reaches_the_device_before_the_flush(make_request):
    states = RequestStates(LIMITS, max_stop_ids=3)
    states.add_request(1, make_request())
    assert not any(column.any() for column in columns(states).values())


def test_other_rows_are_left_alone(make_request):
    states = RequestStates(LIMITS, max_stop_ids=3)
    poison(states, 0)
    before = {name: column.clone() for name, column in columns(states).items()}
    states.add_request(2, make_request(prompt=range(24), stop=(1, 2, 3)))
    states.flush()
    others = [0, 1, 3, 4, 5]
    for name, column in columns(states).items():
        assert torch.equal(column[others], before[name][others]), name


def test_remove_and_add_within_one_flush(make_request):
    states = RequestStates(LIMITS, max_stop_ids=3)
    states.add_request(2, make_request("a"))
    states.flush()
    states.remove_request(2, "a")
    states.add_request(2, make_request("b", prompt=(1, 2)))
    states.add_request(3, make_request("c"))
    states.add_request(3, make_request("c", prompt=(9, 9, 9, 9)))  # adding again is legal
    states.flush()
    assert states.active.tolist() == [False, False, True, True, False, False]
    assert states.table.total_len.tolist() == [0, 0, 2, 4, 0, 0]


def test_removing_what_isnt_there_is_legal_and_harms_nobody(make_request):
    states = RequestStates(LIMITS, max_stop_ids=3)
    states.add_request(2, make_request("a"))
    for row, req_id in ((2, "unknown"), (4, "a"), (-1, "a"), (99, "a")):
        states.remove_request(row, req_id)
    states.flush()
    assert states.active.tolist() == [False, False, True, False, False, False]
    states.remove_request(2, "a")
    states.remove_request(2, "a")
    states.flush()
    assert not states.active.any()


def test_device_updates_survive_later_flushes(make_request):
    states = RequestStates(LIMITS, max_stop_ids=3)
    states.add_request(2, make_request(prompt=(5, 6), computed=0))
    states.flush()
    gained = torch.zeros(1, dtype=torch.int32)
    update_after_sample(
        rows=torch.tensor([2], dtype=torch.int32),
        seq_lens=torch.tensor([2], dtype=torch.int32),
        sampled=torch.tensor([[77]]),
        num_candidates=torch.ones(1, dtype=torch.int32),
        all_token_ids=states.table.all_token_ids,
        total_len=states.table.total_len,
        num_computed=states.table.num_computed,
        active=states.active,
        len_limit=states.len_limit,
        stop_token_ids=states.stop_token_ids,
        num_sampled=gained,
    )
    states.add_request(0, make_request("other", prompt=np.arange(20)))
    states.flush()
    assert gained.item() == 1
    assert states.table.all_token_ids[2, :3].tolist() == [5, 6, 77]
    assert (int(states.table.total_len[2]), int(states.table.num_computed[2])) == (3, 2)
