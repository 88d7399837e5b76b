from hypothesis import given
from hypothesis import strategies as st

from ring_dilated_attention.plan.rows import dilated_rows, intersect, union_size

progressions = st.builds(range, st.integers(-20, 60), st.integers(-20, 90), st.integers(1, 12))


@given(progressions, progressions)
def test_intersection(a, b):
    assert sorted(set(a) & set(b)) == list(intersect(a, b))


@given(st.lists(progressions, max_size=6))
def test_union_size(many):
    assert union_size(many) == len(set().union(*many))


@given(st.integers(0, 40), st.integers(1, 40), st.integers(1, 12), st.integers(0, 90), st.data())
def test_dilated_rows_are_the_cell_within_a_range(start, length, rate, low, data):
    offset = data.draw(st.integers(0, rate - 1))
    high = data.draw(st.integers(low, 100))
    cell = range(start + offset, start + length, rate)
    got = dilated_rows(start, start + length, offset, rate, low, high)
    assert list(got) == [x for x in cell if low <= x < high]
