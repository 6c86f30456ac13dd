"""Quantised checkpoints: parameters of vLLM's methods are slots as well, and tokens those of vLLM's own class."""

import pytest
import torch
import transformers
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

from mrv2.errors import WeightsError
from mrv2.testing.checkpoints import edit_config, make_checkpoint, read_tensors, write_tensors

pytestmark = pytest.mark.slow

SIZES = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "bos_token_id": None,
}
IGNORED = ("lm_head", "model.layers.1.mlp.down_proj", "model.layers.0.self_attn.o_proj")
GROUP = 32


def int8(weight):
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}


def int4(weight):
    grouped = weight.view(len(weight), -1, GROUP)
    scale = grouped.abs().amax(-1, keepdim=True) / 7
    whole = (grouped / scale).round().clamp(-8, 7).to(torch.int8).view(weight.shape)
    shape = torch.tensor(weight.shape)
    return {"weight_packed": pack_to_int32(whole, 4), "weight_scale": scale.squeeze(-1), "weight_shape": shape}


WEIGHTS8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False}
TOKENS8 = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
WEIGHTS4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}
SCHEMES = {
    "int8": (int8, "int-quantized", {"weights": WEIGHTS8, "input_activations": TOKENS8}),
    "int4": (int4, "pack-quantized", {"weights": WEIGHTS4, "input_activations": None}),
}


@pytest.fixture
def quantised(tmp_path):
    def make(scheme, without="", family="Llama"):
        quantise, layout, group = SCHEMES[scheme]
        config = getattr(transformers, f"{family}Config")(**SIZES)
        folder = make_checkpoint(tmp_path / scheme, config, seed=4)
        tensors = {}
        for name, tensor in read_tensors(folder).items():
            owner = name.removesuffix(".weight")
            if owner.endswith("_proj") and owner not in IGNORED:
                tensors |= {f"{owner}.{part}": value.contiguous() for part, value in quantise(tensor).items()}
            else:
                tensors[name] = tensor
        tensors = {name: tensor for name, tensor in tensors.items() if name != without}
        write_tensors(folder, tensors)
        edit_config(
            folder,
            quantization_config={
                "quant_method": "compressed-tensors",
                "format": layout,
                "quantization_status": "compressed",
                "ignore": list(IGNORED),
                "config_groups": {"group_0": {"targets": ["Linear"]} | group},
            },
        )
        return folder

    return make


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_tokens_are_those_of_vllms_own_class(scheme, family, quantised, engine, generate, runner_of, ragged):
    folder, prompts = quantised(scheme, family=family), ragged((3, 40, 17, 33))
    said = {}
    for architecture in (f"{family}ForCausalLM", f"Mrv2{family}ForCausalLM"):
        # vLLM's kernels for CPUs know no float32 here.
        with engine(folder, hf_overrides={"architectures": [architecture]}, dtype="bfloat16") as llm:
            assert type(runner_of(llm).model).__name__ == architecture
            said[architecture] = generate(llm, prompts)
    theirs, ours = said.values()
    assert [tokens for tokens, _, _ in ours] == [tokens for tokens, _, _ in theirs]
    for (_, mine, _), (_, want, _) in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(want, abs=1e-5)


def test_a_scale_that_is_missing(quantised, engine):
    """vLLM's own loader would take what happens to be in memory."""
    name = "model.layers.0.mlp.up_proj.weight_scale"
    folder = quantised("int8", without=name)
    with (
        pytest.raises(WeightsError, match=r"layers\.0\.mlp.up_proj\.weight_scale"),
        engine(folder, hf_overrides={"architectures": ["Mrv2LlamaForCausalLM"]}),
    ):
        pass
