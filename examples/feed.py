"""Judge a feed without an end: a worker makes the readings, the others judge them with a model that
each slot has loaded once, and the results come in order, a few ahead of the program.

    python examples/feed.py
"""

import itertools
import random
import typing

import zmqdist as zd

HOURS = 12


def readings(sensor):
    """Yield the temperature of each hour, for ever."""
    draw = random.Random(sensor)
    for hour in itertools.count():
        yield hour, draw.gauss(20, 6)


def load_model():
    """Return what may take a minute to load: here two bounds."""
    return {"frosty": 12, "pleasant": 22}


def judge(model, reading):
    if random.random() < 0.2:
        raise ConnectionError("the archive of this hour is busy")
    hour, degrees = reading
    word = next((word for word, bound in model.items() if degrees < bound), "hot")
    return hour, round(degrees), word


def extremes(degrees):
    return min(degrees), max(degrees)


def main():
    with zd.local_cluster(workers=3) as cluster, cluster.coordinator() as coordinator:
        model = coordinator.per_slot(load_model)
        retries = zd.Retries(20, backoff_s=0.01, backoff_max_s=0.1, retry_if=ConnectionError)
        patient = coordinator.options(retries=retries)
        days = []
        with (
            coordinator.stream(readings, 7, ahead=10) as feed,
            patient.imap(judge, itertools.repeat(model), feed, ahead=10) as judged,
        ):
            for hour, degrees, word in itertools.islice(judged, HOURS):
                print(f"{hour:2} h {degrees:3} degrees: {word}")
                days.append(degrees)
        parts: typing.Any = coordinator.options(num_returns=2).submit(extremes, days)
        lowest, highest = parts
        print(f"from {lowest.result()} to {highest.result()} degrees")


if __name__ == "__main__":
    main()
