"""Every error a user can meet, each with a stable code.

A message answers four questions: *what* is wrong, *where* it comes from, *how to fix it*, and where to
read more. `mrv2 explain CODE` prints the class documentation; `docs/errors.md` is generated from it.
Codes are never reused: 1xx adapters and registry, 2xx checkpoints, configs and tokenizers, 3xx layers and
kernels, 4xx requests and the runner, 5xx command line and files, 6xx inside vLLM, 7xx conformance kit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

DOCS_URL = "https://mrv2.readthedocs.io/errors"


class Mrv2Error(Exception):
    """Base of all typed errors.

    Args:
        what: what is wrong, with the offending names and values.
        where: distribution and version, entry point, file, request or option it comes from.
        fix: what the reader can do now.
    """

    code: ClassVar[str] = "MRV2-000"
    title: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 2

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what = what
        self.where = where
        self.fix = fix
        super().__init__(what)

    def __str__(self) -> str:
        lines = [f"{self.code} {self.title}: {self.what}"]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.fix:
            lines.append(f"  fix:   {self.fix}")
        lines.append(f"  more:  mrv2 explain {self.code}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process boundaries (workers, plug-ins); the default would lose the keyword fields.
        return (_rebuild, (type(self), self.what, self.where, self.fix))

    def to_dict(self) -> dict[str, str]:
        """The error for `--json` output."""
        return {
            "code": self.code,
            "title": self.title,
            "what": self.what,
            "where": self.where,
            "fix": self.fix,
            "docs": f"{DOCS_URL}#{self.code.lower()}",
        }


def _rebuild(cls: type[Mrv2Error], what: str, where: str, fix: str) -> Mrv2Error:
    return cls(what, where=where, fix=fix)


def all_error_classes() -> Iterator[type[Mrv2Error]]:
    """All error classes of the core, by code."""
    found: list[type[Mrv2Error]] = []
    todo: list[type[Mrv2Error]] = [Mrv2Error]
    while todo:
        cls = todo.pop()
        for sub in cls.__subclasses__():
            todo.append(sub)
            if sub.__module__ == __name__:
                found.append(sub)
    yield from sorted(found, key=lambda c: c.code)


# ---- 1xx: adapters and registry ----------------------------------------------------------------------------


class UnknownArchitectureError(Mrv2Error):
    """No adapter in this environment serves the architecture or model type that a checkpoint's config names.

    The message lists what the installed adapters do serve. An install hint is given only when a catalogue
    (the core's own, or files named in `MRV2_CATALOG`) knows a distribution for it; names are never guessed.
    Install that distribution, or give your own adapter with `--adapter ./folder`.
    """

    code = "MRV2-101"
    title = "unknown architecture"


class SettingError(Mrv2Error):
    """An `MRV2_*` environment variable has a value that makes no sense here: `MRV2_ADAPTERS` lists a
    distribution that isn't installed, `MRV2_PREFER` isn't `Architecture=adapter`, or a time isn't a positive number.

    Correct the variable or unset it. A setting is never skipped in silence: an entry of `MRV2_PREFER` for an adapter
    or architecture that isn't here stops that architecture alone, and `mrv2 list` and `mrv2 doctor` name it.
    """

    code = "MRV2-102"
    title = "bad setting"


class CoreVersionError(Mrv2Error):
    """The adapter's distribution requires another version of `mrv2` than the one that is running.

    Installed without its dependencies, or the core changed afterwards. Install a version of either that fits.
    """

    code = "MRV2-103"
    title = "core version doesn't fit"


class ManifestMissingError(Mrv2Error):
    """An installed entry point leads nowhere: its package is gone (stale metadata of an uninstalled or renamed
    package), or it has no `adapter.toml` beside its `__init__.py`.

    Reinstall or uninstall the distribution; as its author, ship `adapter.toml` inside the package.
    """

    code = "MRV2-104"
    title = "no manifest"


class ManifestError(Mrv2Error):
    """`adapter.toml` is not valid TOML, lacks a field, has one that doesn't exist, or a value of the wrong kind.

    The message lists each field and what it should be. The fields are described in `mrv2.manifest.Manifest`.
    """

    code = "MRV2-105"
    title = "bad manifest"


class SdkApiError(Mrv2Error):
    """The adapter is written for a contract that this core doesn't offer: another major version, or a minor
    version newer than ours.

    Upgrade `mrv2` for a newer adapter, or the adapter for an older one. `mrv2 doctor NAME` lists what changed.
    """

    code = "MRV2-106"
    title = "SDK API doesn't fit"


class AdapterConflictError(Mrv2Error):
    """Two adapters claim the same architecture, model type or name, or one distribution is installed twice.

    Nothing is chosen by chance or by order of installation. Name the one to use with `--adapter NAME` or
    `MRV2_PREFER=Architecture=NAME`, restrict the environment with `MRV2_ADAPTERS`, or uninstall one.
    """

    code = "MRV2-107"
    title = "conflicting adapters"


class AdapterImportError(Mrv2Error):
    """Importing the adapter's package failed: it raised, or it tried to end the process.

    The message names the line of the adapter's code it came from. Often a dependency is absent or was upgraded.
    """

    code = "MRV2-108"
    title = "adapter can't be imported"


class AdapterTimeoutError(Mrv2Error):
    """Importing the adapter's package took longer than allowed (60 seconds, or `MRV2_IMPORT_TIMEOUT`).

    The message names the line where it waits. Imports should neither use the network nor wait for anything;
    on a slow disk raise the limit.
    """

    code = "MRV2-109"
    title = "adapter import hangs"


class HookError(Mrv2Error):
    """The adapter's hooks don't match the contract: an unknown name starting with `mrv2_`, an argument no hook
    has, a missing `@mrv2.hookimpl`, no hook at all, or attributes that raise when they are read.

    The message names file and line, and the nearest known name. `mrv2.hookspecs` documents all hooks.
    """

    code = "MRV2-110"
    title = "bad hook"


class HookResultError(Mrv2Error):
    """A hook raised, or returned something other than what its specification says: an instance instead of a
    class, a model class without `weight_map`, `parts` or `recurrent`, nothing for an architecture that the
    manifest claims.

    The message names adapter, hook, file and line. Fix the hook, or the claim in `adapter.toml`.
    """

    code = "MRV2-111"
    title = "wrong result of a hook"


class UnknownAdapterError(Mrv2Error):
    """No adapter has the given name. Names are those of `mrv2 list`; a distribution's name works too."""

    code = "MRV2-112"
    title = "unknown adapter"


class LocalAdapterError(Mrv2Error):
    """A path given with `--adapter` isn't an adapter: it doesn't exist, isn't a Python file or a package, or
    states no manifest.

    A folder needs `__init__.py` and `adapter.toml`; a single file states the same TOML in a comment block that
    starts with `# /// adapter` and ends with `# ///`. A project's folder is taken for the package that its
    `pyproject.toml` names under `[project.entry-points."mrv2.adapters"]`.
    """

    code = "MRV2-113"
    title = "bad local adapter"


class CatalogError(Mrv2Error):
    """A catalogue named in `MRV2_CATALOG` can't be read, or isn't the JSON it should be.

    The message names the file and the place. The format is that of `mrv2 catalog --json`, key `catalog`.
    """

    code = "MRV2-114"
    title = "bad catalogue"


class MetadataError(Mrv2Error):
    """A distribution's installed metadata is damaged: an entry point or a requirement that can't be parsed.

    Reinstall the distribution.
    """

    code = "MRV2-115"
    title = "damaged metadata"


class ForwardInputError(Mrv2Error):
    """An adapter's extra inputs clash: two `InputPart`s have one key, a key is one that every `forward`
    already has (`input_ids`, `positions`, `ctx`), or `attn_extras` names a KV group that doesn't exist.

    Give each part a key of its own, equal to the keyword in the model's `forward`.
    """

    code = "MRV2-120"
    title = "clashing model inputs"
    exit_code = 1


# ---- 2xx: checkpoints, configs, tokenizers -----------------------------------------------------------------


class ConfigError(Mrv2Error):
    """The model folder's `config.json` (or `generation_config.json`) is missing, isn't UTF-8 JSON, names no
    architecture or several, has a size that is no positive integer, or holds a value that the config class refuses.

    Check that MODEL is the folder that holds `config.json`, and that the file is whole. A config that names
    several architectures has to be cut down to the one to run.
    """

    code = "MRV2-201"
    title = "bad model config"


class WeightsError(Mrv2Error):
    """The checkpoint and the model don't fit each other: a tensor is missing, is of no use to the model, has
    another shape, comes twice, holds packed (quantised) values, or the number of layers differs.

    The message lists names of each kind. Loading is strict, since every one of these makes a model that runs
    and writes wrong text. Compare the config with the checkpoint; an adapter's author corrects `weight_map`.
    Weights in an instance that was being loaded are incomplete: don't run it.
    """

    code = "MRV2-202"
    title = "checkpoint doesn't fit the model"


class CheckpointFileError(Mrv2Error):
    """A checkpoint file is truncated, damaged, absent, of an unknown format, or would need to run code
    (pickle) to be read.

    Copy the file again, or convert a pickle checkpoint to safetensors where you trust it.
    """

    code = "MRV2-203"
    title = "bad checkpoint file"


class TokenizerError(Mrv2Error):
    """The tokenizer's files can't be read, or a chat was asked for and there is no chat template.

    Use raw prompts, give token ids, or add the tokenizer's files to the model folder.
    """

    code = "MRV2-204"
    title = "bad tokenizer"


class ModelNotFoundError(Mrv2Error):
    """MODEL is no folder, no GGUF file, no bundled name, and no hub id that can be reached.

    A hub id looks like `org/name` and needs a network; everything else is looked for on this machine only.
    """

    code = "MRV2-205"
    title = "model not found"


class ModelCacheError(Mrv2Error):
    """The folder that keeps converted and downloaded models can't be written, or its disk is full.

    Set `MRV2_CACHE` to a folder that can be written and has room. Nothing half-written is ever used.
    """

    code = "MRV2-206"
    title = "model cache unusable"


class ChecksumError(Mrv2Error):
    """A file's SHA-256 isn't the recorded one: the download was cut, or the file was changed.

    Delete the file and fetch it again.
    """

    code = "MRV2-207"
    title = "checksum differs"


class DownloadError(Mrv2Error):
    """A model couldn't be fetched: no network, no such package or repository, or no permission.

    The message has the exact command to run by hand, here or on a machine with a network.
    """

    code = "MRV2-208"
    title = "download failed"


class MissingExtraError(Mrv2Error):
    """A package that is needed for what was asked isn't installed. The message has the command to install it."""

    code = "MRV2-209"
    title = "package missing"


class SlotError(Mrv2Error):
    """A model's layers don't account for their parameters: a parameter that no weight slot fills, or a slot
    that names no parameter, or two slots of one name.

    For authors of models and layer sets: make parameters through the layer set (`L.param`, `L.norm`, …), or
    list them in the module's `weight_slots()`. Values computed after loading belong in buffers.
    """

    code = "MRV2-210"
    title = "parameter without a weight slot"


class ModelBuildError(Mrv2Error):
    """The constructor of the adapter's model class raised, or asked for more memory than there is.

    The message names the line. Sizes come from `config.json`: compare them with the checkpoint. If they are right,
    the adapter's code is at fault, or the device is too small for this model.
    """

    code = "MRV2-211"
    title = "model can't be built"


# ---- 3xx: layers and kernels -------------------------------------------------------------------------------


class LayerNameError(Mrv2Error):
    """A layer was given a name that isn't the attribute path it is stored under, or was built and stored
    nowhere. LoRA, quantisation, caches and the checkpoint go by names, so both must agree.

    In the model file, pass the attribute's own name: `self.mlp = L.gated_mlp("mlp", ...)`, and scope the
    layer set for a sub-module: `self.model = Inner(L.scope("model"), config)`.
    """

    code = "MRV2-301"
    title = "layer name"


class LayerArgumentError(Mrv2Error):
    """A layer can't be built from the sizes or options given: an unknown activation, query heads that aren't
    a multiple of the key/value heads, a window below one.

    The message names the layer and the value; it usually comes from the checkpoint's `config.json`.
    """

    code = "MRV2-302"
    title = "layer argument"


class RopeError(Mrv2Error):
    """The rotary embedding's parameters can't be used: an unknown type, a key that its type doesn't have, a
    missing key, a value out of range, a list of the wrong length, or two spellings of one key (`rope_parameters`, or
    `rope_theta` and `rope_scaling`; `rope_type` or `type`) with different values.

    Nothing is guessed, since a wrong table gives fluent nonsense. Correct the named keys in `config.json`.
    """

    code = "MRV2-303"
    title = "rotary parameters"


class RecurrentFlagError(Mrv2Error):
    """The model class's attribute `recurrent` doesn't say what its layers declare: it is True exactly if a layer
    keeps a state per request (`L.cache(name, PerRequest(...), kernel)`).

    Hosts read the attribute before there is an instance, so it can't be derived. Set it in the model class.
    """

    code = "MRV2-304"
    title = "recurrent attribute"


class KernelError(Mrv2Error):
    """A kernel's launcher and its torch twin don't take the same parameters, or kernels can't be run here as
    a test asks: Triton is missing, or was imported before `mrv2.testing.interpret_kernels()` was called.

    Give both the same parameters; call `interpret_kernels()` in the top-level `conftest.py`.
    """

    code = "MRV2-310"
    title = "kernel declared or tested wrongly"
    exit_code = 1


# ---- 4xx: requests and the runner --------------------------------------------------------------------------


class RequestError(Mrv2Error):
    """A request can't be served as given: an empty prompt, a token id out of range, a prompt longer than
    the model's context or than the whole KV cache, or a sampling parameter out of its range.

    Only this request is refused; others go on. Change the named field.
    """

    code = "MRV2-401"
    title = "bad request"


class CacheTooSmallError(Mrv2Error):
    """The memory given to the KV cache can't hold even one block of one request.

    Give more memory (`--kv-memory`), or lower `--max-model-len`.
    """

    code = "MRV2-402"
    title = "KV cache too small"


class UnsupportedError(Mrv2Error):
    """Two settings exclude each other, or the host doesn't offer what was asked for.

    The message names both settings. Nothing is ignored in silence: change one of them.
    """

    code = "MRV2-403"
    title = "unsupported combination"


class EngineError(Mrv2Error):
    """The engine failed while requests were running. Every waiting request gets this error, with the
    original exception as its cause. The engine does not go on: build a new one.
    """

    code = "MRV2-404"
    title = "engine failed"
    exit_code = 1


class OutputError(Mrv2Error):
    """A request's tokens could not be turned into text: the tokenizer, often an adapter's own, raised.

    Only this request is lost; others go on. The original exception is the cause.
    """

    code = "MRV2-405"
    title = "output failed"
    exit_code = 1


class QueueFullError(Mrv2Error):
    """More requests would wait than the engine's `max_queue` allows. None of those given together was started.

    Try again later, give fewer at once, or raise `max_queue`. `LLM.generate` waits for room by itself.
    """

    code = "MRV2-406"
    title = "queue full"
    exit_code = 1


class CacheWriteError(EngineError):
    """Debug mode: a step changed a cache block in which it had no entry to write: one that nobody owns, one of the
    prefix cache, or another request's.

    A kernel wrote outside its slots; a slot of -1 that was used as an index is the usual cause. The message names
    the block, the step, and the layers whose cache lies there.
    """

    code = "MRV2-407"
    title = "write outside of the step's cache slots"


class StaleStepError(EngineError):
    """Debug mode: a step's view or metadata was read after that step. Positions in a batch mean nothing in another.

    Work that is deferred keeps copies of what it needs, indexed by row. The message names the line that reads.
    """

    code = "MRV2-408"
    title = "batch position used outside its step"


class PoisonReadError(EngineError):
    """Debug mode: a request's hidden state is NaN. All that a step must not read holds NaN then: freed blocks, cache
    entries past a request's length, rows of requests that are gone.

    A kernel most likely reads there, or multiplies by zero what it should deselect. If the same request gives NaN
    without debug mode too, the model itself overflows: use another dtype.
    """

    code = "MRV2-409"
    title = "NaN in a hidden state"


class GraphCaptureError(EngineError):
    """A decode step could not be captured as a CUDA graph. What it launches has to be the same in every step of its
    size, and nothing on the way may wait for the device: a value read with `.item()`, `int(tensor)` or a mask as an
    index, a copy from memory that isn't pinned, memory allocated in another stream.

    `mrv2.testing.check_frozen` finds the line, without a GPU too. A model whose device side can't do without says
    `GraphSupport.NEVER` in `ModelState.graph_support`, one whose kernel can't says `capturable=False` in `L.cache`.
    """

    code = "MRV2-410"
    title = "step can't be captured"


# ---- 5xx: command line and files ---------------------------------------------------------------------------


class CommandLineError(Mrv2Error):
    """A command was called wrongly: an unknown command or option, a value of the wrong kind, an argument too few.

    `mrv2 COMMAND --help` shows what it takes, with examples.
    """

    code = "MRV2-500"
    title = "wrong use of the command line"


class InputFileError(Mrv2Error):
    """An input file can't be read as what it should be: not UTF-8, or a line that is not the expected JSON.

    The message names the file and the line. Other lines of a batch still run.
    """

    code = "MRV2-501"
    title = "bad input file"


class ScaffoldError(Mrv2Error):
    """`mrv2 new-adapter` can't make the project: the name is malformed or taken, the folder exists, or an option has a
    value that isn't among its own.

    Nothing was written or overwritten. A name is lower-case letters and digits, words joined by single hyphens. It is
    taken if an adapter that is installed or in a catalogue has it.
    """

    code = "MRV2-502"
    title = "project not made"


# ---- 6xx: inside vLLM --------------------------------------------------------------------------------------


class VllmVersionError(Mrv2Error):
    """This vLLM isn't one the bridge was tested with, and something the bridge touches has changed in it.

    The message names the member and both signatures. Use a listed vLLM, or a newer mrv2. A version that isn't
    listed and differs in nothing we touch runs, with one notice.
    """

    code = "MRV2-601"
    title = "unknown vLLM"


class VllmRunnerError(Mrv2Error):
    """vLLM runs this model with its old model runner, which would leave out the adapter's state in silence.

    Set `VLLM_USE_V2_MODEL_RUNNER=1`, or give up the option that makes vLLM choose the old one; its log names it.
    """

    code = "MRV2-602"
    title = "old model runner"


class AdapterExcludedError(Mrv2Error):
    """The adapter of this architecture is installed, and the allowlist `MRV2_ADAPTERS` doesn't name it.

    Add its distribution to the list, in the environment of every vLLM process.
    """

    code = "MRV2-603"
    title = "adapter not allowed"


class PluginExcludedError(Mrv2Error):
    """`VLLM_PLUGINS` lists the plug-ins that vLLM loads, and mrv2 isn't among them, so vLLM knows no adapter.

    Add `mrv2` to the list, or unset the variable.
    """

    code = "MRV2-604"
    title = "vLLM doesn't load mrv2"


class StaleInspectionError(Mrv2Error):
    """What vLLM had stored about the model class no longer holds, because a package changed that the class depends on.

    The stored file has been deleted. Start again.
    """

    code = "MRV2-605"
    title = "stale model information"


class VllmProbeError(Mrv2Error):
    """The installed vLLM can't be asked about adapters: importing it failed, hung, or found nothing to run on.

    The message has the last line that it said. Run the import by hand to see the rest.
    """

    code = "MRV2-606"
    title = "vLLM can't be asked"


# ---- 7xx: conformance kit ----------------------------------------------------------------------------------


class TargetError(Mrv2Error):
    """What an adapter is to be tested with can't be used: no small config, one that serves too few tokens, a
    checkpoint that can't be made for it, or a reference of the wrong kind.

    An adapter says it in the hook `mrv2_test_target`, a test class in attributes of the same names; see
    `mrv2.testing.Target`.
    """

    code = "MRV2-701"
    title = "bad test target"


class OverrideError(Mrv2Error):
    """A test class replaces a standard test, or takes it out, without saying why.

    Put `@mrv2.testing.override("the reason")` above it. The summary shows the reason, and the test doesn't count as
    the standard one.
    """

    code = "MRV2-702"
    title = "standard test replaced without a reason"


class RecordError(Mrv2Error):
    """`conformance.json` can't be written or read: nothing has passed that could be recorded, something failed, the
    adapter isn't in a folder that can be written, or the file is damaged.

    Correct what failed, or delete the damaged file, and run `mrv2 check NAME --record` again.
    """

    code = "MRV2-703"
    title = "no conformance record"


class RunFileError(Mrv2Error):
    """The file of a recorded run can't be read or written: it is damaged, of another format, from another version, or
    exists already, which `--record` never overwrites.

    `mrv2 generate … --record RUN` writes such a file, `mrv2 replay RUN` reads it.
    """

    code = "MRV2-704"
    title = "unusable run"
