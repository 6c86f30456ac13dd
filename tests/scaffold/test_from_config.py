"""`mrv2 new-adapter --from-config`: names and sizes of a config, and what it asks for that the code doesn't do."""

import json
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrv2.kernels.gated_act import ACTIVATIONS
from mrv2.manifest import validate
from mrv2.scaffold import from_config
from mrv2.scaffold.answers import complete, known_to_transformers
from mrv2.scaffold.render import render

pytestmark = pytest.mark.usefixtures("own_folder")

KINDS = ("decoder", "moe", "hybrid")

OWN = {
    "architectures": ["ZephyrLM"],
    "model_type": "zephyr-2",
    "vocab_size": 50000,
    "hidden_size": 768,
    "intermediate_size": 2000,
    "num_hidden_layers": 30,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "hidden_act": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000},
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}


@pytest.fixture
def scaffolded(capsys, make, contents):
    """Files and open points of a project made from a config."""

    def scaffold(**config):
        Path("config.json").write_text(json.dumps(config))
        make("apex", "--kind", "decoder", "--from-config", "config.json", "--json")
        told = json.loads(capsys.readouterr().out)
        files = contents("mrv2-adapter-apex")
        readme = " ".join(files["README.md"].split())
        for point in told["open"]:
            assert " ".join(point.split()) in readme
        return files, told["open"]

    return scaffold


def test_a_config_gives_names_and_sizes_and_nothing_is_open(scaffolded):
    files, open_ = scaffolded(**OWN)
    assert open_ == []
    assert "Open points" not in files["README.md"]
    manifest = tomllib.loads(files["src/mrv2_adapter_apex/adapter.toml"])
    assert (manifest["architectures"], manifest["model_types"]) == (["ZephyrLM"], ["zephyr-2"])
    config = files["src/mrv2_adapter_apex/config.py"]
    for line in (
        'model_type = "zephyr-2"', "vocab_size: int = 50000,", "num_key_value_heads: int | None = 4,",
        "head_dim: int | None = None,", 'hidden_act: str = "gelu_pytorch_tanh",', "rms_norm_eps: float = 1e-05,",
        "rope_theta: float = 500000.0,", "tie_word_embeddings: bool = True,", "sliding_window: int | None = 512,",
    ):  # fmt: skip
        assert line in config
    assert 'ARCHITECTURE = "ZephyrLM"' in files["src/mrv2_adapter_apex/testing.py"]


MISSING = {
    "media": ({"vision_config": {"depth": 3}}, "media"),
    "encoder": ({"is_encoder_decoder": True}, "decoders only"),
    "latent": ({"kv_lora_rank": 512}, "latent attention"),
    "bits": ({"quantization_config": {"bits": 4}}, "fewer bits"),
    "draft": ({"num_nextn_predict_layers": 1}, "draft"),
    "experts": ({"num_experts": 8, "num_experts_per_tok": 2}, "--kind moe"),
    "state": ({"ssm_state_size": 16}, "--kind hybrid"),
    "code": ({"auto_map": {"AutoModel": "modeling.Own"}}, "never run"),
    "act": ({"hidden_act": "xielu"}, '`hidden_act` is "xielu"'),
    "absent": ({"vocab_size": None}, "`vocab_size`: not there"),
    "odd": ({"hidden_size": [1, 2]}, "`hidden_size` is [1, 2]"),
    "unread": ({"mystery_scale": 0.3}, "`mystery_scale`: nothing reads it"),
    "several": ({"architectures": ["A", "B"]}, "names 2"),
    "none": ({"architectures": []}, "names no class"),
    "evil": ({"architectures": ['X"]\nowner = "me']}, "names no class"),
}


ROPE = {"rope_type": "default", "rope_theta": 5e5}
TURNED = {
    "share": ({"partial_rotary_factor": 0.5}, "`partial_rotary_factor`: the model follows it;"),
    "both": (
        {"partial_rotary_factor": 0.5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        "`partial_rotary_factor`, `rope_scaling`: the model follows them;",
    ),
    "older": ({"rope_scaling": {"type": "linear", "factor": 2}}, "`rope_scaling`: the model follows it;"),
    "within": ({"rope_parameters": ROPE | {"partial_rotary_factor": 0.25}}, "`rope_parameters`: the model follows it;"),
    "new": (
        {"rope_parameters": ROPE | {"rope_type": "yarn", "factor": 4.0}},
        "`rope_parameters`: the model follows it;",
    ),
    "nested": ({"rope_parameters": {"sliding_attention": ROPE}}, "`rope_parameters`: one per layer type; `Block`"),
    "whole": ({"partial_rotary_factor": 1.0, "rope_scaling": None}, ""),
    "once": ({"rope_scaling": {"type": "linear", "factor": 1.0}}, ""),
    "plain": ({"rope_parameters": ROPE | {"partial_rotary_factor": 1}}, ""),
}


@pytest.mark.parametrize("case", TURNED)
def test_rotary_positions_that_the_answer_does_not_follow_are_told(case, scaffolded):
    changes, words = TURNED[case]
    _, open_ = scaffolded(**OWN | changes)
    assert [point.startswith(words) for point in open_] == ([True] if words else [])
    if "follows" in words:
        assert "the answer and the small configs in `testing.py` don't yet" in open_[0]


@pytest.mark.parametrize("case", MISSING)
def test_an_unsupported_architecture_is_scaffolded_and_told_what_is_missing(case, scaffolded, make, contents, capsys):
    make("plain", "--kind", "decoder")
    capsys.readouterr()
    plain = contents("mrv2-adapter-plain")
    changes, words = MISSING[case]
    files, open_ = scaffolded(**OWN | changes)
    assert len([point for point in open_ if words in point]) == 1, open_
    assert set(files) == {path.replace("plain", "apex") for path in plain}
    assert validate(tomllib.loads(files["src/mrv2_adapter_apex/adapter.toml"]), "here").name == "apex"
    compile(files["src/mrv2_adapter_apex/config.py"], "config.py", "exec")


def test_an_empty_config_is_enough(scaffolded):
    files, open_ = scaffolded()
    assert "ApexForCausalLM" in files["src/mrv2_adapter_apex/adapter.toml"]
    assert any("hidden_size" in point for point in open_)


def test_a_nested_text_config_is_read(scaffolded):
    text = {k: v for k, v in OWN.items() if k != "architectures"}
    outer = {"architectures": ["SeerLM"], "model_type": "seer", "vision_config": {"depth": 2}, "text_config": text}
    files, _ = scaffolded(**outer)
    assert "vocab_size: int = 50000," in files["src/mrv2_adapter_apex/config.py"]
    assert 'model_types = ["seer"]' in files["src/mrv2_adapter_apex/adapter.toml"]


def test_what_others_have_is_said(scaffolded):
    """Transformers' config classes win in every host, and an installed adapter may serve the architecture."""
    files, open_ = scaffolded(**OWN | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"})
    assert any("MRV2_PREFER=Qwen3ForCausalLM=apex" in point for point in open_)
    assert any("transformers has a config class for model type `qwen3`" in point for point in open_)
    assert 'model_types = ["apex_adapter"]' in files["src/mrv2_adapter_apex/adapter.toml"]


@pytest.mark.parametrize("text", [None, "{", "[1]", "\xff", "[" * 100000])
def test_a_file_that_holds_no_config_is_refused(text, refused):
    if text is not None:
        Path("config.json").write_bytes(text.encode("latin-1"))
    assert "MRV2-501" in refused("apex", "--kind", "decoder", "--from-config", "config.json")


def test_keys_that_no_file_can_hold_are_escaped_and_many_are_counted(scaffolded):
    odd = {"\ud800": 1, "two\nlines": 2} | {f"key{i:02}": i for i in range(40)}
    files, open_ = scaffolded(**OWN | odd)
    (unread,) = [point for point in open_ if "nothing reads them" in point]
    assert r"`\ud800`, `two\nlines`, `key00`" in unread
    assert unread.endswith("`key21` and 18 more: nothing reads them yet")
    assert unread in files["README.md"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=30)
@given(
    st.dictionaries(st.sampled_from([*OWN, "text_config", "num_experts", "layer_types", "x"]), JSON),
    st.sampled_from(KINDS),
)
def test_whatever_a_config_holds_the_code_is_code(config, kind):
    Path("any.json").write_text(json.dumps(config))
    found = from_config.read_config(Path("any.json"), kind)
    names = {"architecture": found.architecture, "model_type": found.model_type}
    answers = {name: value for name, value in names.items() if value} | {"name": "apex", "kind": kind}
    about = {"sizes": dict(found.sizes), "open": list(found.open)}
    for path, text in render(complete(answers | {"_from_config": about})):
        if path.endswith(".py"):
            compile(text, path, "exec")
        elif path.endswith(".toml"):
            tomllib.loads(text)
        elif path.endswith(".json"):
            json.loads(text)


def test_the_lists_are_those_of_their_owners():
    assert set(from_config.ACTIVATIONS) == set(ACTIVATIONS)
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    known = sorted(CONFIG_MAPPING_NAMES)
    assert [name for name in known[::23] if not known_to_transformers(name)] == []
    assert not known_to_transformers("apex")
