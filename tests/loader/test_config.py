"""`load_model_config`: what is read, and every malformed config is a typed error."""

from __future__ import annotations

import json
import os

import pytest
import torch
from transformers import PretrainedConfig

from mrv2.config import load_model_config
from mrv2.errors import ConfigError, RopeError

GOOD = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def load(tmp_path, registry):
    def run(content, generation=None):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        (tmp_path / "config.json").write_bytes(data)
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return load_model_config(tmp_path, registry)

    return run


def test_facts_are_read(load, tmp_path):
    config = load(GOOD)
    assert (config.architecture, config.model_type) == ("LlamaForCausalLM", "llama")
    assert (config.vocab_size, config.num_layers, config.max_model_len) == (64, 3, 128)
    assert config.eos_token_ids == (2,)
    assert config.dtype == torch.bfloat16
    assert config.raw == GOOD
    context = config.context()
    assert context.config is config.hf_config
    assert (context.path, context.host) == (tmp_path, "native")


@pytest.mark.parametrize(
    ("own", "generation", "want"),
    [
        (2, None, (2,)),
        ([2, 3], None, (2, 3)),
        (None, None, ()),
        (2, {"eos_token_id": [5, 6, 5]}, (5, 6)),
        (2, {"eos_token_id": 7}, (7,)),
        (2, {"temperature": 0.5}, (2,)),
        (0, {}, (0,)),
    ],
)
def test_end_tokens(load, own, generation, want):
    assert load(GOOD | {"eos_token_id": own}, generation).eos_token_ids == want


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 12345.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 12345.0}},
    ],
)
def test_both_rope_spellings_survive(load, rope):
    got = load(GOOD | rope).hf_config.rope_parameters
    assert (got["rope_type"], got["factor"], got["rope_theta"]) == ("linear", 2.0, 12345.0)


def test_no_config(tmp_path, registry):
    with pytest.raises(ConfigError, match=r"there is no config\.json"):
        load_model_config(tmp_path, registry)


def without(key):
    return {k: v for k, v in GOOD.items() if k != key}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "isn't JSON"),
        (b'{"a": ', "line 1"),
        (b'{"a": "\xff\xfe"}', "isn't UTF-8"),
        (b"[" * 100_000, "can't be read|isn't JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "can't be read"),
        (b"[]", "no JSON object"),
        (b"3", "no JSON object"),
        (without("architectures"), "architectures is missing"),
        (GOOD | {"architectures": []}, "architectures is missing"),
        (GOOD | {"architectures": "LlamaForCausalLM"}, "architectures is missing"),
        (GOOD | {"architectures": [None]}, "architectures is missing"),
        (GOOD | {"architectures": ["A", "B"]}, "names 2: A, B"),
        (without("model_type"), "model_type is missing"),
        (GOOD | {"model_type": 3}, "model_type is missing"),
        (GOOD | {"vocab_size": "many"}, "vocab_size|refuses"),
        (GOOD | {"vocab_size": 0}, "vocab_size is 0"),
        (GOOD | {"num_hidden_layers": -1}, "num_hidden_layers is -1|refuses"),
        (GOOD | {"eos_token_id": [2.5]}, "eos_token_id|refuses"),
        (GOOD | {"eos_token_id": -1}, "eos_token_id is -1"),
        (GOOD | {"hidden_size": 15}, "refuses"),
    ],
)
def test_malformed_configs(load, content, message, tmp_path):
    with pytest.raises(ConfigError, match=message) as caught:
        load(content)
    assert str(tmp_path) in str(caught.value)
    assert caught.value.code == "MRV2-201"


@pytest.mark.parametrize("generation", [[], {"eos_token_id": "x"}, {"eos_token_id": [1, None]}])
def test_malformed_generation_config(load, generation):
    with pytest.raises(ConfigError, match="generation_config"):
        load(GOOD, generation)


PRIVATE = GOOD | {"architectures": ["AcmeForCausalLM"], "model_type": "acme_of_the_test"}


def test_a_private_config_class_comes_from_the_adapter(load, adapter):
    class Config(PretrainedConfig):
        model_type = "acme_of_the_test"
        attribute_map = {"num_hidden_layers": "depth", "max_position_embeddings": "reach"}  # noqa: RUF012

        def __init__(self, depth=1, reach=None, secret=0, vocab_size=8, **kw):
            self.depth, self.reach, self.secret, self.vocab_size = depth, reach, secret, vocab_size
            super().__init__(**kw)

    adapter.config = Config
    content = {k: PRIVATE[k] for k in ("architectures", "model_type")} | {"depth": 5, "secret": 7}
    for _ in range(2):  # registering again is legal
        config = load(content)
    assert isinstance(config.hf_config, Config)
    assert (config.num_layers, config.max_model_len, config.hf_config.secret) == (5, None, 7)
    assert config.eos_token_ids == ()


def test_a_private_type_without_class_is_refused(load):
    with pytest.raises(ConfigError, match="neither transformers nor an adapter knows model_type 'acme_unknown'"):
        load(PRIVATE | {"model_type": "acme_unknown"})


def test_code_in_a_checkpoint_is_not_run(load, tmp_path):
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')\nclass C: pass\n")
    with pytest.raises(ConfigError):
        load(PRIVATE | {"model_type": "acme_evil", "auto_map": {"AutoConfig": "evil.C"}})
    assert load(GOOD | {"auto_map": {"AutoConfig": "evil.C"}}).vocab_size == 64


SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")


@pytest.mark.parametrize("value", [0, -4, "4", 4.0, True, 10**30, [4, 0]])
@pytest.mark.parametrize("name", [*SIZES, "num_hidden_layers", "max_position_embeddings"])
def test_sizes_have_to_be_positive_integers(load, adapter, name, value):
    """With a class that validates nothing, as a private one may; transformers' own refuse some of these before."""
    adapter.config = type("Loose", (PretrainedConfig,), {"model_type": "acme_of_sizes"})
    with pytest.raises(ConfigError, match=f"{name} is .*, expected a positive integer"):
        load(PRIVATE | {"model_type": "acme_of_sizes", name: value})
    if value is not True:  # which transformers takes for one
        with pytest.raises(ConfigError, match=name):
            load(GOOD | {name: value})


def test_a_size_per_layer_is_left_to_the_model(load, adapter):
    adapter.config = type("PerLayer", (PretrainedConfig,), {"model_type": "acme_per_layer"})
    config = load(PRIVATE | {"model_type": "acme_per_layer", "intermediate_size": [8, 16, 8], "head_dim": None})
    assert config.hf_config.intermediate_size == [8, 16, 8]


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_a_pipe_is_not_waited_for(load, tmp_path, registry, file):
    load(GOOD)
    (tmp_path / file).unlink(missing_ok=True)
    os.mkfifo(tmp_path / file)
    with pytest.raises(ConfigError, match="no regular file") as caught:
        load_model_config(tmp_path, registry)
    assert file in caught.value.where


LONG = {"rope_theta": 1e4, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"rope_type": "linear", "factor": 2.5}, 320),
        ({"rope_type": "linear", "factor": 0.001}, 1),
        ({"rope_type": "dynamic", "factor": 2}, 256),
        (LONG | {"rope_type": "yarn", "factor": 8.0}, 256),
        (LONG | {"rope_type": "yarn", "factor": 2.0}, 128),
    ],
)
def test_scaling_lengthens_the_context(load, rope, length):
    assert load(GOOD | {"rope_parameters": {"rope_theta": 1e4} | rope}).max_model_len == length


@pytest.mark.parametrize("factor", [0, -1.0, "2", float("nan"), float("inf"), 1e30, 10**400])
@pytest.mark.parametrize("rope_type", ["linear", "dynamic", "yarn"])
def test_a_factor_out_of_range_is_refused(load, rope_type, factor):
    rope = LONG if rope_type == "yarn" else {"rope_theta": 1e4}
    with pytest.raises((RopeError, ConfigError), match="factor"):
        load(GOOD | {"rope_parameters": rope | {"rope_type": rope_type, "factor": factor}})


@pytest.mark.parametrize("before", [0, -5, 2.5, "32"])
def test_an_original_length_out_of_range_is_refused(load, before):
    rope = LONG | {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": before}
    with pytest.raises((RopeError, ConfigError), match=r"original_max_position_embeddings|refuses"):
        load(GOOD | {"rope_parameters": rope})
