"""Launch a Triton kernel without asking Triton each time which of its compiled forms fits.

`JITFunction.run` looks at each of 40 arguments, in 25 us; a compiled kernel is launched in 15, and
in 8 where no hooks are told of it. What Triton compiles for is dtypes, 16-byte alignment,
constants, and which integers exceed 32 bits: our kernels name the rest in `do_not_specialize`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from ..caches import keep_few
from .device_profile import MOST_GELU_WIDTH, profile_of

_LEAST_CAPABILITY = (7, 0)
"""Of devices that Triton compiles for."""


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


def normalizes_gelu(device: torch.device, width: int) -> bool:
    """Whether the kernels of `gelu_norm` run on a device, for rows of so many elements."""
    return width <= MOST_GELU_WIDTH and compiles_for(device)


def runs_triton(tensor: torch.Tensor) -> bool:
    """Whether Triton's kernels compute in the dtype and on the device of a tensor."""
    return tensor.is_cuda and tensor.dtype != torch.float64 and compiles_for(tensor.device)


_TABLE_ALIGNMENT = 16
"""The address of each table is a multiple of it: Triton compiles a kernel again for others."""


def spread(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index i repeated ``counts[i]`` times, for all i; and 0, 1, ... within each index."""
    # Not by repeat_interleave, which wakes all threads however few the counts are.
    ends, total = counts.cumsum(0), int(counts.sum())
    begins = counts.new_zeros(total + 1).index_add_(0, ends[:-1], torch.ones_like(ends[:-1]))
    indices = begins[:total].cumsum(0)
    return indices, torch.arange(total) - (ends - counts)[indices]


def moved_together(device: torch.device | str, *tables: torch.Tensor) -> list[torch.Tensor]:
    """Tables on a device: in one allocation, because they are usually small."""
    sizes = [-(-x.nbytes // _TABLE_ALIGNMENT) * _TABLE_ALIGNMENT for x in tables]
    together = torch.zeros(sum(sizes), dtype=torch.uint8)

    def places(memory: torch.Tensor) -> list[torch.Tensor]:
        parts = zip(memory.split(sizes), tables, strict=True)
        return [part[: x.nbytes].view(x.dtype).view(x.shape) for part, x in parts]

    for place, table in zip(places(together), tables, strict=True):
        place.copy_(table)
    return places(together.to(device))


MOST_FORMS = 256
"""Of a kernel that are kept ready: each was compiled before, and Triton keeps it."""
LAUNCHES_KEPT = 8
"""Of the tables of cells or ranges: how kernels are launched on them, by layout."""
_ALIGNMENT = 15  # the bits of an address that are 0 where it is a multiple of 16
_LIMIT = 2**31


class KernelLaunch(NamedTuple):
    """What a `Launcher` takes besides tensors."""

    grid: tuple[int, int]
    numbers: tuple[float, ...]
    constants: dict[str, Any]
    memo: dict[Any, Any]


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

    def __call__(
        self,
        grid: tuple[int, int],
        tensors: Sequence[torch.Tensor],
        numbers: Sequence[float],
        constants: dict[str, Any],
        memo: dict[Any, Any] | None = None,
    ) -> None:
        """Launch on the current stream of the current device.

        Args:
            grid: programs along two axes.
            tensors: the first arguments, on the current device.
            numbers: the next arguments, ints and floats.
            constants: the other arguments, and options of the launch such as `num_warps`, by
                name; always in the same order.
            memo: of the caller, who gives the same one for the same numbers and constants only:
                they need not be looked at again. None: the caller has none.
        """
        bits = 0
        for x in tensors:
            bits |= x.data_ptr()
        aligned: Hashable = True  # all of them, as nearly always
        if bits & _ALIGNMENT:
            aligned = tuple([x.data_ptr() & _ALIGNMENT == 0 for x in tensors])
        of_tensors = tensors[0].device, aligned, *[x.dtype for x in tensors]
        form = None if memo is None else memo.get(of_tensors)
        if form is None:
            form = self._form(of_tensors, grid, tensors, numbers, constants)
            if form is None:
                return
            if memo is not None:
                memo[of_tensors] = form
        compiled, rest = form
        rows, columns = grid
        arguments = *tensors, *numbers, *rest
        if _has_hooks(self._runtime):
            compiled[rows, columns, 1](*arguments)
            return
        # What that does from Triton 3.4 to 3.9, but for what only hooks are told.
        compiled.run(
            rows,
            columns,
            1,
            self._stream_of(tensors[0].device.index),
            compiled.function,
            compiled.packed_metadata,
            None,
            None,
            None,
            *arguments,
        )

    def _form(
        self,
        of_tensors: tuple[Hashable, ...],
        grid: tuple[int, int],
        tensors: Sequence[torch.Tensor],
        numbers: Sequence[float],
        constants: dict[str, Any],
    ) -> tuple[Any, list[Any]] | None:
        """The form of a call; None where there is none yet, and this was its first launch."""
        key = *of_tensors, *constants.values()
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
    """Whether somebody, such as a profiler, is to be told of launches.

    Args:
        runtime: Triton's `knobs.runtime`.
    """
    # From Triton 3.5 on each is a chain of hooks; before, one, or None.
    first, last = runtime.launch_enter_hook, runtime.launch_exit_hook
    if first is None and last is None:
        return False
    return bool(getattr(first, "calls", first) or getattr(last, "calls", last))
