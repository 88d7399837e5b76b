"""Triton's interpreter, without what it does again and again to no effect.

Most of its time goes to finding out what it knows: on CPUs the kernels' tests take a fifth of it.
"""

import math
from collections.abc import Callable
from functools import cache
from inspect import getmembers, ismodule
from typing import Any

PARTS = (
    "GridExecutor",
    "_get_np_dtype",
    "_patch_builtin",
    "_patch_lang",
    "interpreter_semantic",
)


def quicken_the_interpreter() -> None:
    """Replace some of its functions by quicker ones that do the same, where they are as known."""
    from triton.language import core
    from triton.runtime import interpreter

    if not all(hasattr(interpreter, name) for name in PARTS):
        return
    _patch_the_language_once_a_launch(interpreter)
    _list_what_is_patched_once(interpreter, core)
    _check_for_overflow_in_debugging_alone(interpreter)
    _look_up_dtypes_by_name(interpreter)
    _look_up_shapes(core)
    _broadcast_what_differs(interpreter)


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


def _list_what_is_patched_once(interpreter: Any, core: Any) -> None:
    """It searches modules for what to replace in each launch, and copies each call's options."""
    checks_for_semantic = core.builtin(lambda: None).__code__

    def given_semantic(member: Any) -> Callable[..., Any]:
        checks = getattr(member, "__code__", None) is checks_for_semantic
        function = member.__wrapped__ if checks else member

        def call(*arguments: Any, **options: Any) -> Any:
            options["_semantic"] = interpreter.interpreter_semantic
            return function(*arguments, **options)

        return call

    @cache
    def replacements(package: Any) -> list[tuple[str, Callable[..., Any]]]:
        members = [pair for pair in getmembers(package) if core.is_builtin(pair[1])]
        return [(name, given_semantic(member)) for name, member in members]

    def patch(package: Any, builder: Any, scope: Any) -> None:
        for name, call in replacements(package):
            scope.set_attr(package, name, call)

    interpreter._patch_builtin = patch


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


def _broadcast_what_differs(interpreter: Any) -> None:
    """It makes new tensors of two whose shapes are the same."""
    semantic = type(interpreter.interpreter_semantic)
    broadcast, computed = semantic.broadcast_impl_value, semantic.computation_type_impl
    known = dict[Any, Any]()

    def broadcast_others(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        if lhs.shape is rhs.shape:  # those of several scalars are one, too
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    def known_type(self: Any, a: Any, a_scalar: bool, b: Any, b_scalar: bool, divides: bool) -> Any:
        key = a.name, a_scalar, b.name, b_scalar, divides
        if key not in known:
            known[key] = computed(self, a, a_scalar, b, b_scalar, divides)
        return known[key]

    semantic.broadcast_impl_value = broadcast_others
    semantic.computation_type_impl = known_type
