"""Penstock for Lightning: data modules, Fabric, and checkpoints that carry the data's state.

data = ps.lightning.DataModule(train=lambda ranks: dataset.distribute(service, job="run", ranks=ranks))
trainer = lightning.Trainer(callbacks=[ps.lightning.DataState()])
trainer.fit(model, data, ckpt_path=...)
"""

from penstock.lightning.callback import DataState
from penstock.lightning.modules import DataModule, FabricLoader

__all__ = ["DataModule", "DataState", "FabricLoader"]
