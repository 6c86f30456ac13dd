"""An adapter's own caches: what may be declared, and the helpers against loops over requests."""

import pytest
import torch

from mrv2.errors import LayerArgumentError
from mrv2.layers import (
    CacheMeta,
    CacheTensor,
    PerRequest,
    PerToken,
    fresh,
    load_state,
    read_tokens,
    steps,
    store_state,
    write_tokens,
)
from mrv2.layers.native import NativeLayers

NAN = float("nan")


def make_meta(computed, lens, *, padding=0, **fields):
    """Requests that have computed so many tokens and compute `lens` more, then padded ones."""
    ends = torch.tensor([0, *lens] + [0] * padding).cumsum(0)
    seq_lens = [c + n for c, n in zip(computed, lens, strict=True)] + [0] * padding
    return CacheMeta(
        num_reqs=len(seq_lens),
        num_tokens=int(ends[-1]) + padding,
        max_query_len=max(lens),
        max_seq_len=max(seq_lens),
        num_decodes=0,
        query_start_loc=ends.int(),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        **{"slot_mapping": torch.full((int(ends[-1]) + padding,), -1), "block_table": torch.zeros(0), "block_size": 4}
        | fields,
    )


def test_tokens_come_back_in_order_from_scattered_blocks():
    """In pages that are strided (C1)."""
    table = torch.tensor([[5, 2, 7], [3, 6, 0], [0, 0, 0]], dtype=torch.int32)
    computed, lens, size = [6, 0], [3, 5], 4
    places = [(i, p) for i in range(2) for p in range(computed[i], computed[i] + lens[i])]
    slots = [int(table[i, p // size]) * size + p % size for i, p in places]
    meta = make_meta(
        computed, lens, padding=1, slot_mapping=torch.tensor([*slots, -1]), block_table=table, block_size=size
    )
    # Strided, as pages are; garbage everywhere but in the first request's earlier tokens.
    cache = torch.full((8, size + 1, 2, 3), NAN)[:, :size]
    for p in range(6):
        cache[table[0, p // size], p % size] = 100.0 + p
    new = torch.arange(9.0)[:, None, None].expand(9, 2, 3)
    write_tokens(cache, meta, new)
    got = read_tokens(cache, meta)
    assert got.shape == (3, 12, 2, 3)
    assert got[0, :, 0, 0].tolist() == [100, 101, 102, 103, 104, 105, 0, 1, 2, 0, 0, 0]
    assert got[1, :, 1, 2].tolist() == [3, 4, 5, 6, 7, 0, 0, 0, 0, 0, 0, 0]
    assert got[2].eq(0).all()


def test_a_new_request_has_a_state_of_zeros_whatever_the_slot_holds():
    meta = make_meta([3, 0], [1, 2], padding=1, state_slots=torch.tensor([[4], [2], [0]], dtype=torch.int32))
    cache = torch.full((5, 2), NAN)
    cache[4] = 7
    assert load_state(cache, meta).tolist() == [[7, 7], [0, 0], [0, 0]]
    assert fresh(meta, torch.full((3, 2, 2), NAN)).isnan().flatten(1).all(1).tolist() == [True, False, False]


def run_sums(meta, x, cache):
    """A running sum per request, by the helpers."""
    s = load_state(cache["s"], meta)
    out = torch.zeros_like(x)
    for t, (i, live) in enumerate(steps(meta)):
        s = torch.where(live, s + x[i], s)
        out.index_add_(0, i, torch.where(live, s, 0))
        store_state(cache, meta, t, live, s=s)
    return out


def test_steps_walk_ragged_requests_and_the_last_state_is_stored():
    meta = make_meta([2, 0, 5], [1, 3, 2], padding=2, state_slots=torch.tensor([[3], [1], [2], [0], [0]]).int())
    cache = {"s": torch.tensor([NAN, NAN, 20.0, 30.0])}
    out = run_sums(meta, torch.tensor([1.0, 2, 3, 4, 5, 6, 0, 0]), cache)
    assert out.tolist() == [31, 2, 5, 9, 25, 31, 0, 0]
    assert cache["s"][1:].tolist() == [9, 31, 31]


def test_a_request_may_be_moved_to_another_slot_between_two_steps():
    """Slots are the metadata's to say (C3)."""
    x, cache = torch.tensor([1.0, 2, 4, 8]), {"s": torch.full((4,), NAN)}
    first = run_sums(make_meta([0], [2], state_slots=torch.tensor([[3]]).int()), x[:2], cache)
    cache["s"][1], cache["s"][3] = cache["s"][3].clone(), NAN
    second = run_sums(make_meta([2], [2], state_slots=torch.tensor([[1]]).int()), x[2:], cache)
    assert torch.cat((first, second)).tolist() == [1, 3, 7, 15]


def test_with_drafts_a_verifying_request_keeps_the_state_after_each_token():
    """Which column to read and which to write (C6)."""
    slots = torch.tensor([[1, 2, 3], [4, 5, 6], [0, 0, 0]]).int()
    meta = make_meta(
        [5, 4],
        [3, 2],
        padding=1,
        state_slots=slots,
        read_col=torch.tensor([2, 0, 0]).int(),  # two drafts of the first were accepted
        verify=torch.tensor([True, False, False]),
    )
    cache = {"s": torch.tensor([NAN, -1.0, -2, 10, 20, -5, -6])}
    out = run_sums(meta, torch.tensor([1.0, 2, 3, 4, 5, 0]), cache)
    assert out.tolist() == [11, 13, 16, 24, 29, 0]
    assert cache["s"][1:].tolist() == [11, 13, 16, 29, -5, -6]


@pytest.mark.parametrize(
    ("spec", "what"),
    [
        (PerRequest({}), "no tensor"),
        (PerToken({"k": CacheTensor((2, 0))}), r"k of shape \[2, 0\]"),
        (PerRequest({"s": CacheTensor((2, 3), shard=2)}), "divides axis 2 of s"),
    ],
)
def test_what_cannot_be_a_cache_is_refused(spec, what):
    with pytest.raises(LayerArgumentError, match=rf"mixer\.state .*{what}"):
        NativeLayers().scope("mixer").cache("state", spec, print)


def test_a_state_is_not_looked_for_among_tokens():
    with pytest.raises(LayerArgumentError, match="declared PerToken"):
        load_state(torch.zeros(2, 4, 1), make_meta([0], [1]))


def test_a_name_is_declared_once():
    layers = NativeLayers()
    layers.cache("state", PerRequest({"s": CacheTensor((1,))}), print)
    with pytest.raises(LayerArgumentError, match="state is declared twice"):
        layers.cache("state", PerToken({"s": CacheTensor((1,))}), print)
