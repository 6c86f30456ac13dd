"""Kernels that prepare a step and write it back: Triton against twin, and twin against plain loops."""

import numpy as np
import pytest
import torch

from mrv2.kernels import Kernel, apply_staged_writes, copy_blocks, prepare_inputs, report_sampled, update_after_sample
from mrv2.testing import check_kernel

SEEDS = range(30)


def ints(rng, low, high, shape, dtype=torch.int32):
    return torch.from_numpy(np.asarray(rng.integers(low, high, size=shape))).to(dtype)


def ragged_batch(rng, *, max_rows=12, max_len=600):
    """Rows in random order, padding at the end, some rows inactive, lengths from 1 to more than a tile."""
    real = int(rng.integers(1, max_rows + 1))
    padded = int(rng.integers(real, max_rows + 1))
    rows = torch.full((padded,), -1, dtype=torch.int32)
    rows[:real] = torch.from_numpy(rng.permutation(max_rows)[:real])
    lens = torch.zeros(padded, dtype=torch.int32)
    lens[:real] = ints(rng, 1, int(rng.choice([2, 9, max_len // 2])), real)
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), lens.cumsum(0, dtype=torch.int32)])
    num_tokens = int(starts[-1] + rng.integers(0, 300))
    return rows, lens, starts, num_tokens


# -- prepare_inputs --------------------------------------------------------------------------------------

PREPARED = ("rows", "query_start_loc", "seq_lens", "logits_indices", "token_to_i", "positions", "input_ids")
PER_GROUP = ("block_tables", "slots")


def prepare_inputs_inputs(rng, max_rows=12, max_len=600):
    rows, _, starts, num_tokens = ragged_batch(rng, max_rows=max_rows, max_len=max_len)
    n, num_groups, size = len(rows), int(rng.integers(0, 4)), int(rng.choice([1, 4, 16]))
    width = -(-max_len // size) if rng.integers(2) else 3  # wide enough, or too narrow for most positions
    batch = torch.full((2, max_rows + 4), -1, dtype=torch.int32)
    batch[0, :n], batch[1, : n + 1] = rows, starts
    return {
        "num_computed": ints(rng, 0, max_len, max_rows),
        "all_token_ids": ints(rng, 1, 1000, (max_rows, max_len)),
        "active": ints(rng, 0, 4, max_rows) > 0,
        "tables": ints(rng, 1, 2**31 - 1, (num_groups, max_rows, width)),
        "block_sizes": torch.tensor([size, size * 2, 1][:num_groups], dtype=torch.int32),
        "num_cols": int(rng.integers(0, width + 1)),
        "batch": batch,
        "rows": torch.zeros(n, dtype=torch.int32),
        "query_start_loc": torch.zeros(n + 1, dtype=torch.int32),
        "seq_lens": torch.zeros(n, dtype=torch.int32),
        "logits_indices": torch.zeros(n, dtype=torch.int64),
        "token_to_i": torch.zeros(num_tokens, dtype=torch.int32),
        "positions": torch.zeros(num_tokens, dtype=torch.int64),
        "input_ids": torch.zeros(num_tokens, dtype=torch.int32),
        "block_tables": torch.zeros(num_groups, max_rows, width, dtype=torch.int32)[:, :n],
        "slots": torch.zeros(int(rng.integers(0, num_groups + 1)), num_tokens + 5, dtype=torch.int64)[:, :num_tokens],
    }


@pytest.mark.sanitize
def test_prepare_inputs_kernel_equals_twin():
    check_kernel(prepare_inputs, prepare_inputs_inputs, outputs=PREPARED + PER_GROUP, cases=40)


@pytest.mark.sanitize
def test_prepare_inputs_takes_long_queries_and_tables():
    """More tokens, padding and blocks than one tile."""

    def make(rng):
        inputs = prepare_inputs_inputs(rng, max_rows=3, max_len=2500)
        return inputs | {"num_cols": inputs["tables"].shape[2]}

    check_kernel(prepare_inputs, make, outputs=PREPARED + PER_GROUP, cases=8)


@pytest.mark.parametrize("seed", SEEDS)
def test_prepare_inputs_twin_equals_a_loop(seed):
    inputs = prepare_inputs_inputs(np.random.default_rng(seed))
    for name in PREPARED + PER_GROUP:
        inputs[name].fill_(-77)
    prepare_inputs(**inputs)
    n, num_tokens, table = len(inputs["rows"]), len(inputs["positions"]), inputs["all_token_ids"]
    rows, starts = inputs["batch"][0, :n].tolist(), inputs["batch"][1, : n + 1].tolist()
    ids, positions, owner = [0] * num_tokens, [0] * num_tokens, [-1] * num_tokens
    slots = np.full(inputs["slots"].shape, -1)
    blocks = np.full(inputs["block_tables"].shape, -77)
    seq_lens, last, cols, width = [], [], inputs["num_cols"], inputs["tables"].shape[2]
    for i, row in enumerate(rows):
        live = row >= 0 and bool(inputs["active"][row])
        computed = int(inputs["num_computed"][row]) if live else 0
        for token in range(starts[i], starts[i + 1]):
            positions[token] = computed + token - starts[i]
            owner[token] = i
            if live and positions[token] < table.shape[1]:
                ids[token] = int(table[row, positions[token]])
            for group in range(len(slots)):
                col, offset = divmod(positions[token], inputs["block_sizes"][group].item())
                if live and col < width:
                    block = inputs["tables"][group, row, col].item()
                    slots[group, token] = block * inputs["block_sizes"][group].item() + offset
        blocks[:, i, :cols] = inputs["tables"][:, row, :cols] if live else 0
        seq_lens.append(computed + starts[i + 1] - starts[i])
        last.append(starts[i + 1] - 1 if starts[i + 1] > starts[i] else 0)
    got = [inputs[name].tolist() for name in PREPARED]
    assert got == [rows, starts, seq_lens, last, owner, positions, ids]
    np.testing.assert_array_equal(inputs["block_tables"].numpy(), blocks)
    np.testing.assert_array_equal(inputs["slots"].numpy(), slots)


def test_prepare_inputs_may_read_where_it_writes():
    """Rows and query starts in place, as in a replayed graph."""

    def in_place(run):
        def prepare(**inputs):
            n, batch = len(inputs["rows"]), inputs["batch"]
            run(**inputs | {"rows": batch[0, :n], "query_start_loc": batch[1, : n + 1]})

        return prepare

    kernel = Kernel(in_place(prepare_inputs.triton), in_place(prepare_inputs.twin))
    check_kernel(kernel, prepare_inputs_inputs, outputs=PREPARED[2:] + PER_GROUP, cases=10)


# -- staged writes ---------------------------------------------------------------------------------------


def staged_inputs(rng, dtype=None):
    num_rows, width = 10, int(rng.choice([1, 7, 700]))
    rows = rng.permutation(num_rows)[: int(rng.integers(1, num_rows + 1))]
    starts = rng.integers(0, width, len(rows))
    lens = rng.integers(0, width - starts + 1)
    dtype = dtype or [torch.int32, torch.int64, torch.float32, torch.uint8][int(rng.integers(4))]
    rows = np.where(rng.random(len(rows)) < 0.2, -1, rows)
    return {
        "target": ints(rng, 0, 100, (num_rows, width), dtype),
        "rows": torch.from_numpy(rows).int(),
        "starts": torch.from_numpy(starts).int(),
        "cu_lens": torch.from_numpy(np.concatenate([[0], np.cumsum(lens)])).int(),
        "values": ints(rng, 100, 200, int(lens.sum()), dtype),
    }


@pytest.mark.sanitize
def test_staged_writes_kernel_equals_twin():
    check_kernel(apply_staged_writes, staged_inputs, cases=30)


@pytest.mark.parametrize("seed", SEEDS)
def test_staged_writes_twin_equals_a_loop(seed):
    inputs = staged_inputs(np.random.default_rng(seed))
    want, cu = inputs["target"].clone(), inputs["cu_lens"].tolist()
    for k, (row, start) in enumerate(zip(inputs["rows"].tolist(), inputs["starts"].tolist(), strict=True)):
        if row >= 0:
            want[row, start : start + cu[k + 1] - cu[k]] = inputs["values"][cu[k] : cu[k + 1]]
    apply_staged_writes(**inputs)
    assert torch.equal(inputs["target"], want)


# -- update_after_sample ---------------------------------------------------------------------------------


def update_inputs(rng):
    max_rows, max_len, slots, stops = 10, 20, int(rng.integers(1, 5)), int(rng.integers(1, 6))
    rows, *_ = ragged_batch(rng, max_rows=max_rows)
    n = len(rows)
    total_len = ints(rng, 1, max_len + 1, max_rows)
    # Around the known length: in the middle of a prefill, just complete, or past it.
    seq_lens = total_len[rows.clamp(min=0).long()] + ints(rng, -2, 2, n)
    return {
        "rows": rows,
        "seq_lens": seq_lens.int(),
        "sampled": ints(rng, 0, 6, (n, slots), torch.int64),
        "num_candidates": ints(rng, 0, slots + 2, n),
        "all_token_ids": ints(rng, 50, 99, (max_rows, max_len)),
        "total_len": total_len,
        "num_computed": ints(rng, 0, max_len, max_rows),
        "active": ints(rng, 0, 4, max_rows) > 0,
        "len_limit": ints(rng, 1, max_len + 4, max_rows),
        "stop_token_ids": ints(rng, -1, 6, (max_rows, stops)),
        "num_sampled": torch.zeros(n, dtype=torch.int32),
    }


@pytest.mark.sanitize
def test_update_after_sample_kernel_equals_twin():
    check_kernel(update_after_sample, update_inputs, outputs=("num_sampled",), cases=60)


@pytest.mark.parametrize("seed", range(60))
def test_update_after_sample_twin_equals_a_loop(seed):
    inputs = update_inputs(np.random.default_rng(seed))
    inputs["num_sampled"].fill_(-7)
    want = {name: value.numpy().copy() for name, value in inputs.items()}
    slots, max_len = want["sampled"].shape[1], want["all_token_ids"].shape[1]
    for i, row in enumerate(want["rows"]):
        want["num_sampled"][i] = 0
        if row < 0 or not want["active"][row]:
            continue
        if want["seq_lens"][i] < want["total_len"][row]:
            want["num_computed"][row] = want["seq_lens"][i]
            continue
        limit = min(want["len_limit"][row], max_len)
        want["active"][row] = want["total_len"][row] < limit
        for token in want["sampled"][i, : min(want["num_candidates"][i], slots)]:
            if not want["active"][row]:
                break
            want["all_token_ids"][row, want["total_len"][row]] = token
            want["total_len"][row] += 1
            want["num_sampled"][i] += 1
            want["active"][row] = token not in want["stop_token_ids"][row] and want["total_len"][row] < limit
        want["num_computed"][row] = want["total_len"][row] - 1
    update_after_sample(**inputs)
    for name, value in inputs.items():
        np.testing.assert_array_equal(value.numpy(), want[name], err_msg=name)


# -- copy_blocks -----------------------------------------------------------------------------------------


def copy_blocks_inputs(rng):
    num_blocks, width = int(rng.integers(2, 30)), int(rng.choice([1, 7, 1024, 1500, 3000]))
    n = int(rng.integers(1, num_blocks // 2 + 1))
    blocks = torch.from_numpy(rng.permutation(num_blocks)).int()
    dtype = torch.int64 if rng.integers(2) else torch.uint8
    padded = ints(rng, 0, 100, (num_blocks, width + 5), dtype)  # rows lie apart, as in a view of wider pages
    # Many rows may start from one source.
    return {"pages": padded[:, :width], "sources": blocks[ints(rng, 0, n, n).long()], "targets": blocks[n : 2 * n]}


@pytest.mark.sanitize
def test_copy_blocks_kernel_equals_twin():
    check_kernel(copy_blocks, copy_blocks_inputs)


def test_copy_blocks_twin_equals_a_loop():
    for seed in SEEDS:
        inputs = copy_blocks_inputs(np.random.default_rng(seed))
        want = inputs["pages"].clone()
        for source, target in zip(inputs["sources"].tolist(), inputs["targets"].tolist(), strict=True):
            want[target] = want[source]
        copy_blocks(**inputs)
        assert torch.equal(inputs["pages"], want)


# -- report_sampled --------------------------------------------------------------------------------------


def report_sampled_inputs(rng):
    n, width, num_slots = int(rng.integers(1, 700)), int(rng.integers(1, 4)), int(rng.integers(1, 5))
    return {
        "sampled": ints(rng, 0, 2**31 - 1, (n, width), torch.int64),
        "num_sampled": ints(rng, 0, width + 1, n),
        "slot": ints(rng, -1, num_slots, 1),
        "out": ints(rng, -9, 0, (num_slots, 1 + width, n + int(rng.integers(0, 9)))),
    }


@pytest.mark.sanitize
def test_report_sampled_kernel_equals_twin():
    check_kernel(report_sampled, report_sampled_inputs, outputs=(), cases=30)


@pytest.mark.parametrize("seed", SEEDS)
def test_report_sampled_twin_writes_one_slot(seed):
    inputs = report_sampled_inputs(np.random.default_rng(seed))
    before, slot = inputs["out"].clone(), int(inputs["slot"])
    report_sampled.twin(**inputs)
    n = len(inputs["num_sampled"])
    for k, (old, new) in enumerate(zip(before, inputs["out"], strict=True)):
        if k != slot:
            assert torch.equal(old, new)
            continue
        assert new[0, :n].tolist() == inputs["num_sampled"].tolist()
        assert new[1:, :n].T.tolist() == inputs["sampled"].tolist()
        assert torch.equal(old[:, n:], new[:, n:])
