"""JAX over a mesh of four simulated devices: batches sharded over it, and a resume that goes on where it stood.

pip install 'penstock[jax]'
python examples/jax_mesh.py
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import penstock as ps

STOPS_AT = 7


def row(number, rng):
    x = rng.normal(size=8).astype(np.float32)
    return {"x": x, "y": np.float32(x @ np.arange(8))}


def make_data(mesh):
    # Over several processes: .distribute(service, job="run", ranks=ps.Ranks(jax.process_count(), jax.process_index()))
    loader = ps.range(640).shuffle(seed=1).map(row).batch(32).distribute()
    return ps.jax.arrays(loader, sharding=NamedSharding(mesh, PartitionSpec("data")))


@jax.jit
def step(weights, batch):
    loss, gradient = jax.value_and_grad(lambda w: ((batch["x"] @ w - batch["y"]) ** 2).mean())(weights)
    return weights - 0.05 * gradient, loss


def train(data, weights, steps=None):
    losses = []
    for batch in data:
        weights, loss = step(weights, batch)
        losses.append(float(loss))
        if len(losses) == steps:
            break
    return weights, losses


def main():
    mesh = Mesh(jax.devices(), ("data",))
    begins = jax.device_put(jnp.zeros(8), NamedSharding(mesh, PartitionSpec()))
    first = next(iter(make_data(mesh)))
    rows = [shard.data.shape[0] for shard in first["x"].addressable_shards]
    print(f"a batch of {first['x'].shape[0]} rows lies on {len(rows)} devices, {rows[0]} rows on each")

    _, expected = train(make_data(mesh), begins)
    data = make_data(mesh)
    weights, losses = train(data, begins, steps=STOPS_AT)
    checkpoint = json.dumps(data.state_dict())  # docs/jax.md has it with Orbax

    data = make_data(mesh)
    data.load_state_dict(json.loads(checkpoint))
    _, rest = train(data, weights)
    assert losses + rest == expected
    print(f"stopped after {STOPS_AT} of {len(expected)} steps and resumed: the same losses, down to {expected[-1]:.4f}")


if __name__ == "__main__":
    main()
