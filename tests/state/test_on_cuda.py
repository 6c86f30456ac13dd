"""The device side on a GPU: what the CPU gives, without the host ever waiting."""

import numpy as np
import pytest
import torch

from mrv2.attn.groups import KVGroup
from mrv2.kernels import gumbel_noise, sample_gumbel, update_after_sample
from mrv2.state.block_tables import BlockTables
from mrv2.state.columns import MirroredColumn
from mrv2.state.input_buffers import InputBuffers
from mrv2.state.request_states import RequestStates
from mrv2.state.view import Limits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

GROUPS = tuple(
    KVGroup(name=f"g{k}", index=k, layers=(f"l{k}",), window=None, block_size=size) for k, size in enumerate((4, 16))
)
VOCAB = 3000


class Steps:
    """Steps of a few requests with made-up logits."""

    def __init__(self, device):
        limits = Limits(max_rows=16, max_num_tokens=256, max_model_len=64, device=torch.device(device))
        self.states = RequestStates(limits, max_stop_ids=4)
        self.tables = BlockTables(limits, GROUPS)
        self.buffers = InputBuffers(limits, GROUPS)
        self.seeds = MirroredColumn((16,), dtype=torch.int64, device=limits.device)
        self.temperature = MirroredColumn((16,), dtype=torch.float32, device=limits.device)
        self.logits = torch.from_numpy(np.random.default_rng(0).normal(0, 3, (16, VOCAB))).float().to(device)
        self.ones = torch.ones(16, dtype=torch.int32, device=device)
        self.sampled = torch.zeros(16, 1, dtype=torch.int64, device=device)
        self.num_sampled = torch.zeros(16, dtype=torch.int32, device=device)

    def add(self, row, request, writes):
        self.states.add_request(row, request)
        self.tables.stage(writes)
        self.seeds.set(row, 1000 + row)
        self.temperature.set(row, row % 2)

    def step(self, plan, num_reqs, num_tokens):
        for staged in (self.states, self.tables, self.seeds, self.temperature):
            staged.flush()
        view = self.buffers.prepare(plan, self.states, self.tables, num_reqs=num_reqs, num_tokens=num_tokens)
        table = view.table
        sample_gumbel(
            logits=self.logits[:num_reqs],
            rows=view.rows,
            seeds=self.seeds.device_tensor,
            temperature=self.temperature.device_tensor,
            positions=view.seq_lens.long(),
            stream=0,
            scaled=True,
            drawn=True,
            out=self.sampled[:num_reqs, 0],
        )
        update_after_sample(
            rows=view.rows,
            seq_lens=view.seq_lens,
            sampled=self.sampled[:num_reqs],
            num_candidates=self.ones[:num_reqs],
            all_token_ids=table.all_token_ids,
            total_len=table.total_len,
            num_computed=table.num_computed,
            active=table.active,
            len_limit=self.states.len_limit,
            stop_token_ids=self.states.stop_token_ids,
            num_sampled=self.num_sampled[:num_reqs],
        )
        fields = (view.seq_lens, view.input_ids, view.positions, view.token_to_i, view.logits_indices)
        kept = [x.clone() for x in (*fields, *view.slot_mappings, self.sampled, self.num_sampled)]
        return [
            *kept,
            *(x[:, :4].clone() for x in view.block_tables),
            table.all_token_ids.clone(),
            table.active.clone(),
        ]


def run_steps(device, make_request, make_writes, make_plan):
    steps = Steps(device)
    rng = np.random.default_rng(1)
    rows = rng.permutation(16)[:9].tolist()
    for row in rows:
        prompt = rng.integers(1, 99, 8)
        blocks = rng.integers(1, 2**20, 16)
        steps.add(
            row,
            make_request(str(row), prompt=prompt, len_limit=int(rng.integers(9, 13)), stop=(5,)),
            (make_writes((row, 0, blocks)), make_writes((row, 0, blocks[:4]))),
        )
    plans = [make_plan(rows, [3] * 9), make_plan(rows[::-1], [5] * 9), *[make_plan(rows, [1] * 9)] * 8]
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        seen = [steps.step(plan, 12, 64) for plan in plans]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [[x.cpu() for x in step] for step in seen]


def test_steps_equal_the_cpus_and_never_wait(make_request, make_writes, make_plan):
    run_steps("cuda", make_request, make_writes, make_plan)  # compiles
    got = run_steps("cuda", make_request, make_writes, make_plan)
    want = run_steps("cpu", make_request, make_writes, make_plan)
    for n, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        for k, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert torch.equal(a, b), (n, k)


def test_noise_equals_the_cpus():
    seeds, positions = torch.arange(5) * 10**15, torch.arange(5)
    got = gumbel_noise(seeds.cuda(), positions.cuda(), 1, 5000).cpu()
    torch.testing.assert_close(got, gumbel_noise(seeds, positions, 1, 5000), rtol=1e-6, atol=1e-6)


def test_a_replayed_preparation_equals_an_eager_one(make_request, make_writes, make_plan):
    """Sizes stay, whatever else changes: which rows, their lengths, tokens and blocks, and who has stopped."""
    rng, steps = np.random.default_rng(3), Steps("cuda")
    states, tables, buffers = steps.states, steps.tables, steps.buffers

    def admit():
        for row in range(16):
            prompt, blocks = rng.integers(1, 99, 40), rng.integers(1, 2**20, 16)
            request = make_request(str(row), prompt=prompt, computed=int(rng.integers(0, 30)))
            steps.add(row, request, (make_writes((row, 0, blocks)), make_writes((row, 0, blocks[:4]))))
        for row in rng.permutation(16)[:3]:
            states.remove_request(int(row), str(row))
        states.flush(), tables.flush()

    def prepare(plan):
        view = buffers.prepare(plan, states, tables, num_reqs=12, num_tokens=64)
        per_request = (view.rows, view.query_start_loc, view.seq_lens, view.logits_indices)
        per_token = (view.input_ids, view.positions, view.token_to_i, *view.slot_mappings)
        return [*per_request, *per_token, *(table[:, :8] for table in view.block_tables)]

    def replayed():
        buffers.gather(buffers.batch, states, tables, num_reqs=12, num_tokens=64, max_seq_len=64)

    admit()
    tensors = prepare(make_plan([0], [1], max_seq_len=64))
    replayed()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed()
    for _ in range(10):
        admit()
        rows = rng.permutation(16)[: int(rng.integers(1, 13))].tolist()
        plan = make_plan(rows, rng.integers(1, 6, len(rows)).tolist(), max_seq_len=64)
        want, batch = [tensor.clone() for tensor in prepare(plan)], buffers.batch.clone()
        for tensor in tensors:
            tensor.fill_(-77)
        buffers.batch.copy_(batch)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(tensors, want, strict=True))


def test_a_batch_size_doesnt_compile_anew(make_request, make_writes, make_plan):
    from mrv2.kernels.prepare_inputs import _prepare_inputs_kernel

    steps = Steps("cuda")
    steps.add(0, make_request(), (make_writes(), make_writes()))
    steps.step(make_plan([0], [1]), 1, 1)
    compiled = sum(len(cache[0]) for cache in _prepare_inputs_kernel.device_caches.values())
    for n in (2, 7, 16):
        steps.step(make_plan([0], [1]), n, n)
    assert sum(len(cache[0]) for cache in _prepare_inputs_kernel.device_caches.values()) == compiled
