"""Two ranks train on sentences of many lengths; in every step both get batches of one bucket, padded alike.

python examples/length_buckets.py

Without `coordinated=True` one rank may draw a batch of long sentences while the other draws a short one, and then waits
for it. The ranks are processes that wait for each other after each step, as data-parallel training does: with torch
through gloo, else through a barrier.
"""

import importlib.util
import multiprocessing
import os
import tempfile
from pathlib import Path

import numpy as np

import penstock as ps

RANKS, SENTENCES, BATCH, WORDS = 2, 4000, 16, 1000
BOUNDARIES = (8, 16, 32, 64)


def sentence(i, rng):
    length = min(100, 1 + int(rng.gamma(1.5, 8)))  # most are short, some are long
    return {"id": i, "words": rng.integers(1, WORDS, length)}


def dataset():
    return (
        ps.range(SENTENCES)
        .shuffle(seed=1)
        .map(sentence)
        .bucket_by_length(lambda row: len(row["words"]), boundaries=BOUNDARIES, batch_size=BATCH)
    )


class NumpyTrainer:
    """A bag of words, and no more: what matters here is how the ranks keep step."""

    def __init__(self, barrier):
        self._barrier = barrier
        self._weights = np.zeros(WORDS)

    def step(self, words):
        self._weights += np.bincount(words.ravel(), minlength=WORDS)
        self._barrier.wait(60)


class TorchTrainer:
    def __init__(self, rank, rendezvous):
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(0)
        torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
        embedding = torch.nn.Embedding(WORDS, 16, padding_idx=0)
        self._model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(embedding, torch.nn.Linear(16, 1)))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)
        self._torch = torch

    def step(self, words):
        self._optimizer.zero_grad()
        scores = self._model(self._torch.from_numpy(words)).mean(dim=(1, 2))
        loss = ((scores - 1.0) ** 2).mean()
        loss.backward()  # the ranks' gradients are averaged here: each waits for the other
        self._optimizer.step()


def train(rank, service, folder, barrier):
    with_torch = importlib.util.find_spec("torch") is not None
    trainer = TorchTrainer(rank, folder / "rendezvous") if with_torch else NumpyTrainer(barrier)
    shapes, ids = [], []
    loader = dataset().distribute(
        service, job="buckets", ranks=ps.Ranks(RANKS, rank, coordinated=True), limits=ps.Limits(timeout_s=60)
    )
    with loader:
        for batch in loader:
            trainer.step(batch["words"])
            shapes.append(batch["words"].shape[1])
            ids += batch["id"].tolist()
    np.savez(folder / f"rank{rank}.npz", shapes=shapes, ids=ids)


def main():
    folder = Path(tempfile.mkdtemp())
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(RANKS)
    with ps.LocalService(workers=2) as service:
        address = os.fspath(service.service_file)
        ranks = [context.Process(target=train, args=(rank, address, folder, barrier)) for rank in range(RANKS)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
            assert rank.exitcode == 0
    read = [np.load(folder / f"rank{rank}.npz") for rank in range(RANKS)]
    assert np.array_equal(read[0]["shapes"], read[1]["shapes"])
    ids = np.concatenate([one["ids"] for one in read])
    assert np.array_equal(np.sort(ids), np.arange(SENTENCES))
    print(f"{len(read[0]['shapes'])} steps: in each, both ranks had batches of one padded length")
    print(
        f"{len(ids)} sentences read once each, padded to between {read[0]['shapes'].min()} and {max(read[0]['shapes'])}"
    )


if __name__ == "__main__":
    main()
