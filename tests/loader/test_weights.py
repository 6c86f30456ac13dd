"""`collect_slots` and `load_weights` on single modules, and properties over random sets of defects."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mrv2.errors import LayerArgumentError, SlotError, WeightsError
from mrv2.layers.base import PARAM_SLOT, Slot, WeightMap
from mrv2.loader.weights import collect_slots, load_weights

SIZES = {"q": 3, "k": 2, "v": 2}


class Packed(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.weight = nn.Parameter(torch.full((sum(SIZES.values()), width), torch.nan))

    def weight_slots(self):
        slots, start = {}, 0
        for name, size in SIZES.items():
            rows = self.weight.data[start : start + size]
            slots[f"../{name}.weight"] = Slot("weight", tuple(rows.shape), rows.copy_)
            start += size
        return slots


class Net(nn.Module):
    def __init__(self, num_layers=2):
        super().__init__()
        self.layers = nn.ModuleList(nn.Module() for _ in range(num_layers))
        for layer in self.layers:
            layer.qkv = Packed()


def tensors(num_layers=2, seed=0):
    g = torch.Generator().manual_seed(seed)
    return {
        f"layers.{i}.{n}.weight": torch.randn(s, 4, generator=g) for i in range(num_layers) for n, s in SIZES.items()
    }


def test_slots_have_full_unpacked_names_and_their_parameter():
    net = Net()
    slots = collect_slots(net)
    assert list(slots) == [f"layers.{i}.{n}.weight" for i in range(2) for n in SIZES]
    assert slots["layers.1.k.weight"].parameter is net.layers[1].qkv.weight
    assert slots["layers.1.k.weight"].param_name == "layers.1.qkv.weight"


def test_bare_parameters_carry_their_slot():
    net = nn.Module()
    net.inner = nn.Module()
    net.inner.scale = nn.Parameter(torch.zeros(3))
    setattr(net.inner.scale, PARAM_SLOT, Slot("", (3,), net.inner.scale.data.copy_))
    load_weights(net, [("inner.scale", torch.arange(3.0))], WeightMap())
    assert net.inner.scale.tolist() == [0, 1, 2]


def test_slots_that_clash_or_lead_nowhere_are_refused():
    class Bad(nn.Module):
        def weight_slots(self):
            return {"x": Slot("nothing", (1,), lambda t: t)}

    net = Net()
    net.layers[0].bad = Bad()
    net.layers[0].twin = Packed()
    with pytest.raises(SlotError) as caught:
        collect_slots(net)
    assert "two slots are called layers.0.q.weight" in str(caught.value)
    assert "slot layers.0.bad.x fills layers.0.bad.nothing" in str(caught.value)


def test_optional_slots_keep_their_default_and_are_reported():
    net = Net(1)
    net.scale = nn.Parameter(torch.ones(2))
    setattr(net.scale, PARAM_SLOT, Slot("", (2,), net.scale.data.copy_, optional=True))
    report = load_weights(net, tensors(1).items(), WeightMap())
    assert report.defaulted == ("scale",)
    assert net.scale.tolist() == [1, 1]
    assert report.num_bytes == 7 * 4 * 4


def test_ignored_names_are_reported_and_nothing_else_is_skipped():
    extra = {"layers.0.rotary_emb.inv_freq": torch.ones(2)}
    report = load_weights(Net(), (tensors() | extra).items(), WeightMap())
    assert report.ignored == tuple(extra)
    assert set(report.filled) == set(tensors())


def test_two_names_for_one_place_are_refused():
    extra = {"layers.0.old_q.weight": torch.ones(3, 4)}
    with pytest.raises(WeightsError, match="second tensor") as caught:
        load_weights(Net(), (tensors() | extra).items(), WeightMap(rename=((r"old_q", "q"),)))
    assert "layers.0.old_q.weight (after layers.0.q.weight)" in str(caught.value)


def test_one_name_twice_is_refused():
    pairs = list(tensors().items())
    with pytest.raises(WeightsError, match="second tensor"):
        load_weights(Net(), [*pairs, pairs[0]], WeightMap())


def test_a_transform_makes_what_the_slots_expect():
    want = tensors()

    def split(pairs):
        for name, t in pairs:
            for part, rows in zip(SIZES, t.split(list(SIZES.values())), strict=True):
                yield name.replace("fused", part), rows

    fused = {f"layers.{i}.fused.weight": torch.cat([want[f"layers.{i}.{n}.weight"] for n in SIZES]) for i in range(2)}
    net = Net()
    load_weights(net, fused.items(), WeightMap(transform=split))
    assert torch.equal(net.layers[1].qkv.weight, fused["layers.1.fused.weight"])


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn])
def test_packed_values_are_refused(dtype):
    pairs = tensors() | {"layers.0.q.weight": torch.zeros(3, 4).to(dtype)}
    with pytest.raises(WeightsError, match=str(dtype).removeprefix("torch.")):
        load_weights(Net(), pairs.items(), WeightMap())


def test_the_tied_copy_may_come_before_its_twin():
    class Head(nn.Module):
        def __init__(self, table):
            super().__init__()
            self.weight = table

        def weight_slots(self):
            return {"weight": Slot("weight", (3,), None)}

    net = nn.Module()
    net.table = nn.Parameter(torch.zeros(3))
    setattr(net.table, PARAM_SLOT, Slot("", (3,), net.table.data.copy_))
    net.head = Head(net.table)
    values = torch.arange(3.0)
    load_weights(net, [("head.weight", values.clone()), ("table", values)], WeightMap())
    with pytest.raises(WeightsError, match=r"head\.weight \(tied to head\.weight\)"):
        load_weights(net, [("head.weight", values + 1), ("table", values)], WeightMap())


def test_a_parameter_that_only_tied_slots_mention_is_filled_by_nobody():
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3))

        def weight_slots(self):
            return {"weight": Slot("weight", (3,), None)}

    with pytest.raises(SlotError, match="weight"):
        collect_slots(Head())


NAMES = sorted(tensors())


@given(
    st.sets(st.sampled_from(NAMES), max_size=4),
    st.sets(st.sampled_from(NAMES), max_size=4),
    st.sets(st.sampled_from(["layers.0.o.weight", "layers.7.q.weight", "x"]), max_size=2),
    st.randoms(use_true_random=False),
)
def test_a_load_succeeds_only_without_any_defect_and_names_every_one(missing, misshapen, extra, random):
    pairs = {n: t for n, t in tensors().items() if n not in missing}
    for name in misshapen - missing:
        pairs[name] = torch.cat([pairs[name], pairs[name][:1]])
    pairs |= {n: torch.zeros(1) for n in extra}
    order = list(pairs.items())
    random.shuffle(order)
    net = Net()
    bad = missing | misshapen | extra
    if not bad:
        load_weights(net, order, WeightMap(), num_layers=2)
        packed = torch.cat([tensors()[f"layers.1.{n}.weight"] for n in SIZES])
        assert torch.equal(net.layers[1].qkv.weight, packed)
        return
    with pytest.raises(WeightsError) as caught:
        load_weights(net, order, WeightMap(), num_layers=2)
    for name in bad:
        assert name in str(caught.value)


@pytest.mark.parametrize(
    "transform",
    [lambda pairs: None, lambda pairs: iter([1]), lambda pairs: ((1, 2, 3) for _ in pairs), lambda pairs: 1 / 0],
)
def test_a_transform_that_fails_is_named(transform):
    class Model(nn.Module):
        weight_map = WeightMap(transform=transform)

    with pytest.raises(WeightsError, match="transform failed"):
        load_weights(Model(), iter([("a", torch.ones(1))]), Model.weight_map)


@pytest.mark.parametrize("transform", [lambda: None, lambda tensors, heads: tensors, lambda config: config, 3])
def test_a_transform_that_wants_something_else_is_refused_when_the_map_is_made(transform):
    with pytest.raises(LayerArgumentError, match="transform can't be called") as caught:
        WeightMap(transform=transform)
    assert "transform(tensors, config)" in caught.value.fix


def test_only_a_transform_that_asks_for_the_config_gets_it():
    plain = WeightMap(transform=lambda tensors, *rest, **more: iter([("got", (rest, more))]))
    assert plain.for_config("c") is plain
    asking = WeightMap(rename=((r"^a", "b"),), transform=lambda tensors, config=None: iter([("got", config)]))
    bound = asking.for_config("c")
    assert list(bound.transform(iter(()))) == [("got", "c")]
    assert bound.canonical("a.x") == "b.x"
    assert list(asking.transform(iter(()))) == [("got", None)]  # the class's own map is left as it was


@pytest.mark.parametrize("rename", [(r"^blk", "layers"), [("a", "b")], (("a", "b", "c"),), (("^nf($", "x"),)])
def test_a_weight_map_is_checked_when_it_is_made(rename):
    with pytest.raises(LayerArgumentError, match=r"rename=|is no regex"):
        WeightMap(rename=rename)
