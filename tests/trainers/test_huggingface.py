"""Hugging Face: datasets in and out, and a `Trainer` that resumes where it stood."""

from __future__ import annotations

from itertools import chain

import datasets
import pytest
import torch
import transformers

import penstock as ps
from penstock.torch import DataLoader
from tests.trainers.rows import rows
from tests.waiting import wait_until


class Regression(torch.nn.Module):
    """What the trainer asks of a model, and no more. It notes which rows it saw."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(4, 1)
        self.seen = []

    def forward(self, x=None, labels=None, index=None):
        if self.training:
            self.seen.append(index.tolist())
        return {"loss": ((self.layer(x.float())[:, 0] - labels.float()) ** 2).mean()}


class StopAt(transformers.TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **more):
        control.should_training_stop = state.global_step == self.step


def named():
    return rows().map(lambda row: {"x": row["x"], "labels": row["y"], "index": row["index"]})


class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        x = torch.rand(4)
        return {"x": x, "labels": x.sum(), "index": index}


def train(folder, *, stops_at=None, resume=None, **data):
    args = transformers.TrainingArguments(
        str(folder),
        num_train_epochs=2,
        per_device_train_batch_size=8,
        save_steps=5,
        save_strategy="steps",
        logging_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
        learning_rate=0.01,
    )
    model = Regression()
    callbacks = [] if stops_at is None else [StopAt(stops_at)]
    trainer = ps.huggingface.LoaderTrainer(model, args, callbacks=callbacks, **data)
    trainer.train(resume_from_checkpoint=resume)
    weights = [float(x) for p in model.parameters() for x in p.detach().flatten()]
    return {
        "seen": model.seen,
        "weights": weights,
        "loader": trainer._prepared.loader,
        "steps": trainer.state.global_step,
    }


def test_a_trainer_reads_a_pipeline_and_resumes_in_mid_epoch(tmp_path):
    whole = train(tmp_path / "whole", train_loader=named().batch(8))
    assert whole["steps"] == len(whole["seen"]) == 24
    train(tmp_path / "stopped", stops_at=7, train_loader=named().batch(8))
    resumed = train(tmp_path / "stopped", resume=tmp_path / "stopped" / "checkpoint-5", train_loader=named().batch(8))
    assert resumed["seen"] == whole["seen"][5:] and resumed["weights"] == whole["weights"]


def test_with_offload_a_trainer_ends_with_the_same_weights_and_nothing_is_left_of_it(tmp_path):
    with ps.LocalService(workers=1) as service:
        plain = train(tmp_path / "plain", train_loader=named().batch(8).distribute(service, order="deterministic"))
        with_offload = train(tmp_path / "offloaded", train_loader=named().batch(8), offload=service)
        assert with_offload["seen"] == plain["seen"] and with_offload["weights"] == plain["weights"]
        wait_until(lambda: len(service.workers()) == 1, "guests to be gone")


def test_a_trainer_makes_our_loader_over_its_dataset_and_resumes_in_mid_epoch(tmp_path):
    whole = train(tmp_path / "whole", train_dataset=Noisy())
    assert type(whole["loader"]) is DataLoader and len(whole["seen"]) == 24
    train(tmp_path / "stopped", stops_at=17, train_dataset=Noisy())
    resumed = train(tmp_path / "stopped", resume=tmp_path / "stopped" / "checkpoint-15", train_dataset=Noisy())
    assert type(resumed["loader"]) is DataLoader
    assert resumed["seen"] == whole["seen"][15:] and resumed["weights"] == whole["weights"]


def test_a_checkpoint_without_the_data_s_state_is_refused(tmp_path):
    train(tmp_path, stops_at=6, train_loader=named().batch(8))
    (found,) = (tmp_path / "checkpoint-5").glob("penstock-data-*")
    found.unlink()
    with pytest.raises(ps.InvalidArgumentError, match="does not say where the data stood"):
        train(tmp_path, resume=tmp_path / "checkpoint-5", train_loader=named().batch(8))


@pytest.mark.parametrize("streaming", [False, True])
def test_datasets_come_in_and_resume(streaming):
    given = datasets.Dataset.from_list([{"id": i, "text": f"t{i}"} for i in range(20)])
    if streaming:
        given = given.to_iterable_dataset(num_shards=4)
    dataset = ps.from_huggingface(given).shuffle(8, seed=3).batch(4)
    iterator = dataset.iterator()
    head = [next(iterator)["id"].tolist() for _ in range(2)]
    state = iterator.state_dict()
    rest = [batch["id"].tolist() for batch in iterator]
    again = dataset.iterator()
    again.load_state_dict(state)
    assert [batch["id"].tolist() for batch in again] == rest
    assert sorted(chain.from_iterable(head + rest)) == list(range(20))


def test_pipelines_go_out_as_datasets():
    dataset = ps.range(6).map(lambda i: {"id": i, "text": f"t{i}"})
    made = ps.huggingface.to_datasets(dataset)
    assert isinstance(made, datasets.Dataset) and made["text"][:2] == ["t0", "t1"] and len(made) == 6
    streamed = ps.huggingface.to_datasets(dataset, streaming=True)
    assert isinstance(streamed, datasets.IterableDataset)
    assert [row["id"] for row in streamed] == list(range(6)) == [row["id"] for row in streamed]
    with pytest.raises(ps.InvalidArgumentError, match="a pipeline of dicts"):
        ps.huggingface.to_datasets(ps.range(3))
