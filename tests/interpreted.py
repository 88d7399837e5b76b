"""Triton's interpreter, without what it does again and again to no effect.

Most of its time goes to finding out what it knows: on CPUs the kernels' tests take a third of it.
"""

from functools import cache
from inspect import ismodule
from typing import Any

PARTS = "GridExecutor", "_get_np_dtype", "_patch_lang", "interpreter_semantic"


def quicken_the_interpreter() -> None:
    """Replace three of its functions by quicker ones that do the same, where they are as known."""
    from triton.runtime import interpreter

    if not all(hasattr(interpreter, name) for name in PARTS):
        return
    _patch_the_language_once_a_launch(interpreter)
    _check_for_overflow_in_debugging_alone(interpreter)
    _look_up_dtypes_by_name(interpreter)


def _patch_the_language_once_a_launch(interpreter: Any) -> None:
    """It replaces the functions of triton.language for a launch, and for each call within it."""
    launch, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    patched: set[frozenset[int]] = set()

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


def _check_for_overflow_in_debugging_alone(interpreter: Any) -> None:
    """It computes each sum and product in 64 bits, too, and looks at them if it is debugging."""
    semantic = type(interpreter.interpreter_semantic)
    check = semantic.binary_op_sanitize_overflow_impl

    def check_in_debugging(self: Any, lhs: Any, rhs: Any, operation: Any) -> None:
        if self.builder.options.debug:
            check(self, lhs, rhs, operation)

    semantic.binary_op_sanitize_overflow_impl = check_in_debugging


def _look_up_dtypes_by_name(interpreter: Any) -> None:
    """It makes a table of all dtypes to look up one."""
    look_up, known = interpreter._get_np_dtype, dict[str, Any]()

    def dtype_of(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = look_up(dtype)
        return known[name]

    interpreter._get_np_dtype = dtype_of
