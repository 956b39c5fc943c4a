"""`tp3`, the entry point: commands are rows of a table and imported when they are called.

A ValueError is the user's: it becomes one sentence on stderr and exit code 2, as click's own usage
errors do. Anything else is ours and keeps its traceback.
"""

import importlib
from typing import Any, cast

import click

from tp3 import __version__

COMMANDS = {
    "algorithms": "tp3.cli.algorithms:algorithms",
    "bench": "tp3.cli.bench:bench",
    "check": "tp3.cli.check:check",
    "doctor": "tp3.cli.doctor:doctor",
    "pad": "tp3.cli.pad:pad",
    "plan": "tp3.cli.plan:plan",
    "smoke": "tp3.cli.smoke:smoke",
    "verify": "tp3.cli.verify:verify",
}


class BadInput(click.ClickException):
    exit_code = 2


class LazyGroup(click.Group):
    """A group whose commands are the rows of COMMANDS."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, function = COMMANDS[cmd_name].split(":")
        return cast(click.Command, getattr(importlib.import_module(module), function))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ValueError as error:
            raise BadInput(" ".join(str(error).split())) from error


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tp3", message="%(prog)s %(version)s")
def main() -> None:
    """Run large language models tensor-parallel on 3, 5, 6 or 7 GPUs."""
