"""Compiled kernels are launched again only where Triton would choose the same one."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from triton import knobs
from triton.knobs import HookChain

from ring_dilated_attention.kernels.launch import MOST_FORMS, Launcher

NAMES = ("a", "b", "n", "scale", "BLOCK", "CAUSAL")


class Kernel:
    """What a Launcher uses of `triton.JITFunction`, noting who is asked for what."""

    def __init__(self, *, interpreted=False, specialized=()):
        self.interpreted, self.compiled, self.launched, self.told = interpreted, [], [], []
        self.params = [
            SimpleNamespace(
                name=name, is_constexpr=name.isupper(), do_not_specialize=name not in specialized
            )
            for name in NAMES
        ]

    def __getitem__(self, grid):
        def run(*arguments, **constants):
            self.compiled.append((grid, arguments, constants))
            return None if self.interpreted else _Compiled(self)

        return run


class _Compiled:
    function, packed_metadata = "function", "metadata"

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *arguments: self.kernel.told.append((grid, arguments))

    def run(self, rows, columns, layers, *given):
        *known, enter, leave = given[:6]
        assert known == [17, "function", "metadata", None]
        assert enter is None is leave
        self.kernel.launched.append(((rows, columns, layers), given[6:]))


def launcher(kernel):
    return Launcher(kernel, stream_of=lambda _: 17)


def call(launch, memo=None, **changes):
    tensor = torch.zeros(64)
    given = {"a": tensor, "b": tensor, "n": 7, "scale": 0.5, "CAUSAL": True, "BLOCK": 64} | changes
    constants = {name: x for name, x in given.items() if name.isupper()} | {"num_warps": 4}
    launch((3, 2), (given["a"], given["b"]), (given["n"], given["scale"]), constants, memo)
    return given


def test_a_launch_like_another_goes_to_its_compiled_kernel():
    kernel = Kernel()
    launch = launcher(kernel)
    call(launch)
    (((grid, arguments, constants),), launched) = kernel.compiled, kernel.launched
    assert (grid, len(arguments), launched) == ((3, 2), 4, [])
    assert constants == {"CAUSAL": True, "BLOCK": 64, "num_warps": 4}
    given = call(launch, a=torch.ones(64), n=2**31 - 1, scale=-2.0)
    assert len(kernel.compiled) == 1
    ((grid, arguments),) = kernel.launched
    assert grid == (3, 2, 1)
    assert arguments[0] is given["a"]
    assert arguments[2:] == (2**31 - 1, -2.0, 64, True)


@pytest.mark.parametrize(
    "change",
    [
        {"a": torch.zeros(64, dtype=torch.float16)},
        {"b": torch.zeros(65)[1:]},
        {"n": 2**31},
        {"n": -(2**31) - 1},
        {"BLOCK": 32},
        {"CAUSAL": False},
    ],
    ids=str,
)
def test_what_triton_compiles_for_makes_another_form(change):
    kernel = Kernel()
    launch = launcher(kernel)
    call(launch)
    for _ in range(2):
        call(launch, **change)
    assert (len(kernel.compiled), len(kernel.launched)) == (2, 1)


def test_a_memo_saves_looking_at_numbers_and_constants():
    kernel = Kernel()
    launch, memo = launcher(kernel), dict[Any, Any]()
    for _ in range(3):
        call(launch, memo)
    launch.forms.clear()  # whoever has a memo needs nothing else
    given = call(launch, memo)
    assert (len(kernel.compiled), len(kernel.launched)) == (1, 3)
    assert kernel.launched[-1][1][0] is given["a"]
    call(launch, memo, b=torch.zeros(65)[1:])  # tensors are looked at all the same
    assert (len(kernel.compiled), len(kernel.launched)) == (2, 3)


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_are_told_of_launches(name, monkeypatch):
    kernel = Kernel()
    launch = launcher(kernel)
    call(launch)
    one, chain = (lambda *_: None), HookChain()
    for hook in (None, chain):
        monkeypatch.setattr(knobs.runtime, name, hook)
        call(launch)
    assert (len(kernel.launched), kernel.told) == (2, [])
    monkeypatch.setattr(knobs.runtime, name, one)  # as before Triton 3.5
    call(launch)
    monkeypatch.setattr(knobs.runtime, name, chain)
    chain.add(one)
    given = call(launch)
    assert (len(kernel.launched), len(kernel.told)) == (2, 2)
    grid, arguments = kernel.told[-1]
    assert grid == (3, 2, 1)
    assert arguments[0] is given["a"]


def test_a_large_scale_is_no_large_integer():
    kernel = Kernel()
    launch = launcher(kernel)
    for scale in (2.0**64, 2.0**63):
        call(launch, scale=scale)
    assert (len(kernel.compiled), len(kernel.launched)) == (1, 1)


def test_where_nothing_is_compiled_nothing_is_kept():
    kernel = Kernel(interpreted=True)
    launch = launcher(kernel)
    for _ in range(3):
        call(launch)
    assert (len(kernel.compiled), kernel.launched) == (3, [])


def test_an_integer_that_is_specialised_on_is_refused():
    with pytest.raises(AssertionError):
        call(launcher(Kernel(specialized=("n",))))


def test_few_forms_are_kept():
    launch = launcher(Kernel())
    for block in range(MOST_FORMS + 9):
        call(launch, BLOCK=block)
    assert len(launch.forms) == MOST_FORMS
