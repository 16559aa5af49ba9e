"""The entry point of the command line: collect the commands, and turn errors into exit codes.

    plan, extract -> record, append, encode -> info, verify, replay (these three in replay.py)
    learn, demo, bench
    reproduce, report

A command parses its options, calls the library, and prints: results on stdout, progress and messages on stderr.
Exit codes: 0 done; 1 refused, with `error: ...` on stderr; 2 wrong usage; 130 stopped with Ctrl-C, 143 by SIGTERM, 129
by SIGHUP. What is done is saved in all three cases.
Commands import torch inside the function, so that `--help` does not wait for it.
"""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from krnet.cli.append import append
from krnet.cli.bench import bench
from krnet.cli.demo import demo
from krnet.cli.encode import encode
from krnet.cli.extract import extract
from krnet.cli.learn import learn
from krnet.cli.output import say
from krnet.cli.plan import plan
from krnet.cli.record import record
from krnet.cli.replay import info, replay, verify
from krnet.cli.report import report
from krnet.cli.reproduce import reproduce
from krnet.cli.signals import is_of_a_stop, stopping_like_ctrl_c
from krnet.config import plain_text
from krnet.errors import KrnetError, KrnetWarning
from krnet.io.ledger import package_version
from krnet.ranks import Rank, leave_reason, refuse_several, this_rank

CTRL_C_CODE = 130  # with which a command ends that has been stopped
IN_ONE_PROCESS = ("append", "demo", "bench", "reproduce")
STOP_CODES = (129, CTRL_C_CODE, 143)
LAST = ("bench", "reproduce", "report")  # typer lists a group of commands, such as bench, behind all others


class Commands(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        """The names in the order of their use."""
        names = super().list_commands(ctx)
        return [name for name in names if name not in LAST] + [name for name in LAST if name in names]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that is asked for; refused if several processes were to do, and write, the same."""
        name, command, rest = super().resolve_command(ctx, args)
        if name in IN_ONE_PROCESS:
            refuse_several(name, this_rank())
        return name, command, rest

    def invoke(self, ctx: Any) -> Any:
        """Print a refusal as `error: ...` without a traceback, and exit with code 1."""
        _refuse_empty_output(ctx.args)
        with stopping_like_ctrl_c() as stop, _plain_warnings():
            try:
                return self._invoke(ctx)
            except KeyboardInterrupt:
                say("stopped")
                raise typer.Exit(stop.exit_code) from None
            except typer.Exit as end:
                if end.exit_code != CTRL_C_CODE:
                    raise
                raise typer.Exit(stop.exit_code) from None
            except Exception as error:
                if not is_of_a_stop(error):
                    raise
                say("stopped")
                raise typer.Exit(stop.exit_code) from None

    def _invoke(self, ctx: Any) -> Any:
        rank = Rank()
        try:
            rank = this_rank()
            return super().invoke(ctx)
        except BrokenPipeError:  # the reader of stdout has closed it, as `head` does: no error message
            raise
        except (KrnetError, OSError) as error:
            command = self.get_command(ctx, ctx.invoked_subcommand or "")
            message = f"{rank.prefix}error: {_with_option_name(str(error), command)}"
            leave_reason(plain_text(message))
            say(message)
            raise typer.Exit(1) from error


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Print warnings of krnet as messages, without the line of code that they come from."""
    with warnings.catch_warnings():
        show_others = warnings.showwarning

        def show(message: Any, category: Any, *where: Any, **more: Any) -> None:
            if issubclass(category, KrnetWarning):
                if this_rank().is_first:  # others would say the same
                    say(f"warning: {message}")
            else:
                show_others(message, category, *where, **more)

        warnings.showwarning = show
        yield


def _refuse_empty_output(words: Sequence[str]) -> None:
    """Refuse -o '': as a path it would be the current folder."""
    for option, value in pairwise([*words, "end"]):
        if option == "--out=" or (option in ("-o", "--out") and not value):
            raise typer.BadParameter("its value is empty; expected a name", param_hint="'--out'")


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
    try:
        app(prog_name="krnet")
    except KeyboardInterrupt:  # before the command has begun
        _end_now(CTRL_C_CODE)
    except SystemExit as end:
        # Python's way out may abort a process of a team: threads of torch.distributed are still there.
        if end.code in STOP_CODES or (_in_team() and isinstance(end.code, int | None)):
            _end_now(end.code or 0)
        raise


def _in_team() -> bool:
    try:
        return this_rank().count > 1
    except KrnetError:  # said already
        return False


def _end_now(code: int) -> None:
    """End with this code. Python itself would report SIGINT where a stop came within code made from a string."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


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


app.command(short_help="Predict the size, R2 and time of a recording.")(plan)
app.command(short_help="Write the features that a network makes of images.")(extract)
app.command(short_help="Write features to a recording file.")(record)
app.command(short_help="Add samples to a recording.")(append)
app.command(short_help="Encode many samples with a fitted model, into a folder.")(encode)
app.command(short_help="Show what a recording holds, its size and its error.")(info)
app.command(short_help="Check a recording byte by byte, or against its features.")(verify)
app.command(short_help="Write samples of a recording to a .npy file.")(replay)
app.command(short_help="Learn classes task after task, by one or several methods.")(learn)
app.command(short_help="Learn digits in two minutes: KRIL against all images.")(demo)
app.add_typer(bench, name="bench")
app.command(short_help="Run the experiments of the paper, and compare with its numbers.")(reproduce)
app.command(short_help="Show results on one page.")(report)
