"""Search for the settings of a training, and stop bad trials early.

    python examples/search.py

A trial trains epoch by epoch, one task an epoch. When a task ends, the program looks at its
accuracy: if it is among the best third, of what all trials had reached by this epoch, the trial
gets its next task, by `add`. When a trial reaches the goal, all that still runs is cancelled.
"""

import network
import numpy as np
import plots

import zmqdist as zd

TRIALS, EPOCHS, GOAL = 24, 20, 0.983


def settings(trial):
    rng = np.random.default_rng(trial)
    return {"rate": 10 ** rng.uniform(-3, 0.5), "hidden": int(rng.integers(4, 64))}


def train(trial, epoch, weights, rate, hidden):
    """Runs on a worker: one epoch from these weights on. Returns what the next one needs."""
    training, test = network.load(np.random.default_rng(0))
    weights = weights or network.initial(np.random.default_rng(trial), hidden)
    order = np.random.default_rng([trial, epoch]).permutation(len(training[1]))
    for rows in np.array_split(order, 45):
        _, gradients = network.gradients(weights, training[0][rows], training[1][rows])
        weights = [value - rate * by for value, by in zip(weights, gradients, strict=True)]
    return trial, epoch, weights, network.accuracy(weights, *test)


def main():
    curves: dict[int, list[float]] = {trial: [] for trial in range(TRIALS)}  # by epoch
    with zd.local_cluster(workers=2) as cluster, cluster.coordinator() as coordinator:
        first = [coordinator.submit(train, n, 0, None, **settings(n)) for n in range(TRIALS)]
        running = coordinator.as_completed(first)
        for value in running:
            trial, epoch, weights, accuracy = value.result()
            curves[trial].append(accuracy)
            reached = [max(curve[: epoch + 1]) for curve in curves.values() if curve]
            if accuracy >= GOAL:
                coordinator.cancel_all()
                break
            if epoch + 1 < EPOCHS and accuracy >= np.quantile(reached, 2 / 3):
                again = coordinator.submit(train, trial, epoch + 1, weights, **settings(trial))
                running.add(again)
    best = max(curves, key=lambda trial: max(curves[trial], default=0))
    epochs = sum(map(len, curves.values()))
    print(f"{TRIALS} trials: {epochs} epochs were trained, of {TRIALS * EPOCHS}")
    told = ", ".join(f"{name} {value:.3g}" for name, value in settings(best).items())
    print(f"the best: {told}: accuracy {max(curves[best]):.3f} in epoch {len(curves[best])}")
    plots.curves("search.png", "Trials", "epoch", "test accuracy", curves.values(), best)


if __name__ == "__main__":
    main()
