"""Tiles of links between different parts, joined where they make one and put into few groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, count

from .parts import Link
from .rows import Rows, Tile, TileGroup


def group_tiles(linked: Iterable[tuple[Link, Sequence[Tile]]]) -> tuple[TileGroup, ...]:
    """The tiles of links between different parts, in few groups.

    Tiles of a group share no row, so where m parts see m parts it takes m groups, not m * m: the
    i-th sees the j-th in group j - i mod m. Evenly spaced parts then make evenly spaced tiles.
    """
    joined = _join_tiles(linked)
    every = [link for links, _ in joined for link in links]
    queries, keys = (
        {start: number for number, start in enumerate(dict.fromkeys(starts))}
        for starts in ([link.queries.start for link in every], [link.keys.start for link in every])
    )
    most = max(len(queries), len(keys))
    groups: dict[tuple[int, int], tuple[set[int], set[int], list[Tile]]] = {}
    for links, tiles in joined:
        if not tiles:
            continue
        own, other = {link.queries.start for link in links}, {link.keys.start for link in links}
        first = keys[links[0].keys.start] - queries[links[0].queries.start]
        for place in chain(((first + i) % most for i in range(most)), count(most)):
            taken = groups.setdefault((links[0].branch, place), (set(), set(), []))
            if taken[0].isdisjoint(own) and taken[1].isdisjoint(other):
                break
        taken[0].update(own)
        taken[1].update(other)
        taken[2].extend(tiles)
    return tuple(TileGroup(tuple(tiles)) for _, _, tiles in groups.values())


def _join_tiles(
    linked: Iterable[tuple[Link, Sequence[Tile]]],
) -> list[tuple[list[Link], list[Tile]]]:
    """Join neighbours that make one block: the same keys and queries that go on, or vice versa.

    Fewer and larger tiles: fewer results to merge, gradients to add and kernels to start.
    """
    joined: list[tuple[list[Link], list[Tile]]] = []
    for link, group in linked:
        joined.append(([link], list(group)))
        while len(joined) > 1:
            (links, a), (more, b) = joined[-2:]
            both = [_join(x, y) for x, y in zip(a, b, strict=False)]
            together = [tile for tile in both if tile is not None]
            if not len(a) == len(b) == len(together):
                break
            joined[-2:] = [(links + more, together)]
    return joined


def _join(a: Tile, b: Tile) -> Tile | None:
    """One tile in place of two, where that is possible."""
    if a._replace(queries=b.queries, keys=b.keys) != b or a.is_causal or a.segments > 1:
        return None
    if a.keys == b.keys and _goes_on(a.queries, b.queries):
        longer = a.queries._replace(length=a.queries.length + b.queries.length)
        return a._replace(queries=longer)
    if a.queries == b.queries and _goes_on(a.keys, b.keys):
        return a._replace(keys=a.keys._replace(length=a.keys.length + b.keys.length))
    return None


def _goes_on(a: Rows, b: Rows) -> bool:
    """Whether rows `b` go on where rows `a` end."""
    return a._replace(start=a.start + a.length * a.stride, length=b.length) == b
