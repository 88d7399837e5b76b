"""Apply a row-wise function to a few rows at a time, forward and backward.

A norm, a projection, an MLP, logits and their cross-entropy treat every row alone, so what they
make in between (four times the width in an MLP, the vocabulary in a loss) never has to exist for
all rows at once. `torch.cat` of parts would hold every result twice, and the backward of a slice
makes a tensor of full size for each part: here results and gradients are written where they belong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import compress
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .recompute import Weights, drawing_again, may_draw, random_state, refuse_flat_weights

T = TypeVar("T", Tensor, tuple[Tensor, ...])


def map_rows(
    function: Callable[..., T],
    *inputs: Tensor,
    rows: int | None,
    modules: Iterable[nn.Module] = (),
) -> T:
    """Call a row-wise function on chunks of rows, and again in backward.

    With `rows`, autograd keeps the inputs alone; backward calls the function once more on each
    chunk, under the autocast of the forward call, with the weights and the random numbers that it
    had. Otherwise the function must be deterministic, and modules must stay as they are until then:
    modules that were replaced, and `training` or adapters of peft that were changed, raise; what a
    module remembers from call to call is not brought back. Beyond inputs, results and their
    gradients, one chunk's intermediates live at a time.
    Gradients of parameters are summed over chunks in float32, or in float64 for those of float64.
    Not for ``fullgraph=True`` of torch.compile.

    Args:
        function: takes a chunk of each input and returns a tensor, or a tuple of tensors; row i of
            every result, shape (batch, rows, ...), depends on row i of the inputs alone.
        inputs: shape (batch, n, ...), the same n for all (batch may be 1 where a result's is not);
            n may be 0: then the function is called once on no rows.
        rows: number of rows per chunk; the last may be shorter. None calls the function once, on
            all rows.
        modules: the modules that `function` uses; all their parameters must take part in its
            results.

    Returns:
        What `function` would return for all rows.

    Raises:
        ValueError: `rows` is below 1, or the inputs have different numbers of rows; or the weights
            of `modules` are views of a flat one of FullyShardedDataParallel.
        RuntimeError: in backward, a parameter takes no part in the results, or modules, `training`
            or adapters have changed.
    """
    if rows is None:
        return function(*inputs)
    if rows < 1:
        raise ValueError(f"rows must be >= 1, got {rows}")
    if len({x.shape[1] for x in inputs}) != 1:
        shapes = ", ".join(str(tuple(x.shape)) for x in inputs)
        raise ValueError(f"the inputs must have the same number of rows; got shapes {shapes}")
    modules = tuple(modules)
    refuse_flat_weights(modules)
    weights, draws = Weights(modules), torch.is_grad_enabled() and may_draw(function, modules)
    result: T = _MapRows.apply(  # type: ignore[no-untyped-call]
        function, rows, weights, draws, *inputs, *weights.tensors
    )
    return result


class _MapRows(torch.autograd.Function):
    """For chunks c: y_c = f(x_c; w). Backward: dx_c = dy_c df/dx_c, dw = sum_c dy_c df_c/dw."""

    @staticmethod
    def forward(
        ctx: Any,
        function: Callable[..., Any],
        rows: int,
        weights: Weights,
        draws: bool,
        *tensors: Tensor,
    ) -> Any:
        inputs = tensors[: len(tensors) - len(weights.tensors)]
        ctx.save_for_backward(*tensors)  # parameters too: autograd checks that they are unchanged
        ctx.function, ctx.rows, ctx.weights = function, rows, weights
        ctx.states = [] if draws else None  # of random numbers, by chunk
        ctx.autocast = _autocast(inputs[0].device.type)
        ctx.set_materialize_grads(False)
        length = inputs[0].shape[1]
        whole: list[Tensor] | None = None
        is_tuple = False
        for start, stop in _chunks(length, rows):
            if draws:
                ctx.states.append(random_state(inputs[0].device))
            results = function(*(x[:, start:stop] for x in inputs))
            is_tuple = isinstance(results, tuple)
            parts = results if is_tuple else (results,)
            if length <= rows:
                weights.note_versions()
                return results
            if whole is None:
                whole = [y.new_empty(y.shape[0], length, *y.shape[2:]) for y in parts]
            for total, part in zip(whole, parts, strict=True):
                total[:, start:stop] = part
            del results, parts  # before the next chunk makes its own
        weights.note_versions()
        assert whole is not None
        return tuple(whole) if is_tuple else whole[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # once: inside of a checkpoint a second look is an error
        inputs = saved[: len(saved) - len(ctx.weights.tensors)]
        ctx.weights.refuse_settings()
        given = {i: gradient for i, gradient in enumerate(gradients) if gradient is not None}
        if not given:
            return (None,) * len(ctx.needs_input_grad)
        needs = ctx.needs_input_grad[4:]
        wanted = [index for index in range(len(inputs)) if needs[index]]
        is_whole = inputs[0].shape[1] <= ctx.rows
        dinputs = {} if is_whole else {i: torch.empty_like(inputs[i]) for i in wanted}
        dparameters: list[Tensor] = []
        with ctx.weights.back(as_leaves=True) as weights:
            # Those that were frozen since forward get none, as autograd has it.
            have = zip(weights, needs[len(inputs) :], strict=True)
            wants = [need and weight.requires_grad for weight, need in have]
            parameters = [*compress(weights, wants)]
            for number, (start, stop) in enumerate(_chunks(inputs[0].shape[1], ctx.rows)):
                chunks = [x[:, start:stop].detach() for x in inputs]
                for index in wanted:
                    chunks[index].requires_grad_()
                results, dresults = _again(
                    ctx, number, chunks, {i: g[:, start:stop] for i, g in given.items()}
                )
                if not results:
                    return (None,) * len(ctx.needs_input_grad)
                of = [*(chunks[index] for index in wanted), *parameters]
                dchunks = torch.autograd.grad(results, of, dresults)
                del results, dresults, of, chunks
                for index, dchunk in zip(wanted, dchunks, strict=False):
                    if is_whole:
                        dinputs[index] = dchunk
                    else:
                        dinputs[index][:, start:stop] = dchunk
                shares = dchunks[len(wanted) :]
                dparameters = list(shares) if is_whole else _summed(dparameters, shares)
                del dchunks, shares
        summed = (total.to(p.dtype) for total, p in zip(dparameters, parameters, strict=True))
        return (
            *(None, None, None, None),
            *(dinputs.get(index) for index in range(len(inputs))),
            *(next(summed) if want else None for want in wants),
        )


def _again(
    ctx: Any, number: int, chunks: list[Tensor], gradients: dict[int, Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Results of a chunk, computed again, and their gradients: of those that have any."""
    device = chunks[0].device
    draws = drawing_again(ctx.states[number], device) if ctx.states else nullcontext()
    with torch.enable_grad(), ctx.autocast(), draws:
        results = ctx.function(*chunks)
    parts = results if isinstance(results, tuple) else (results,)
    # autograd may have gradients of results too that nothing trained is a part of.
    have = [index for index in gradients if parts[index].requires_grad]
    return [parts[index] for index in have], [gradients[index] for index in have]


def _summed(totals: list[Tensor], shares: tuple[Tensor, ...]) -> list[Tensor]:
    """Totals of gradients, in float32 at least, with those of another chunk."""
    if not totals:
        return [x.to(torch.promote_types(x.dtype, torch.float32), copy=True) for x in shares]
    return [total.add_(share) for total, share in zip(totals, shares, strict=True)]


def _chunks(length: int, rows: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of every chunk; a single empty one where there are no rows."""
    for start in range(0, max(length, 1), rows):
        yield start, min(start + rows, length)


def _autocast(device_type: str) -> Callable[[], AbstractContextManager[Any]]:
    """Enters autocast as it is now; backward runs outside of it, on a thread of its own."""
    if not torch.amp.is_autocast_available(device_type):
        return nullcontext
    return partial(
        torch.autocast,
        device_type,
        dtype=torch.get_autocast_dtype(device_type),
        enabled=torch.is_autocast_enabled(device_type),
        cache_enabled=torch.is_autocast_cache_enabled(),
    )
