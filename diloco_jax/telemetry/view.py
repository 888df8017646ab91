"""A run in progress, read from its folder as it grows."""

from collections import deque
import os
import pathlib
import statistics
from typing import Any

from diloco_jax.telemetry import accounting
from diloco_jax.telemetry import folder
from diloco_jax.telemetry import lines
from diloco_jax.telemetry import tape as tape_lib

Row = dict[str, Any]

DECISIONS_MAX = 1000  # kept until taken; the oldest go first
RECENT = 240  # rows that rates and medians are taken over

# What the tape says about the standing of an island.
STANDINGS = {
  'joined': 'live',
  'readmitted': 'live',
  'lapsed': 'lapsed',
  'left': 'left',
  'quarantined': 'quarantined',
}
# Decisions that people want to hear of one by one.
TOLD = (
  *STANDINGS, 'run_started', 'started_without', 'refused', 'hello_refused',
  'pace_warning', 'draining', 'finished',
)  # fmt: skip


class RunView:
  """The newest of a run; `poll` reads what was written since the last one.

  Attributes:
    islands: island -> its latest metrics row.
    standing: island -> live, lapsed, left or quarantined, from the tape.
    incarnations: island -> the newest incarnation that joined.
    syncer: the syncer's latest metrics row.
    evaluation: the latest evaluation.
    finished: the tape's `finished` line, at the end of a run.
    merges: merges on the tape.
    refused: contributions refused.
    steps_done: inner steps of all islands.
    bad_lines: whole lines that could not be read; they are skipped, since
      looking at a run must not end it.
    now_s: the newest time in any file.
  """

  def __init__(self, workdir: str | os.PathLike) -> None:
    self.workdir = pathlib.Path(workdir)
    self.islands: dict[int, Row] = {}
    self.standing: dict[int, str] = {}
    self.incarnations: dict[int, int] = {}
    self.syncer: Row | None = None
    self.evaluation: Row | None = None
    self.finished: Row | None = None
    self.merges = 0
    self.refused = 0
    self.steps_done = 0
    self.bad_lines = 0
    self.now_s = 0.0
    self._decisions: deque[Row] = deque(maxlen=DECISIONS_MAX)
    self._step_times: deque[float] = deque(maxlen=RECENT)
    self._global_steps: deque[tuple[float, int]] = deque(maxlen=RECENT)
    self._first_step_s: float | None = None
    self._last_step_s = 0.0
    self._up = accounting.Counter()
    self._down = accounting.Counter()
    self._tape = lines.LineTail(self.workdir / folder.TAPE)
    self._syncer = lines.LineTail(self.workdir / folder.SYNCER_METRICS)
    self._evaluator = lines.LineTail(self.workdir / folder.EVALUATOR_METRICS)
    self._islands: dict[int, lines.LineTail] = {}

  def poll(self) -> bool:
    """Reads what is new; whether there was anything."""
    for island, path in folder.island_files(self.workdir).items():
      if island not in self._islands:
        self._islands[island] = lines.LineTail(path)
    found = False
    for raw in self._tape.poll():
      found = True
      if not tape_lib.is_event(raw):
        line = self._decoded(raw, self._tape)
        if line is not None and isinstance(line.get('kind'), str):
          self._on_tape(line)
    for island, tail in sorted(self._islands.items()):
      for raw in tail.poll():
        found = True
        row = self._decoded(raw, tail)
        if row is not None:
          self._on_island(island, row)
    for raw in self._syncer.poll():
      found = True
      row = self._decoded(raw, self._syncer)
      if row is not None:
        self._on_syncer(row)
    for raw in self._evaluator.poll():
      found = True
      row = self._decoded(raw, self._evaluator)
      if row is not None and row.get('eval_loss') is not None:
        self.evaluation = row
        self._decisions.append({**row, 'kind': 'eval'})
    return found

  def take_decisions(self) -> list[Row]:
    """Tape lines worth telling since the last call, and evaluations."""
    taken = list(self._decisions)
    self._decisions.clear()
    return taken

  # Figures made of several rows.

  @property
  def bytes_up(self) -> float | None:
    return self._up.total

  @property
  def bytes_down(self) -> float | None:
    return self._down.total

  @property
  def global_step(self) -> int | None:
    steps = [row.get('global_step') for row in (self.syncer, self.finished)
             if row is not None]  # fmt: skip
    known = [step for step in steps if step is not None]
    return max(known) if known else None

  def goodput(self, islands: int, floor_s: float = 0.0) -> float | None:
    """So far; see `accounting.goodput`."""
    if self._first_step_s is None or not self._step_times:
      return None
    median_s = statistics.median(self._step_times)
    train_s = self._last_step_s - self._first_step_s + median_s
    return accounting.goodput(
      self.steps_done, islands, train_s, floor_s or median_s
    )

  def left_s(self, steps: int) -> float | None:
    """Seconds until `steps` global steps at the present pace."""
    if len(self._global_steps) < 2:
      return None
    (t0, first), (t1, last) = self._global_steps[0], self._global_steps[-1]
    if last <= first or t1 <= t0:
      return None
    return max(0, steps - last) * (t1 - t0) / (last - first)

  # One line each.

  def _decoded(self, raw: bytes, tail: lines.LineTail) -> Row | None:
    try:
      row = lines.decode_line(raw, tail.path, 0)
    except lines.MalformedLineError:
      row = {}
    t_s = row.get('t_s')
    if isinstance(t_s, bool) or not isinstance(t_s, (int, float)):
      self.bad_lines += 1
      return None
    self.now_s = max(self.now_s, t_s)
    return row

  def _on_tape(self, line: Row) -> None:
    kind = line['kind']
    if kind in STANDINGS and isinstance(line.get('island'), int):
      if line['island'] >= 0:  # evaluators have negative indices
        self.standing[line['island']] = STANDINGS[kind]
        if kind == 'joined':
          self.incarnations[line['island']] = line['incarnation']
    elif kind == 'merge':
      self.merges += 1
    elif kind == 'refused':
      self.refused += 1
    elif kind == 'finished':
      self.finished = line
    if kind in TOLD:
      self._decisions.append(line)

  def _on_island(self, island: int, row: Row) -> None:
    before = self.islands.get(island, {})
    if not accounting.steps_of(row):
      # A row about a state knows no loss: show the last one.
      row = {**row, 'loss': before.get('loss')}
    self.islands[island] = row
    steps = accounting.steps_of(row)
    if not steps:
      return
    self.steps_done += steps
    step_s = row.get('step_time_s') or 0.0
    if step_s:
      self._step_times.append(step_s)
    begun_s = row['t_s'] - (steps - 1) * step_s
    if self._first_step_s is None or begun_s < self._first_step_s:
      self._first_step_s = begun_s
    self._last_step_s = max(self._last_step_s, row['t_s'])

  def _on_syncer(self, row: Row) -> None:
    self.syncer = row
    self._up.add(row.get('bytes_up'))
    self._down.add(row.get('bytes_down'))
    if row.get('global_step') is not None:
      self._global_steps.append((row['t_s'], row['global_step']))
