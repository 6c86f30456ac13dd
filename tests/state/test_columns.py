"""Columns, the ring behind them, and row allocation."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrv2.state.columns import MirroredColumn, StagedColumn
from mrv2.state.rows import RowAllocator
from mrv2.state.staging import StagingRing

CPU = torch.device("cpu")


@settings(max_examples=100)
@given(data=st.data(), width=st.integers(1, 12))
def test_staged_writes_act_in_order(data, width):
    column = StagedColumn((5, width), dtype=torch.int32, device=CPU)
    want = np.zeros((5, width), dtype=np.int32)
    value = 1
    for _ in range(data.draw(st.integers(1, 4))):
        for _ in range(data.draw(st.integers(0, 6))):
            row, start = data.draw(st.integers(0, 4)), data.draw(st.integers(0, width))
            n = data.draw(st.integers(0, width - start))
            values = np.arange(value, value + n)
            value += n
            column.stage(row, start, values)
            want[row, start : start + n] = values
        column.flush()
        np.testing.assert_array_equal(column.device_tensor.numpy(), want)


def test_staged_runs_equal_single_writes():
    one, many = (StagedColumn((4, 6), dtype=torch.int64, device=CPU) for _ in range(2))
    values = np.arange(1, 10)
    many.stage_runs([3, 0, 1, 3], [0, 2, 5, 1], [0, 4, 6, 6, 9], values)
    for row, start, part in ((3, 0, values[:4]), (0, 2, values[4:6]), (3, 1, values[6:])):
        one.stage(row, start, part)
    one.flush()
    many.flush()
    assert torch.equal(one.device_tensor, many.device_tensor)
    assert many.device_tensor[3].tolist() == [1, 7, 8, 9, 0, 0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.float64, torch.bool, torch.uint8])
def test_columns_of_one_value_per_row(dtype):
    column = StagedColumn((7,), dtype=dtype, device=CPU)
    for row in (6, 2, 0):
        column.stage(row, 0, 1)
    column.stage(2, 0, 0)
    column.flush()
    assert column.device_tensor.tolist() == [1, 0, 0, 0, 0, 0, 1]


def test_a_flush_larger_than_any_before():
    column = StagedColumn((3, 10_000), dtype=torch.int32, device=CPU)
    for _ in range(3):
        for row in range(3):
            column.stage(row, 0, np.arange(10_000) + row)
        column.flush()
    assert column.device_tensor[:, -1].tolist() == [9999, 10_000, 10_001]


def test_writes_out_of_range_are_caught():
    column = StagedColumn((3, 4), dtype=torch.int32, device=CPU)
    for row, start, n in ((-1, 0, 1), (3, 0, 1), (0, -1, 1), (0, 2, 3)):
        with pytest.raises(AssertionError):
            column.stage(row, start, np.zeros(n))


def test_staged_values_are_copied_when_staged():
    column = StagedColumn((2, 3), dtype=torch.int32, device=CPU)
    values = np.array([1, 2, 3], dtype=np.int32)
    column.stage(0, 0, values)
    values[:] = 9
    column.flush()
    assert column.device_tensor[0].tolist() == [1, 2, 3]


def test_the_address_never_changes_and_an_empty_flush_does_nothing(monkeypatch):
    column, mirror = (
        StagedColumn((4,), dtype=torch.int32, device=CPU),
        MirroredColumn((4,), dtype=torch.int32, device=CPU),
    )
    addresses = column.device_tensor.data_ptr(), mirror.device_tensor.data_ptr()
    column.stage(1, 0, 5)
    mirror.set(1, 5)
    column.flush()
    mirror.flush()
    monkeypatch.setattr("mrv2.state.columns.apply_staged_writes", None)  # calling it would raise
    column.flush()
    mirror.flush()
    assert (column.device_tensor.data_ptr(), mirror.device_tensor.data_ptr()) == addresses


def test_a_flush_costs_what_changed(monkeypatch):
    mirror = MirroredColumn((1000, 50), dtype=torch.int32, device=CPU)
    sent = []
    monkeypatch.setattr("mrv2.state.columns.apply_staged_writes", lambda **kw: sent.append(len(kw["values"])))
    mirror.set(3, 1)
    mirror.set(3, 2)
    mirror.mark([7, 8])
    mirror.flush()
    assert sent == [150]


def test_a_mirror_doesnt_alias_the_host():
    mirror = MirroredColumn((4, 2), dtype=torch.float32, device=CPU, fill=-1)
    assert mirror.device_tensor.unique().tolist() == [-1]
    mirror.set(2, [1, 2])
    mirror.np[3] = 7
    mirror.mark(np.array([3]))
    mirror.flush()
    mirror.np[:] = 100
    assert mirror.device_tensor.tolist() == [[-1, -1], [-1, -1], [1, 2], [7, 7]]
    mirror.mark(0)
    mirror.flush()
    assert mirror.device_tensor.tolist() == [[100, 100], [-1, -1], [1, 2], [7, 7]]


class SlowEvent:
    """Counts; a buffer must not be handed out again before its event was waited for."""

    def __init__(self):
        self.recorded = self.waited = 0

    def record(self):
        self.recorded += 1

    def synchronize(self):
        self.waited += 1


def test_a_ring_buffer_is_reused_only_after_its_reader():
    events, device = [], torch.zeros(8, dtype=torch.uint8)

    def make_event():
        events.append(SlowEvent())
        return events[-1]

    ring = StagingRing(8, CPU, depth=3, make_event=make_event)
    taken = []
    for step in range(7):
        before = sum(event.waited for event in events)
        buffer = ring.take(8)
        assert sum(event.waited for event in events) - before == (step >= 3)
        buffer[:] = step
        ring.send(device)
        taken.append(buffer.ctypes.data)
        assert device.tolist() == [step] * 8
    assert len(set(taken)) == 3
    assert taken[:3] == taken[3:6]
    assert [event.recorded - event.waited for event in events] == [1, 1, 1]


def test_rows_are_reused_at_once():
    rows = RowAllocator(3)
    assert [rows.allocate() for _ in range(3)] == [0, 1, 2]
    assert rows.num_free == 0
    with pytest.raises(AssertionError):
        rows.allocate()
    rows.release(1)
    assert rows.allocate() == 1
    rows.release(0)
    rows.release(2)
    assert rows.allocate() == 2
    for row in (0, 3, -1):
        with pytest.raises(AssertionError):
            rows.release(row)
