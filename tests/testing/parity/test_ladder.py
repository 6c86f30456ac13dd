"""Engines with one defect each, and the rung at which the ladder has to find it."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import mrv2_adapter_llama  # noqa: F401 - the adapter has to be there
from mrv2.cli.app import run
from mrv2.frontend.build import load
from mrv2.frontend.engine_config import EngineConfig
from mrv2.runner.forward import ForwardPass
from mrv2.runner.kv_cache import KVCacheManager
from mrv2.runner.request import Status
from mrv2.runner.runner import Runner
from mrv2.runner.scheduler import Scheduler
from mrv2.testing import Outcome, tiny_config
from mrv2.testing.checkpoints import make_checkpoint
from mrv2.testing.ladder import RUNGS, climb

NAMES = [name for name, _, _ in RUNGS]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("llama"), tiny_config("LlamaConfig"), seed=5)


@pytest.fixture(scope="module")
def loaded(checkpoint):
    return load(str(checkpoint), EngineConfig(device="cpu", dtype="float32"))


# -- defects: each gets a `monkeypatch` ---------------------------------------------------------------------------


def attention_of_another_scale(patch):
    from mrv2.attn import cpu

    attend = cpu._attend
    patch.setattr(cpu, "_attend", lambda q, *rest, **how: attend(q * 0.5, *rest, **how))


def async_loses_the_late_token(patch):
    from mrv2.runner import runner

    update = runner.update_after_sample

    def wrong(**given):
        update(**given)
        late = given["seq_lens"] % 3 == 0
        given["all_token_ids"][given["rows"][late].long(), given["seq_lens"][late].long()] = 0

    patch.setattr(runner, "update_after_sample", wrong)


def a_graph_freezes_the_positions(patch):
    launch, hidden, inside = Runner._launch, ForwardPass.hidden, []

    def capture(self, key):
        inside.append(key)
        try:
            return launch(self, key)
        finally:
            inside.pop()

    def wrong(self, view):
        return hidden(self, replace(view, positions=torch.full_like(view.positions, 5)) if inside else view)

    patch.setattr(Runner, "_launch", capture)
    patch.setattr(ForwardPass, "hidden", wrong)


def the_place_in_the_batch_for_the_row(patch):
    write = Runner._write_back

    def wrong(self, view, sampled):
        place = torch.arange(len(view.rows), dtype=torch.int32)
        return write(self, replace(view, rows=torch.where(view.rows < 0, view.rows, place)), sampled)

    patch.setattr(Runner, "_write_back", wrong)


def chunks_are_written_off_by_one(patch):
    from mrv2.attn import cpu

    make = cpu.make_plan

    def wrong(layout, meta, window, **how):
        lens = meta.query_start_loc[1:] - meta.query_start_loc[:-1]
        later = bool(((lens > 1) & (meta.computed > 0)).any())
        shifted = replace(meta, slot_mapping=(meta.slot_mapping - 1).clamp(min=0)) if later else meta
        return make(layout, shifted, window, **how)

    patch.setattr(cpu, "make_plan", wrong)


def a_prefix_hit_gets_wrong_blocks(patch):
    hit = KVCacheManager._hit_blocks
    patch.setattr(KVCacheManager, "_hit_blocks", lambda self, g, hashes: hit(self, g, hashes)[-1:] * len(hashes))


def resuming_loses_a_token(patch):
    release = Scheduler._release

    def wrong(self, row):
        request = self._request_at(row)
        release(self, row)
        if request.status is Status.WAITING and len(request.tokens_np) > len(request.prompt_np) + 2:
            request.tokens_np = np.delete(request.tokens_np, len(request.tokens_np) - 2)

    patch.setattr(Scheduler, "_release", wrong)


DEFECTS = {
    "cpu code": attention_of_another_scale,
    "async": async_loses_the_late_token,
    "graphs": a_graph_freezes_the_positions,
    "batched": the_place_in_the_batch_for_the_row,
    "chunked": chunks_are_written_off_by_one,
    "hot cache": a_prefix_hit_gets_wrong_blocks,
    "preempted": resuming_loses_a_token,
}


@pytest.mark.parametrize("rung", DEFECTS)
def test_a_defect_is_found_at_its_rung(rung, loaded, monkeypatch):
    DEFECTS[rung](monkeypatch)
    found = climb(loaded, device="cpu")
    parted = [r.rung for r in found if r.outcome is Outcome.FAILED]
    assert parted == [rung], [(r.rung, r.outcome, r.message) for r in found]
    at = NAMES.index(rung)
    assert {r.outcome for r in found[at + 1 :]} <= {Outcome.NOT_RUN}
    assert "request " in found[at].message, found[at].message


def test_a_right_engine_climbs_to_the_top(checkpoint, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert run(["parity", str(checkpoint), "--ladder", "--json", "--device", "cpu"]) == 0
    said = json.loads(capsys.readouterr().out)
    outcomes = {r["rung"]: r["outcome"] for r in said["rungs"]}
    missing = {"kernels", "vllm"}
    assert said["first"] is None
    assert {name for name, outcome in outcomes.items() if outcome == "not run"} == missing
    assert {name for name, outcome in outcomes.items() if outcome == "passed"} == set(NAMES) - missing
