"""`train`: one run on this machine, from an empty folder to a summary."""

import json
import pathlib
import secrets
import sys
import time
from typing import Any

import jax

from diloco_jax import config as config_lib
from diloco_jax import config_json
from diloco_jax.errors import Problem
from diloco_jax.errors import UserError
from diloco_jax.launch import assembly
from diloco_jax.launch import connecting
from diloco_jax.launch import evaluating
from diloco_jax.launch import processes as processes_lib
from diloco_jax.launch import role
from diloco_jax.launch import threads
from diloco_jax.run_config import RunConfig
from diloco_jax.runtime.clock import RealClock
from diloco_jax.storage import parameters
from diloco_jax.telemetry import report
from diloco_jax.telemetry import summary as summary_lib
from diloco_jax.telemetry.processes import ProcessTable
from diloco_jax.telemetry.progress import Progress
from diloco_jax.telemetry.progress import RunInfo
from diloco_jax.telemetry.view import RunView

# How long a syncer may be without islands: at the end it waits for the
# evaluator, and nobody else comes back in this version.
ALONE_S = 40.0
OK = 'ok'
INTERRUPTED = 'interrupted'
FAILED = 'failed'
EXIT_CODES = {OK: 0, FAILED: 1, INTERRUPTED: 130}


def prepare(run: RunConfig, workdir: pathlib.Path) -> tuple[RunConfig, Any]:
  """Check everything that can be checked, then make the folder.

  Returns:
    The configuration with its fragments settled, and the task.

  Raises:
    UserError: the model, data, mesh or folder does not fit.
  """
  task = assembly.make_task(run)
  shapes = assembly.param_shapes(task, run.seed)
  planned = assembly.layout(run, shapes)
  for message in planned.messages:
    print(message, file=sys.stderr)  # noqa: T201
  assembly.make_trainer(run, task)  # raises where mesh or batch do not fit
  config_lib.check_workdir(run, workdir)
  for name in ('tape', 'metrics', 'run', 'logs'):
    (workdir / name).mkdir(parents=True, exist_ok=True)
  config_json.save(planned.run, workdir)
  token = workdir / role.TOKEN_FILE
  token.touch(mode=0o600)
  token.chmod(0o600)
  token.write_text(secrets.token_urlsafe(32), encoding='utf-8')
  (workdir / role.START_FILE).write_text(
    json.dumps({'wall_s': time.time()}), encoding='utf-8'
  )
  return planned.run, task


class TrainingRun:
  """A run whose islands are processes."""

  def __init__(self, run: RunConfig, task: Any, workdir: pathlib.Path):
    self._run = run
    self._task = task
    self._workdir = workdir
    self._clock = RealClock(role.started_wall_s(workdir))
    self._table = ProcessTable(workdir / 'processes.json', self._clock.now)
    self._view = RunView(workdir)
    self._progress = Progress(
      self._view,
      RunInfo(
        islands=run.island_count,
        steps=run.steps,
        period=run.sync.period,
        preset=run.preset,
        step_floor_s=run.launch.step_floor_ms / 1000,
      ),
      sys.stderr,
    )
    self._processes = processes_lib.Processes(
      run, workdir, self._table, self._progress.note
    )
    self._evaluation: evaluating.Evaluation | None = None

  def train(self) -> str:
    """Until the run is over; returns its status."""
    self._progress.start()
    status = FAILED
    try:
      status = self._run_to_end()
    except KeyboardInterrupt:
      self._progress.note('stopping; a second Ctrl-C ends at once')
      status = self._interrupt()
    finally:
      left = [
        x
        for kind in (processes_lib.ISLAND, processes_lib.SYNCER)
        for x in self._processes.running(kind)
      ]
      if left:
        self._processes.stop(left, 10.0)
      self._progress.stop()
    return status

  def _run_to_end(self) -> str:
    syncer = self._processes.start_syncer()
    address_file = self._workdir / role.ADDRESS_FILE
    if not processes_lib.wait_for(
      address_file.exists, syncer, self._processes, 120.0
    ):
      raise self._failed(syncer)
    first = self._processes.start_island(0)
    self._begin_evaluation(address_file.read_text(encoding='utf-8'))
    # One island compiles, the others find its work in the cache.
    ready = self._workdir / 'run' / 'island_0.ready'
    processes_lib.wait_for(
      ready.exists, first, self._processes, processes_lib.READY_TIMEOUT_S
    )
    for index in range(1, self._run.island_count):
      self._processes.start_island(index)
    return self._watch(syncer)

  def _begin_evaluation(self, address: str) -> None:
    token = connecting.read_token(self._workdir / role.TOKEN_FILE)
    self._evaluation = evaluating.Evaluation(
      self._run,
      self._task,
      workdir=self._workdir,
      endpoint=connecting.open_endpoint(
        address, token, self._run.launch.transport
      ),
      clock=self._clock,
    )
    self._evaluation.begin()

  def _watch(self, syncer: processes_lib.Child) -> str:
    """Until the syncer has ended."""
    alone_since = time.monotonic()
    while syncer.process.pid not in self._processes.ended:
      self._processes.poll()
      self._name_incarnations()
      self._progress.poll()
      if self._processes.running(processes_lib.ISLAND):
        alone_since = time.monotonic()
      elif time.monotonic() - alone_since > ALONE_S:
        self._progress.note('no island is left; stopping')
        self._processes.stop([syncer], processes_lib.STOP_TIMEOUT_S)
        return FAILED
      time.sleep(processes_lib.POLL_S)
    code = self._processes.ended[syncer.process.pid]
    if code != 0:
      self._progress.note(processes_lib.last_lines(syncer.log))
      return FAILED
    self._wait_for_islands()
    self._evaluate_finally()
    return OK

  def _wait_for_islands(self) -> None:
    deadline = time.monotonic() + processes_lib.STOP_TIMEOUT_S
    while self._processes.running(processes_lib.ISLAND):
      if time.monotonic() > deadline:
        return
      self._processes.poll()
      time.sleep(processes_lib.POLL_S)

  def _evaluate_finally(self) -> None:
    if self._evaluation is None:
      return
    self._progress.note('measuring the final parameters on the held-out set')
    evaluation, self._evaluation = self._evaluation, None
    try:
      row = evaluation.finish(
        parameters.load(self._workdir / 'model', evaluation.param_shapes)
      )
    except (RuntimeError, OSError, ValueError) as error:
      # The model is trained and saved; only its figure is missing.
      self._progress.note(f'the evaluation failed: {error!r}')
      return
    if row is not None and row.get('sample'):
      self._progress.note(f'sample: {row["sample"]!r}')

  def _interrupt(self) -> str:
    """Ctrl-C: the syncer exports Θ and tells the islands to go."""
    try:
      syncers = self._processes.running(processes_lib.SYNCER)
      for child in syncers:
        child.process.terminate()
      deadline = time.monotonic() + processes_lib.STOP_TIMEOUT_S
      while self._processes.running(processes_lib.SYNCER):
        self._processes.poll()
        if time.monotonic() > deadline:
          break
        time.sleep(processes_lib.POLL_S)
      self._wait_for_islands()
    except KeyboardInterrupt:
      self._progress.note('ending at once')
    return INTERRUPTED

  def _name_incarnations(self) -> None:
    """Take over from the tape which incarnation a process is."""
    for index, incarnation in self._view.incarnations.items():
      for child in self._processes.running(processes_lib.ISLAND):
        if child.index == index:
          self._table.set_incarnation(child.process.pid, incarnation)

  def _failed(self, child: processes_lib.Child) -> UserError | RuntimeError:
    """What a child that did not come up has to say."""
    told = processes_lib.last_lines(child.log)
    code = self._processes.ended.get(child.process.pid)
    if code == UserError.EXIT_CODE:
      return UserError([Problem(child.name, told, 'a process that starts', '')])
    return RuntimeError(f'{child.name} did not start:\n{told}')


def train(run: RunConfig, workdir: pathlib.Path) -> int:
  """Runs `train`; returns the exit code."""
  run, task = prepare(run, workdir)
  jax.config.update('jax_compilation_cache_dir', str(workdir / 'cache'))
  if run.launch.runtime == 'threads':
    status = _train_in_threads(run, task, workdir)
  else:
    status = TrainingRun(run, task, workdir).train()
  return close_books(workdir, status)


def close_books(workdir: pathlib.Path, status: str | None = None) -> int:
  """Summary and report of a run that has ended; returns the exit code.

  Args:
    workdir: of the run.
    status: ok, interrupted or failed; None: as the folder tells.
  """
  summary = summary_lib.summarize(workdir, status, strict=status == OK)
  summary_lib.write_summary(workdir, summary)
  report.write_report(workdir)
  _tell(workdir, summary)
  return EXIT_CODES.get(summary['status'], EXIT_CODES[FAILED])


def _train_in_threads(run: RunConfig, task: Any, workdir: pathlib.Path) -> str:
  with threads.short_switches():
    try:
      threads.ThreadRun(run, task, workdir).train()
    except KeyboardInterrupt:
      return INTERRUPTED
  return OK


def _tell(workdir: pathlib.Path, summary: dict[str, Any]) -> None:
  shown = (
    'status', 'merges', 'effective_h', 'eval_loss', 'tokens_trained',
    'goodput', 'wall_s',
  )  # fmt: skip
  parts = []
  for key in shown:
    value = summary[key]
    text = f'{value:.4g}' if isinstance(value, float) else str(value)
    parts.append(f'{key} {text}')
  print(', '.join(parts))  # noqa: T201
  print(f'run folder: {workdir} (summary.json, report.html)')  # noqa: T201
