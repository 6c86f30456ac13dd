"""Triton 3.9's interpreter, quicker by more than half: what it does again and again for the same result is kept.

For each launch it looks through all of `triton.language`, wraps what it finds and takes the wrappers off again, and for
each function that a kernel calls, once more; each operation passes three wrappers; each sum of integers is computed
twice, to look for overflows. None of this changes what a kernel of vLLM's computes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from types import FunctionType
from typing import Any

_MARK = "mrv2_quick"


def apply() -> None:
    """Patch the interpreter; may be called again."""
    from triton.runtime import interpreter

    if hasattr(interpreter, _MARK):
        return
    setattr(interpreter, _MARK, True)
    look_once(interpreter)
    keep_types(interpreter)
    builder = interpreter.interpreter_builder
    # A debugging aid: compiled kernels don't have it either. Our own kernels' tests do without this package.
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


class _Patches:
    """What the interpreter sets in `triton.language` during a launch: all of it, found once."""

    def __init__(self, interpreter: Any) -> None:
        import triton.language as tl

        seen = FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core})
        scope = interpreter._patch_lang(seen)
        first: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        for owner, name, original in scope._changes:
            first.setdefault((id(owner), name), (owner, name, original))
        missing = interpreter._MISSING
        self._changes = [
            (owner, name, original, _direct(getattr(owner, name), interpreter.interpreter_semantic))
            for owner, name, original in first.values()
        ]
        scope.restore()
        self._missing = missing
        self._launches = 0

    def enter(self, fn: object) -> _Patches:
        """A launch, or within it the call of a function, for which all is in place."""
        if self._launches == 0:
            for owner, name, _, new in self._changes:
                setattr(owner, name, new)
        self._launches += 1
        return self

    def restore(self) -> None:
        """The end of either."""
        self._launches -= 1
        if self._launches == 0:
            for owner, name, original, _ in self._changes:
                if original is self._missing:
                    delattr(owner, name)
                else:
                    setattr(owner, name, original)


def _direct(patched: Any, semantic: Any) -> Any:
    """Of a builtin's wrappers none: what they add is one keyword, and the check that it is there."""
    builtin = (getattr(patched, "__kwdefaults__", None) or {}).get("member")
    if builtin is None:  # something else of the interpreter's
        return patched
    inner = getattr(builtin, "__wrapped__", builtin)

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return inner(*args, **kwargs)

    return call


def look_once(interpreter: Any) -> None:
    """`_patch_lang` sets what was found the first time, and functions that kernels call find it set."""
    patches = _Patches(interpreter)
    interpreter._patch_lang = patches.enter

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        scope = patches.enter(self.fn)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error
        finally:
            scope.restore()

    interpreter.InterpretedFunction.__call__ = call


def keep_types(interpreter: Any) -> None:
    """Types of blocks, what tensors of a type say of their size, and NumPy's types are each made once."""
    from triton.language import core

    made: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], tuple[Any, Any, Any]] = {}
    make: Callable[..., None] = core.block_type.__init__

    def block_init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(s.value if isinstance(s, core.constexpr) else s for s in shape)
        key = (str(element_ty), sizes)
        if key not in made:
            make(self, element_ty, shape)
            numel, as_constants = core.constexpr(math.prod(sizes)), tuple(core.constexpr(s) for s in sizes)
            self.shape, *self.mrv2_sizes = shapes.setdefault(sizes, (self.shape, numel, as_constants))
            made[key] = dict(self.__dict__)
        else:
            self.__dict__.update(made[key])
            self.element_ty = element_ty  # a pointer's name doesn't say its address space

    one = (core.constexpr(1), ())

    def tensor_init(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.mrv2_sizes if type.is_block() else one

    core.block_type.__init__ = block_init
    core.tensor.__init__ = tensor_init

    broadcast = interpreter.TritonSemantic.broadcast_impl_value

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    interpreter.TritonSemantic.broadcast_impl_value = broadcast_impl_value

    numpy_types: dict[str, Any] = {}
    numpy_type = interpreter._get_np_dtype

    def known_numpy_type(dtype: Any) -> Any:
        name = dtype.name if not dtype.is_block() else dtype.element_ty.name
        if name not in numpy_types:
            numpy_types[name] = numpy_type(dtype)
        return numpy_types[name]

    interpreter._get_np_dtype = known_numpy_type
