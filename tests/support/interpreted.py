"""Triton's interpreter, without what it does again and again to no effect.

Most of its time goes to finding out what it knows: on CPUs the kernels' tests take a fifth of it.
"""

import math
from functools import cache
from inspect import ismodule
from typing import Any


def quicken_the_interpreter() -> None:
    """Replace some of its functions by quicker ones that do the same, where they are as known."""
    from triton.language import core
    from triton.runtime import interpreter

    parts = "GridExecutor", "_patch_lang", "interpreter_semantic"
    if not all(hasattr(interpreter, name) for name in parts):
        return
    _patch_the_language_once_a_launch(interpreter)
    _check_for_overflow_in_debugging_alone(interpreter)
    _look_up_shapes(core)


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


def _look_up_shapes(core: Any) -> None:
    """Each tensor makes constants of its shape, and a type of it that checks it again."""
    make_type, equal = core.block_type.__init__, core.dtype.__eq__
    known = dict[Any, dict[str, Any]]()

    @cache
    def shared(lengths: tuple[int, ...]) -> dict[str, Any]:
        constants = core.tuple([core.constexpr(length) for length in lengths])
        of_tensor = constants, core.constexpr(math.prod(lengths))
        return {"shape": core.tuple(lengths), "of_tensor": of_tensor}

    def make_known_type(self: Any, element: Any, shape: Any) -> None:
        lengths = tuple([x.value if isinstance(x, core.constexpr) else x for x in shape])
        key = element.name, lengths
        if key not in known:
            make_type(self, element, shape)
            known[key] = {**vars(self), **shared(lengths)}
        vars(self).update(known[key], element_ty=element)

    of_scalar = shared(())["of_tensor"]

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_tensor if type.is_block() else of_scalar

    core.block_type.__init__ = make_known_type
    core.tensor.__init__ = make_tensor
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
