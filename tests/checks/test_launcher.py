"""Commands among the ranks of a launcher: malformed variables, commands of one process."""

import pytest
from typer.testing import CliRunner

from ring_dilated_attention.cli import app

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
WITHOUT = "start the command with torchrun, or unset WORLD_SIZE and RANK to run without ranks"
BENCH = ("bench", "--device=cpu", "--seq-len=64")


@pytest.fixture
def said(monkeypatch, tmp_path):
    """Runs a command with these variables: what it says as it ends by an error of one line."""

    def run(arguments, variables, code=2):
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        out = [f"--out={tmp_path / 'out'}"] if arguments[0] == "bench" else []
        result = CliRunner().invoke(app, [*arguments, *out])
        assert result.exit_code == code, result.output
        (line,) = result.stderr.splitlines()
        return line

    return run


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"WORLD_SIZE": "abc", "RANK": "0"},
            "WORLD_SIZE, which a launcher sets, must be a whole number >= 1; got 'abc'",
        ),
        (
            {"WORLD_SIZE": "2", "RANK": "2"},
            "RANK, which a launcher sets, must be a whole number from 0 to 1; got '2'",
        ),
        (
            {"WORLD_SIZE": "2"},
            "WORLD_SIZE=2 says that there are 2 ranks, but RANK, from 0 to 1, is not set",
        ),
    ],
    ids=["size", "rank", "no rank"],
)
def test_a_malformed_variable_of_a_launcher_is_named(variables, message, said):
    assert said(BENCH, variables) == f"error: {message}: {WITHOUT}"


def test_a_command_of_one_process_says_so(said):
    arguments = ("simulate", "--seq-len=64")
    assert "rda simulate runs in one process, and this is rank 0 of 2: start it without" in said(
        arguments, {"WORLD_SIZE": "2", "RANK": "0"}
    )
    assert "RANK, from 0 to 1, is not set" in said(arguments, {"WORLD_SIZE": "2"})
