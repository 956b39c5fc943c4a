"""The command group: commands come from the table, and what the user did wrong is one sentence."""

import sys
import types

import click
import pytest
from click.testing import CliRunner

from tp3 import __version__
from tp3.cli import main as main_module


@pytest.fixture
def tp3(monkeypatch):
    """Runs `tp3 ARGUMENTS` with a command `fail` in place of the real ones."""

    @click.command()
    @click.option("--kind", default="value")
    def fail(kind):
        raise {"value": ValueError("got 0;\n allowed: 1"), "ours": RuntimeError("a bug")}[kind]

    module = types.ModuleType("tp3_test_commands")
    module.fail = fail
    monkeypatch.setitem(sys.modules, "tp3_test_commands", module)
    monkeypatch.setattr(main_module, "COMMANDS", {"fail": "tp3_test_commands:fail"})
    return lambda *arguments: CliRunner().invoke(main_module.main, arguments)


def test_version(tp3):
    assert tp3("--version").output == f"tp3 {__version__}\n"


def test_help_lists_the_table(tp3):
    result = tp3("--help")
    assert result.exit_code == 0
    assert "fail" in result.output


def test_a_value_error_is_one_sentence_and_code_2(tp3):
    result = tp3("fail")
    assert (result.exit_code, result.stderr) == (2, "Error: got 0; allowed: 1\n")
    assert result.stdout == ""


def test_our_own_errors_keep_their_traceback(tp3):
    assert isinstance(tp3("fail", "--kind", "ours").exception, RuntimeError)


@pytest.mark.parametrize("arguments", [("nonsense",), ("fail", "--nonsense")])
def test_usage_errors_are_code_2(tp3, arguments):
    result = tp3(*arguments)
    assert result.exit_code == 2
    assert "nonsense" in result.stderr


def test_the_table_names_modules_and_functions():
    for target in main_module.COMMANDS.values():
        module, function = target.split(":")
        assert module.startswith("tp3.cli.")
        assert function.isidentifier()
