"""A run whose syncer and islands are threads of this process.

For notebooks and tests: the same roles over the in-process transport. Each
island has its own part of the devices where there are enough, else they share
one. Nobody can be killed here; an island is stopped at its next boundary.
"""

from collections.abc import Iterator
import contextlib
import os
import pathlib
import secrets
import sys
import tempfile
import threading
from typing import Any

import jax

from diloco_jax.launch import assembly
from diloco_jax.launch import evaluating
from diloco_jax.launch import islanding
from diloco_jax.launch import role
from diloco_jax.launch.results import RunResult
from diloco_jax.launch.results import collect
from diloco_jax.launch.results import make_folder
from diloco_jax.launch.syncing import Syncer
from diloco_jax.run_config import RunConfig
from diloco_jax.runtime.clock import RealClock
from diloco_jax.telemetry.processes import EXIT_OK
from diloco_jax.telemetry.processes import ProcessTable
from diloco_jax.transport import inprocess

JOIN_TIMEOUT_S = 60.0
SWITCH_S = 0.0005  # between Python threads; the default is ten times that


def device_parts(islands: int) -> list[Any]:
  """Disjoint devices for each island, or the first one for all."""
  devices = jax.local_devices()
  each = len(devices) // islands
  if each == 0:
    return [devices[:1]] * islands
  return [devices[k * each : (k + 1) * each] for k in range(islands)]


class ThreadRun:
  """One run in threads."""

  def __init__(
    self,
    run: RunConfig,
    task: Any,
    workdir: pathlib.Path,
    *,
    evaluate: bool = True,
  ):
    self._run = run
    self._task = task
    self._workdir = workdir
    self._evaluate = evaluate
    self._clock = RealClock(role.started_wall_s(workdir))
    self._hub = inprocess.Hub(token=secrets.token_urlsafe(16))
    self._failures: list[BaseException] = []
    self._leave: dict[int, str] = {}
    # Islands compile the same programs. JAX's cache on disk shows an entry
    # that is still being written, so they compile one after the other; all
    # but the first then find everything there.
    self._compiling = threading.Lock()
    shapes = assembly.param_shapes(task, run.seed)
    self._planned = assembly.layout(run, shapes)
    self.syncer = Syncer(
      self._planned,
      task,
      workdir=workdir,
      endpoint=self._hub.server(),
      clock=self._clock,
      tensorboard=run.metrics.tensorboard,
    )
    self.outcomes: dict[int, islanding.Outcome] = {}

  def stop_island(self, index: int, reason: str = 'killed') -> None:
    """Make an island leave at its next boundary."""
    self._leave[index] = reason

  def train(self) -> None:
    """Until the run is over.

    Raises:
      Exception: of the first participant that failed.
    """
    table = ProcessTable(self._workdir / 'processes.json', self._clock.now)
    count = self._run.island_count
    threads = [threading.Thread(target=self._guard, args=(self._sync,))]
    parts = device_parts(count)
    for index in range(count):
      threads.append(
        threading.Thread(
          target=self._guard,
          args=(self._island, index, parts[index]),
          name=f'island {index}',
        )
      )
      table.start('island', index, 1, os.getpid())
    table.start('syncer', 0, 1, os.getpid())
    evaluation = self._evaluation() if self._evaluate else None
    for thread in threads:
      thread.start()
    if evaluation is not None:
      evaluation.begin()
    try:
      while any(thread.is_alive() for thread in threads):
        for thread in threads:
          thread.join(0.2)
        if self._failures:
          break
    except KeyboardInterrupt:
      self.syncer.stop('interrupted')
      for thread in threads:
        thread.join(JOIN_TIMEOUT_S)
      raise
    finally:
      if self._failures:
        self.syncer.stop('failed')
      for _ in range(count + 1):
        table.end(os.getpid(), EXIT_OK)
    if self._failures:
      raise self._failures[0]
    if evaluation is not None:
      evaluation.finish(self.syncer.final_parameters())

  def _guard(self, work: Any, *args: Any) -> None:
    try:
      work(*args)
    except BaseException as error:
      self._failures.append(error)

  def _sync(self) -> None:
    self.syncer.run()

  def _island(self, index: int, devices: Any) -> None:
    with contextlib.ExitStack() as compiling:
      compiling.enter_context(self._compiling)
      self.outcomes[index] = islanding.run_island(
        self._run,
        self._task,
        index=index,
        workdir=self._workdir,
        endpoint=self._hub.connect(self._hub.token),
        clock=self._clock,
        devices=devices,
        on_ready=lambda trainer: compiling.close(),
        should_leave=lambda: self._leave.get(index, ''),
      )

  def _evaluation(self) -> evaluating.Evaluation:
    return evaluating.Evaluation(
      self._run,
      self._task,
      workdir=self._workdir,
      endpoint=self._hub.connect(self._hub.token),
      clock=self._clock,
    )


def run_in_threads(
  task: Any,
  run: RunConfig,
  workdir: pathlib.Path | None = None,
  *,
  evaluate: bool = True,
) -> RunResult:
  """A whole run in this process; see `RunResult`.

  Args:
    task: what is trained, one object for all.
    run: the configuration.
    workdir: of the run folder; None: a temporary one that is removed.
    evaluate: measure the held-out loss.
  """
  with short_switches(), tempfile.TemporaryDirectory() as temporary:
    folder = workdir or pathlib.Path(temporary)
    shapes = assembly.param_shapes(task, run.seed)
    run = assembly.layout(run, shapes).run
    make_folder(run, folder)
    threads = ThreadRun(run, task, folder, evaluate=evaluate)
    threads.train()
    return collect(folder, threads.syncer.final_parameters())


@contextlib.contextmanager
def short_switches() -> Iterator[None]:
  """Threads of the exchange may not keep a training thread waiting."""
  interval = sys.getswitchinterval()
  sys.setswitchinterval(SWITCH_S)
  try:
    yield
  finally:
    sys.setswitchinterval(interval)
