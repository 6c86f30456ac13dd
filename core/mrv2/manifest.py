"""`adapter.toml`: what an adapter says about itself without being imported."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from mrv2.api import SDK_API, ApiVersion
from mrv2.context import Host
from mrv2.errors import ManifestError, Mrv2Error, SdkApiError

MANIFEST_FILE = "adapter.toml"


class Capability(StrEnum):
    """What an adapter may declare. One that isn't declared counts as `no`.

    Members are the things that can be asked for with a setting and refused by name.
    """

    CHUNKED_PREFILL = "chunked_prefill"
    """A prompt may be computed in pieces, over several steps."""
    PREFIX_CACHING = "prefix_caching"
    """A request may start from cache blocks that another one computed."""
    SLIDING_WINDOW = "sliding_window"
    """Layers may see the last N tokens only."""
    RECURRENT = "recurrent"
    """Layers keep a state per request instead of entries per token."""
    CUDA_GRAPHS = "cuda_graphs"
    """A decode step may be captured once and replayed."""
    STRUCTURED_OUTPUT = "structured_output"
    """Tokens may be masked by a grammar."""
    LOGITS_PROCESSORS = "logits_processors"
    """The adapter brings processors of its own (`mrv2_logits_processors`)."""
    MULTIMODAL = "multimodal"
    """Images, audio or video beside text (`mrv2_mm_processor`)."""
    SPECULATION = "speculation"
    """The model can verify tokens that a drafter proposed."""
    DRAFTING = "drafting"
    """The adapter brings a drafter (`mrv2_speculator`)."""
    LORA = "lora"
    """Low-rank adapters per request."""
    QUANTIZATION = "quantization"
    """Weights stored in fewer bits stay so in memory."""
    GGUF = "gguf"
    """Weights may come from a GGUF file."""
    TENSOR_PARALLEL = "tensor_parallel"
    """Each layer may be divided over several devices."""
    PIPELINE_PARALLEL = "pipeline_parallel"
    """The stack of layers may be cut into stages on several devices."""
    EXPERT_PARALLEL = "expert_parallel"
    """Experts may live on different devices."""


class Support(StrEnum):
    """Which hosts offer a capability with this adapter."""

    NATIVE = "native"
    VLLM = "vllm"
    BOTH = "both"
    NO = "no"

    def on(self, host: Host) -> bool:
        """Whether `host` is among them."""
        return self is Support.BOTH or self.value == host


Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]*$")]
Identifier = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
ModelType = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]


class Drafts(BaseModel):
    """What a drafter drafts for.

    Args:
        method: how, for example `eagle3`, `mtp`, `draft_model`.
        targets: architectures whose tokens it proposes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: Name
    targets: Annotated[tuple[Identifier, ...], Field(min_length=1)]


class Manifest(BaseModel):
    """The contents of `adapter.toml`.

    Args:
        name: short name, the same as the entry point's.
        kind: a model family, a drafter for other families, or an addon to them.
        sdk_api: contract it was written for, `"major.minor"`.
        architectures: as checkpoints' configs name them (`architectures`).
        model_types: as checkpoints' configs name them (`model_type`).
        drafts: for a drafter, what it drafts for.
        capabilities: name to the hosts that offer it; absent means no.
        owner: whom to ask.
        docs: link to its documentation.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Name
    kind: Literal["model", "drafter", "addon"] = "model"
    sdk_api: str
    architectures: Annotated[tuple[Identifier, ...], Field(min_length=1)]
    model_types: tuple[ModelType, ...] = ()
    drafts: Drafts | None = None
    capabilities: Mapping[Capability, Support] = Field(default_factory=dict)
    owner: Annotated[str, Field(min_length=1)]
    docs: str | None = None

    @field_validator("architectures", "model_types")
    @classmethod
    def _no_repeats(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        repeated = sorted({v for v in values if values.count(v) > 1})
        if repeated:
            raise ValueError(f"listed twice: {', '.join(repeated)}")
        return values

    @property
    def api(self) -> ApiVersion:
        """`sdk_api` as numbers."""
        return parse_api(self.sdk_api)

    def support(self, capability: Capability | str) -> Support:
        """Which hosts offer `capability`."""
        return self.capabilities.get(Capability(capability), Support.NO)


def parse_api(text: str) -> ApiVersion:
    """`"0.1"` as numbers.

    Raises:
        ValueError: `text` isn't `major.minor`.
    """
    match = re.fullmatch(r"(0|[1-9][0-9]{0,5})\.(0|[1-9][0-9]{0,5})", text)
    if match is None:
        raise ValueError(f"{text!r} is not of the form 'major.minor'")
    return ApiVersion(int(match[1]), int(match[2]))


def accepts_api(wanted: ApiVersion, offered: ApiVersion = SDK_API) -> bool:
    """Equal major version, and a minor version that isn't newer than ours."""
    return wanted.major == offered.major and wanted.minor <= offered.minor


def read_toml(text: str, where: str) -> dict[str, Any] | Mrv2Error:
    """The raw table of a manifest."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # its own error, integers of thousands of digits, deep nesting
        return ManifestError(f"not valid TOML: {error}", where=where, fix="correct the named line")


def check_api(raw: Mapping[str, Any], where: str) -> Mrv2Error | None:
    """Compare `sdk_api` before anything else: a newer manifest may have fields that we don't know."""
    if "sdk_api" not in raw:
        return ManifestError(
            "sdk_api is missing", where=where, fix=f'state what it was written for: sdk_api = "{SDK_API}"'
        )
    try:
        wanted = parse_api(raw["sdk_api"])
    except (TypeError, ValueError):
        return ManifestError(
            f"sdk_api is {raw['sdk_api']!r}, which is not a string 'major.minor'",
            where=where,
            fix=f'for example sdk_api = "{SDK_API}"',
        )
    if accepts_api(wanted):
        return None
    newer = wanted > SDK_API
    return SdkApiError(
        f"written for SDK API {wanted}, this core offers {SDK_API}",
        where=where,
        fix="upgrade mrv2: pip install -U mrv2" if newer else "upgrade the adapter, or install an older mrv2",
    )


def validate(raw: Mapping[str, Any], where: str) -> Manifest | Mrv2Error:
    """The manifest, or an error that lists every wrong field."""
    try:
        return Manifest.model_validate(raw)
    except ValidationError as error:
        faults = [f"{'.'.join(str(p) for p in e['loc']) or 'manifest'}: {e['msg']}" for e in error.errors()]
        return ManifestError("; ".join(faults), where=where, fix="correct these fields; see mrv2.manifest.Manifest")


def declared_architectures(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """What a manifest claims, even one that can't be accepted: a broken adapter still says what it is for."""
    listed = raw.get("architectures")
    return tuple(a for a in listed if isinstance(a, str)) if isinstance(listed, list) else ()
