"""What all operators here need: registration, and what derivatives do not offer, refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function, unwrap_dead_wrappers
from torch.autograd import forward_ad

from ..exchange import untraced


def apply_function(function: type[torch.autograd.Function], *inputs: Any, in_operator: bool) -> Any:
    """Do what ``function.apply`` does, without inspecting its signature: that takes 0.1 ms a call.

    The function has a `setup_context`. The autograd of an operator (`in_operator`) is called by the
    dispatcher for each transform of torch.func in turn; else ``function.apply`` sees to those.
    """
    apply: Any = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    if not torch._C._are_functorch_transforms_active():
        return apply(*unwrap_dead_wrappers(inputs))
    if not in_operator:
        return function.apply(*inputs)  # type: ignore[no-untyped-call]
    with enable_single_level_autograd_function():
        return apply(*inputs)


def refuse_tangents(name: str, *tensors: object) -> None:
    """Raise a `NotImplementedError` where an input of `name` has a forward-mode tangent."""
    if forward_ad._current_level < 0:  # tensors have no tangents
        return
    given = [x for x in tensors if isinstance(x, torch.Tensor)]
    parts = [forward_ad.unpack_dual(tensor) for tensor in given]  # type: ignore[no-untyped-call]
    if any(part.tangent is not None for part in parts):
        raise NotImplementedError(
            f"{name} has no forward-mode derivative (torch.func.jvp, torch.autograd.forward_ad): "
            "use reverse mode, torch.func.vjp or backward"
        )


def once_differentiable(
    name: str, gradient: Callable[..., Any], *tensors: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    """Return ``gradient(*tensors)``, computed with autograd off; differentiating it raises.

    (torch's own `once_differentiable` returns zeros where only saved tensors require gradients.)

    Args:
        name: of what these are the gradients of, for the `RuntimeError`.
        gradient: takes `tensors` and returns the gradients.
        tensors: all that the gradients depend on.
    """
    if not torch.is_grad_enabled():  # backward without create_graph
        found: tuple[torch.Tensor | None, ...] = gradient(*tensors)
        return found
    found = _Once.apply(name, gradient, *tensors)  # type: ignore[no-untyped-call]
    return found


class _Once(torch.autograd.Function):
    """Calls a function, and refuses to go back through it."""

    generate_vmap_rule = True  # torch.func.jacrev

    @staticmethod
    def forward(name: str, gradient: Callable[..., Any], *tensors: torch.Tensor) -> Any:
        return gradient(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.of = inputs[0]  # name() is that of the node

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise RuntimeError(f"the gradient of {ctx.of} cannot be differentiated again")

    jvp = backward  # torch.func.hessian


_Library: Any = torch.library.Library  # its methods have no annotations
LIBRARY = _Library("ring_dilated_attention", "DEF")
_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality


def define(schema: str) -> Any:
    """Define an operator of this package by its schema, and return its overload."""
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    return getattr(torch.ops.ring_dilated_attention, schema.partition("(")[0]).default


def implement(
    operator: Any,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    function: Any = None,
    name: str = "",
) -> Callable[..., Any]:
    """Register functions for an operator.

    Args:
        operator: an overload, as `define` returns it.
        run: computes it on any device, below autograd. torch.compile never traces it.
        fake: returns empty tensors like the results.
        function: the derivative, a `torch.autograd.Function` of the tensors among the inputs, which
            come first, and a tuple of the others, with a `setup_context`; its forward is set here.
            (`torch.library.register_autograd` takes 30 us more a call.)
        name: of the function in messages.

    Returns:
        What calls the operator, and passes the dispatcher, which converts all inputs, once where
        nothing above the derivative is to see the call.
    """
    registered = operator._schema.name.partition("::")[2]
    LIBRARY.impl(registered, untraced(run), "CompositeExplicitAutograd")
    torch.library.register_fake(operator, fake, lib=LIBRARY)
    if function is None:
        return operator  # type: ignore[no-any-return]
    count = sum("Tensor" in str(x.type) for x in operator._schema.arguments)

    def autograd(*inputs: Any) -> Any:
        tensors = inputs[:count]
        refuse_tangents(name, *tensors)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors):
            return apply_function(function, *tensors, inputs[count:], in_operator=True)
        return below(*inputs)

    def below(*inputs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*inputs)

    function.forward = staticmethod(lambda *inputs: below(*inputs[:-1], *inputs[-1]))
    derived = untraced(autograd)
    LIBRARY.impl(registered, derived, "Autograd")

    def call(*inputs: Any) -> Any:
        if (
            torch.compiler.is_compiling()
            or torch._C._are_functorch_transforms_active()
            or torch._C._get_tracing_state() is not None
            or torch._C._dispatch_tls_is_dispatch_key_excluded(_AUTOGRAD)
        ):
            return operator(*inputs)
        return derived(*inputs)

    return call
