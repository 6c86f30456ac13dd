"""What vLLM expects of a model class, in front of the adapter's own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.model_executor.models.utils import make_empty_intermediate_tensors_factory
from vllm.v1.kv_cache_interface import MambaSpec

from mrv2.adapter import LoadedAdapter, require
from mrv2.attn.specs import PerRequest
from mrv2.bridge.checks import check_engine
from mrv2.bridge.older import OlderHost, check_states
from mrv2.bridge.weights import load_from_vllm
from mrv2.context import AdapterContext
from mrv2.errors import ModelBuildError, Mrv2Error, RecurrentFlagError, UnsupportedError
from mrv2.layers.native import NativeLayers
from mrv2.layers.vllm.caches import RequestState, local_entries, state_layout
from mrv2.layers.vllm.context import HIDDEN, RESIDUAL, VllmContext
from mrv2.layers.vllm.layer_set import VllmLayers
from mrv2.layers.vllm.names import check_names
from mrv2.loader.weights import bind_weight_map
from mrv2.loading import describe, raised_at, source_of
from mrv2.manifest import Capability


class HostMixin(OlderHost):
    """Builds the adapter's model of vLLM's layers, runs it, and loads its weights strictly.

    Names of its own start with `mrv2_`, since the adapter's model shares them.
    """

    # Fused layers by the names that a checkpoint, LoRA and quantisation know their parts by.
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    embedding_modules: ClassVar[dict[str, str]] = {
        "embed_tokens": "input_embeddings",
        "lm_head": "output_embeddings",
    }

    # Set on the generated class.
    mrv2_adapter: ClassVar[LoadedAdapter]
    mrv2_context: ClassVar[AdapterContext]
    mrv2_model: ClassVar[Any]
    mrv2_state: ClassVar[type]

    mrv2_aux_layers: tuple[int, ...] = ()

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        check_engine(vllm_config, self.mrv2_adapter, type(self))
        model, config = self.mrv2_model, vllm_config.model_config.hf_config
        _tie_as_written(vllm_config.model_config)
        layers = VllmLayers(vllm_config, prefix)
        try:
            super().__init__(layers, config)  # type: ignore[call-arg]
            bind_weight_map(self, config)  # type: ignore[arg-type]
        except Mrv2Error:
            raise
        except Exception as error:  # an adapter's code, or a layer of vLLM's that refuses a size
            raise ModelBuildError(
                f"{describe(error)}, raised at {raised_at(error.__traceback__)}",
                where=f"{self.mrv2_context.architecture} of {vllm_config.model_config.model}, {source_of(model)}",
                fix="compare the sizes in config.json with the checkpoint, or correct the named line",
            ) from error
        assert isinstance(self, nn.Module)
        check_names(self, layers, prefix)
        self.mrv2_config = vllm_config
        self.mrv2_built = layers.built
        self._check_recurrent(vllm_config)
        if layers.built.windows:
            setting = f"a sliding window in {vllm_config.model_config.model}"
            require(Capability.SLIDING_WINDOW, "vllm", self.mrv2_adapter.entry, setting=setting)
        self.requires_grad_(False)
        self.mrv2_first, self.mrv2_last = layers.is_first, layers.is_last
        if layers.built.logits is not None:
            self.logits_processor = layers.built.logits  # where LoRA looks for it
        if not hasattr(self, "config"):
            self.config = config
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(
            [HIDDEN, RESIDUAL], layers.built.hidden_size
        )

    # -- running ---------------------------------------------------------------------------------------

    def mrv2_forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **inputs: Tensor,
    ) -> Any:
        """The adapter's `forward` with this step's context; `inputs` are those of the parts."""
        ctx = VllmContext(
            is_first=self.mrv2_first,
            is_last=self.mrv2_last,
            incoming=intermediate_tensors,
            inputs_embeds=inputs_embeds,
            aux_layers=self.mrv2_aux_layers,
        )
        out = self.mrv2_model.forward(self, input_ids, positions, ctx, **inputs)
        return (out, ctx.aux) if self.mrv2_aux_layers else out

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Token embeddings [num_tokens, hidden]."""
        table: Any = self.mrv2_built.table
        embedded: Tensor = table(input_ids)
        return embedded

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Logits [n, vocab], gathered over ranks; None on ranks that don't need them."""
        built = self.mrv2_built
        if built.hidden_scale != 1.0:
            hidden_states = hidden_states * built.hidden_scale
        logits: Tensor | None = self.logits_processor(built.head, hidden_states)
        return logits

    def set_aux_hidden_state_layers(self, layers: Iterable[int]) -> None:
        """Which layers' streams a drafter wants beside the hidden states.

        Raises:
            UnsupportedError: there are pipeline stages.
        """
        if not (self.mrv2_first and self.mrv2_last):
            raise UnsupportedError(
                "a drafter that reads hidden states of inner layers, and pipeline stages",
                where="speculative_config and pipeline_parallel_size",
                fix="do without one of them",
            )
        self.mrv2_aux_layers = tuple(sorted(set(layers)))

    # -- loading ---------------------------------------------------------------------------------------

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Strictly, by the native host's loader. Returns the names of all parameters that have values now."""
        return load_from_vllm(self, weights)

    # -- what vLLM asks the class ------------------------------------------------------------------------

    @classmethod
    def get_model_state_cls(cls) -> type:
        """Asked by Model Runner V2 before it chooses by itself."""
        return cls.mrv2_state

    @classmethod
    def get_mamba_specs_from_config(cls, vllm_config: VllmConfig) -> list[MambaSpec]:
        """States of the whole model, whatever this pipeline stage holds: vLLM fits attention's pages to them."""
        dtype, ranks = vllm_config.model_config.dtype, vllm_config.parallel_config.tensor_parallel_size
        layouts = [state_layout(local_entries(s.tensors, dtype, ranks)) for s in cls._states(vllm_config)]
        return [
            MambaSpec(
                shapes=tuple(shape for shape, _ in layout), dtypes=tuple(dtype for _, dtype in layout), block_size=-1
            )
            for layout in layouts
        ]

    @classmethod
    def get_mamba_state_copy_funcs(cls, mamba_types: Iterable[Any]) -> dict[Any, tuple[Any, ...]]:
        """How prefix caching copies each type of state: every tensor as a whole."""
        return {t: (get_temporal_copy_spec,) * int(t.name.rpartition("_")[2]) for t in mamba_types}

    @classmethod
    def _states(cls, vllm_config: VllmConfig) -> list[PerRequest]:
        """The declared states, from a model that is built without memory."""
        layers = NativeLayers()
        with torch.device("meta"):
            cls.mrv2_model(layers, vllm_config.model_config.hf_config)
        return [spec for spec in layers.caches.values() if isinstance(spec, PerRequest)]

    def _check_recurrent(self, vllm_config: VllmConfig) -> None:
        """The class attribute `recurrent`, which vLLM's inspection has read, says what the layers declare.

        Raises:
            RecurrentFlagError: it says otherwise; or the config hides it from vLLM.
        """
        declared = bool(self.mrv2_model.recurrent)
        # A pipeline stage may hold none of a recurrent model's states, so all of it is asked; of others this stage.
        own = [handle for handle in self.mrv2_built.caches if isinstance(handle, RequestState)]
        check_states(vllm_config, own)
        here = bool(own)
        states = here or (declared and bool(self._states(vllm_config)))
        if declared != states:
            raise RecurrentFlagError(
                f"recurrent is {declared}, and {'a' if states else 'no'} layer keeps a state per request",
                where=source_of(self.mrv2_model),
                fix=f"set recurrent = {states} in the model class",
            )
        if states and not vllm_config.model_config.is_hybrid:
            raise RecurrentFlagError(
                "layers keep states per request, and vLLM takes the model for one of attention alone, because the "
                'config\'s layer_types are all "full_attention"',
                where=str(vllm_config.model_config.model),
                fix="give the config class another name for that attribute",
            )


def _tie_as_written(model_config: Any) -> None:
    """VLLM takes a head that the checkpoint has, whatever the config says of tying. A copy that differs is refused in
    the native host, and so it is here: the strict loader compares it.
    """
    if getattr(model_config, "word_embeddings_untied_by_checkpoint", False):
        model_config.hf_config.tie_word_embeddings = True
        model_config.hf_config.get_text_config().tie_word_embeddings = True
        model_config.word_embeddings_untied_by_checkpoint = False
