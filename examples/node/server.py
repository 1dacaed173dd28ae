"""Functions for example.mjs: `python examples/node/server.py 127.0.0.1:5060`."""

import sys

import zmqdist as zd


def scale(array, by=10):
    return array * by


def next_number(number):
    return number + 1


def count(upto):
    yield from range(upto)


def find(name):
    raise zd.errors.NotFoundError(f"nobody is called {name}")


if __name__ == "__main__":
    with zd.rpc.serve(sys.argv[1], [scale, next_number, count, find]) as server:
        print(server.address, flush=True)
        sys.stdin.read()
