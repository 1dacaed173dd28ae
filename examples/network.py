"""The digits of data/ and a network with one hidden layer, which other programs here train."""

from pathlib import Path

import numpy as np

TRAINING = 1_437  # of 1,797 images; the other 360 are the test


def load(rng):
    """Training and test set, each (n, 64) pixels of 0 to 16 and (n,) digits, uint8."""
    file = Path(__file__).parent / "data" / "digits.csv.gz"
    rows = rng.permutation(np.loadtxt(file, delimiter=",", dtype=np.uint8))
    return (rows[:TRAINING, :64], rows[:TRAINING, 64]), (rows[TRAINING:, :64], rows[TRAINING:, 64])


def initial(rng, hidden):
    """The four weights, before any training: small random numbers, and offsets of zero."""
    sizes = [(64, hidden), (hidden,), (hidden, 10), (10,)]
    scales = [(2 / size[0]) ** 0.5 * (len(size) > 1) for size in sizes]
    return [rng.normal(0, *how).astype("f4") for how in zip(scales, sizes, strict=True)]


def forward(weights, images):
    """Hidden layer and logits."""
    w1, b1, w2, b2 = weights
    hidden = np.maximum(images / np.float32(16) @ w1 + b1, 0)
    return hidden, hidden @ w2 + b2


def gradients(weights, images, labels):
    """The loss of a batch and its gradient by each weight, both as a mean over the images."""
    hidden, logits = forward(weights, images)
    logits = logits - logits.max(axis=1, keepdims=True)
    chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    picked = np.arange(len(labels)), labels
    loss = -np.log(chances[picked]).mean()
    chances[picked] -= 1
    chances /= len(labels)
    below = (chances @ weights[2].T) * (hidden > 0)
    by_w1 = images.T / np.float32(16) @ below
    return loss, [by_w1, below.sum(axis=0), hidden.T @ chances, chances.sum(axis=0)]


def accuracy(weights, images, labels):
    return float((forward(weights, images)[1].argmax(axis=1) == labels).mean())
