"""Two DDP ranks on gloo, one of them killed; started again from their checkpoints they end as if nothing had happened.

pip install 'penstock[torch]'
python examples/torch_ddp_resume.py
"""

import multiprocessing
import os
import signal
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler

from penstock.torch import DataLoader

RANKS, EPOCHS, DIES_AT = 2, 3, 17
WORKERS = 0  # with 2, each rank has two processes that make the same batches


class Line(Dataset):
    """Points of a line, with noise from torch's global generator."""

    def __len__(self):
        return 90  # uneven: DistributedSampler fills up, so that ranks take equal steps

    def __getitem__(self, index):
        x = torch.tensor([index / 90])
        return x, 3 * x - 1 + 0.1 * torch.randn(1)


def train(rank, folder, run, dies_at):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet-{run}", rank=rank, world_size=RANKS)
    torch.manual_seed(rank)
    dataset = Line()
    sampler = DistributedSampler(dataset, RANKS, rank, seed=5)
    loader = DataLoader(dataset, batch_size=5, sampler=sampler, num_workers=WORKERS, seed_samples=True)
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    checkpoint = Path(folder) / f"rank-{rank}.pt"
    step = first = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        loader.load_state_dict(saved["data"])
        step, first = saved["step"], saved["epoch"]
    for epoch in range(first, EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            step += 1
            state = {"model": model.state_dict(), "data": loader.state_dict(), "step": step, "epoch": epoch}
            torch.save(state, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").rename(checkpoint)
            if step == dies_at and rank == 1:
                dist.barrier()  # the other rank has saved this step too
                os.kill(os.getpid(), signal.SIGKILL)
            if step == dies_at:
                dist.barrier()
    dist.destroy_process_group()


def launch(folder, run, dies_at=None):
    """Start the ranks, as torchrun would; return how they ended, and the model of rank 0."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=train, args=(rank, folder, run, dies_at)) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    ranks[1].join()
    if ranks[1].exitcode:
        ranks[0].kill()  # one is lost: all begin again from their checkpoints
    ranks[0].join()
    return ranks[1].exitcode, torch.load(Path(folder) / "rank-0.pt")


def main():
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as disturbed, tempfile.TemporaryDirectory() as undisturbed:
        ended, _ = launch(disturbed, "first", dies_at=DIES_AT)
        _, resumed = launch(disturbed, "second")
        _, expected = launch(undisturbed, "only")
    print(f"rank 1 ended with {ended} after step {DIES_AT}")
    assert resumed["step"] == expected["step"]
    assert all(torch.equal(resumed["model"][name], expected["model"][name]) for name in expected["model"])
    print(f"after {resumed['step']} steps the weights are those of a run that was not disturbed, bit for bit")


if __name__ == "__main__":
    main()
