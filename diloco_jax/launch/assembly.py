"""From a configuration to the parts of a run: task, layout, settings.

Every participant assembles its own from the same configuration; the layout's
fingerprint tells whether they agree.
"""

import dataclasses
from typing import Any, NamedTuple

import jax

from diloco_jax import algorithm as A
from diloco_jax import config as config_lib
from diloco_jax.island.anchors import Fragments
from diloco_jax.island.trainer import Trainer
from diloco_jax.protocol.settings import Settings
from diloco_jax.run_config import RunConfig
from diloco_jax.syncer.store import Store
from diloco_jax.tasks import language_model

TASKS = {'language_model': language_model.LanguageModelTask}


class Layout(NamedTuple):
  """The fragments of one model under one configuration."""

  run: RunConfig  # with the number of fragments settled
  partition: A.Partition
  settings: Settings
  messages: tuple[str, ...]  # about what was changed


def make_task(run: RunConfig) -> Any:
  """The task that the configuration names."""
  data = dataclasses.replace(run.data, batch=run.island_batch)
  return TASKS[run.task](run.model, data, run.seed)


def layout(run: RunConfig, param_shapes: Any) -> Layout:
  """Fragments and protocol settings, from shapes alone.

  Raises:
    UserError: the given number of fragments does not fit the model.
  """
  count = len(jax.tree.leaves(param_shapes))
  run, messages = config_lib.resolve_layout(run, count)
  partition = A.partition(param_shapes, run.sync.fragments)
  settings = config_lib.protocol_settings(
    run, partition.sizes, partition.fingerprint
  )
  return Layout(run, partition, settings, messages)


def param_shapes(task: Any, seed: int) -> Any:
  """Shapes of the parameters, without allocating them."""
  params, _ = jax.eval_shape(task.init, jax.random.key(seed))
  return params


def make_trainer(run: RunConfig, task: Any, devices: Any = None) -> Trainer:
  """The inner training of one island."""
  return Trainer(
    task,
    run.inner,
    run.mesh,
    seed=run.seed,
    batch_size=run.island_batch,
    devices=devices,
  )


def make_store(planned: Layout) -> Store:
  """The syncer's Θ and outer optimizer."""
  run = planned.run
  return Store(
    planned.partition,
    A.outer_optimizer(
      run.outer.lr, run.outer.momentum, nesterov=run.outer.rule == 'nesterov'
    ),
    rule=run.sync.merge,
    islands=run.island_count,
    upload=run.sync.upload,
    download=run.sync.download,
  )


def make_fragments(planned: Layout, shardings: Any = None) -> Fragments:
  """An island's (or evaluator's) anchors."""
  sync = planned.run.sync
  return Fragments(
    planned.partition,
    alpha=sync.alpha,
    upload=sync.upload,
    download=sync.download,
    shardings=shardings,
  )


def start_params(task: Any, seed: int) -> Any:
  """Θ(0), made from task and seed, on the host."""
  params, _ = jax.jit(task.init)(jax.random.key(seed))
  return jax.device_get(params)
