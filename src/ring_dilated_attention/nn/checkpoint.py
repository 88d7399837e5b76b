"""Activation checkpointing: what backward computes again, for all rows or for a few at a time.

Attention is the part of a block that is dear to compute and cheap to keep: its out and lse take as
much memory as one hidden state, while computing them again would run every tile and every transfer
between ranks a second time. So ``keep_attention`` recomputes everything else.

A norm, a projection, an MLP, logits and their cross-entropy treat every row alone, so what they
make in between (four times the width in an MLP, the vocabulary in a loss) never has to exist for
all rows at once. `torch.cat` of parts would hold every result twice, and the backward of a slice
makes a tensor of full size for each part: `map_rows` writes results and gradients where they
belong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import compress
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    _CachedTorchDispatchMode,
    create_selective_checkpoint_contexts,
    get_device_states,
    set_device_states,
)

from ..parallel import is_dtensor
from ..pattern import check_choice, check_positive_int
from ..torch_op import AGREED, FORWARD, LENGTHS
from .modules import LayerNorm, runs_hooks

T = TypeVar("T")
Rows = TypeVar("Rows", Tensor, tuple[Tensor, ...])

Checkpoint: TypeAlias = Literal["none", "full", "keep_attention"]
"""What a module keeps for backward: ``none`` all that backward needs, ``full`` the inputs of each
block, ``keep_attention`` those and the out and lse of its attention."""
CHECKPOINTS: tuple[str, ...] = get_args(Checkpoint)
_KEPT = (FORWARD, LENGTHS, AGREED)
"""The operators of attention."""
_PACKAGE = __name__.partition(".")[0]
_FIXED = (nn.Linear, nn.Embedding, nn.LayerNorm, LayerNorm)
"""Modules that draw no random numbers, beside those of this library."""


def check_checkpoint(checkpoint: Checkpoint, blocks: int, chunk_rows: int | None) -> None:
    """Raise unless a module can checkpoint like this, with the input of every `blocks`-th block.

    Without ``keep_attention`` attention would be computed a third time where `blocks` is above 1.
    """
    check_choice("checkpoint", checkpoint, CHECKPOINTS)
    if check_positive_int("checkpoint_blocks", blocks) > 1 and checkpoint != "keep_attention":
        raise ValueError(
            f"checkpoint_blocks above 1 needs checkpoint 'keep_attention'; got {blocks} with "
            f"{checkpoint!r}"
        )
    if chunk_rows is not None:
        check_positive_int("chunk_rows", chunk_rows)


def attention_policy(
    ctx: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """Save the results of attention, recompute those of every other operator.

    For `torch.utils.checkpoint.create_selective_checkpoint_contexts`; call it from a policy of your
    own to keep more.
    """
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


class _Recomputation(_CachedTorchDispatchMode):  # type: ignore[no-untyped-call]
    """In backward, gives back what attention computed; every other operator runs.

    torch's own mode, `made`, refuses an operator that runs more often than in forward. Under
    `fully_shard` backward may gather weights that forward found gathered.
    """

    def __init__(self, made: Any) -> None:
        vars(self).update(vars(made))  # torch's arguments differ from version to version

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _KEPT:
            return func(*args, **(kwargs or {}))
        kept: Any = super()
        return kept.__torch_dispatch__(func, types, args, kwargs)


def keep_attention() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """A `context_fn` for `torch.utils.checkpoint.checkpoint` with `attention_policy`.

    Examples:
        >>> from torch.utils.checkpoint import checkpoint
        >>> block = torch.nn.Linear(8, 8)
        >>> x = torch.ones(2, 8, requires_grad=True)
        >>> checkpoint(block, x, use_reentrant=False, context_fn=keep_attention).shape
        torch.Size([2, 8])
    """
    forward: Any
    forward, backward = create_selective_checkpoint_contexts(attention_policy)  # type: ignore[no-untyped-call]
    return forward, _Recomputation(backward)


class _Weights:
    """The weights that modules have now; `tensors` are those of them, each one once."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._places = [
            (x, name, tensor, _version(tensor))
            for module in modules
            for x in module.modules()
            for name, tensor in (*x._parameters.items(), *x._buffers.items())
            if tensor is not None and (name in x._parameters or tensor.requires_grad)
        ]
        self.tensors = list({id(x): x for *_, x, _ in self._places}.values())

    def refuse_changes(self) -> None:
        """Raise a `RuntimeError` unless backward, which computes again, has those of forward."""
        for module, name, tensor, version in self._places:
            now = module._parameters.get(name, module._buffers.get(name))
            # Who shards or offloads weights brings them back by itself: fully_shard has DTensors in
            # their place, FullyShardedDataParallel attributes, and accelerate meta tensors.
            is_away = now is None or any(x.is_meta or is_dtensor(x) for x in (now, tensor))
            same = now is tensor or is_away
            if not same or _version(tensor) != version:
                other = "another one (with functional_call use torch.func.grad, or pass tensors)"
                how = "changed in place" if same else other
                raise RuntimeError(
                    f"{name} of a {type(module).__name__} was {how} between forward and backward, "
                    "which computes with it again: call backward before the optimizer's step, or "
                    'give checkpoint="none" and no chunk_rows'
                )


def _version(tensor: Tensor) -> int | None:
    """How often a tensor was changed in place; None where that is not known."""
    return None if is_dtensor(tensor) or tensor.is_inference() else tensor._version


def _refuse_flat_weights(modules: Sequence[nn.Module]) -> None:
    """Raise where FullyShardedDataParallel has weights in a flat one: gradients would be lost."""
    for x in (x for module in modules for x in module.modules()):
        weight = x.__dict__.get("weight")  # a view, which is no parameter of its module
        if isinstance(weight, Tensor) and weight.requires_grad and weight._is_view():
            raise ValueError(
                "chunk_rows computes gradients of the weights of modules, and "
                f"FullyShardedDataParallel has put the weight of a {type(x).__name__} into a "
                "flat one: use fully_shard, or use_orig_params=True and no checkpointing"
            )


def _may_draw(function: Callable[..., Any], modules: Sequence[nn.Module]) -> bool:
    """Whether a function may draw random numbers, as the dropout of an adapter does.

    Methods of this library do not, beside the modules that they use, of which there are some.
    """
    whose = getattr(getattr(function, "func", function), "__self__", function)
    return not (modules and _is_ours(whose)) or any(
        not (type(x) in _FIXED or _is_ours(x)) or runs_hooks(x)
        for module in modules
        for x in module.modules()
    )


def _is_ours(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == _PACKAGE


def run_checkpointed(
    checkpoint: Checkpoint,
    modules: Iterable[nn.Module],
    function: Callable[..., T],
    *arguments: Any,
) -> T:
    """Call a function as `checkpoint`, one of `CHECKPOINTS`, says.

    Args:
        checkpoint: what is kept for backward.
        modules: that the function uses; they must have the same weights in backward, else it
            raises. Random numbers are brought back unless all are known to draw none.
        function: deterministic but for these.
        arguments: of the function.
    """
    if checkpoint == "none" or not torch.is_grad_enabled():
        return function(*arguments)
    options: dict[str, Any] = {}  # dynamo takes no conditional expression as a context_fn
    if checkpoint == "keep_attention":
        options["context_fn"] = keep_attention
    draws = False
    if not torch.compiler.is_compiling():  # which brings random numbers back by itself
        modules = tuple(modules)
        draws = _may_draw(function, modules)
        function = partial(_checked, _Weights(modules), function)
    result: T = torch.utils.checkpoint.checkpoint(
        function, *arguments, use_reentrant=False, preserve_rng_state=draws, **options
    )
    return result


def _checked(weights: _Weights, function: Callable[..., T], *arguments: Any) -> T:
    weights.refuse_changes()  # as autograd does where nothing is computed again
    return function(*arguments)


def map_rows(
    function: Callable[..., Rows],
    *inputs: Tensor,
    rows: int | None,
    modules: Iterable[nn.Module] = (),
) -> Rows:
    """Call a position-wise function on chunks of positions, and again in backward.

    With `rows`, autograd keeps the inputs alone; backward calls the function once more on each
    chunk, under the autocast of the forward call, with the random numbers that it had. Otherwise
    the function must be deterministic, and modules must stay as they are until then.
    Beyond inputs, results and their gradients, one chunk's intermediates live at a time. Gradients
    of parameters are summed over chunks in float32, or in float64 for those of float64.
    Not for ``fullgraph=True`` of torch.compile; torch.jit.trace sees all rows at once.

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
        RuntimeError: in backward, a parameter takes no part in the results, or is another one.
    """
    if rows is None or torch.jit.is_tracing():  # type: ignore[no-untyped-call]
        return function(*inputs)
    check_positive_int("rows", rows)
    if len({x.shape[1] for x in inputs}) != 1:
        shapes = ", ".join(str(tuple(x.shape)) for x in inputs)
        raise ValueError(f"the inputs must have the same number of rows; got shapes {shapes}")
    modules = tuple(modules)
    _refuse_flat_weights(modules)
    weights, draws = _Weights(modules), torch.is_grad_enabled() and _may_draw(function, modules)
    result: Rows = _MapRows.apply(  # type: ignore[no-untyped-call]
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
        weights: _Weights,
        draws: bool,
        *tensors: Tensor,
    ) -> Any:
        inputs = tensors[: len(tensors) - len(weights.tensors)]
        ctx.save_for_backward(*tensors)  # parameters too: autograd checks that they are unchanged
        ctx.function, ctx.rows, ctx.weights = function, rows, weights
        ctx.states = []  # of random numbers, by chunk
        ctx.autocast = _autocast(inputs[0].device.type)
        ctx.set_materialize_grads(False)
        length = inputs[0].shape[1]
        whole: list[Tensor] = []
        for start, stop in _chunks(length, rows):
            if draws:
                ctx.states.append((torch.get_rng_state(), *get_device_states(inputs[0])))
            results = function(*(x[:, start:stop] for x in inputs))
            if length <= rows:
                return results
            is_tuple = isinstance(results, tuple)
            parts = results if is_tuple else (results,)
            whole = whole or [y.new_empty(y.shape[0], length, *y.shape[2:]) for y in parts]
            for total, part in zip(whole, parts, strict=True):
                total[:, start:stop] = part
            del results, parts  # before the next chunk makes its own
        return tuple(whole) if is_tuple else whole[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # once: inside of a checkpoint a second look is an error
        inputs = saved[: len(saved) - len(ctx.weights.tensors)]
        length, needs = inputs[0].shape[1], ctx.needs_input_grad[4:]
        wanted = [index for index in range(len(inputs)) if needs[index]]
        ctx.weights.refuse_changes()
        weights = zip(needs[len(inputs) :], ctx.weights.tensors, strict=True)
        wants = [need and weight.requires_grad for need, weight in weights]  # frozen since
        parameters = [*compress(ctx.weights.tensors, wants)]
        is_whole = length <= ctx.rows
        dinputs = {} if is_whole else {i: torch.empty_like(inputs[i]) for i in wanted}
        totals: list[Tensor] = []  # of the gradients of parameters
        for number, (start, stop) in enumerate(_chunks(length, ctx.rows)):
            chunks = [x[:, start:stop].detach() for x in inputs]
            of = [*(chunks[i].requires_grad_() for i in wanted), *parameters]
            dys = [None if dy is None else dy[:, start:stop] for dy in gradients]
            found = _gradients_of(ctx, number, chunks, of, dys)
            if found is None:
                return (None,) * len(ctx.needs_input_grad)
            shares = found[len(wanted) :]
            if is_whole:
                dinputs, totals = dict(zip(wanted, found, strict=False)), list(shares)
                continue
            for index, dchunk in zip(wanted, found, strict=False):
                dinputs[index][:, start:stop] = dchunk
            totals = _summed(totals, shares)
            del found, shares, chunks, of  # before the next chunk makes its own
        summed = (total.to(p.dtype) for total, p in zip(totals, parameters, strict=True))
        return (
            *(None, None, None, None),
            *(dinputs.get(index) for index in range(len(inputs))),
            *(next(summed) if want else None for want in wants),
        )


def _gradients_of(
    ctx: Any, number: int, chunks: list[Tensor], of: list[Tensor], dys: list[Tensor | None]
) -> Sequence[Tensor] | None:
    """Gradients of these tensors, from those of a chunk's results; None if no result has one."""
    state = ctx.states[number] if ctx.states else None
    with torch.enable_grad(), ctx.autocast(), _drawing_again(state, chunks[0].device):
        results = ctx.function(*chunks)
    # A result may have no gradient; or one, though nothing trained is a part of it.
    ys = results if isinstance(results, tuple) else (results,)
    pairs = [x for x in zip(ys, dys, strict=True) if x[1] is not None and x[0].requires_grad]
    if not pairs:
        return None
    return torch.autograd.grad([y for y, _ in pairs], of, [dy for _, dy in pairs])


@contextmanager
def _drawing_again(state: Any, device: torch.device) -> Iterator[None]:
    """In the body random numbers are those that followed `state`; behind it, what they would be."""
    if state is None:
        yield
        return
    on_cpu, devices, on_devices = state
    kind = device.type if devices else "cuda"
    with torch.random.fork_rng(devices, device_type=kind):
        torch.set_rng_state(on_cpu)
        set_device_states(devices, on_devices, device_type=kind)
        yield


def _summed(totals: list[Tensor], shares: Sequence[Tensor]) -> list[Tensor]:
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
