"""The framework's own training loop; it uses the public hook like any other."""

from collections.abc import Callable, Iterator
import time
from typing import Any

from diloco_jax.island.hook import Island
from diloco_jax.island.trainer import Trainer


def batch_tokens(task: Any, batch: Any) -> int:
  """Tokens in a batch, as the task counts them; else its leading dimension."""
  count = getattr(task, 'batch_tokens', None)
  if count is not None:
    return int(count(batch))
  return int(next(iter(batch.values())).shape[0])


def train(
  island: Island,
  trainer: Trainer,
  batches: Iterator[Any],
  *,
  tokens: Callable[[Any], int],
  floor_s: float = 0.0,
  on_step: Callable[[Island], None] | None = None,
) -> Any:
  """Train until the run is over; returns the island's own parameters.

  Args:
    island: joined.
    trainer: with parameters' shardings like the island's.
    batches: of this island's lease.
    tokens: in a batch.
    floor_s: each step takes at least this long. It stands for an accelerator
      on a machine where the islands' work would slow each other.
    on_step: called after each step.
  """
  params = island.params
  due = time.monotonic() + floor_s
  while not island.should_stop:
    batch = next(batches)
    params, loss = trainer.step(params, batch)
    params = island.step(
      params, tokens=tokens(batch), loss=loss, extra=trainer.extra
    )
    if on_step is not None:
      on_step(island)
    if floor_s > 0:
      loss.block_until_ready()
      time.sleep(max(0.0, due - time.monotonic()))
      # A step that took longer moves the rhythm; it is not caught up with.
      due = max(due, time.monotonic()) + floor_s
  return params
