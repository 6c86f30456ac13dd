"""Rotary angles against transformers, for every type it knows and every spelling of its keys."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from mrv2.errors import RopeError
from mrv2.layers import rope_parameters
from mrv2.layers.rope_config import RopeSpec
from mrv2.layers.rotary import RotaryTable, rotate

HEAD_DIM, MAX_POSITION = 16, 64
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
SHORT = [1.0 + 0.1 * j for j in range(HEAD_DIM // 2)]
LONG = [2.0 + 0.7 * j for j in range(HEAD_DIM // 2)]
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": SHORT,
    "long_factor": LONG,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
PARAMETERS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "linear-partial": {"rope_type": "linear", "factor": 3.0, "partial_rotary_factor": 0.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.5},
    "yarn": YARN,
    "yarn-more": YARN | {"beta_fast": 16, "beta_slow": 2, "truncate": False, "partial_rotary_factor": 0.5},
    "yarn-mscale": YARN | {"mscale": 0.8, "mscale_all_dim": 1.2},
    "yarn-factor": YARN | {"attention_factor": 0.7},
    "longrope": LONGROPE,
    "longrope-factor": LONGROPE | {"attention_factor": 1.1},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
}


def theirs(rope: dict, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) [len(positions), rotary_dim] of a fresh transformers module in one call."""
    config = LlamaConfig(
        hidden_size=HEAD_DIM,
        num_attention_heads=1,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITION,
        rope_parameters={"rope_theta": 5000.0} | rope,
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    return cos[0], sin[0]


def table(rope: dict) -> RotaryTable:
    return RotaryTable(RopeSpec.parse(rope, head_dim=HEAD_DIM, max_position=MAX_POSITION))


def check(rope: dict, reference: dict, length: int) -> None:
    positions = torch.arange(length)
    cos, sin = theirs(reference, positions)
    angles = table(rope).angles(positions, torch.float32, torch.full((length,), length))
    half = cos.shape[-1] // 2
    torch.testing.assert_close(angles.cos[:, 0], cos, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(angles.sin[:, 0, half:], sin[:, half:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(angles.sin[:, 0, :half], -sin[:, :half], rtol=1e-5, atol=1e-5)


def test_every_type_of_transformers_is_covered() -> None:
    assert {"default", *ROPE_INIT_FUNCTIONS} == {p["rope_type"] for p in PARAMETERS.values()}


@pytest.mark.parametrize("length", [10, MAX_POSITION, 3 * MAX_POSITION])
@pytest.mark.parametrize("name", PARAMETERS)
def test_tables_equal_transformers(name: str, length: int) -> None:
    check({"rope_theta": 5000.0} | PARAMETERS[name], PARAMETERS[name], length)


@pytest.mark.parametrize("name", PARAMETERS)
def test_old_spelling_gives_the_same(name: str) -> None:
    scaling = dict(PARAMETERS[name])
    scaling["type"] = scaling.pop("rope_type")
    beside = {k: scaling.pop(k) for k in ("partial_rotary_factor",) if k in scaling}
    old = {"rope_theta": 5000.0, "rope_scaling": scaling} | beside
    check(rope_parameters({"model_type": "acme", "hidden_size": 16} | old), PARAMETERS[name], 40)
    check(old, PARAMETERS[name], 40)


def test_the_original_length_may_stand_beside() -> None:
    scaling = {k: v for k, v in LONGROPE.items() if k != "original_max_position_embeddings"}
    config = {"rope_theta": 5000.0, "original_max_position_embeddings": 16, "rope_scaling": scaling}
    check(rope_parameters(config), LONGROPE, 40)


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_a_token_depends_on_its_own_request_only(name: str) -> None:
    rope = {"rope_theta": 5000.0} | PARAMETERS[name]
    lens = torch.tensor([5, 200, 64, 17, 100])
    positions = lens - 1
    together = table(rope).angles(positions, torch.float32, lens)
    for i, length in enumerate(lens.tolist()):
        cos, _ = theirs(PARAMETERS[name], torch.arange(length))
        torch.testing.assert_close(together.cos[i, 0], cos[-1], rtol=1e-5, atol=1e-5)


def test_the_limit_of_length_independence_is_told() -> None:
    limits = {
        name: RopeSpec.parse(p, head_dim=HEAD_DIM, max_position=MAX_POSITION).fixed_up_to
        for name, p in PARAMETERS.items()
    }
    assert {name: limit for name, limit in limits.items() if limit is not None} == {
        "dynamic": MAX_POSITION,
        "longrope": 16,
        "longrope-factor": 16,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_equals_transformers(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(9, 5, HEAD_DIM, generator=generator).to(dtype)
    positions = torch.arange(9) * 7
    cos, sin = theirs({"rope_type": "default"}, positions)
    heads = q[None].transpose(1, 2)
    expected, _ = apply_rotary_pos_emb(heads, heads, cos[None].to(dtype), sin[None].to(dtype))
    got = rotate(q, table({"rope_theta": 5000.0}).angles(positions, dtype, None))
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(got, expected[0].transpose(0, 1), rtol=tolerance, atol=tolerance)


def test_elements_beyond_the_rotary_part_stay() -> None:
    q = torch.randn(3, 2, HEAD_DIM)
    rope = {"rope_type": "linear", "factor": 1.0, "partial_rotary_factor": 0.5}
    got = rotate(q, table(rope).angles(torch.arange(3), torch.float32, None))
    assert torch.equal(got[..., 8:], q[..., 8:])
    assert not torch.equal(got[1:, :, :8], q[1:, :, :8])


def test_frequencies_survive_the_meta_device() -> None:
    with torch.device("meta"):
        made = table({"rope_theta": 5000.0})
    expected = table({"rope_theta": 5000.0})
    positions = torch.arange(5)
    assert torch.equal(
        made.angles(positions, torch.float32, None).cos, expected.angles(positions, torch.float32, None).cos
    )


@pytest.mark.parametrize(
    ("rope", "names"),
    [
        ({"rope_type": "spiral"}, ["spiral", "yarn"]),
        ({"rope_type": "linear"}, ["linear", "factor"]),
        ({"rope_type": "linear", "factor": "two"}, ["factor", "two"]),
        ({"rope_type": "linear", "factor": 2.0, "mscale": 3.0}, ["mscale=3.0"]),
        ({"rope_type": "linear", "type": "yarn", "factor": 2.0}, ["rope_type", "linear", "yarn"]),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_theta": 5e4}}, ["rope_theta", "10000.0", "50000.0"]),
        (
            {
                "rope_parameters": {"rope_type": "linear", "factor": 2.0},
                "rope_scaling": {"type": "linear", "factor": 4},
            },
            ["factor", "rope_parameters.factor", "2.0", "4"],
        ),
        ({"full_attention": {"rope_type": "default"}, "sliding_attention": None}, ["full_attention", "None"]),
        (LONGROPE | {"short_factor": 3.0}, ["short_factor", "3.0"]),
    ],
)
def test_bad_parameters_are_refused_by_name(rope: dict, names: list[str]) -> None:
    with pytest.raises(RopeError) as caught:
        RopeSpec.parse(rope, head_dim=HEAD_DIM, max_position=MAX_POSITION, where="config.json")
    assert all(name in str(caught.value) for name in [*names, "config.json", "MRV2-303"])


def test_an_impossible_rotary_size_is_refused() -> None:
    with pytest.raises(RopeError, match="partial_rotary_factor"):
        table({"rope_type": "linear", "factor": 1.0, "partial_rotary_factor": 0.01})


def test_agreeing_spellings_are_fine() -> None:
    config = {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2.0}}
    assert rope_parameters(config) == {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}


def test_one_layer_type_is_chosen() -> None:
    config = LlamaConfig()
    config.rope_parameters = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert rope_parameters(config, "sliding_attention")["rope_theta"] == 1e4


@pytest.mark.parametrize("name", PARAMETERS)
def test_angles_read_nothing_on_the_host(name: str) -> None:
    """Meta tensors have no values: any read of one raises."""
    positions = torch.empty(3, dtype=torch.int64, device="meta")
    assert table(PARAMETERS[name]).angles(positions, torch.float32, positions).cos.is_meta


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), 10**400, True, "4"])
@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("default", "rope_theta"),
        ("linear", "factor"),
        ("dynamic", "factor"),
        ("yarn", "factor"),
        ("yarn", "original_max_position_embeddings"),
        ("yarn", "beta_fast"),
        ("yarn", "attention_factor"),
        ("longrope", "factor"),
        ("longrope", "original_max_position_embeddings"),
        ("llama3", "low_freq_factor"),
        ("linear", "partial_rotary_factor"),
    ],
)
def test_values_out_of_range_are_refused_by_name(name: str, key: str, value: object) -> None:
    with pytest.raises(RopeError, match=f"{key} is "):
        table(PARAMETERS[name] | {key: value})


@pytest.mark.parametrize("factor", [1e30, 1e17])
def test_a_factor_that_no_model_has_is_refused(factor: float) -> None:
    with pytest.raises(RopeError, match="factor is 1e"):
        table({"rope_type": "linear", "factor": factor})


@pytest.mark.parametrize("share", [2.0, 1.0001])
def test_no_more_than_a_head_can_be_rotated(share: float) -> None:
    with pytest.raises(RopeError, match=r"partial_rotary_factor is .*at most 1"):
        table({"rope_type": "default", "partial_rotary_factor": share})
    with pytest.raises(RopeError, match=r"partial_rotary_factor is .*at most 1"):
        rope_parameters({"partial_rotary_factor": share}, whole_heads=True)


def test_factor_lists_of_another_length_are_refused_with_both_lengths() -> None:
    for short, long in ((SHORT[:-1], LONG), (SHORT, [*LONG, 1.0, 1.0]), ([], [])):
        with pytest.raises(RopeError) as caught:
            table(LONGROPE | {"short_factor": short, "long_factor": long})
        for words in (f"short_factor has {len(short)}", f"long_factor has {len(long)}", f"rotates {HEAD_DIM // 2}"):
            assert words in caught.value.what


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), True])
def test_factors_have_to_be_positive(bad: float) -> None:
    with pytest.raises(RopeError, match=r"long_factor is .* positive numbers"):
        table(LONGROPE | {"long_factor": [*LONG[:-1], bad]})


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e-300},  # infinite frequencies
        {"rope_type": "dynamic", "factor": 2.0, "partial_rotary_factor": 0.125},  # divides by two dimensions less two
        {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "factor": 4.0}
        | {"original_max_position_embeddings": 1},  # divides by the logarithm of one
    ],
)
def test_what_gives_no_finite_frequencies_is_refused(rope: dict) -> None:
    with pytest.raises(RopeError, match="frequencies"):
        table(rope)


def test_a_family_of_whole_heads_rotates_them_whole() -> None:
    config = {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "hidden_size": 16}
    assert rope_parameters(config)["partial_rotary_factor"] == 0.5
    assert "partial_rotary_factor" not in rope_parameters(config, whole_heads=True)
    scaling = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    with pytest.raises(RopeError, match=r"partial_rotary_factor is 0\.5 with rope_type 'linear'"):
        rope_parameters(config | scaling, whole_heads=True)
    assert rope_parameters(config | scaling | {"partial_rotary_factor": 1.0}, whole_heads=True)["factor"] == 2.0
