"""A small language model on a packed mixture of two sources, over two ranks; one is killed, both go on.

pip install 'penstock[torch]'
python examples/language_model.py
"""

import multiprocessing
import os
import signal
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import penstock as ps
from penstock.torch import tensors

RANKS, STEPS, DIES_AT, LENGTH, BATCH = 2, 24, 9, 64, 4


def tokens(text):
    return {"tokens": np.frombuffer(text.encode(), np.uint8).astype(np.int64)}


def write_sources(folder):
    for name, words in {"prose": ("the river ", "runs to the sea. "), "code": ("for x in y: ", "return z; ")}.items():
        lines = [f"{i} " + "".join(words[(i * j) % 2] for j in range(3 + i % 9)) for i in range(2000)]
        Path(folder, f"{name}.txt").write_text("\n".join(lines))


def mixture(folder):
    prose, code = (ps.read_text(f"{folder}/{name}.txt").shuffle(500, seed=1) for name in ("prose", "code"))
    return (
        ps.mix([prose.repeat(), code.repeat()], weights=[0.7, 0.3])
        .map(tokens)
        .pack(LENGTH + 1, key="tokens")  # rows of whole texts, with segment ids: no token is padding but a few
        .batch(BATCH)
    )


def loss_of(model, rows):  # the next byte from this one
    return torch.nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def train(rank, folder, run, service, dies_at):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet-{run}", rank=rank, world_size=RANKS)
    loader = tensors(mixture(folder).distribute(service, job=run, ranks=ps.Ranks(RANKS, rank), order="deterministic"))
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Embedding(256, 256))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    checkpoint, step = Path(folder, f"{run}-rank-{rank}.pt"), 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["data"])
        step = saved["step"]
    for batch in loader:
        loss = loss_of(model, batch["tokens"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "data": loader.state_dict()}
        torch.save({**state, "step": step, "loss": loss.item()}, checkpoint)
        if step == dies_at:
            dist.barrier()  # both have saved this step
            os.kill(os.getpid(), signal.SIGKILL)
        if step == STEPS:
            return


def launch(folder, run, service, dies_at=None):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "penstock.torch"])  # imported once, not by every rank
    ranks = [context.Process(target=train, args=(r, folder, run, service, dies_at)) for r in range(RANKS)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    Path(folder, f"meet-{run}").unlink(missing_ok=True)
    return torch.load(Path(folder, f"{run}-rank-0.pt"))


def main():
    with tempfile.TemporaryDirectory() as folder, ps.LocalService(1) as service:
        write_sources(folder)
        expected = launch(folder, "whole", service.service_file)
        launch(folder, "killed", service.service_file, dies_at=DIES_AT)
        resumed = launch(folder, "killed", service.service_file)
    assert all(torch.equal(expected["model"][name], resumed["model"][name]) for name in expected["model"])
    print(f"both ranks killed after step {DIES_AT}; after {STEPS} the model is the undisturbed run's, bit for bit")


if __name__ == "__main__":
    main()
