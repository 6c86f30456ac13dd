"""What goes wrong is said when the model is built, by name, and not in a log line above another error."""

from types import SimpleNamespace

import pytest
import transformers

from mrv2 import DefaultModelState
from mrv2.bridge import checks, plugin, versions
from mrv2.bridge.environment import check_plugins
from mrv2.errors import (
    AdapterExcludedError,
    HookResultError,
    LayerNameError,
    PluginExcludedError,
    RecurrentFlagError,
    UnsupportedError,
    VllmRunnerError,
    VllmVersionError,
    WeightsError,
)
from mrv2.model_state.graphs import GraphSupport
from mrv2.state.view import Limits
from mrv2.testing.checkpoints import defects, edit_config, make_checkpoint

CONFIG = transformers.LlamaConfig(
    vocab_size=61,
    hidden_size=64,
    intermediate_size=48,
    num_attention_heads=2,
    num_key_value_heads=1,
    num_hidden_layers=3,
    max_position_embeddings=128,
    eos_token_id=None,
    tie_word_embeddings=True,
)


@pytest.fixture
def checkpoint(tmp_path):
    def make(architecture, config=CONFIG):
        folder = make_checkpoint(tmp_path / "model", config)
        edit_config(folder, architectures=[architecture])
        return folder

    return make


@pytest.fixture
def fails(engine):
    def check(folder, error, match, **settings):
        with pytest.raises(error, match=match), engine(folder, max_model_len=128, **settings):
            pass

    return check


def test_a_layer_stored_under_another_name(checkpoint, fails):
    fails(
        checkpoint("MisnamedForCausalLM"),
        LayerNameError,
        "head_of_another_name is stored as head",
        enable_prefix_caching=False,
    )


def test_an_adapter_that_raises(checkpoint, fails):
    fails(checkpoint("RaisingForCausalLM"), HookResultError, "the library it needs is too old.*faulty.py:")


def test_a_setting_for_which_a_capability_isnt_declared(checkpoint, fails):
    fails(
        checkpoint("ModestForCausalLM"),
        UnsupportedError,
        "enable_prefix_caching asks for prefix_caching, which adapter faulty-sample declares for no host",
        enable_prefix_caching=True,
    )


def test_a_window_for_which_the_capability_isnt_declared(checkpoint, fails):
    sizes = {k: v for k, v in CONFIG.to_dict().items() if k not in ("architectures", "model_type")}
    config = transformers.MistralConfig(**(sizes | {"sliding_window": 16}))
    fails(
        checkpoint("WindowedForCausalLM", config),
        UnsupportedError,
        "a sliding window in .* asks for sliding_window, which adapter faulty-sample declares for no host",
        enable_prefix_caching=False,
    )


def test_a_part_that_vllms_class_cant_take(checkpoint, fails):
    fails(
        checkpoint("BorrowedForCausalLM"),
        HookResultError,
        "mrv2_vllm of adapter faulty-sample names LlamaForCausalLM, whose forward doesn't take offset",
    )


def test_a_state_that_vllm_wouldnt_call(checkpoint, fails):
    fails(
        checkpoint("GreedyStateForCausalLM"),
        UnsupportedError,
        "OwnAttention overrides prepare_attn",
        enable_prefix_caching=False,
    )


def test_a_recurrent_flag_that_lies(checkpoint, fails):
    fails(checkpoint("FlaggedForCausalLM"), RecurrentFlagError, "recurrent is True", enable_prefix_caching=False)


def test_the_old_runner(checkpoint, fails, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    fails(checkpoint("Mrv2LlamaForCausalLM"), VllmRunnerError, "old model runner")


def test_a_rotary_type_that_a_table_cant_say(checkpoint, fails):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    config = transformers.LlamaConfig(**(CONFIG.to_dict() | {"rope_parameters": rope, "max_position_embeddings": 64}))
    fails(checkpoint("Mrv2LlamaForCausalLM", config), Exception, "give --max-model-len 64")


@pytest.mark.parametrize("defect", [d for d in defects(CONFIG) if d.code == "MRV2-202"], ids=lambda d: d.name)
def test_checkpoints_with_one_defect(defect, checkpoint, fails):
    folder = checkpoint("Mrv2LlamaForCausalLM")
    defect.apply(folder)
    with pytest.raises(WeightsError) as caught:
        fails(folder, AssertionError, "")
    assert all(text in str(caught.value) for text in defect.mentions)


# -- without an engine -------------------------------------------------------------------------------------


def test_an_adapter_that_the_allowlist_leaves_out(monkeypatch):
    monkeypatch.setenv("MRV2_ADAPTERS", "mrv2-adapter-qwen")
    monkeypatch.delenv("MRV2_LOCAL_ADAPTERS")
    hosted = {one.entry.name: one for one in plugin.find_hosted()}
    assert hosted["qwen"].error is None
    assert isinstance(hosted["llama"].error, AdapterExcludedError)
    from mrv2.bridge.build import hosted_class

    with pytest.raises(AdapterExcludedError, match="add mrv2-adapter-llama to MRV2_ADAPTERS"):
        hosted_class(hosted["llama"], "Mrv2LlamaForCausalLM", "m")(vllm_config=None)


@pytest.mark.parametrize(("value", "excluded"), [(None, False), ("mrv2,other", False), ("", True), ("other", True)])
def test_a_plugin_list_without_us(value, excluded):
    env = {} if value is None else {"VLLM_PLUGINS": value}
    if excluded:
        with pytest.raises(PluginExcludedError, match="add mrv2 to VLLM_PLUGINS"):
            check_plugins(env)
    else:
        check_plugins(env)


def test_this_vllm_is_listed():
    assert versions.installed() in versions.table()
    versions.check_version()


def test_an_unlisted_version_runs_if_nothing_we_touch_differs(caplog):
    known = versions.table()
    found = dict(known[versions.installed()])
    versions.compare("0.99.0", found, known)
    assert "vLLM 0.99.0 isn't listed" in caplog.text
    name = next(n for n in found if n.endswith("DefaultModelState.prepare_attn"))
    found[name] = "(self, everything)"
    for version in ("0.99.0", versions.installed()):
        with pytest.raises(VllmVersionError) as caught:
            versions.compare(version, found, known)
        assert f"{name} is (self, everything), was {known[versions.installed()][name]}" in str(caught.value)


def test_a_state_that_asks_for_tokens_on_every_stage():
    class Counting(DefaultModelState):
        def after_sample(self, view, num_sampled):
            pass

    checks.check_stages(Counting, 1)
    checks.check_stages(DefaultModelState, 2)
    with pytest.raises(UnsupportedError, match=r"(?s)Counting overrides after_sample.*do without stages"):
        checks.check_stages(Counting, 2)


class NeverCaptured(DefaultModelState):
    def graph_support(self):
        return GraphSupport.NEVER


class PlansGraphs(DefaultModelState):
    def graph_plan(self, default):
        return default


class CapturesMore(DefaultModelState):
    def capture_inner(self, ctx):
        pass


@pytest.mark.parametrize(
    ("state", "what"),
    [
        (NeverCaptured, "says GraphSupport.NEVER"),
        (PlansGraphs, "overrides graph_plan"),
        (CapturesMore, "overrides capture_inner"),
        (DefaultModelState, None),
    ],
)
def test_a_state_with_a_say_in_graphs(state, what):
    from vllm.config import CUDAGraphMode

    def config(mode):
        return SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=mode))

    one = state(SimpleNamespace(parts=()), Limits(max_rows=1, max_num_tokens=1, max_model_len=1), ())
    for off in (CUDAGraphMode.NONE, None):
        checks.check_graphs(one, config(off))
    if what is None:
        checks.check_graphs(one, config(CUDAGraphMode.FULL_AND_PIECEWISE))
    else:
        with pytest.raises(UnsupportedError, match=rf"(?s){state.__name__} {what}.*FULL_DECODE_ONLY.*--enforce-eager"):
            checks.check_graphs(one, config(CUDAGraphMode.FULL_DECODE_ONLY))


def test_every_setting_that_is_asked_about_is_a_capability():
    assert {c.value for c in checks.ASKED} <= {c.value for c in checks.Capability}
