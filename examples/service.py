"""A service that classifies digits, for any number of programs that call it with arrays.

    python examples/service.py               serves and calls, in one process
    python examples/service.py ADDRESS       only serves, at 127.0.0.1:5070, say, until Ctrl-C

Another program calls it as `call` does below, and a shell by `zmqdist call ADDRESS mistakes`.
"""

import contextlib
import sys
import threading

import network
import numpy as np

import zmqdist as zd

weights = network.initial(np.random.default_rng(0), hidden=64)
training, test = network.load(np.random.default_rng(0))


def learn(epochs, rate=0.3):
    for rows in epochs * np.array_split(np.arange(len(training[1])), 45):
        _, gradients = network.gradients(weights, training[0][rows], training[1][rows])
        for value, by in zip(weights, gradients, strict=True):
            value -= rate * by


def classify(images):
    """The digits of (n, 64) images."""
    if images.shape[1:] != (64,):
        raise ValueError(f"images are (n, 64), not {images.shape}")
    return network.forward(weights, images)[1].argmax(axis=1)


def mistakes():
    """A stream of the test images that the network gets wrong, one by one."""
    for number, guess in enumerate(classify(test[0])):
        if guess != test[1][number]:
            yield {"image": test[0][number].reshape(8, 8), "says": guess, "is": test[1][number]}


def call(address):
    images, labels = test
    with zd.rpc.connect(address) as client:
        print(*client.methods().values(), sep="\n")
        answers = [client.classify(part) for part in np.array_split(images, 36)]  # all at once
        digits = np.concatenate([answer.get_value() for answer in answers])
        right = (digits == labels).mean()
        print(f"{len(answers)} calls: {right:.0%} of {len(labels)} digits are right")
        for mistake in client.mistakes():
            print(f"a {mistake['is']} that looks like a {mistake['says']}:")
            for row in mistake["image"]:
                print("  ", "".join(" .:-=+*#%@"[pixel * 9 // 16] * 2 for pixel in row).rstrip())
            break  # ends the stream, at the server, too
        try:
            client.classify(images[:, :8]).get_value()
        except zd.errors.OpError as error:
            print(str(error).splitlines()[0])


def main():
    address = sys.argv[1] if sys.argv[1:] else "127.0.0.1:0"  # port 0: a free one
    learn(epochs=10)
    with zd.rpc.serve(address, methods=[classify, mistakes]) as server:
        print(f"serves at {server.address}", flush=True)
        if not sys.argv[1:]:
            call(server.address)
            return
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()


if __name__ == "__main__":
    main()
