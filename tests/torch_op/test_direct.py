"""Calls that go around torch's dispatcher give the same, and those that must not do not."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch._C._profiler import _ExperimentalConfig
from torch.utils._python_dispatch import TorchDispatchMode

from ring_dilated_attention import DilatedPattern, SequenceLayout, dilated_attention
from ring_dilated_attention.exchange import run_loopback

PATTERN = DilatedPattern([8, None], [1, 2])


def case(device: str = "cpu") -> list[torch.Tensor]:
    """Query, key, value and dout."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 20, 2, 16, generator=generator).to(device) for _ in range(4)]


def results(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dout: torch.Tensor
) -> list[torch.Tensor]:
    """Out and the gradients of the inputs."""
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    query, key, value = map(lazily, leaves)
    out = dilated_attention(query, key, value, PATTERN)
    return [out, *torch.autograd.grad(out, leaves, lazily(dout))]


def lazily(x: torch.Tensor) -> torch.Tensor:
    """-x, by a view that negates what it shows."""
    found = torch._neg_view(x)
    assert found.is_neg()
    return found


def check_views_that_negate(device: str) -> None:
    """The dispatcher computes them; a kernel that reads their memory would not."""
    query, key, value, dout = case(device)
    found = results(query, key, value, dout)
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    query, key, value = (-x for x in leaves)
    out = dilated_attention(query, key, value, PATTERN)
    for a, b in zip(found, [out, *torch.autograd.grad(out, leaves, -dout)], strict=True):
        torch.testing.assert_close(a, b)
    query, key, value = map(lazily, leaves)
    with torch.no_grad():
        again = dilated_attention(query, key, value, PATTERN)
    torch.testing.assert_close(again, out)


def test_views_that_negate() -> None:
    check_views_that_negate("cpu")


@pytest.mark.gpu
def test_views_that_negate_on_a_gpu() -> None:
    check_views_that_negate("cuda")


class Seen(TorchDispatchMode):
    """Notes the operators of this package."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "ring_dilated_attention":
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_modes_and_profilers_see_the_operators() -> None:
    """FLOP counters, selective checkpoints and traces go by them."""
    query, key, value, dout = case()
    for x in (query, key, value):
        x.requires_grad_()
    with Seen() as seen:
        dilated_attention(query, key, value, PATTERN).backward(dout)
    assert seen.names == ["forward.default", "backward.default"]
    with torch.profiler.profile() as profile:
        dilated_attention(query, key, value, PATTERN).backward(dout)
    names = {event.key for event in profile.key_averages()}
    assert {"ring_dilated_attention::forward", "ring_dilated_attention::backward"} <= names


def test_a_profiler_of_all_threads() -> None:
    query, key, value, _ = case()
    config = _ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(experimental_config=config) as profile:
        thread = threading.Thread(target=dilated_attention, args=(query, key, value, PATTERN))
        thread.start()
        thread.join()
    assert "ring_dilated_attention::forward" in {event.key for event in profile.key_averages()}


def ours(graph: torch.fx.GraphModule) -> list[str]:
    """The operators of this package in a graph."""
    names = [str(node.target).partition(".") for node in graph.graph.nodes]
    return [name for package, _, name in names if package == "ring_dilated_attention"]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_autograd() -> None:
    """It traces backward, whatever has computed forward."""
    from torch._dynamo import compiled_autograd  # here: it takes a second
    from torch._dynamo.testing import EagerAndRecordGraphs

    query, key, value, dout = case()
    query.requires_grad_()
    out = dilated_attention(query, key, value, PATTERN)
    (expected,) = torch.autograd.grad(out, query, dout, retain_graph=True)
    torch.compiler.reset()
    backend = EagerAndRecordGraphs()
    with compiled_autograd._enable(torch.compile(backend=backend, fullgraph=True)):
        out.backward(dout)
    torch.compiler.reset()
    assert query.grad is not None
    torch.testing.assert_close(query.grad, expected)
    assert [ours(graph) for graph in backend.graphs] == [["backward.default"]]


def test_meta_tensors() -> None:
    """Nothing is computed: kernels of other devices will do, and no other rank is waited for."""

    def rank(ends: Any) -> None:
        if ends.rank == 0:
            query, key, value, dout = case("meta")
            query.requires_grad_()
            out, lse = dilated_attention(
                query, key, value, PATTERN, group=ends, backend="flash", return_lse=True
            )
            out.backward(dout)
            assert out.is_meta
            assert lse.shape == (1, 2, 20)
            assert query.grad is not None
            assert query.grad.is_meta

    run_loopback(2, rank)


@pytest.mark.parametrize(
    "options",
    [
        {"documents": [0, 5]},
        {"documents": torch.tensor([0, 9, 7, 20])},
        {"lengths": [21]},
        {"lengths": [3, 4]},
        {"layout": SequenceLayout.contiguous(21, 1)},
        {"layout": SequenceLayout.contiguous(20, 2)},
    ],
)
def test_meta_tensors_with_integers_that_do_not_fit(options: Any) -> None:
    """Refused as where something is computed."""
    said = []
    for device in ("cpu", "meta"):
        query, key, value, _ = case(device)
        with pytest.raises(ValueError, match=next(iter(options))) as caught:
            dilated_attention(query, key, value, PATTERN, **options)
        said.append(str(caught.value))
    assert said[0] == said[1]


class Named(torch.Tensor):
    """A tensor of a user's."""


@pytest.mark.parametrize("grad", [False, True])
def test_subclasses_come_back(grad: bool) -> None:
    query, key, value, dout = case()
    expected = dilated_attention(query, key, value, PATTERN)
    ours = query.as_subclass(Named).requires_grad_(grad)
    out: Any = dilated_attention(ours, key, value, PATTERN)
    assert type(out) is Named
    torch.testing.assert_close(out.as_subclass(torch.Tensor), expected)
    if grad:
        out.backward(dout)
        assert ours.grad is not None


def test_inference_tensors() -> None:
    query, key, value, _ = case()
    expected = dilated_attention(query, key, value, PATTERN)
    with torch.inference_mode():
        made = [x.clone() for x in (query, key, value)]
        out = dilated_attention(made[0], made[1], made[2], PATTERN)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(dilated_attention(query, key, value, PATTERN), expected)


def test_where_autograd_is_off_in_the_dispatcher() -> None:
    """Inference mode, in which `enable_grad` makes no difference, and what implements operators."""
    query, key, value, _ = case()
    expected = dilated_attention(query, key, value, PATTERN)
    query.requires_grad_()
    with torch.inference_mode(), torch.enable_grad():
        out = dilated_attention(query, key, value, PATTERN)
        assert not out.requires_grad
        torch.testing.assert_close(out, expected)
    with torch._C._AutoDispatchBelowAutograd():
        out = dilated_attention(query, key, value, PATTERN)
    assert not out.requires_grad
