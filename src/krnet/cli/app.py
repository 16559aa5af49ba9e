"""The command line, thin: parse, call, print. Data on stdout, progress and messages on stderr.

    krnet plan -> record -> info, verify, replay (record.py); learn, demo, bench

Exit codes: 0 done; 1 refused, with `error: ...` on stderr; 2 the command itself is wrong; 130 stopped with Ctrl-C.
Torch is imported inside the commands: help comes at once.
"""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from krnet.cli.bench import bench
from krnet.cli.demo import demo
from krnet.cli.learn import learn
from krnet.cli.output import say
from krnet.cli.record import info, plan, record, replay, verify
from krnet.errors import KrnetError
from krnet.io.ledger import package_version


class Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        """Every refusal ends here: its message, no traceback."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # whoever read stdout has gone: nothing to say, and nobody to say it to
            raise
        except (KrnetError, OSError) as error:
            say(f"error: {error}")
            raise typer.Exit(1) from error


app = typer.Typer(
    cls=Commands, no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)


def main() -> None:
    # Threads that sleep while they wait: beside another busy process, spinning ones slow both down many times over.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    app(prog_name="krnet")


def _show_version(asked: bool) -> None:
    if asked:
        print(f"krnet {package_version()}")
        raise typer.Exit()


@app.callback()
def common(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Record feature maps in a network and replay them by sample ID."""


app.command(short_help="What a recording would take, before making it.")(plan)
app.command(short_help="Features to a recording file.")(record)
app.command(short_help="What a recording holds, how large and how good.")(info)
app.command(short_help="Check a recording, byte by byte, or against its features.")(verify)
app.command(short_help="Samples of a recording to a .npy file.")(replay)
app.command(short_help="Learn classes task after task, by one method or by all.")(learn)
app.command(short_help="Learn digits task after task: KRIL against its bounds, in minutes.")(demo)
app.add_typer(bench, name="bench")
