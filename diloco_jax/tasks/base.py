"""The interface between a task and everything else."""

from collections.abc import Iterator
from typing import Any, Protocol

import jax


class Task(Protocol):
  """What is trained.

  Optional, looked up by name where a task has them:
    inner_optimizer(inner_options) -> optax.GradientTransformation: takes the
      place of the default one whole. Its rate is its own; the trainer passes
      the cumulative inner step to `update` as `index`, which a transformation
      with extra arguments may use.
    sharding_rules() -> {pattern of a parameter's path: mesh axis, one of
      'data' 'fsdp' 'tensor' 'expert' or None, of each dimension}; without a
      rule a parameter is whole on every device.
    batch_tokens(batch) -> int; else the leading dimension counts.
    sample(params, count, key) -> str
  """

  def init(self, key: jax.Array) -> tuple[Any, Any]:
    """(params, state): pytrees of arrays; state (BatchNorm) is not merged."""
    ...

  def loss(
    self, params: Any, state: Any, batch: Any, key: jax.Array, train: bool
  ) -> tuple[jax.Array, tuple[Any, dict[str, jax.Array]]]:
    """(scalar, (new state, metrics)) of a batch."""
    ...

  def batches(self, split: str, lease: Any) -> Iterator[Any]:
    """Batches of NumPy arrays: of a lease of 'train', or all of 'test'."""
    ...
