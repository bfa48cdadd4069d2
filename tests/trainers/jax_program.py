"""What is read with JAX, as processes of two simulated devices: `python -m tests.trainers.jax_program RANK FOLDER`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{os.environ['MASTER_PORT']}", num_processes=2, process_id=rank)

import jax.numpy as jnp  # noqa: E402
import orbax.checkpoint as ocp  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

import penstock as ps  # noqa: E402
from tests.trainers.rows import rows  # noqa: E402

BATCH = 4
mesh = Mesh(jax.devices(), ("data",))
over_data = NamedSharding(mesh, PartitionSpec("data"))


def loader(job):
    ranks = ps.Ranks(2, rank)
    return rows().batch(BATCH).distribute(os.environ["SERVICE"], job=job, ranks=ranks, order="deterministic")


def shards(batch):
    return [shard.data.tolist() for shard in sorted(batch["x"].addressable_shards, key=lambda s: s.index[0].start or 0)]


@jax.jit
def step(weights, x, y):
    loss, gradient = jax.value_and_grad(lambda w: ((x @ w - y) ** 2).mean())(weights)
    return weights - 0.1 * gradient, loss


def train(data, weights, steps=None):
    seen = []
    for number, batch in enumerate(data):
        weights, loss = step(weights, batch["x"], batch["y"])
        seen.append(float(loss))
        if number + 1 == steps:
            break
    return weights, seen


def main():
    plain = [batch["x"].tolist() for batch in loader("plain")]
    data = ps.jax.arrays(loader("plain"), sharding=over_data)
    found = {"plain": plain, "shards": [shards(batch) for batch in data]}
    begins = jax.device_put(jnp.zeros(4), NamedSharding(mesh, PartitionSpec()))
    data = ps.jax.arrays(loader("whole"), sharding=over_data)
    weights, whole = train(data, begins)
    found |= {"whole": whole, "weights": weights.tolist()}
    data = ps.jax.arrays(loader("stopped"), sharding=over_data, ahead=3)
    weights, head = train(data, begins, steps=5)
    manager = ocp.CheckpointManager(folder / "orbax")
    state = ocp.args.Composite(
        weights=ocp.args.StandardSave({"w": weights}), data=ocp.args.JsonSave(data.state_dict(all=True))
    )
    manager.save(5, args=state)
    manager.wait_until_finished()
    data.close()
    again = ps.jax.arrays(loader("resumed"), sharding=over_data)
    restored = manager.restore(
        5, args=ocp.args.Composite(weights=ocp.args.StandardRestore({"w": begins}), data=ocp.args.JsonRestore())
    )
    again.load_state_dict(restored["data"])
    weights, rest = train(again, restored["weights"]["w"])
    found |= {"resumed": head + rest, "weights resumed": weights.tolist()}
    print(json.dumps(found), flush=True)
    jax.distributed.shutdown()


main()
