"""What a benchmark times: this library, and the baselines by name."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from ..exchange import ProcessGroupExchange
from ..functional import Schedule, dilated_attention
from ..layout import SequenceLayout
from ..pattern import check_choice
from . import one_device, ring
from .contender import Contender, Site, by_reference, flops_on, local_shapes
from .workload import Workload

OURS, MESSAGES = "ours", "ours:messages"
"""This library; and it with rows that travel as messages of NCCL between GPUs of one host too."""

BASELINES = (*one_device.NAMES, *ring.NAMES, MESSAGES)


def contender(
    name: str,
    workload: Workload,
    site: Site,
    *,
    layout: str = "auto",
    exchange: Schedule = "auto",
) -> Contender:
    """What `name` (`OURS`, or one of `BASELINES`) runs for a workload.

    Args:
        name: the contender.
        workload: what all ranks compute together; its length is that of the whole sequence.
        site: where it computes.
        layout: of ours, one of `layout.LAYOUTS`.
        exchange: of `dilated_attention`, for ours.

    Raises:
        ValueError: the name is unknown, or it cannot compute such a workload; says why.
    """
    if name == OURS:
        return _ours(workload, site, layout, exchange)
    check_choice("baseline", name, BASELINES)
    if name in one_device.NAMES:
        return one_device.baseline(name, workload, site)
    if name in ring.NAMES:
        return ring.baseline(name, workload, site)
    site.refuse_cpu(name)
    if site.size == 1:
        raise ValueError(f"{name} needs several ranks: on one it is {OURS}")
    assert isinstance(site.group, dist.ProcessGroup)
    by_messages = ProcessGroupExchange(site.group, peer_memory=False)
    return _ours(workload, replace(site, group=by_messages), layout, exchange)


def _ours(workload: Workload, site: Site, layout: str, exchange: Schedule) -> Contender:
    dealt = SequenceLayout.named(layout, workload.seq_len, site.size, is_causal=workload.is_causal)
    several = site.size > 1

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return dilated_attention(
            query,
            key,
            value,
            workload.pattern,
            is_causal=workload.is_causal,
            group=site.group,
            layout=dealt if several else None,
            exchange=exchange if several else "auto",
            backend=workload.backend,
        )

    return Contender(
        attend=attend,
        shapes=local_shapes(workload, dealt, site.rank),
        flops=flops_on(workload, site, dealt),
        layout=dealt,
        expected=by_reference(workload, workload.pattern),
        kernel=lambda *_: workload.backend,
    )
