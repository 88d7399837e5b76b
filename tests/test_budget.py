"""The house stays small: lines and files of each room, and names of its door."""

import ast

import pytest
from support.lines import PACKAGE, REPOSITORY, Size, sizes_now, table, total

# A change lowers these numbers, or raises one with a reason in the same commit. `make lines` prints
# what there is. Where they go: 29,000 lines in 120 files with windows and cohorts of slides.
BUDGET = {
    "bench": (812, 4),
    "checks": (1_448, 6),
    "cli": (1_300, 7),
    "decode": (1_605, 5),
    "draw": (732, 5),
    "engine": (2_215, 9),
    "exchange": (1_498, 6),
    "integrations": (3_242, 11),
    "kernels": (3_389, 10),
    "nn": (3_935, 16),
    "parallel": (997, 4),
    "plan": (2_937, 9),
    "the root": (2_537, 11),
    "tiles": (1_112, 6),
    "torch_op": (1_211, 5),
}
MOST_TESTS = 23_559
SLACK = 0.02
"""A budget that is higher than this above what there is, is to be lowered."""

DOOR = 20


def test_rooms_are_within_their_budget():
    now = sizes_now()
    assert now.keys() == BUDGET.keys(), f"rooms without a budget, or gone:\n{table(now)}"
    for room, size in now.items():
        allowed = Size(*BUDGET[room])
        assert size.lines <= allowed.lines, f"{room}\n{table(now)}"
        assert size.files <= allowed.files, f"{room}\n{table(now)}"


def test_budgets_are_lowered_with_what_they_hold():
    for room, size in sizes_now().items():
        allowed = Size(*BUDGET[room])
        assert allowed.files == size.files, f"{room} has {size.files} files: lower its budget"
        assert allowed.lines <= size.lines * (1 + SLACK) + 10, f"{room}: lower it to {size.lines}"


def test_tests_are_within_their_budget():
    lines = sum(p.read_text().count("\n") for p in (REPOSITORY / "tests").rglob("*.py"))
    assert lines <= MOST_TESTS


def door_of(room: str) -> list[str]:
    tree = ast.parse((REPOSITORY / PACKAGE / room / "__init__.py").read_text())
    assigned = [n for n in tree.body if isinstance(n, ast.Assign)]
    (names,) = (
        ast.literal_eval(n.value) for n in assigned if ast.unparse(n.targets[0]) == "__all__"
    )
    return list(names)


def test_doors_are_narrow():
    """Each module of integrations is a door of its own; the root is the library's."""
    for room in BUDGET.keys() - {"the root", "integrations"}:
        assert len(door_of(room)) <= DOOR, room


@pytest.mark.parametrize(
    ("path", "room"), [("layout.py", "the root"), ("plan/rank.py", "plan"), ("nn/a/b.py", "nn")]
)
def test_room_of(path, room):
    from support.lines import room_of

    assert room_of(path) == room


def test_table_says_what_changed():
    text = table({"plan": Size(90, 2), "nn": Size(5, 1)}, {"plan": Size(100, 3), "cli": Size(7, 1)})
    assert f"{'plan':12}      90     2  -10 -1" in text
    assert text.endswith(f"{'sum':12}      95     3  -12 -1")
    assert total({"plan": Size(90, 2), "nn": Size(5, 1)}) == Size(95, 3)
