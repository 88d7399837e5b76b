"""The options of a call in one object, with one check: `AttentionOptions`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias, TypedDict, get_args

from .exchange import Group, one_group
from .layout import SequenceLayout
from .pattern import DilatedPattern, check_bool, check_choice, check_head_slice, in_brief
from .tiles import BACKENDS, Backend

Schedule: TypeAlias = str
"""One of `EXCHANGES`, or ``"heads:M"``."""
EXCHANGES = "auto", "ring", "gather", "heads"
BranchGradients: TypeAlias = Literal["exact", "detached"]
BRANCH_GRADIENTS: tuple[str, ...] = get_args(BranchGradients)
MOST_SCALE = 2.0**64
"""Scores of ordinary inputs times this are finite in float32; beyond, they would turn into NaN."""


class OptionFields(TypedDict, total=False):
    """The fields of `AttentionOptions` as keyword arguments, for editors and type checkers."""

    is_causal: bool
    scale: float | None
    softcap: float | None
    group: Group
    mesh: Group
    layout: SequenceLayout | None
    exchange: Schedule
    backend: Backend
    workspace: float | None
    branch_gradients: BranchGradients
    head_slice: Sequence[int] | None


_NAMES = tuple(OptionFields.__annotations__)


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """How attention is computed, and on which ranks. Functions and modules take it or its fields.

    Args:
        is_causal: whether a query sees only keys at positions <= its own. Default False.
        scale: factor on the scores, between ``2**-64`` and ``2**64``; None: ``head_dim ** -0.5``.
        softcap: c, between ``2**-64`` and ``2**64``: a score s, scaled, becomes ``c * tanh(s / c)``
            (Gemma 2), by the back ends ``"fa4"`` and ``"eager"``, one of which ``"auto"`` takes.
            None, the default: it does not.
        group: the ranks that share the sequence: a ProcessGroup, a 1-D DeviceMesh, an `Exchange`,
            or None if this process holds the whole sequence.
        mesh: another name for `group`, as DTensor APIs call it; pass only one of the two.
        layout: which rank holds which positions; None: contiguous equal shards.
        exchange: ``"ring"`` keeps one message in flight during compute and holds the rows of at
            most two remote shards; ``"gather"`` starts all transfers at once and holds them all;
            ``"heads"`` gives each rank all rows of some heads and sends the results back
            (all-to-all, as DeepSpeed-Ulysses), ``"heads:M"`` in groups of M consecutive ranks,
            between which rows go by ring or gather (M divides the number of ranks, and is at most
            that of heads: of KV heads where these see different keys); ``"heads"`` takes the
            largest M;
            ``"auto"``, the default, takes ``"heads:M"`` where the cost model predicts it to be
            faster by 3% than a ring or gather, on H200 GPUs of as many hosts as torchrun started
            (`rda plan` prints the prediction); else, and where sizes are symbols of torch.compile,
            a ring, or gather where that takes no more memory than query and out.
        backend: kernels that compute the tiles: ``"auto"``, the default, takes the fastest that
            supports the tensors; ``"sdpa"``, ``"fa4"``, ``"cpu_flash"``, ``"cudnn"``, ``"flash"``,
            ``"efficient"``, ``"triton"`` and ``"eager"`` take that one or raise.
        workspace: bound on the temporary memory of kernels, in multiples of the size of query (a
            single head of a single segment may need more). None: about a quarter in forward and a
            half in backward, or 64 MiB or what 131,072 rows take if that is more.
        branch_gradients: ``"exact"``, the default, is the gradient of the whole function;
            ``"detached"`` takes the weights that mix the branches, ``exp(lse of the branch -
            lse)``, for constants, as torchscale does: weights trained with it have seen that
            gradient. Forward is the same; backward computes each branch's own result again.
        head_slice: (start, stop, total): the call's KV heads are heads start to stop (excluded) of
            a layer with total of them, and have their offsets and branches; for tensor parallelism.
            The ranks of a group hold the same heads. None: the call has all heads.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: an option has a value that is not allowed, or both `group` and `mesh` are given.

    Examples:
        >>> options = AttentionOptions(is_causal=True, exchange="ring")
        >>> query = key = value = torch.randn(1, 16, 2, 8)
        >>> dilated_attention(query, key, value, DilatedPattern([8], [2]), options).shape
        torch.Size([1, 16, 2, 8])
    """

    is_causal: bool = False
    scale: float | None = None
    softcap: float | None = None
    group: Group = None
    mesh: InitVar[Group] = None
    layout: SequenceLayout | None = None
    exchange: Schedule = "auto"
    backend: Backend = "auto"
    workspace: float | None = None
    branch_gradients: BranchGradients = "exact"
    head_slice: Sequence[int] | None = None

    def __post_init__(self, mesh: Group) -> None:
        if mesh is not None:
            object.__setattr__(self, "group", one_group(self.group, mesh))
        for name, check in _OF_OPTIONS.items():
            if (value := getattr(self, name)) is not _DEFAULTS[name]:
                check(name, value)


def read_options(
    caller: str, options: AttentionOptions | None, fields: Mapping[str, Any]
) -> AttentionOptions:
    """The options of a call or module `caller`: those of an object, of fields, or of both.

    Fields are those of `AttentionOptions` by name; they replace those of `options`.

    Raises:
        TypeError, ValueError: see `AttentionOptions`; or a field has an unknown name.
    """
    for name in fields:
        if name not in _NAMES:
            known = ", ".join(_NAMES)
            raise TypeError(f"{caller} has no option {name!r}; AttentionOptions has {known}")
    if options is None:
        return AttentionOptions(**fields) if fields else NO_OPTIONS
    group_of_options(caller, options, fields)  # raises where there is no such object
    return replace(options, **fields) if fields else options


def group_of_options(
    caller: str, options: AttentionOptions | None, fields: Mapping[str, Any]
) -> Group:
    """The ranks that an error in the options is told; the arguments are those of `read_options`.

    Raises:
        TypeError: `options` is no `AttentionOptions`.
        ValueError: the ranks are given by `group` and by `mesh`.
    """
    if options is not None and not isinstance(options, AttentionOptions):
        raise TypeError(
            f"the options of {caller} must be an AttentionOptions, or its fields by name; got "
            f"{in_brief(options)}"
        )
    group = None if options is None else options.group
    return one_group(fields.get("group", group), fields.get("mesh"))


def check_options(**values: Any) -> None:
    """Check values by name: fields of `AttentionOptions`, or `pattern` or `return_lse`.

    Raises:
        TypeError, ValueError: a value is not allowed.
    """
    for name, value in values.items():
        _CHECKS[name](name, value)


def _check_pattern(name: str, value: Any) -> None:
    if not isinstance(value, DilatedPattern):
        raise TypeError(
            f"{name} must be a DilatedPattern, as in DilatedPattern([2048, None], [1, 4]), got "
            f"{in_brief(value)}"
        )


def _check_layout(name: str, value: Any) -> None:
    if value is not None and not isinstance(value, SequenceLayout):
        raise TypeError(
            f"{name} must be a SequenceLayout or None, got {in_brief(value)}; "
            "SequenceLayout.zigzag(length, ranks) makes one"
        )


def _check_number(name: str, value: Any, low: float, most: float, allowed: str) -> None:
    """Raise unless it is None, or a number from `low` to `most`, as `allowed` says in words."""
    if value is None:
        return
    # Tuples, not unions: torch.compile of torch 2.8 does not know those.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a float or None, got {in_brief(value)}")
    if not low <= value <= most:  # nor is NaN
        raise ValueError(f"{name} must be {allowed}, got {in_brief(value)}")


def _check_exchange(name: str, value: Any) -> None:
    ranks = value.removeprefix("heads:") if isinstance(value, str) else ""
    if ranks == value or not ranks.isdecimal():
        check_choice(name, value, (*EXCHANGES, "heads:M"))


_Check: TypeAlias = Callable[[str, Any], object]
_OF_OPTIONS: dict[str, _Check] = {
    "is_causal": check_bool,
    **dict.fromkeys(("scale", "softcap"), partial(
        _check_number, low=1 / MOST_SCALE, most=MOST_SCALE,
        allowed="> 0, between 2**-64 and 2**64",
    )),
    "layout": _check_layout,
    "exchange": _check_exchange,
    "backend": partial(check_choice, choices=BACKENDS),
    "workspace": partial(
        _check_number, low=sys.float_info.min, most=sys.float_info.max,
        allowed="> 0 and finite",
    ),
    "branch_gradients": partial(check_choice, choices=BRANCH_GRADIENTS),
    "head_slice": lambda name, value: value is None or check_head_slice(value),
}  # fmt: skip
_DEFAULTS = {name: getattr(AttentionOptions, name) for name in _OF_OPTIONS}
NO_OPTIONS = AttentionOptions()
_CHECKS = {"pattern": _check_pattern, "return_lse": check_bool, **_OF_OPTIONS}
