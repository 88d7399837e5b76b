"""The one-page program computes what the library computes."""

import re

import pytest
from support.launched import EXAMPLES, run_program


@pytest.mark.parametrize("ranks", [1, 3])
def test_ring_in_one_page_equals_dilated_attention(ranks):
    done = run_program(EXAMPLES / "ring_in_one_page.py", [], ranks=ranks)
    assert done.returncode == 0, done.stderr[-2000:]
    gaps = re.findall(r"largest difference from the library (\S+)", done.stdout)
    assert len(gaps) == ranks
    assert all(float(gap) < 1e-13 for gap in gaps)
