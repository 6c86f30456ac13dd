"""The freeze test passes for models that keep the rules, and names what a planted fault computes on the host."""

import dataclasses
import re

import pytest
import torch

from mrv2.errors import UnsupportedError
from mrv2.frontend.build import assemble
from mrv2.frontend.engine_config import EngineConfig
from mrv2.kernels.registry import Kernel
from mrv2.model_state.default import DefaultModelState
from mrv2.model_state.graphs import GraphSupport
from mrv2.model_state.parts import InputPart
from mrv2.sample.params import SamplingParams
from mrv2.testing import check_frozen
from mrv2.testing.recorder import HostReadError, RecordedOps

PARAMS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1, top_k=5),
    SamplingParams(temperature=0.7, min_p=0.1),
]


def test_clean_models_pass(any_tiny):
    check_frozen(any_tiny.loaded, device=any_tiny.device, params=PARAMS)


def planted(model, state_class):
    return dataclasses.replace(model.loaded, state_class=state_class)


class Shifted(DefaultModelState):
    """Adds something of the step to positions, which a clean part may do, too."""

    def prepare_inputs(self, view):
        view.positions.add_(self.shift(view))
        return super().prepare_inputs(view)


class OnDevice(Shifted):
    def shift(self, view):
        return view.seq_lens.max() % 3


class Counted(Shifted):
    """A counter in Python."""

    count = 0

    def shift(self, view):
        self.count += 1
        return self.count % 3


class FromAList(Shifted):
    """A tensor made of what the host knows."""

    def __init__(self, *args):
        super().__init__(*args)
        self.rows = {}

    def add_request(self, row, request):
        self.rows[row] = request.req_id

    def remove_request(self, row, req_id):
        self.rows.pop(row, None)

    def shift(self, view):
        return torch.tensor([len(self.rows)]).to(view.positions.device)


class ReadsTheLongest(Shifted):
    """Waits for the device."""

    def shift(self, view):
        return int(view.seq_lens.max()) % 3


class PicksByMask(Shifted):
    """A shape that only the device knows."""

    def shift(self, view):
        return view.rows[view.rows >= 0].long().sum() % 3


class ThroughNumPy(Shifted):
    """Goes around torch."""

    def shift(self, view):
        return int(view.seq_lens.cpu().numpy().max()) % 3


def test_what_is_computed_on_the_device_passes(tiny):
    model = tiny("llama")
    check_frozen(planted(model, OnDevice), device=model.device)


@pytest.mark.parametrize("fault", [Counted, FromAList, ReadsTheLongest, PicksByMask, ThroughNumPy])
def test_what_is_computed_on_the_host_is_found(tiny, fault):
    model = tiny("llama")
    if fault is not Counted and model.device != "cpu":
        pytest.skip("a capture that fails leaves the process's CUDA in doubt; see tests/gpu/test_graphs.py")
    with pytest.raises(AssertionError, match=r"step \d+") as error:
        check_frozen(planted(model, fault), device=model.device)
    text = str(error.value)
    if fault in (ReadsTheLongest, PicksByMask):
        assert re.search(rf"needs a value of the device on the host, at {re.escape(__file__)}:\d+ in shift", text)
    else:
        assert "replayed: hidden states differ" in text


class Numbers(InputPart):
    """Counts the requests of its step, in Python."""

    key = "numbers"

    def __init__(self, limits):
        self.buffer = torch.zeros(limits.max_num_tokens, device=limits.device)
        self.count = 0

    def add_request(self, row, request):
        self.count += 1

    def fill(self, view):
        return self.buffer[: view.num_tokens].fill_(self.count)

    def fill_dummy(self, num_reqs, num_tokens):
        return self.buffer[:num_tokens].zero_()


def test_the_input_that_is_frozen_is_named(tiny, monkeypatch):
    model = tiny("llama")
    module = model.loaded.module
    forward = module.forward
    monkeypatch.setattr(type(module), "parts", (Numbers,))
    monkeypatch.setattr(module, "forward", lambda *args, numbers: forward(*args))  # has no use for them
    with pytest.raises(AssertionError, match="replayed: numbers differ from what a fresh build"):
        check_frozen(model.loaded, device=model.device)


def test_a_kernels_host_values_freeze_too(tiny, monkeypatch):
    from recurrent import mixers

    load = mixers.load_state
    calls = []

    def counted(cache, meta):
        calls.append(None)
        return load(cache, meta) * (1 + 1 / len(calls))

    monkeypatch.setattr(mixers, "load_state", counted)
    model = tiny("hybrid")
    with pytest.raises(AssertionError, match="hidden states differ"):
        check_frozen(model.loaded, device=model.device)


# -- declarations --------------------------------------------------------------------------------------------


def test_graphs_are_refused_where_they_cant_be(tiny):
    model = tiny("llama", "cpu")
    for settings, what in (
        ({"graphs": True}, "graphs=True, and the model runs on cpu"),
        ({"graphs": True, "debug": True}, "graphs=True: must be left out or false with debug=True"),
        ({"graphs": True, "runner": "sync"}, "graphs=True: must be left out or false with runner='sync'"),
        ({"graphs": 1}, "graphs=1: must be true, false, or None"),
    ):
        with pytest.raises(UnsupportedError, match=re.escape(what)):
            model.engine(**settings)
    assert model.engine().graphs is None


class Never(DefaultModelState):
    def graph_support(self):
        return GraphSupport.NEVER


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_model_that_says_never_runs_eagerly(tiny):
    model = tiny("llama", "cuda")
    loaded = planted(model, Never)
    with pytest.warns(UserWarning, match=r"without CUDA graphs: .*Never.graph_support\(\) of .* is NEVER"):
        assert assemble(loaded, EngineConfig(device="cuda")).graphs is None
    with pytest.raises(UnsupportedError, match="is NEVER"):
        assemble(loaded, EngineConfig(device="cuda", graphs=True))


def test_a_kernel_that_says_no_keeps_the_model_eager(tiny):
    from mrv2.frontend.build import why_eager
    from mrv2.layers.custom import CacheHandle

    parts = tiny("hybrid", "cpu").engine()
    state = parts.engine._runner._state
    on_gpu = dataclasses.replace(state.limits, device=torch.device("cuda"))
    state.limits = on_gpu
    loaded = tiny("hybrid", "cpu").loaded
    assert why_eager(loaded, state) is None
    handle = next(m for m in loaded.module.modules() if isinstance(m, CacheHandle))
    handle.capturable = False
    try:
        assert f"the kernel of {handle.name} with capturable=False" in why_eager(loaded, state)
    finally:
        handle.capturable = True


# -- the recorder itself -------------------------------------------------------------------------------------


def test_operations_are_done_again_on_the_same_tensors():
    x, total = torch.arange(4.0), torch.zeros(4)

    def run():
        y = (x * 2).view(2, 2).t().contiguous()
        total.add_(y.flatten())
        first, rest = torch.cat((y, y)).split([1, 3])
        return first + 1, rest.topk(1).values, x.clone()

    replay = RecordedOps().record(run)
    for scale in (1.0, 10.0, -3.0):
        x.copy_(torch.arange(4.0) * scale)
        total.zero_()
        want = [t.clone() for t in run()]
        want_total = total.clone()
        total.zero_()
        got = replay()
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert torch.equal(total, want_total)


def test_a_kernel_is_one_operation():
    def double(*, x, out):
        """Reads on the host, as a twin may."""
        for i, value in enumerate(x.tolist()):
            out[i] = 2 * int(torch.tensor(value))

    kernel = Kernel(double, double)
    x, out = torch.arange(3), torch.zeros(3, dtype=torch.int64)
    replay = RecordedOps().record(lambda: kernel(x=x, out=out))
    x.add_(5)
    replay()
    assert out.tolist() == [10, 12, 14]


@pytest.mark.parametrize(
    "read",
    [lambda x: int(x[0]), lambda x: bool((x > 0).all()), lambda x: x[x > 1], lambda x: x.nonzero(), lambda x: x.item()],
)
def test_reading_on_the_host_is_refused(read):
    with pytest.raises(HostReadError, match="needs a value of the device"):
        RecordedOps().record(lambda: read(torch.ones(1)))
