"""Common to all tests. Imports nothing that imports Triton, except through `interpret_kernels`."""

import pytest
from hypothesis import settings

from mrv2.testing import interpret_kernels

# How long an example takes says nothing about it: processes share the machine's cores, and a GPU.
settings.register_profile("mrv2", deadline=None)
settings.load_profile("mrv2")

# Before any test module: without a GPU, check_kernel interprets Triton kernels in this process. Everything
# else goes on calling their torch twins, which are quick.
interpret_kernels()


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="where the runner's tests run: cpu (default) or cuda")


@pytest.fixture(scope="session")
def text_model(tmp_path_factory):
    """Folder of a tiny model with a byte-level tokenizer and a chat template: its text is mostly not UTF-8."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    from mrv2.testing.checkpoints import make_checkpoint

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<end>", "<turn>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(
        ["the cat sat on the mat, the rat sat on the hat, dépêche-toi, grüße, 猫が好き"] * 9, trainer
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = "{% for m in messages %}<turn>{{ m.role }}: {{ m.content }}{% endfor %}<turn>"
    folder = tmp_path_factory.mktemp("text") / "model"
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        max_position_embeddings=128,
        eos_token_id=fast.eos_token_id,
        bos_token_id=None,
    )
    make_checkpoint(folder, config, seed=5)
    fast.save_pretrained(folder)
    return folder
