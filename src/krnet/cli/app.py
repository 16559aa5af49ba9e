"""The entry point of the command line: collect the commands, and turn errors into exit codes.

    plan, extract -> record -> info, verify, replay   record.py; extract.py, append.py
    learn, demo, bench                                learn.py, demo.py, bench.py
    reproduce, report                                 reproduce.py, report.py

A command parses its options, calls the library, and prints: results on stdout, progress and messages on stderr.
Exit codes: 0 done; 1 refused, with `error: ...` on stderr; 2 wrong usage; 130 stopped with Ctrl-C.
Commands import torch inside the function, so that `--help` does not wait for it.
"""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from krnet.cli.append import append
from krnet.cli.bench import bench
from krnet.cli.demo import demo
from krnet.cli.extract import extract
from krnet.cli.learn import learn
from krnet.cli.output import say
from krnet.cli.record import info, plan, record, replay, verify
from krnet.cli.report import report
from krnet.cli.reproduce import reproduce
from krnet.errors import KrnetError
from krnet.io.ledger import package_version

LAST = ("bench", "reproduce", "report")  # typer lists a group of commands, such as bench, behind all others


class Commands(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        """The names in the order of their use."""
        names = super().list_commands(ctx)
        return [name for name in names if name not in LAST] + [name for name in LAST if name in names]

    def invoke(self, ctx: Any) -> Any:
        """Print a refusal as `error: ...` without a traceback, and exit with code 1."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # the reader of stdout has closed it, as `head` does: no error message
            raise
        except (KrnetError, OSError) as error:
            command = self.get_command(ctx, ctx.invoked_subcommand or "")
            say(f"error: {_with_option_name(str(error), command)}")
            raise typer.Exit(1) from error


def _with_option_name(message: str, command: Any) -> str:
    """Name the option where a message begins with the setting that it gives: "time_budget is 0", of --time-budget."""
    name, verb, rest = message.partition(" is ")
    options = {param.name: max(param.opts, key=len) for param in getattr(command, "params", ())}
    found = options.get(name, "")
    return f"{found}{verb}{rest}" if found.startswith("--") else message


app = typer.Typer(
    cls=Commands, no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)


def main() -> None:
    # Let waiting threads sleep: threads that spin slow down every other busy process on the machine, and this one.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    app(prog_name="krnet")


def _show_version(asked: bool) -> None:
    if asked:
        print(f"krnet {package_version()}")
        raise typer.Exit()


@app.callback()
def common(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Record feature maps in a small file, replay them by sample ID, and learn new classes on the replays."""


app.command(short_help="Predict the size of a recording.")(plan)
app.command(short_help="Write the features that a network makes of images.")(extract)
app.command(short_help="Write features to a recording file.")(record)
app.command(short_help="Add samples to a recording.")(append)
app.command(short_help="Show what a recording holds, its size and its error.")(info)
app.command(short_help="Check a recording byte by byte, or against its features.")(verify)
app.command(short_help="Write samples of a recording to a .npy file.")(replay)
app.command(short_help="Learn classes task after task, by one or several methods.")(learn)
app.command(short_help="Learn digits in two minutes: KRIL against all images.")(demo)
app.add_typer(bench, name="bench")
app.command(short_help="Run the experiments of the paper, and compare with its numbers.")(reproduce)
app.command(short_help="Show results on one page.")(report)
