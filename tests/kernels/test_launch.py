"""Compiled kernels are launched again only where Triton would choose the same one."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from triton import knobs
from triton.knobs import HookChain

from ring_dilated_attention.kernels.launch import MOST_FORMS, KernelLaunch, Launcher

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
        self.launch = Launcher(self, stream_of=lambda _: 17)

    def __getitem__(self, grid):
        def run(*arguments, **constants):
            self.compiled.append((grid, arguments, constants))
            return None if self.interpreted else _Compiled(self)

        return run

    def call(self, memo=None, **changes):
        tensor = torch.zeros(64)
        given: dict[str, Any] = {"a": tensor, "b": tensor, "n": 7, "scale": 0.5}
        given |= {"CAUSAL": True, "BLOCK": 64} | changes
        constants = {name: x for name, x in given.items() if name.isupper()} | {"num_warps": 4}
        numbers, memo = (given["n"], given["scale"]), {} if memo is None else memo
        self.launch(KernelLaunch((3, 2), numbers, constants, memo), (given["a"], given["b"]))
        return given

    @property
    def counts(self):
        return len(self.compiled), len(self.launched)


class _Compiled:
    function, packed_metadata = "function", "metadata"

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *arguments: self.kernel.told.append((grid, arguments))

    def run(self, rows, columns, layers, *given):
        assert given[:6] == (17, "function", "metadata", None, None, None)
        self.kernel.launched.append(((rows, columns, layers), given[6:]))


def test_a_launch_like_another_goes_to_its_compiled_kernel():
    kernel = Kernel()
    kernel.call()
    ((grid, arguments, constants),) = kernel.compiled
    assert (grid, len(arguments), kernel.launched) == ((3, 2), 4, [])
    assert constants == {"CAUSAL": True, "BLOCK": 64, "num_warps": 4}
    given = kernel.call(a=torch.ones(64), n=2**31 - 1, scale=-2.0)
    assert kernel.counts == (1, 1)
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
    kernel.call()
    for _ in range(2):
        kernel.call(**change)
    assert kernel.counts == (2, 1)


def test_a_memo_saves_looking_at_numbers_and_constants():
    kernel, memo = Kernel(), dict[Any, Any]()
    for _ in range(3):
        kernel.call(memo)
    kernel.launch.forms.clear()  # whoever has a memo needs nothing else
    kernel.call(memo)
    assert kernel.counts == (1, 3)
    kernel.call(memo, b=torch.zeros(65)[1:])  # tensors are looked at all the same
    assert kernel.counts == (2, 3)


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_are_told_of_launches(name, monkeypatch):
    kernel = Kernel()
    kernel.call()
    one, chain = (lambda *_: None), HookChain()
    for hook in (None, chain):
        monkeypatch.setattr(knobs.runtime, name, hook)
        kernel.call()
    assert (len(kernel.launched), kernel.told) == (2, [])
    monkeypatch.setattr(knobs.runtime, name, one)  # as before Triton 3.5
    kernel.call()
    monkeypatch.setattr(knobs.runtime, name, chain)
    chain.add(one)
    given = kernel.call()
    assert (len(kernel.launched), len(kernel.told)) == (2, 2)
    grid, arguments = kernel.told[-1]
    assert grid == (3, 2, 1)
    assert arguments[0] is given["a"]


def test_what_is_kept():
    kernel = Kernel()
    for scale in (2.0**64, 2.0**63):  # a large float is no large integer
        kernel.call(scale=scale)
    assert kernel.counts == (1, 1)
    for block in range(MOST_FORMS + 9):
        kernel.call(BLOCK=block)
    assert len(kernel.launch.forms) == MOST_FORMS
    interpreted = Kernel(interpreted=True)  # nothing is compiled there
    for _ in range(3):
        interpreted.call()
    assert interpreted.counts == (3, 0)


def test_an_integer_that_is_specialised_on_is_refused():
    with pytest.raises(AssertionError):
        Kernel(specialized=("n",)).call()
