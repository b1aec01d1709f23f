"""The same with JAX: devices of one process, a sharding for each array, and a compiler that divides
the work. Model and optimizer are written out, as JAX has neither; the first weights are those of
the other programs.

    python docs/comparison/model.py --save first.npz
    export XLA_FLAGS=--xla_force_host_platform_device_count=2
    python docs/comparison/with_jax.py first.npz

With ``--wrong dim``, ``cut`` or ``heads`` something is said wrongly; there is one process, so its
inputs cannot differ.
"""

import sys

import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
import numpy as np
from jax.sharding import (  # pyright: ignore[reportMissingImports]
    AxisType,
    NamedSharding,
    PartitionSpec,
)

WIDTH, HEADS = 32, 4
QKV = ("query", "key", "value")
WRONG = sys.argv[3] if len(sys.argv) > 3 else ""


def linear(w, name, x):
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def mlp(w, x, prefix=""):
    return linear(w, f"{prefix}down", jax.nn.gelu(linear(w, f"{prefix}up", x), approximate=False))


def norm(w, name, x):
    x = x - x.mean(-1, keepdims=True)
    x = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    return x * w[f"{name}.weight"] + w[f"{name}.bias"]


def attention(w, x):
    n, t, _ = x.shape
    heads = (HEADS, -1) if WRONG == "heads" else (-1, WIDTH // HEADS)
    q, k, v = (linear(w, f"attention.{name}", x).reshape(n, t, *heads) for name in QKV)
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return linear(w, "attention.out", y.reshape(n, t, WIDTH))


def block(w, x):
    x = x + attention(w, norm(w, "norm1", x))
    return x + mlp(w, norm(w, "norm2", x), "mlp.")


@jax.jit(static_argnums=0)
def step(model, w, m, v, count, x, y):
    loss, grads = jax.value_and_grad(lambda w: ((model(w, x) - y) ** 2).mean())(w)
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, grads)
    v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, v, grads)

    def adamw(p, m, v):
        m, v = m / (1 - 0.9**count), v / (1 - 0.999**count)
        return p * (1 - 0.01 * 0.01) - 0.01 * m / (jnp.sqrt(v) + 1e-8)

    return jax.tree.map(adamw, w, m, v), m, v, loss


def train(name, model, specs):
    # With the default, AxisType.Explicit, the product over a cut dim must name its out_sharding.
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(AxisType.Auto,))
    every = np.load(sys.argv[1]).items()
    given = {key.split("/")[1]: value for key, value in every if key.startswith(name)}
    x, y = given.pop("x"), given.pop("y")
    w = {
        key: jax.device_put(value, NamedSharding(mesh, specs.get(key, PartitionSpec())))
        for key, value in given.items()
    }
    m = v = jax.tree.map(jnp.zeros_like, w)
    losses = []
    for count in (1, 2):
        w, m, v, loss = step(model, w, m, v, count, x, y)
        losses.append(float(loss))
    print(f"{name}: loss {losses[0]:.5f}, after a step {losses[1]:.5f}")


def main():
    rows, columns = PartitionSpec("tp", None), PartitionSpec(None, "tp")
    vector = PartitionSpec("tp")
    if WRONG == "dim":
        rows = PartitionSpec(None, None, "tp")
    last = rows if WRONG == "cut" else columns
    pair = {"up.weight": rows, "up.bias": vector, "down.weight": last}
    train("MLP", mlp, pair)
    specs = {f"mlp.{key}": spec for key, spec in pair.items()}
    specs |= {f"attention.{name}.weight": rows for name in QKV}
    specs |= {f"attention.{name}.bias": vector for name in QKV}
    train("Block", block, {**specs, "attention.out.weight": columns})


if __name__ == "__main__":
    main()
