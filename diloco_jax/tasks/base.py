"""The interface between a task and everything else."""

from collections.abc import Iterator
from typing import Any, Protocol

import jax


class Task(Protocol):
  """What is trained.

  Optional, looked up by name where a task has them:
    inner_optimizer(inner_options) -> optax.GradientTransformation
    sharding_rules() -> {pattern of a parameter's path: axis per dimension}
    batch_tokens(batch) -> int
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
