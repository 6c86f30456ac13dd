"""`DefaultModelState` with a real extra input: a scalar per request, spread over its tokens."""

import numpy as np
import pytest
import torch
from torch import nn

from mrv2.attn.groups import KVGroup
from mrv2.errors import ForwardInputError
from mrv2.model_state.default import DefaultModelState
from mrv2.model_state.parts import InputPart
from mrv2.state.block_tables import BlockTables
from mrv2.state.columns import MirroredColumn
from mrv2.state.input_buffers import InputBuffers
from mrv2.state.request_states import RequestStates
from mrv2.state.view import Limits

LIMITS = Limits(max_rows=6, max_num_tokens=24, max_model_len=20)
GROUPS = (
    KVGroup(name="full.0", index=0, layers=("a",), window=None, block_size=4),
    KVGroup(name="window8.0", index=1, layers=("b",), window=8, block_size=4),
)


class Loudness(InputPart):
    """`extra_args["loudness"]` of each token's request, times its position; 0 for padding."""

    key = "loudness"

    def __init__(self, limits):
        self.by_row = MirroredColumn((limits.max_rows,), dtype=torch.float32, device=limits.device)
        self.buffer = torch.zeros(limits.max_num_tokens)

    def add_request(self, row, request):
        self.by_row.set(row, request.sampling.extra_args.get("loudness", 1.0))

    def flush(self):
        self.by_row.flush()

    def fill(self, view):
        i = view.token_to_i.clamp(min=0).long()
        value = self.by_row.device_tensor[view.rows[i].clamp(min=0).long()] * view.positions
        return self.buffer[: view.num_tokens].copy_(torch.where(view.token_to_i >= 0, value, 0))

    def fill_dummy(self, num_reqs, num_tokens):
        return self.buffer[:num_tokens].zero_()


class Lengths(InputPart):
    """The lengths themselves, one per request."""

    key = "lengths"

    def __init__(self, limits):
        self.buffer = torch.zeros(limits.max_rows, dtype=torch.int32)

    def fill(self, view):
        return self.buffer[: view.num_reqs].copy_(view.seq_lens)

    def fill_dummy(self, num_reqs, num_tokens):
        return self.buffer[:num_reqs].zero_()


class Model(nn.Module):
    parts = (Loudness, Lengths)


class Host:
    """What a runner does around a model state, for tests."""

    def __init__(self, state_class=DefaultModelState, model=Model):
        self.state = state_class(model(), LIMITS, GROUPS)
        self.requests = RequestStates(LIMITS, max_stop_ids=2)
        self.tables = BlockTables(LIMITS, GROUPS)
        self.buffers = InputBuffers(LIMITS, GROUPS)

    def add(self, row, request):
        self.requests.add_request(row, request)
        self.state.add_request(row, request)

    def view(self, plan, **padded):
        self.requests.flush()
        self.state.apply_staged_writes()
        return self.buffers.prepare(plan, self.requests, self.tables, **padded)


@pytest.fixture
def host(make_request):
    host = Host()
    for row in range(6):
        request = make_request(str(row), prompt=range(8), computed=row, extra_args={"loudness": 10.0 + row})
        host.add(row, request)
    return host


@pytest.mark.parametrize("rows", [[0, 1, 2], [2, 0, 1], [5, 3], [4, 1, 0, 2, 3, 5]])
@pytest.mark.parametrize("padding", [0, 3])
def test_inputs_follow_the_row_not_the_batch_position(host, make_plan, rows, padding):
    lens = [1 + row % 3 for row in rows]
    num_reqs, num_tokens = min(6, len(rows) + padding), sum(lens) + padding
    for part in host.state.parts:
        part.buffer.fill_(-99)
    inputs = host.state.prepare_inputs(host.view(make_plan(rows, lens), num_reqs=num_reqs, num_tokens=num_tokens))
    loudness = [(10.0 + row) * (row + k) for row, n in zip(rows, lens, strict=True) for k in range(n)]
    assert set(inputs) == {"loudness", "lengths"}
    assert inputs["loudness"].tolist() == loudness + [0.0] * padding
    lengths = [row + n for row, n in zip(rows, lens, strict=True)]
    assert inputs["lengths"].tolist() == lengths + [0] * (num_reqs - len(rows))


def test_a_reused_row_has_its_new_requests_value(host, make_request, make_plan):
    host.state.remove_request(2, "2")
    host.add(2, make_request("new", prompt=range(8), computed=3))
    got = host.state.prepare_inputs(host.view(make_plan([2], [2])))
    assert got["loudness"].tolist() == [3.0, 4.0]


def test_dummy_and_real_inputs_share_everything_but_values(host, make_plan):
    view = host.view(make_plan([4, 1], [3, 2]), num_reqs=4, num_tokens=8)
    real = host.state.prepare_inputs(view)
    facts = {key: (x.shape, x.dtype, x.data_ptr()) for key, x in real.items()}
    dummy = host.state.prepare_dummy_inputs(4, 8)
    assert {key: (x.shape, x.dtype, x.data_ptr()) for key, x in dummy.items()} == facts
    assert list(dummy) == list(real)
    assert not any(x.any() for x in dummy.values())


def test_attention_metadata_is_the_views(host, make_plan):
    view = host.view(make_plan([4, 1], [3, 2]), num_reqs=3, num_tokens=8)
    attn = host.state.prepare_attn(view)
    assert list(attn) == ["full.0", "window8.0"]
    for group in GROUPS:
        meta = attn[group.name]
        assert meta.slot_mapping.data_ptr() == view.slot_mappings[group.index].data_ptr()
        assert meta.block_table.data_ptr() == view.block_tables[group.index].data_ptr()
        assert (meta.num_reqs, meta.num_tokens, meta.block_size, meta.extras) == (3, 8, 4, {})
        assert meta.computed.tolist() == [4, 1, 0]
        np.testing.assert_array_equal(meta.seq_lens, [7, 3, 0])
        np.testing.assert_array_equal(meta.query_start_loc, [0, 3, 5, 5])


def test_extras_reach_their_group_only(make_plan, make_request):
    class State(DefaultModelState):
        def attn_extras(self, view):
            return {"window8.0": {"bias": view.seq_lens}}

    host = Host(State)
    host.add(0, make_request())
    attn = host.state.prepare_attn(host.view(make_plan([0], [3])))
    assert attn["full.0"].extras == {}
    assert attn["window8.0"].extras["bias"].tolist() == [3]


def test_extras_for_an_unknown_group_are_refused(make_plan, make_request):
    class State(DefaultModelState):
        def attn_extras(self, view):
            return {"full": {}}

    host = Host(State)
    host.add(0, make_request())
    with pytest.raises(ForwardInputError, match=r"attn_extras gives tensors for full; .* full.0, window8.0") as error:
        host.state.prepare_attn(host.view(make_plan([0], [3])))
    assert "State.attn_extras" in error.value.where


def test_a_model_without_parts_has_no_extra_inputs(make_plan, make_request):
    host = Host(model=nn.Identity)
    host.add(0, make_request())
    assert host.state.prepare_inputs(host.view(make_plan([0], [3]))) == {}
    assert host.state.prepare_dummy_inputs(1, 1) == {}


def test_two_parts_with_one_key_are_refused():
    class Copy(Lengths):
        pass

    class Clash(nn.Module):
        parts = (Lengths, Loudness, Copy)

    with pytest.raises(ForwardInputError, match=r"parts Lengths and .*Copy both have the key 'lengths'"):
        Host(model=Clash)


@pytest.mark.parametrize("key", ["input_ids", "positions", "ctx"])
def test_a_key_that_forward_has_already_is_refused(key):
    part = type("Bad", (Lengths,), {"key": key})
    model = type("BadModel", (nn.Module,), {"parts": (part,)})
    with pytest.raises(ForwardInputError, match=f"part Bad has the key '{key}'"):
        Host(model=model)
