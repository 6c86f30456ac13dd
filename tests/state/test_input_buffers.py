"""From a plan to a `StepView`, against plain loops, over random batches with padding and stopped rows."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from mrv2.attn.groups import KVGroup
from mrv2.state.block_tables import BlockTables
from mrv2.state.input_buffers import InputBuffers
from mrv2.state.request_states import RequestStates
from mrv2.state.view import Limits

LIMITS = Limits(max_rows=8, max_num_tokens=64, max_model_len=40)


def kv_groups(*sizes):
    return tuple(
        KVGroup(name=f"g{k}", index=k, layers=(f"l{k}",), window=None, block_size=size) for k, size in enumerate(sizes)
    )


def tensors(view):
    """All tensors of a view, by name."""
    found = {}
    for field in dataclasses.fields(view):
        value = getattr(view, field.name)
        if isinstance(value, Tensor):
            found[field.name] = value
        elif isinstance(value, tuple):
            found |= {f"{field.name}.{k}": tensor for k, tensor in enumerate(value)}
    return found


class Table:
    """A populated table, and plain-Python copies of what it holds."""

    def __init__(self, rng, groups, make_request, make_writes):
        self.states = RequestStates(LIMITS, max_stop_ids=2)
        self.tables = BlockTables(LIMITS, groups)
        self.buffers = InputBuffers(LIMITS, groups)
        self.tokens, self.computed, self.blocks = {}, {}, {}
        for row in range(LIMITS.max_rows):
            n = int(rng.integers(2, 30))
            self.tokens[row] = rng.integers(1, 99, n).tolist()
            self.computed[row] = int(rng.integers(0, n))
            self.states.add_request(row, make_request(str(row), prompt=self.tokens[row], computed=self.computed[row]))
            self.blocks[row] = [rng.integers(1, 500, -(-40 // group.block_size)).tolist() for group in groups]
        self.stopped = set(rng.permutation(8)[: int(rng.integers(0, 4))].tolist())
        for row in self.stopped:
            self.states.remove_request(row, str(row))
        self.tables.stage(
            tuple(make_writes(*((row, 0, self.blocks[row][g]) for row in self.blocks)) for g in range(len(groups)))
        )
        self.states.flush()
        self.tables.flush()


def poison(buffers, tables):
    for holder in (buffers, tables):
        for name, value in vars(holder).items():
            if isinstance(value, Tensor) and name not in ("by_row", "block_sizes"):
                value.fill_(-12345)


@pytest.mark.parametrize("seed", range(40))
def test_prepare_equals_a_loop(seed, make_request, make_writes, make_plan):
    rng = np.random.default_rng(seed)
    groups = kv_groups(*[(4,), (4, 8), (16, 4, 4), ()][seed % 4])
    table = Table(rng, groups, make_request, make_writes)
    rows = rng.permutation(8)[: int(rng.integers(1, 9))].tolist()
    lens = [int(rng.integers(1, len(table.tokens[row]) - table.computed[row] + 1)) for row in rows]
    while sum(lens) > LIMITS.max_num_tokens:
        rows.pop(), lens.pop()
    num_reqs = int(rng.integers(len(rows), 9))
    num_tokens = int(rng.integers(sum(lens), 65))
    poison(table.buffers, table.tables)
    plan = make_plan(rows, lens, max_seq_len=32)
    view = table.buffers.prepare(plan, table.states, table.tables, num_reqs=num_reqs, num_tokens=num_tokens)

    want = {name: [] for name in tensors(view)}
    want["query_start_loc"] = [0, *np.cumsum(lens + [0] * (num_reqs - len(rows))).tolist()]
    for i in range(num_reqs):
        row, query_len = (rows[i], lens[i]) if i < len(rows) else (-1, 0)
        live = i < len(rows) and row not in table.stopped
        computed = table.computed[row] if live else 0
        want["rows"].append(row)
        want["seq_lens"].append(computed + query_len)
        want["logits_indices"].append(want["query_start_loc"][i + 1] - 1 if query_len else 0)
        for g, group in enumerate(groups):
            cols = -(-32 // min(group.block_size for group in groups))
            ids = table.blocks[row][g] if live else [0] * -(-40 // group.block_size)
            want[f"block_tables.{g}"].append(ids[:cols])
        for position in range(computed, computed + query_len):
            want["positions"].append(position)
            want["token_to_i"].append(i)
            want["input_ids"].append(table.tokens[row][position] if live else 0)
            for g, group in enumerate(groups):
                size = group.block_size
                slot = table.blocks[row][g][position // size] * size + position % size if live else -1
                want[f"slot_mappings.{g}"].append(slot)
    neutral = {"positions": 0, "token_to_i": -1, "input_ids": 0} | {
        f"slot_mappings.{g}": -1 for g in range(len(groups))
    }
    for name, value in neutral.items():
        want[name] += [value] * (num_tokens - sum(lens))
    for name, tensor in tensors(view).items():
        got = tensor.tolist()
        if name.startswith("block_tables"):
            got = [ids[: len(want[name][0])] for ids in got]
        assert got == want[name], name


def test_dtypes_and_shapes(make_request, make_writes, make_plan):
    table = Table(np.random.default_rng(0), kv_groups(4, 8), make_request, make_writes)
    view = table.buffers.prepare(make_plan([1], [1]), table.states, table.tables, num_reqs=4, num_tokens=6)
    got = {name: (tuple(tensor.shape), str(tensor.dtype)[6:]) for name, tensor in tensors(view).items()}
    assert got == {
        "rows": ((4,), "int32"),
        "query_start_loc": ((5,), "int32"),
        "seq_lens": ((4,), "int32"),
        "input_ids": ((6,), "int32"),
        "positions": ((6,), "int64"),
        "token_to_i": ((6,), "int32"),
        "logits_indices": ((4,), "int64"),
        "block_tables.0": ((4, 10), "int32"),
        "block_tables.1": ((4, 5), "int32"),
        "slot_mappings.0": ((6,), "int64"),
        "slot_mappings.1": ((6,), "int64"),
    }


def test_addresses_are_the_same_every_step(make_request, make_writes, make_plan):
    table = Table(np.random.default_rng(0), kv_groups(4, 8), make_request, make_writes)

    def addresses(rows, lens):
        view = table.buffers.prepare(make_plan(rows, lens), table.states, table.tables)
        return {name: tensor.data_ptr() for name, tensor in tensors(view).items()}

    first = addresses([1], [1])
    assert addresses([5, 2, 0, 7, 6, 3], [1, 2, 1, 1, 1, 1]) == first


def test_the_order_of_a_batch_changes_nothing_for_a_request(make_request, make_writes, make_plan):
    table = Table(np.random.default_rng(5), kv_groups(4), make_request, make_writes)

    def of_row(rows, row):
        view = table.buffers.prepare(make_plan(rows, [1] * len(rows)), table.states, table.tables)
        i = rows.index(row)
        per_i = (view.seq_lens, view.input_ids, view.positions, view.slot_mappings[0])
        return [x[i].item() for x in per_i], view.block_tables[0][i, :5].tolist()

    for row in range(8):
        alone = of_row([row], row)
        assert of_row([row, *(set(range(8)) - {row})], row) == alone
        assert of_row([*(set(range(8)) - {row}), row], row) == alone


def test_a_view_isnt_changed_by_the_next_plan_on_the_host(make_request, make_writes, make_plan):
    table = Table(np.random.default_rng(0), kv_groups(4), make_request, make_writes)
    plan = make_plan([3, 1], [1, 1])
    view = table.buffers.prepare(plan, table.states, table.tables)
    plan.rows_np[:] = 6
    assert view.rows.tolist() == [3, 1]


def test_block_writes_append_and_replace(make_writes):
    tables = BlockTables(LIMITS, kv_groups(4, 4))
    tables.stage((make_writes((2, 0, [7, 8]), (1, 0, [9])), make_writes()))
    tables.stage((make_writes((2, 2, [5])), make_writes((2, 0, [30]))))
    tables.flush()
    tables.stage((make_writes((2, 1, [4])), make_writes()))
    tables.flush()
    assert tables.by_row[:, [2, 1, 0], :4].tolist() == [
        [[7, 4, 5, 0], [9, 0, 0, 0], [0, 0, 0, 0]],
        [[30, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]],
    ]


def test_gather_may_read_the_batch_where_a_view_has_it(make_request, make_writes, make_plan):
    """As a graph does: it always reads the same address."""
    table = Table(np.random.default_rng(0), kv_groups(4, 8), make_request, make_writes)
    buffers, tables = table.buffers, table.tables
    view = buffers.prepare(make_plan([1, 5], [1, 2], max_seq_len=40), table.states, tables, num_reqs=4, num_tokens=6)
    want = {name: tensor.clone() for name, tensor in tensors(view).items()}
    kept = buffers.batch.clone()
    poison(buffers, tables)
    buffers.batch.copy_(kept)
    buffers.gather(buffers.batch, table.states, tables, num_reqs=4, num_tokens=6, max_seq_len=40)
    for name, tensor in tensors(view).items():
        assert torch.equal(tensor, want[name]), name
