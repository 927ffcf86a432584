"""Triton's interpreter, a few times faster: what it finds out again in each call is looked up, with equal results.

A test of a kernel has hundreds of thousands of operations on tiles of some hundred numbers. Most of its time went into
types and shapes, into which functions of Triton are replaced, and into sums that look for overflows and say nothing.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any


def quicken() -> None:
    """Replace functions of the interpreter of Triton; do nothing where another Triton has others."""
    from triton.runtime import interpreter

    tl = interpreter.tl
    parts = ("_patch_builtin", "_patch_attr", "_patch_lang", "_LangPatchScope", "_get_np_dtype", "interpreter_builder")
    if not all(hasattr(interpreter, name) for name in parts):
        return

    # Each int32 operation is done in int64 again for a device_assert, which does nothing without options.debug.
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    names = dict[Any, list[str]]()

    def patch_builtin(owner: Any, *how: Any) -> None:
        """Replace the functions of a module or class that are Triton's, which inspect.getmembers() finds once."""
        if owner not in names:
            names[owner] = [name for name, member in inspect.getmembers(owner) if tl.core.is_builtin(member)]
        for name in names[owner]:
            if tl.core.is_builtin(member := getattr(owner, name)):
                interpreter._patch_attr(owner, name, member, *how)

    interpreter._patch_builtin = patch_builtin
    patch_lang = interpreter._patch_lang

    def patch_lang_once(function: Any) -> Any:
        """Replace nothing in calls of a function by a kernel, for which all of ``tl`` is replaced already."""
        if tl.core.is_builtin(tl.load) or any(value is tl.core for value in function.__globals__.values()):
            return patch_lang(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_lang_once
    get_np_dtype, dtypes = interpreter._get_np_dtype, dict[str, Any]()

    def dtype_of(ty: Any) -> Any:
        name = ty.scalar.name
        if name not in dtypes:
            dtypes[name] = get_np_dtype(ty)
        return dtypes[name]

    interpreter._get_np_dtype = dtype_of
    init_block, blocks = tl.block_type.__init__, dict[Any, tuple[Any, ...]]()

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(n.value if isinstance(n, tl.constexpr) else n for n in shape)
        if key not in blocks:
            init_block(self, element_ty, shape)
            blocks[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = blocks[key]

    tl.block_type.__init__ = block_type
    init_tensor, shapes = tl.tensor.__init__, dict[Any, tuple[Any, ...]]()

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        if key not in shapes:
            init_tensor(self, handle, type)
            shapes[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[key]

    tl.tensor.__init__ = tensor
