"""Plans that calls of other tests have left."""

from ring_dilated_attention import resolve


def forget_plans():
    """Drop what is kept of the calls so far: plans, schedules."""
    for kept in (resolve._resolved, resolve._resolved_packed, resolve._plan):
        kept.cache_clear()
