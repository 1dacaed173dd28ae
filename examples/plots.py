"""The pictures that other programs here write, if matplotlib is installed."""


def _figure(size):
    try:
        import matplotlib
    except ImportError:
        print("no picture: it needs matplotlib (pip install matplotlib)")
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.figure(figsize=size, layout="constrained")


def curves(path, title, across, up, lines, best=None):
    """Draw each of `lines`: its values at 1, 2, ...; the one with number `best` stands out."""
    figure = _figure((6, 3.2))
    if figure is None:
        return
    axes = figure.subplots()
    for number, values in enumerate(lines):
        loud = best is None or number == best
        axes.plot(
            range(1, len(values) + 1),
            values,
            color="tab:blue" if loud else "0.75",
            zorder=1 + loud,
            marker=".",
        )
    axes.set(title=title, xlabel=across, ylabel=up)
    figure.savefig(path, dpi=100)
    print(f"picture: {path}")


def images(path, rows):
    """Draw each row of 64 pixels as a square of 8 x 8, side by side."""
    figure = _figure((len(rows), 1.1))
    if figure is None:
        return
    for axes, row in zip(figure.subplots(1, len(rows)), rows, strict=True):
        axes.imshow(row.reshape(8, 8), cmap="gray_r")
        axes.axis("off")
    figure.savefig(path, dpi=80)
    print(f"picture: {path}")
