"""Launch a Triton kernel without asking Triton each time which of its compiled forms fits.

`JITFunction.run` looks at each of 40 arguments, in 25 us; a compiled kernel is launched in 15, and
in 8 where no hooks are told of it. What Triton compiles for is dtypes, 16-byte alignment,
constants, and which integers exceed 32 bits: our kernels name the rest in `do_not_specialize`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from importlib.util import find_spec
from inspect import signature
from typing import Any, NamedTuple, TypeVar

import torch

from .device_profile import MOST_WIDTH, profile_of

T = TypeVar("T")

_LEAST_CAPABILITY = (7, 0)  # of devices that Triton compiles for


def keep_few(entries: dict[Hashable, T], key: Hashable, make: Callable[[], T], most: int) -> T:
    """The entry of `key`, made if there is none; of more than `most`, the oldest goes."""
    found = entries.get(key)
    if found is None:
        found = entries[key] = make()
        while len(entries) > most:
            oldest = list(entries)[:1]  # in one step: other threads may add, and drop the same
            entries.pop(oldest[0], None)
    return found


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


@lru_cache(maxsize=64)
def compiles_for(device: torch.device) -> bool:
    """Whether Triton's kernels run on a device."""
    if device.type != "cuda" or not has_triton():
        return False
    return profile_of(device).capability >= _LEAST_CAPABILITY


def takes_rows(device: torch.device, width: int) -> bool:
    """Whether kernels that hold whole rows, of `width` elements, in registers run on a device."""
    return width <= MOST_WIDTH and compiles_for(device)


def runs_triton(tensor: torch.Tensor) -> bool:
    """Whether Triton's kernels compute in the dtype and on the device of a tensor."""
    return tensor.is_cuda and tensor.dtype != torch.float64 and compiles_for(tensor.device)


MOST_FORMS = 256
"""Of a kernel that are kept ready: each was compiled before, and Triton keeps it."""
_ALIGNMENT = 15  # the bits of an address that are 0 where it is a multiple of 16
_LIMIT = 2**31


class KernelLaunch(NamedTuple):
    """What a `Launcher` takes besides tensors; kept, and given again for tensors of one layout.

    Attributes:
        grid: programs along two axes.
        numbers: the arguments behind the tensors, ints and floats.
        constants: the other arguments, and options of the launch such as `num_warps`, by name;
            always in the same order.
        memo: compiled forms of the one kernel that it is for, by what its tensors are: numbers and
            constants are not looked at again.
    """

    grid: tuple[int, int]
    numbers: tuple[float, ...]
    constants: dict[str, Any]
    memo: dict[Any, Any]


def kernel(pointers: int) -> Callable[[Callable[..., Any]], Launcher]:
    """Make a Triton kernel, and what launches it: a decorator.

    Triton specialises on no integer or float of its arguments, so that new lengths and strides
    compile nothing.

    Args:
        pointers: how many arguments are tensors: the first ones.
    """

    def make(function: Callable[..., Any]) -> Launcher:
        import triton

        others = [*signature(function).parameters.values()][pointers:]
        numbers = [x.name for x in others if "constexpr" not in str(x.annotation)]
        return Launcher(triton.jit(function, do_not_specialize=numbers))

    return make


class Launcher:
    """A kernel, and its compiled forms by what they were compiled for.

    Args:
        kernel: made by `triton.jit`, all integers and floats of its arguments in
            `do_not_specialize`.
        stream_of: the current stream of a device, by its index, as the driver knows it; None: as
            Triton finds it.

    Attributes:
        kernel: the kernel.
        forms: the compiled forms that are kept.
    """

    def __init__(self, kernel: Any, stream_of: Callable[[int | None], int] | None = None) -> None:
        from triton import knobs
        from triton.runtime import driver

        self.kernel = kernel
        self.forms: dict[Hashable, tuple[Any, list[Any]]] = {}
        self._runtime = knobs.runtime
        self._stream_of = stream_of or (lambda index: driver.active.get_current_stream(index))

    def __call__(self, launch: KernelLaunch, tensors: Sequence[torch.Tensor]) -> None:
        """Launch on the current stream of the current device.

        Args:
            launch: all but the tensors.
            tensors: the first arguments, on the current device.
        """
        bits = 0
        for x in tensors:
            bits |= x.data_ptr()
        aligned: Hashable = True  # all of them, as nearly always
        if bits & _ALIGNMENT:
            aligned = tuple([x.data_ptr() & _ALIGNMENT == 0 for x in tensors])
        of_tensors = tensors[0].device, aligned, *[x.dtype for x in tensors]
        form = launch.memo.get(of_tensors)
        if form is None:
            form = self._form(of_tensors, launch, tensors)
            if form is None:
                return
            launch.memo[of_tensors] = form
        compiled, rest = form
        rows, columns = launch.grid
        arguments = *tensors, *launch.numbers, *rest
        if _has_hooks(self._runtime):
            compiled[rows, columns, 1](*arguments)
            return
        # What the line above does from Triton 3.4 to 3.9, but for what only hooks are told.
        stream = self._stream_of(tensors[0].device.index)
        known = compiled.function, compiled.packed_metadata, None, None, None
        compiled.run(rows, columns, 1, stream, *known, *arguments)

    def _form(
        self, of: tuple[Hashable, ...], launch: KernelLaunch, tensors: Sequence[torch.Tensor]
    ) -> tuple[Any, list[Any]] | None:
        """The form of a call; None where there is none yet, and this was its first launch."""
        grid, numbers, constants, _ = launch
        key = *of, *constants.values()
        if max(numbers) >= _LIMIT or min(numbers) < -_LIMIT:
            key = *key, *[type(x) is int and not -_LIMIT <= x < _LIMIT for x in numbers]
        form = self.forms.get(key)
        if form is None:
            compiled = self.kernel[grid](*tensors, *numbers, **constants)
            # Where it is interpreted nothing is compiled; on AMD it depends on sizes of tensors.
            if compiled is not None and torch.version.hip is None:
                params = self.kernel.params
                assert all(p.is_constexpr or p.do_not_specialize for p in params[len(tensors) :])
                rest = [constants[p.name] for p in params[len(tensors) + len(numbers) :]]
                keep_few(self.forms, key, lambda: (compiled, rest), MOST_FORMS)
        return form


def _has_hooks(runtime: Any) -> bool:
    """Whether somebody, such as a profiler, is to be told of launches; of Triton's `knobs`."""
    # From Triton 3.5 on each is a chain of hooks; before, one, or None.
    first, last = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(first, "calls", first) or getattr(last, "calls", last))
