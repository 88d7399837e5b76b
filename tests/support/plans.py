"""Plans that calls of other tests have left."""

from ring_dilated_attention.resolve import KEPT


def forget_plans():
    """Drop what is kept of the calls so far: plans, schedules."""
    for kept in KEPT:
        kept.cache_clear()
