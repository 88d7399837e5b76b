"""Triton's interpreter, without what it does again and again to no effect.

Most of its time goes to finding out what it knows: on CPUs the kernels' tests take a third of it.
"""

from functools import cache
from inspect import ismodule
from typing import Any

SMALL = 2**15
"""Sums and products of two integers below it fit into 32 bits."""


def quicken_the_interpreter() -> None:
    """Replace three of its functions by quicker ones that do the same."""
    from triton.runtime import interpreter

    _patch_the_language_once_a_launch(interpreter)
    _check_large_numbers_alone_for_overflow(interpreter)
    _look_up_dtypes_by_name(interpreter)


def _patch_the_language_once_a_launch(interpreter: Any) -> None:
    """It replaces the functions of triton.language for a launch, and for each call within it."""
    launch, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    patched = set()

    def launch_anew(self: Any, *arguments: Any, **options: Any) -> None:
        patched.clear()  # a launch puts back what it has replaced
        launch(self, *arguments, **options)

    @cache
    def modules_of(function: Any) -> frozenset[int]:
        return frozenset(id(each) for each in function.__globals__.values() if ismodule(each))

    def patch_once(function: Any) -> Any:
        modules = modules_of(function)
        if modules in patched:
            return None
        patched.add(modules)
        return patch(function)

    interpreter.GridExecutor.__call__ = launch_anew
    interpreter._patch_lang = patch_once


def _check_large_numbers_alone_for_overflow(interpreter: Any) -> None:
    """It computes each sum and product once more, in 64 bits."""
    semantic = type(interpreter.interpreter_semantic)
    check = semantic.binary_op_sanitize_overflow_impl

    def is_small(tensor: Any) -> bool:
        numbers = tensor.handle.data
        return bool(numbers.max() < SMALL and numbers.min() > -SMALL)

    def check_large(self: Any, lhs: Any, rhs: Any, operation: Any) -> None:
        if lhs.type.scalar.int_bitwidth < 32 or not (is_small(lhs) and is_small(rhs)):
            check(self, lhs, rhs, operation)

    semantic.binary_op_sanitize_overflow_impl = check_large


def _look_up_dtypes_by_name(interpreter: Any) -> None:
    """It makes a table of all dtypes to look up one."""
    look_up, known = interpreter._get_np_dtype, dict[str, Any]()

    def dtype_of(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = look_up(dtype)
        return known[name]

    interpreter._get_np_dtype = dtype_of
