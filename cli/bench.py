"""`zmqdist bench`: this machine's figures, each as a ratio to bare pyzmq or to the standard library in the same run."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from zmqdist.observe.bench import Figure


@click.command()
@click.option("--peer", metavar="ADDRESS", help="RPC server to call; it has to offer `echo` and `echo_pool`.")
@click.option("--quick", is_flag=True, help="A few seconds, rough figures.")
@click.option("--json", "as_json", is_flag=True, help="As JSON, when all is measured.")
def bench(peer: str | None, *, quick: bool, as_json: bool) -> None:
    """Measure this machine against bare pyzmq."""
    from zmqdist.observe.bench import Size, machine, measure

    figures = []
    if not as_json:
        click.echo(f"{machine()}; ratios are medians over blocks of this run")
        click.echo(f"{'what':48} {'ours':>12} {'p99':>10} {'other':>12}  ratio")
    for figure in measure(Size.quick() if quick else Size(), peer):
        figures.append(figure)
        if not as_json:
            click.echo(row(figure))
    if as_json:
        told = [dataclasses.asdict(figure) for figure in figures]
        click.echo(json.dumps({"machine": machine(), "figures": told}, indent=2))


def row(figure: Figure) -> str:
    """One line of the table."""
    p99 = "" if figure.p99 is None else number(figure.p99)
    other = "" if figure.other is None else number(figure.other)
    ratio = "" if figure.ratio is None else f"{figure.ratio:.2f} x {figure.against}"
    return f"{figure.what:48} {number(figure.ours):>12} {p99:>10} {other:>12}  {figure.unit}  {ratio}".rstrip()


def number(value: float) -> str:
    """Three figures that count."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
