"""The sample of the sweep has all that the sweep has."""

import pytest
from support.sweep_sample import sweep_sample

from ring_dilated_attention.checks import sweep


def options_of(case):
    return {
        ("causal, back end", case.is_causal, case.backend),
        ("exchange", case.exchange),
        ("dtype", case.dtype),
        ("heads", case.num_heads),
        ("documents, lengths", case.documents is None, case.lengths is None),
        ("pattern", str(case.pattern)),
    }


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("world_size", range(2, 8))
def test_it_has_every_option(world_size, seed):
    cases = list(sweep(world_size))
    sample = [cases[number] for number in sweep_sample(world_size, seed)]
    assert set().union(*map(options_of, sample)) == set().union(*map(options_of, cases))
    long = [case for case in sample if case.layout.length == 53]
    assert len({str(case.pattern) for case in long}) == 6
    assert {case.is_causal for case in long} == {True, False}
    assert {case.exchange for case in long} == {"ring", "gather"}
    assert len({case.layout for case in long}) == 3
