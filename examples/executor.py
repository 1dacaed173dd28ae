"""A program for a ProcessPoolExecutor, on a cluster: only the line that makes the executor differs.

    python examples/executor.py      on the cores of this machine

As `program:` in a file for `zmqdist launch` it runs on the cluster of the file.

The primes are those of the example in Python's manual of concurrent.futures.
"""

import math
from concurrent.futures import as_completed

import zmqdist as zd

PRIMES = [
    112272535095293,
    112582705942171,
    112272535095293,
    115280095190773,
    115797848077099,
    1099726899285419,
]


def is_prime(n):
    if n < 2 or n % 2 == 0:
        return n == 2
    return all(n % i for i in range(3, math.isqrt(n) + 1, 2))


def main():
    with zd.Executor() as executor:  # was: ProcessPoolExecutor()
        for number, prime in zip(PRIMES, executor.map(is_prime, PRIMES), strict=True):
            print(f"{number} is prime: {prime}")
        futures = {executor.submit(int, text, 16): text for text in ("ff", "1000", "no number")}
        for future in as_completed(futures):
            error = future.exception()
            print(f"int({futures[future]!r}, 16): {error or future.result()}")


if __name__ == "__main__":
    main()
