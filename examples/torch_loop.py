"""Train a network of PyTorch whose batches other processes prepare: pip install torch

    python examples/torch_loop.py

The training loop is PyTorch's own. Only its DataLoader reads a dataset that workers compute.
"""

import network
import numpy as np
import torch
from torch.utils.data import DataLoader

import zmqdist as zd
from zmqdist.integrations.torch import IterableDataset

EPOCHS, BATCH = 10, 32
(IMAGES, LABELS), TEST = network.load(np.random.default_rng(0))


def noisy(number):
    """Runs on a worker: an image, with noise that differs from one element to the next."""
    pixels = IMAGES[number] + np.random.default_rng(int(number)).normal(0, 1, 64)
    return (pixels / 16).astype(np.float32), LABELS[number].astype(np.int64)


def main():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    with zd.local_cluster(workers=2) as cluster:
        remote = zd.data.service.distribute("distributed_epoch", cluster)
        dataset = zd.data.Dataset.range(len(LABELS)).map(noisy).batch(BATCH).apply(remote)
        loader = DataLoader(IterableDataset(dataset), batch_size=None)
        for epoch in range(1, EPOCHS + 1):
            losses = []
            for images, labels in loader:
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            print(f"epoch {epoch:2}/{EPOCHS}  loss {np.mean(losses):.4f}", flush=True)
    with torch.no_grad():
        guesses = model(torch.from_numpy(TEST[0] / np.float32(16))).argmax(dim=1)
    print(f"test accuracy: {(guesses.numpy() == TEST[1]).mean():.3f}")


if __name__ == "__main__":
    main()
