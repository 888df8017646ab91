"""The island's role: join, train to the end, leave."""

from collections.abc import Callable
import pathlib
from typing import Any

from diloco_jax.data.samples import Lease
from diloco_jax.island import training
from diloco_jax.island.hook import Island
from diloco_jax.island.trainer import Trainer
from diloco_jax.launch import assembly
from diloco_jax.launch import connecting
from diloco_jax.launch.recording import Recorder
from diloco_jax.run_config import RunConfig
from diloco_jax.runtime.clock import Clock
from diloco_jax.telemetry.metrics import IslandMetrics
from diloco_jax.telemetry.metrics import MetricsWriter
from diloco_jax.transport import base as transport


class Outcome:
  """How an island's run ended."""

  def __init__(self, reason: str, steps: int, params: Any):
    self.reason = reason
    self.steps = steps
    self.params = params


def run_island(
  run: RunConfig,
  task: Any,
  *,
  index: int,
  workdir: pathlib.Path | None,
  endpoint: transport.Endpoint,
  clock: Clock,
  devices: Any = None,
  on_ready: Callable[[Trainer], None] | None = None,
  should_leave: Callable[[], str] | None = None,
) -> Outcome:
  """One island from compiling to leaving.

  Args:
    run: of the syncer, with this island's own fields.
    task: what is trained.
    index: wanted; -1: any.
    workdir: for tape and metrics; None: none are written.
    endpoint: to the syncer.
    clock: of the run.
    devices: of this island; None: all local ones.
    on_ready: called when everything is compiled, before joining.
    should_leave: asked after each step; a reason makes the island leave.

  Raises:
    UserError: the syncer would not have this island.
  """
  trainer = assembly.make_trainer(run, task, devices)
  planned = assembly.layout(run, trainer.param_shapes)
  params = trainer.init()
  trainer.compile(next(iter(task.batches('train', Lease(0, 1, 0, -1)))))
  recorder = None
  if workdir is not None:
    recorder = Recorder(
      workdir / 'tape' / f'island_{index}.jsonl', clock, _ignore
    )
  island = connecting.make_island(
    planned,
    endpoint,
    params,
    put=trainer.put,
    shardings=trainer.param_shardings,
    index=index,
    clock=clock,
    journal=recorder,
    samples_per_step=run.data.batch,
  )
  island.warm_up(params)
  if on_ready is not None:
    on_ready(trainer)
  connecting.join(island, should_leave=should_leave)
  outcome = _train(
    run, task, trainer, island, index, workdir, clock, should_leave
  )
  if recorder is not None:
    recorder.close()
  return outcome


def _ignore(error: BaseException) -> None:
  """An island without a tape trains on; replay will miss the rest of it."""
  del error


def _train(
  run: RunConfig,
  task: Any,
  trainer: Trainer,
  island: Island,
  index: int,
  workdir: pathlib.Path | None,
  clock: Clock,
  should_leave: Callable[[], str] | None,
) -> Outcome:
  metrics = None
  if workdir is not None:
    name = f'island_{index}'
    metrics = IslandMetrics(
      MetricsWriter(
        workdir / 'metrics' / f'{name}.jsonl',
        workdir / 'metrics' / 'tensorboard' / name
        if run.metrics.tensorboard
        else None,
      ),
      island.incarnation,
      clock.now,
    )

  def on_step(island: Island) -> None:
    if metrics is not None:
      metrics.step(
        step=island.finished_step,
        tokens=island.finished_tokens,
        loss=island.loss,
        exchange_s=island.exchange_s,
        step_time_s=island.step_time_s,
        state=island.state,
        anchors_age_s=island.anchors_age_s,
      )
    reason = should_leave() if should_leave is not None else ''
    if reason and not island.should_stop:
      island.leave(reason)

  assert island.start is not None or island.should_stop
  if island.start is not None:
    trainer.index = island.start.rate_index
    trainer.rewarm(island.start.rewarm_steps)
    samples = island.start.samples
    lease = Lease(samples.lane, samples.lanes, samples.begin, samples.end)
    training.train(
      island,
      trainer,
      iter(task.batches('train', lease)),
      tokens=lambda batch: training.batch_tokens(task, batch),
      floor_s=run.launch.step_floor_ms / 1000,
      on_step=on_step,
    )
  if metrics is not None:
    metrics.close()
  return Outcome(island.stop_reason, island.finished_step, island.params)
