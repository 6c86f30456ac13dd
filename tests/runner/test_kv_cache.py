"""Block tables on the host against a shadow that remembers what each block holds."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrv2.attn.groups import AttentionCache, choose_block_size, make_groups
from mrv2.attn.kv_memory import allocate_pages, bind_caches, choose_num_blocks, page_sizes
from mrv2.attn.specs import CacheTensor, PerRequest, PerToken
from mrv2.errors import CacheTooSmallError
from mrv2.runner.block_pool import BlockPool
from mrv2.runner.kv_cache import KVCacheManager, PrefixHit, extend_hashes
from mrv2.runner.state_slots import StateSlots

BLOCK, ROWS, MAX_LEN, WINDOW = 4, 4, 64, 10
LAYERS = {
    "full.a": AttentionCache(2, 8, None),
    "full.b": AttentionCache(2, 8, None),
    "win.a": AttentionCache(1, 8, WINDOW),
    "full.c": AttentionCache(2, 8, None),
}


def make_manager(num_blocks, layers=LAYERS, prefix_caching=True):
    groups = make_groups(layers, BLOCK)
    pool = BlockPool(num_blocks)
    return KVCacheManager(pool, groups, max_rows=ROWS, max_model_len=MAX_LEN, prefix_caching=prefix_caching)


def check_invariants(kv):
    """Every block is scratch, free, or referenced exactly as often as tables show it."""
    refs = np.zeros(kv.pool.num_blocks, int)
    for table in kv.tables_np:
        for row in range(ROWS):
            np.add.at(refs, table[row, : kv.num_cols_np[row]], 1)
    refs[0] = 0
    assert (refs == kv.pool._refs_np).all()
    assert kv.pool.num_free == int((refs[1:] == 0).sum())


def needed_cols(window, length, bound):
    """Columns that the tokens at positions length, length + 1, … may look at."""
    first = 0 if window is None else max(0, length - window + 1)
    return range(first // BLOCK, -(-bound // BLOCK))


class Shadow:
    """Rows driven like the scheduler does, and a memory of the tokens written to each block."""

    def __init__(self, kv):
        self.kv = kv
        self.content = {}  # (group, block) -> token prefix that the block completes
        self.rows = {}  # row -> tokens
        self.hashes = {}

    def open(self, row, tokens):
        hashes = []
        extend_hashes(hashes, b"", np.array(tokens, np.int32), BLOCK)
        hit = self.kv.find_prefix(hashes, (len(tokens) - 1) // BLOCK)
        shared = [b for blocks in hit.blocks for b in blocks if b]
        need = self.kv.blocks_for(len(tokens)) - self.kv.blocks_for(hit.num_tokens)
        if need > self.kv.pool.num_free - self.kv.pool.num_free_of(shared):
            return
        for g, group in enumerate(self.kv.groups):
            for col in needed_cols(group.window, hit.num_tokens, hit.num_tokens):
                block = hit.blocks[g][col]
                assert block, "a block in reach is missing from the hit"
                assert self.content[g, block] == tuple(tokens[: (col + 1) * BLOCK])
        self.kv.open_row(row, hit)
        self.rows[row], self.hashes[row] = list(tokens), hashes
        self.grow(row, 0)

    def grow(self, row, extra):
        tokens = self.rows[row]
        want = min(len(tokens) + extra, MAX_LEN)
        missing = self.kv.missing_np(np.array([row], np.int32), np.array([want], np.int32))
        if int(missing[0]) * len(self.kv.groups) > self.kv.pool.num_free:
            return
        self.kv.grow(np.array([row], np.int32), missing)
        tokens += [(7 * len(tokens) + i) % 3 for i in range(want - len(tokens))]
        extend_hashes(self.hashes[row], b"", np.array(tokens, np.int32), BLOCK)
        for g, table in enumerate(self.kv.tables_np):
            for col in range(len(tokens) // BLOCK):
                if table[row, col]:
                    self.content[g, int(table[row, col])] = tuple(tokens[: (col + 1) * BLOCK])
        self.kv.commit(row, self.hashes[row], len(tokens))
        self.kv.trim_windows(np.array([row], np.int32), np.array([len(tokens)], np.int32))
        for g, group in enumerate(self.kv.groups):
            for col in needed_cols(group.window, len(tokens), len(tokens)):
                assert self.kv.tables_np[g][row, col], "a block in reach was given back"

    def close(self, row):
        self.kv.release_row(row)
        del self.rows[row], self.hashes[row]


steps = st.lists(
    st.tuples(st.sampled_from(["open", "grow", "close"]), st.integers(0, ROWS - 1), st.integers(0, 30)), max_size=40
)


@given(steps=steps, num_blocks=st.integers(2, 60))
@settings(max_examples=150)
def test_tables_own_what_they_show_and_hits_hold_what_was_written(steps, num_blocks):
    kv = make_manager(num_blocks)
    shadow = Shadow(kv)
    for op, row, n in steps:
        if op == "open" and row not in shadow.rows:
            shadow.open(row, [i % 2 for i in range(n + 1)])
        elif op == "grow" and row in shadow.rows:
            shadow.grow(row, n)
        elif op == "close" and row in shadow.rows:
            shadow.close(row)
        check_invariants(kv)
    for row in list(shadow.rows):
        shadow.close(row)
    check_invariants(kv)
    assert kv.pool.num_free == kv.pool.num_usable


@given(
    layers=st.dictionaries(
        st.integers(0, 20), st.sampled_from([None, 1, 2, 4, 5, 9]).map(lambda w: AttentionCache(1, 4, w)), min_size=1
    ),
    block_size=st.integers(1, 8),
)
@settings(max_examples=80)
def test_groups_partition_layers_by_reach(layers, block_size):
    layers = {str(k): v for k, v in layers.items()}
    groups = make_groups(layers, block_size)
    assert sorted(n for g in groups for n in g.layers) == sorted(layers)
    assert all(layers[n].window == g.window for g in groups for n in g.layers)
    assert [g.index for g in groups] == list(range(len(groups)))
    assert len({g.name for g in groups}) == len(groups)


def test_writes_carry_each_group_its_own_ids():
    kv = make_manager(50)
    rows, lens = np.array([2, 0], np.int32), np.array([9, 5], np.int32)
    kv.grow(rows, kv.missing_np(rows, lens))
    writes = kv.take_writes()
    assert len(writes) == len(kv.groups) == 4
    for g, w in enumerate(writes):
        assert w.rows.tolist() == [2, 0]
        assert w.cu_lens.tolist() == [0, 3, 5]
        assert w.block_ids.tolist() == [*kv.tables_np[g][2, :3], *kv.tables_np[g][0, :2]]
    assert not len(kv.take_writes()[0].rows)


def test_least_recently_freed_is_evicted_first_and_uncached_before_cached():
    pool = BlockPool(6)
    a, b, c = pool.allocate(3)
    pool.cache(a, (0, b"a"))
    pool.cache(b, (0, b"b"))
    pool.release([a])
    pool.release([b])
    pool.release([c])  # has no key: next to go
    assert pool.allocate(1) == [c]
    assert pool.find((0, b"a")) == a
    pool.allocate(2)  # the two that were never used
    assert pool.allocate(1) == [a]
    assert pool.find((0, b"a")) is None
    assert pool.find((0, b"b")) == b


def test_without_prefix_caching_nothing_is_found():
    kv = make_manager(40, prefix_caching=False)
    shadow = Shadow(kv)
    shadow.open(0, [1] * 20)
    hashes = []
    extend_hashes(hashes, b"", np.ones(20, np.int32), BLOCK)
    assert kv.find_prefix(hashes, 5) == PrefixHit(0, ((),) * 4)


def test_hash_depends_on_everything_before_and_on_the_root():
    def chain(tokens, root=b""):
        out = []
        extend_hashes(out, root, np.array(tokens, np.int32), BLOCK)
        return out

    assert chain([1, 2, 3, 4, 5, 6, 7, 8])[1] != chain([9, 2, 3, 4, 5, 6, 7, 8])[1]
    assert chain([1, 2, 3, 4])[0] == chain([1, 2, 3, 4, 5])[0]
    assert chain([1, 2, 3, 4], b"lora")[0] != chain([1, 2, 3, 4])[0]


def test_layers_share_bytes_only_across_groups():
    groups = make_groups(LAYERS, BLOCK)
    sizes = page_sizes(groups, LAYERS, torch.float32)
    pages = allocate_pages(sizes, num_blocks=7, device=torch.device("cpu"))
    caches = bind_caches(groups, LAYERS, pages, torch.float32)
    assert caches["full.a"].shape == (7, 2, BLOCK, 2, 8)
    assert caches["win.a"].shape == (7, 2, BLOCK, 1, 8)
    caches["full.a"][3] = 1.0
    assert caches["win.a"][3].eq(1).all()  # same bytes: their groups never own the same block
    assert caches["win.a"][4].eq(0).all()
    assert caches["win.a"][2].eq(0).all()


def test_cache_too_small_says_how_much_is_needed():
    with pytest.raises(CacheTooSmallError, match="at least 2048 bytes"):
        choose_num_blocks(1024, wanted_blocks=10, kv_memory=1500, device=torch.device("cpu"))
    assert choose_num_blocks(1024, wanted_blocks=10, kv_memory=10**9, device=torch.device("cpu")) == 10


SPECS = st.one_of(
    st.builds(AttentionCache, st.integers(1, 2), st.sampled_from([2, 5]), st.sampled_from([None, 6])),
    st.builds(
        lambda cls, tensors: cls(tensors),
        st.sampled_from([PerToken, PerRequest]),
        st.dictionaries(
            st.sampled_from("abc"),
            st.builds(
                CacheTensor,
                st.lists(st.integers(1, 4), max_size=3).map(tuple),
                st.sampled_from([None, torch.float32, torch.int8, torch.float64]),
            ),
            min_size=1,
        ),
    ),
)


@given(specs=st.lists(SPECS, min_size=1, max_size=8), block_size=st.integers(1, 5), half=st.booleans())
@settings(max_examples=80)
def test_any_caches_share_a_pool_and_no_block_reaches_into_another(specs, block_size, half):
    layers, dtype = {str(i): s for i, s in enumerate(specs)}, torch.bfloat16 if half else torch.float32
    groups = make_groups(layers, block_size)
    assert [g.states for g in groups] == sorted(g.states for g in groups)
    pages = allocate_pages(page_sizes(groups, layers, dtype), num_blocks=4, device=torch.device("cpu"))
    caches = bind_caches(groups, layers, pages, dtype)
    assert caches.keys() == layers.keys()
    for group in groups:
        for page in pages:
            page.zero_()
        # One value per tensor of the group, in block 2; then all must be there, and nothing elsewhere.
        parts = [t for n in group.layers for t in (caches[n].values() if isinstance(caches[n], dict) else [caches[n]])]
        for value, part in enumerate(parts, start=1):
            part[2] = value
        assert all(part[2].eq(value).all() for value, part in enumerate(parts, start=1))
        assert all(page[[0, 1, 3]].eq(0).all() for page in pages)
    for name, spec in layers.items():
        if isinstance(spec, AttentionCache):
            continue
        lead = (4,) if isinstance(spec, PerRequest) else (4, block_size)
        for key, tensor in spec.tensors.items():
            assert caches[name][key].shape == (*lead, *tensor.shape)
            assert caches[name][key].dtype == (tensor.dtype or dtype)


def test_blocks_hold_enough_tokens_to_be_no_smaller_than_a_state():
    attention, small = AttentionCache(2, 8, None), AttentionCache(1, 8, None)  # 128 and 64 bytes per token
    state = PerRequest({"s": CacheTensor((8, 8, 17))})
    assert choose_block_size({"a": attention, "b": small}, torch.float32) == 16
    assert choose_block_size({"s": state}, torch.float32) == 16
    layers = {"a": attention, "b": small, "s": state}
    assert choose_block_size(layers, torch.float32) == 48  # 4352 bytes, and 2048 for 16 tokens
    assert page_sizes(make_groups(layers, 48), layers, torch.float32) == [48 * 128]


def test_a_checkpoint_is_never_handed_out_as_the_slot_it_is_copied_to():
    groups = make_groups({"state": PerRequest({"s": CacheTensor((2,))})}, BLOCK)
    states = StateSlots(BlockPool(3), groups, max_rows=2)
    for row, digest in enumerate((b"first", b"second")):
        states.open(row, [])
        states.commit_slot(row, digest)
    hit = states.find(b"first")
    for row in (0, 1):
        states.release(row)
    states.open(0, hit)
    copies = states.take_copies()
    assert copies.sources.tolist() == list(hit)
    assert not set(copies.sources) & set(copies.targets)
    assert states.find(b"first") == hit
    assert states.find(b"second") is None
