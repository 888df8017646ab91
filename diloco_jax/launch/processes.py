"""A run as processes on one machine: a syncer, islands, and this launcher.

The launcher starts them, watches them, hosts the evaluator, shows progress
and writes the summary. An island that dies is told of; the run goes on.
"""

import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any, NamedTuple

from diloco_jax.run_config import RunConfig
from diloco_jax.telemetry.processes import EXIT_STOPPED
from diloco_jax.telemetry.processes import ProcessTable
from diloco_jax.telemetry.processes import exit_text

SYNCER = 'syncer'
ISLAND = 'island'
POLL_S = 0.2
READY_TIMEOUT_S = 300.0  # the first island compiles for the others
STOP_TIMEOUT_S = 60.0  # from a polite stop to the next harder one


class Child(NamedTuple):
  """A process that this launcher has started."""

  role: str
  index: int
  process: 'subprocess.Popen[bytes]'
  log: pathlib.Path

  @property
  def name(self) -> str:
    return SYNCER if self.role == SYNCER else f'island {self.index}'


class Processes:
  """Starts, watches and ends the processes of a run."""

  def __init__(
    self,
    run: RunConfig,
    workdir: pathlib.Path,
    table: ProcessTable,
    tell: Any,
  ):
    self._run = run
    self._workdir = workdir
    self._table = table
    self._tell = tell
    self.children: list[Child] = []
    self.ended: dict[int, int] = {}  # pid -> return code
    self._stopping = False

  def start_syncer(self) -> Child:
    return self._start(SYNCER, 0)

  def start_island(self, index: int) -> Child:
    return self._start(ISLAND, index)

  def _start(self, kind: str, index: int) -> Child:
    name = kind if kind == SYNCER else f'{kind}_{index}'
    log = self._workdir / 'logs' / f'{name}.log'
    log.parent.mkdir(exist_ok=True)
    command = [
      sys.executable, '-m', 'diloco_jax.launch.role', kind,
      f'--workdir={self._workdir}', f'--index={index}',
      f'--core={self._core(kind, index)}',
    ]  # fmt: skip
    with log.open('ab') as stream:
      process = subprocess.Popen(
        command,
        # Its end of this pipe closes when the launcher is gone.
        stdin=subprocess.PIPE,
        stdout=stream,
        stderr=subprocess.STDOUT,
        env=self._environment(),
        # Ctrl-C reaches only the launcher, which stops the run in order.
        start_new_session=True,
      )
    child = Child(kind, index, process, log)
    self.children.append(child)
    # A syncer has no other before it in this version; an island is told.
    known = 1 if kind == SYNCER else None
    self._table.start(kind, index, known, process.pid)
    return child

  def _core(self, kind: str, index: int) -> int:
    """The core of an island process; -1: any."""
    if kind == SYNCER or not self._run.launch.pin_cores:
      return -1
    if not hasattr(os, 'sched_getaffinity'):
      return -1
    cores = sorted(os.sched_getaffinity(0))
    return cores[index % len(cores)]

  def _environment(self) -> dict[str, str]:
    """Islands share a compilation cache, so that only the first compiles."""
    cache = {
      'JAX_COMPILATION_CACHE_DIR': str(self._workdir / 'cache'),
      'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
      'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
    }
    return {**cache, **os.environ}

  def poll(self) -> list[Child]:
    """Children that have ended since the last call, told of and written."""
    fresh = []
    for child in self.children:
      code = child.process.poll()
      pid = child.process.pid
      if code is None or pid in self.ended:
        continue
      self.ended[pid] = code
      asked = self._stopping and code in (-signal.SIGTERM, -signal.SIGKILL)
      self._table.end(pid, EXIT_STOPPED if asked else exit_text(code))
      fresh.append(child)
      if code != 0 and not asked:
        self._tell(
          f'{child.name} (pid {pid}) ended: {_cause(code)}; '
          f'its log: {child.log}'
        )
    return fresh

  def running(self, kind: str) -> list[Child]:
    return [
      x
      for x in self.children
      if x.role == kind and x.process.pid not in self.ended
    ]

  def stop(self, children: list[Child], timeout_s: float) -> None:
    """End children: politely, then at once. Only ever our own, by pid."""
    self._stopping = True
    for number in (signal.SIGTERM, signal.SIGKILL):
      for child in children:
        if child.process.poll() is None:
          child.process.send_signal(number)
      deadline = time.monotonic() + timeout_s
      while time.monotonic() < deadline:
        self.poll()
        if all(x.process.poll() is not None for x in children):
          return
        time.sleep(POLL_S)
      self._tell('some processes do not end; ending them at once')


def _cause(code: int) -> str:
  if code >= 0:
    return f'exit code {code}'
  text = f'killed by {exit_text(code)}'
  if code == -signal.SIGKILL:
    text += ' (by hand, or out of memory)'
  return text


def last_lines(log: pathlib.Path, count: int = 5) -> str:
  """The end of a log, for a message."""
  try:
    text = log.read_text(encoding='utf-8', errors='replace')
  except OSError:
    return ''
  lines = [x for x in text.splitlines() if x.strip()]
  return '\n'.join(lines[-count:])


def wait_for(
  condition: Any, child: Child, processes: Processes, timeout_s: float
) -> bool:
  """Until the condition holds, the child has ended, or time is up."""
  deadline = time.monotonic() + timeout_s
  while time.monotonic() < deadline:
    if condition():
      return True
    processes.poll()
    if child.process.pid in processes.ended:
      return False
    time.sleep(POLL_S / 4)
  return False
