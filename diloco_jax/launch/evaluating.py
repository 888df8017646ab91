"""The evaluator's role: held-out loss of Θ while others train."""

from collections.abc import Callable
import itertools
import pathlib
import threading
from typing import Any

import jax

from diloco_jax.island import training
from diloco_jax.island.evaluator import Evaluator
from diloco_jax.launch import assembly
from diloco_jax.launch import connecting
from diloco_jax.run_config import RunConfig
from diloco_jax.runtime.clock import Clock
from diloco_jax.telemetry.metrics import MetricsWriter
from diloco_jax.transport import base as transport

SAMPLE_BYTES = 160
LOOK_EVERY_S = 0.5


class Evaluation:
  """Measures Θ now and then on a thread of its own, and whole at the end."""

  def __init__(
    self,
    run: RunConfig,
    task: Any,
    *,
    workdir: pathlib.Path,
    endpoint: transport.Endpoint,
    clock: Clock,
    on_row: Callable[[dict[str, Any]], None] | None = None,
  ):
    self._run = run
    self._task = task
    self._clock = clock
    self._on_row = on_row
    self._trainer = assembly.make_trainer(run, task)
    planned = assembly.layout(run, self._trainer.param_shapes)
    self._evaluator: Evaluator = connecting.make_evaluator(
      planned, endpoint, self._trainer.param_shapes, clock
    )
    self._metrics = MetricsWriter(
      workdir / 'metrics' / 'evaluator.jsonl',
      workdir / 'metrics' / 'tensorboard' / 'evaluator'
      if run.metrics.tensorboard
      else None,
    )
    self._closing = threading.Event()
    self._failure: BaseException | None = None
    self._every_batch: int | None = None
    self._thread = threading.Thread(
      target=self._follow, name='evaluation', daemon=True
    )

  @property
  def param_shapes(self) -> Any:
    return self._trainer.param_shapes

  def begin(self) -> None:
    self._evaluator.begin()
    self._thread.start()

  def finish(self, params: Any = None) -> dict[str, Any] | None:
    """Stop following, and measure on the whole held-out set.

    Args:
      params: the exported Θ; None: what this evaluator holds.

    Returns:
      The last row, or None where there is no Θ.
    """
    self._closing.set()
    self._thread.join()
    snapshot = self._evaluator.snapshot()
    step = self._evaluator.global_step
    self._evaluator.close()
    if params is None and snapshot is not None:
      params = snapshot.params
    row = None
    if params is not None:
      row = self._measure(params, step, final=True)
    self._metrics.close()
    if self._failure is not None:
      raise RuntimeError('evaluation failed') from self._failure
    return row

  def _follow(self) -> None:
    every = self._run.metrics.eval_every_s
    due = self._clock.now() + every
    last: Any = None
    while not self._closing.wait(LOOK_EVERY_S):
      if self._evaluator.failure is not None:
        self._failure = self._evaluator.failure
        return
      if self._evaluator.finished.is_set():
        return
      if every <= 0 or self._clock.now() < due:
        continue
      snapshot = self._evaluator.snapshot()
      if snapshot is None or snapshot.versions == last:
        continue
      try:
        self._measure(snapshot.params, snapshot.global_step, final=False)
      except Exception as error:
        self._failure = error
        return
      last = snapshot.versions
      due = self._clock.now() + every

  def _stride(self) -> int:
    """Every how many-th held-out batch is measured while others train.

    The same ones each time, spread over the whole set: its first ones would
    be a few files only.
    """
    if self._every_batch is None:
      tokens = [
        training.batch_tokens(self._task, batch)
        for batch in self._task.batches('test', None)
      ]
      wanted = max(1, self._run.metrics.eval_tokens)
      self._every_batch = max(1, sum(tokens) // wanted)
    return self._every_batch

  def _measure(
    self, host_params: Any, global_step: int, *, final: bool
  ) -> dict[str, Any]:
    params = self._trainer.put(host_params)
    batches = self._task.batches('test', None)
    if not final:
      batches = itertools.islice(batches, 0, None, self._stride())
    measured = self._trainer.evaluate(params, batches)
    row: dict[str, Any] = {
      't_s': round(self._clock.now(), 3),
      'global_step': global_step,
      'eval_loss': measured['loss'],
      'eval_accuracy': measured.get('accuracy'),
      'tokens': int(measured['tokens']),
      'final': final,
    }
    sample = getattr(self._task, 'sample', None)
    if final and sample is not None:
      row['sample'] = sample(params, SAMPLE_BYTES, jax.random.key(0))
    self._metrics.row(**row)
    if self._on_row is not None:
      self._on_row(row)
    return row
