"""The rules of the house: who may import what, by which door, and that only torch is needed."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import ring_dilated_attention

ROOT = Path(ring_dilated_attention.__file__).parent
ORDER = [
    "caches", "units", "terminal", "pattern", "named_patterns", "layout", "documents", "plan",
    "draw", "kernels", "tiles", "exchange", "engine", "resolve", "torch_op",
    "functional", "decode", "nn",
    "integrations", "checks", "train", "bench", "cli",
]  # fmt: skip
"""Rooms, and files of the root: each may import those before it, and rooms by their doors."""
INTEGERS_ONLY = {
    "pattern",
    "named_patterns",
    "plan",
}  # and layout and documents, but for what takes tensors
MAY_USE_DISTRIBUTED = {
    *("exchange", "cli", "train", "checks.ranks"),
    *("integrations.context_parallel", "integrations.tensor_parallel"),
    *(f"bench.{name}" for name in ("run", "team", "launch", "ring", "contenders")),
}


MOST_LINES, MOST_CODE, MOST_PARAMETERS = 400, 60, 7
"""Of a file; of a function without its docstring."""

AS_OTHERS_CALL_THEM = {
    # Public functions and modules: each argument is a choice of its own, explained where it stands.
    *("functional.dilated_attention", "decode.replicated.replicated_query_attention"),
    *("decode.cache.__init__", "plan.attention.plan_attention"),
    *("nn.attention.__init__", "nn.attention.forward", "nn.attention.attend"),
    "nn.dilated.__init__",
    *("nn.token_generator.generate", "nn.token_generator.stream"),
    "integrations.transformers.set_attention",
    *("checks.reference.reference_attention", "bench.sweep.sweep"),
    # Commands: typer makes an option of each parameter.
    *("cli.bench.bench", "cli.draw.draw", "cli.plan.plan", "cli.plan.simulate", "cli.train.train"),
    # Called by torchscale, transformers and torch.library, which say what the arguments are.
    *("integrations.torchscale.__init__", "integrations.torchscale.forward"),
    *("integrations.transformers.attention_forward", "torch_op.flops.forward_flops"),
}
"""Functions of more parameters or lines, and why. Those of kernels/ are not looked at: Triton takes
tensors, strides and sizes one by one."""


def modules():
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield path, ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path, name):
    """(absolute module, line) of every import that runs, those under TYPE_CHECKING left out."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.walk(node)
    }
    package = name.split(".") if path.name == "__init__.py" and name else name.split(".")[:-1]
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ["ring_dilated_attention"] * bool(node.level) + base
            module = ".".join([*prefix, *(node.module or "").split(".")]).strip(".")
            yield module, node.lineno
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)


ALL = [pytest.param(path, name, id=name or "__init__") for path, name in modules()]
NAMES = {name for _, name in modules()}
ROOMS = {name.split(".")[0] for name in NAMES if "." in name}


def own_imports(path, name):
    """(module of this package, line) of every import of one, the door itself left out."""
    for module, line in imports(path, name):
        target = module.removeprefix("ring_dilated_attention").removeprefix(".")
        if module != target and target in NAMES and target not in ("", name):
            yield target, line


@pytest.mark.parametrize(("path", "name"), ALL)
def test_imports_point_one_way(path, name):
    room = name.split(".")[0]
    if not name:
        return  # the package itself offers what the modules define
    assert room in ORDER, f"{room} is not in ORDER: say where it belongs"
    for target, line in own_imports(path, name):
        other = target.split(".")[0]
        assert ORDER.index(other) <= ORDER.index(room), f"{path.name}:{line} imports {target}"


def offered(room):
    """What the door of a room names."""
    tree = ast.parse((ROOT / room / "__init__.py").read_text())
    (names,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return names


@pytest.mark.parametrize(("path", "name"), ALL)
def test_rooms_are_entered_by_their_doors(path, name):
    room = name.split(".")[0]
    for target, line in own_imports(path, name):
        other, _, inner = target.partition(".")
        if other == room or not inner:
            continue
        assert inner in offered(other), f"{path.name}:{line} imports {target}"


def parameters_of(function):
    """How many, without self."""
    arguments = function.args
    names = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return len(names) - (bool(names) and names[0].arg in ("self", "cls"))


def long_functions(path, name):
    """Those of a module with more lines or parameters than is allowed."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and not name.startswith("kernels."):
            docstring = (ast.get_docstring(node, clean=False) or "").count("\n")
            code = (node.end_lineno or 0) - node.lineno - docstring
            if code > MOST_CODE or parameters_of(node) > MOST_PARAMETERS:
                yield f"{name}.{node.name}", code, parameters_of(node)


@pytest.mark.parametrize(("path", "name"), ALL)
def test_files_and_functions_are_short(path, name):
    assert path.read_text().count("\n") <= MOST_LINES
    for where, code, parameters in long_functions(path, name):
        assert where in AS_OTHERS_CALL_THEM, f"{where}: {code} lines, {parameters} parameters"


def test_exceptions_are_long():
    found = {where for path, name in modules() for where, *_ in long_functions(path, name)}
    assert found >= AS_OTHERS_CALL_THEM


INSIDE = {
    "bench": "bench_tables small_ceilings test_bench test_bench_ranks test_cli_bench",
    "checks": "wrong_bytes",
    "cli": """
        cli_reference cli_tables test_bad_command_lines test_cli_plan test_docs test_json_output
        test_options
    """,
    "decode": "test_decode_kernels test_kv_cache_calls",
    "engine": """
        changed_messages late_streams test_attention test_caches test_device_tables
        test_fuzz test_joined test_late_streams test_memory test_own_rows test_ring_memory
        test_rows_by_index test_views test_zero_keys
    """,
    "exchange": """
        faults faulty_ranks outbox_host streamed_messages test_board test_documents test_gpu_ranks
        test_hosts test_mapped_memory test_nccl test_notices test_peer_memory test_processes
        test_relay test_waiter test_watch
    """,
    "kernels": """
        compiled_sizes test_device_profile test_gpu_generation test_kernel_rows test_launch
    """,
    "nn": """
        test_compiler_faults test_gelu_norm test_generate test_projections test_row_step test_slide
    """,
    "plan": "cut_rings test_plan test_progression test_replicated",
    "terminal": "test_terminal",
    "tiles": "test_gpu test_replay test_tile_choice test_tiles",
    "torch_op": "test_checkpoint test_compile test_detached",
    "train": """
        test_cli_train test_data test_plain_weights test_tokenizer test_train test_train_checkpoint
        test_train_elastic test_train_outputs test_train_tokens test_train_watch
    """,
}
"""Tests of a room from inside, and what they share: each may import the modules of that room.

All others enter rooms by their doors, as benchmarks and examples do. A test that needs the inside
of two rooms is two tests, or one and a helper that stands inside of the other room.
"""

BY_THE_WINDOW = {
    # To measure other values of a constant than the one that was chosen by these measurements.
    *(("host_time", "plan.attention"), ("power", "plan.attention"), ("rounds", "plan.attention")),
    ("power", "exchange.cuda_driver"),  # the power that streams take which wait for flags
    ("shared_rows", "engine.messages"),  # to time what is done with the rows of a message, alone
    # To decode as on devices of other profiles.
    *(("test_decode_kernels", "kernels.decode"), ("test_decode_kernels", "kernels.decode_shape")),
    ("conftest", "terminal.progress"),  # no test but its own sees the first line of progress
}

REPOSITORY = Path(__file__).parents[2]
OUTSIDE = [
    path
    for folder in ("tests", "benchmarks", "examples", "docs")
    for path in sorted((REPOSITORY / folder).glob("*.py"))
    if path != Path(__file__)
]
each_outside = pytest.mark.parametrize("path", OUTSIDE, ids=lambda x: f"{x.parent.name}/{x.name}")


def named_modules(path):
    """(module, line) of each module of this package that a program imports, or names to patch."""
    yield from own_imports(path, f"{path.parent.name}.{path.stem}")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("setattr"):
            text = node.args[0].value if isinstance(node.args[0], ast.Constant) else ""
            target = str(text).removeprefix("ring_dilated_attention.").rpartition(".")[0]
            if target in NAMES:
                yield target, node.lineno


def behind_doors(path):
    """Those of them that no door offers."""
    for target, line in named_modules(path):
        room, _, inner = target.partition(".")
        # A module of integrations/ is a door of its own: it needs what it integrates with.
        if inner and room != "integrations" and inner not in offered(room):
            yield target, line


@each_outside
def test_others_enter_by_doors(path):
    room_of = {file: room for room, files in INSIDE.items() for file in files.split()}
    for target, line in behind_doors(path):
        if (path.stem, target) not in BY_THE_WINDOW:
            room = target.partition(".")[0]
            assert room_of.get(path.stem) == room, f"{path.name}:{line} imports {target}"


def test_exceptions_are_needed():
    """Whoever is said to stand inside of a room, or to come by the window, does."""
    used = {path.stem: {target for target, _ in behind_doors(path)} for path in OUTSIDE}
    for room, files in INSIDE.items():
        for file in files.split():
            assert any(target.startswith(f"{room}.") for target in used[file]), (file, room)
    assert all(target in used[file] for file, target in BY_THE_WINDOW)


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def private_names():
    """Of functions, classes, variables and attributes of the package."""
    for path, _ in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield node.name
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield node.id if isinstance(node, ast.Name) else node.attr


PRIVATE = {name for name in private_names() if is_private(name)}


@each_outside
def test_others_use_no_private_names(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and "ring_dilated_attention" in (node.module or ""):
            names = [alias.name for alias in node.names if is_private(alias.name)]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls"):
            names = [node.attr]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("attr"):
            texts = [x.value for x in node.args if isinstance(x, ast.Constant)]
            names = [text.rpartition(".")[2] for text in texts if isinstance(text, str)]
        found = PRIVATE.intersection(names)
        assert not found, f"{path.name} uses {found}: {ast.unparse(node)}"


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_no_room_has_a_cycle(room):
    arrows = {
        name: {target for target, _ in own_imports(path, name) if target.startswith(f"{room}.")}
        for path, name in modules()
        if name.startswith(f"{room}.")
    }
    while arrows:
        free = {name for name, targets in arrows.items() if not targets & arrows.keys()}
        assert free, f"these import each other: {sorted(arrows)}"
        arrows = {name: targets for name, targets in arrows.items() if name not in free}


@pytest.mark.parametrize(("path", "name"), ALL)
def test_plans_are_integers_and_distributed_stays_at_the_edge(path, name):
    top = name.split(".")[0]
    for module, line in imports(path, name):
        where = f"{path.name}:{line} imports {module}"
        if top in INTEGERS_ONLY:
            assert module.split(".")[0] != "torch", where
        if module.startswith("torch.distributed"):
            assert not {top, name}.isdisjoint(MAY_USE_DISTRIBUTED), where


def test_public_names_are_imported_lazily_and_all_there():
    """The table, ``__all__`` and what type checkers see name the same; all of it resolves."""
    tree = ast.parse((ROOT / "__init__.py").read_text())
    (table,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_FROM"
    )
    typed = {
        alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == table
    assert sorted(typed) == sorted(ring_dilated_attention.__all__)
    for name, module in table.items():
        defined = import_module(f"ring_dilated_attention.{module}")
        assert getattr(ring_dilated_attention, name) is getattr(defined, name)
    assert ring_dilated_attention.nn.LongNet.__name__ == "LongNet"
    with pytest.raises(AttributeError, match="has no attribute 'dilated_atention'"):
        _ = ring_dilated_attention.dilated_atention
    script = "import sys, ring_dilated_attention; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_the_package_shows_what_it_offers():
    shown = [name for name in dir(ring_dilated_attention) if name != "__version__"]
    assert shown == sorted(ring_dilated_attention.__all__)


def test_importing_needs_only_torch():
    """Everything but torch and the standard library is blocked; the environment is not read."""
    script = """
import os, sys
import torch, torch.distributed, torch.multiprocessing
torch_needs = set(sys.modules)

class Block:
    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        if top in sys.stdlib_module_names or top in ("torch", "ring_dilated_attention"):
            return None
        if name in torch_needs or top in {m.split(".")[0] for m in torch_needs}:
            return None
        raise ImportError(f"importing {name}")

class Unread(dict):
    def __getattribute__(self, name):
        if name in ("__getitem__", "get", "items", "keys", "copy"):
            raise AssertionError("the environment was read")
        return dict.__getattribute__(self, name)

sys.meta_path.insert(0, Block())
from torch.distributed.device_mesh import DeviceMesh
real = os.environ
os.environ = Unread()
import ring_dilated_attention, ring_dilated_attention.nn
for name in ring_dilated_attention.__all__:
    getattr(ring_dilated_attention, name)
os.environ = real
assert not torch.distributed.is_initialized()
assert "triton" not in sys.modules or "triton" in torch_needs
print("imported")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "imported", done.stderr


@pytest.mark.xdist_group("architecture")
def test_a_group_of_tests_has_one_worker(request):
    """Else fixtures that are made once are made by every worker, and nothing says so."""
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("not run by several workers")
    assert request.node.nodeid.endswith("@architecture")
