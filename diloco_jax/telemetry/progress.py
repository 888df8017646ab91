"""What a launcher shows of a run: a live table, or lines in a log."""

from collections import deque
from collections.abc import Callable
import dataclasses
import time
from typing import Any, TextIO

from rich import console as console_lib
from rich import live
from rich import table
from rich import text

from diloco_jax.telemetry import view as view_lib

LINE_EVERY_S = 10.0  # status lines in a log
LINES_MAX = 20  # decisions told by one poll
ALIKE_MAX = 3  # lines of one kind about one island ...
ALIKE_S = 60.0  # ... within this time
WIDTH = 80
STATE_WIDTH = 24


@dataclasses.dataclass(frozen=True, slots=True)
class RunInfo:
  """What the table compares the run with."""

  islands: int  # that goodput counts with
  steps: int  # global steps
  period: int  # H
  preset: str = ''
  step_floor_s: float = 0.0  # launch.step_floor_ms


# Numbers for people.


def count_text(value: float | None) -> str:
  """1234567 -> '1.23M'."""
  if value is None:
    return '-'
  for limit, letter in ((1e12, 'T'), (1e9, 'G'), (1e6, 'M'), (1e3, 'k')):
    if abs(value) >= limit:
      return f'{value / limit:.3g}{letter}'
  return f'{value:.3g}'


def bytes_text(value: float | None) -> str:
  return '-' if value is None else f'{count_text(value)}B'


def duration_text(seconds: float | None) -> str:
  """3725 -> '1h02m'; 65 -> '1m05s'."""
  if seconds is None:
    return '-'
  whole = round(seconds)
  if whole >= 3600:
    return f'{whole // 3600}h{whole % 3600 // 60:02d}m'
  if whole >= 60:
    return f'{whole // 60}m{whole % 60:02d}s'
  return f'{whole}s'


def _number(value: float | None, form: str) -> str:
  return '-' if value is None else format(value, form)


# Decisions as sentences.


def _pace_warning(line: view_lib.Row) -> str:
  told = (
    f'warning: fragments are merged every {line.get("reached")} steps,'
    f' configured {line.get("period")}: rounds take'
    f' {line.get("round_steps")} steps'
  )
  overlap = line.get('overlap_that_would_do')
  stride = line.get('stride_that_would_do')
  if overlap is not None:
    told += f'; sync.overlap={overlap} would do'
  if stride is not None:
    told += f', or {stride} steps between rounds'
  return told


def _who(line: view_lib.Row) -> str:
  island = line.get('island')
  if isinstance(island, int) and island < 0:
    return 'evaluator'
  return f'island {island}'


SENTENCES: dict[str, Callable[[view_lib.Row], str]] = {
  'run_started': lambda x: (
    f'syncer started (incarnation {x.get("incarnation")})'
  ),
  'started_without': lambda x: (
    f'warning: started without {x.get("missing")} of the islands'
  ),
  'joined': lambda x: (
    f'{_who(x)} joined (incarnation {x.get("incarnation")}, {x.get("entry")})'
  ),
  'left': lambda x: f'{_who(x)} left: {x.get("reason")}',
  'lapsed': lambda x: (
    f'{_who(x)} lapsed: no progress for {x.get("silent_s")} s'
  ),
  'readmitted': lambda x: f'{_who(x)} is back',
  'quarantined': lambda x: f'{_who(x)} quarantined after repeated refusals',
  'refused': lambda x: (
    f'{_who(x)}: contribution to fragment {x.get("fragment")} refused:'
    f' {x.get("reason")}'
  ),
  'hello_refused': lambda x: (
    f'a newcomer was refused: {x.get("detail") or x.get("reason")}'
  ),
  'pace_warning': _pace_warning,
  'eval': lambda x: (
    f'eval at step {x.get("global_step")}:'
    f' loss {_number(x.get("eval_loss"), ".4f")}'
    + (
      f', accuracy {x["eval_accuracy"]:.4f}'
      if x.get('eval_accuracy') is not None
      else ''
    )
  ),
  'draining': lambda x: 'last round of every fragment',
  'finished': lambda x: (
    f'finished: {x.get("reason")}, global step {x.get("global_step")},'
    f' {x.get("merges")} merges'
  ),
}


class _Limiter:
  """Holds back lines of one kind about one island that come too often."""

  def __init__(self) -> None:
    self._times: dict[tuple[str, Any], deque[float]] = {}
    self._held: dict[tuple[str, Any], int] = {}

  def admit(self, kind: str, subject: Any, now: float) -> str | None:
    """What to put behind the line; None: do not tell it."""
    key = (kind, subject)
    times = self._times.setdefault(key, deque(maxlen=ALIKE_MAX))
    if len(times) == ALIKE_MAX and now - times[0] < ALIKE_S:
      self._held[key] = self._held.get(key, 0) + 1
      return None
    times.append(now)
    held = self._held.pop(key, 0)
    return f' ({held} more alike)' if held else ''

  @property
  def held(self) -> int:
    return sum(self._held.values())


class Progress:
  """Shows a run while it goes on; never writes faster than it is polled.

  On a terminal a table; elsewhere a status line every ~10 s. In both, a line
  for each decision worth telling. Colour is left out where NO_COLOR is set.
  """

  def __init__(
    self,
    view: view_lib.RunView,
    run_info: RunInfo,
    stream: TextIO,
    *,
    clock: Callable[[], float] = time.monotonic,
    console: console_lib.Console | None = None,
  ) -> None:
    """Makes nothing visible yet.

    Args:
      view: of the run's folder.
      run_info: what was configured.
      stream: where to write, normally stderr.
      clock: seconds, for the distance between lines.
      console: instead of one made for the stream.
    """
    self._view = view
    self._info = run_info
    self._stream = stream
    self._clock = clock
    if console is None:
      # Colours forced upon a log would not make it a terminal.
      console = console_lib.Console(
        file=stream, force_terminal=stream.isatty(), highlight=False
      )
    self._console = console
    self._live: live.Live | None = None
    self._limiter = _Limiter()
    self._line_at: float | None = None
    self._drawn: str | None = None

  def start(self) -> None:
    if self._console.is_terminal and not self._console.is_dumb_terminal:
      self._live = live.Live(
        self.render(), console=self._console, auto_refresh=False
      )
      self._live.start()

  def poll(self) -> None:
    """Reads what is new and shows it."""
    self._view.poll()
    now = self._clock()
    self._tell_decisions(now)
    if self._live is not None:
      self._live.update(self.render(), refresh=True)
    elif self._line_at is None:
      self._line_at = now
    elif now - self._line_at >= LINE_EVERY_S:
      self._line_at = now
      self._write_status()

  def note(self, text_: str) -> None:
    """A line of the launcher's own, always told."""
    self._write(text_)

  def stop(self) -> None:
    """The last state of the run; the table stays where it is."""
    self._view.poll()
    self._tell_decisions(self._clock())
    if self._live is not None:
      self._live.update(self.render(), refresh=True)
      self._live.stop()
      self._live = None
    else:
      self._write_status()
    if self._limiter.held:
      self._write(f'{self._limiter.held} lines like those above not shown')
    if self._view.bad_lines:
      self._write(f'warning: {self._view.bad_lines} lines could not be read')

  # Lines.

  def _write(self, line: str) -> None:
    if self._live is not None:
      self._console.print(text.Text(line))
      return
    self._stream.write(f'{line}\n')
    self._stream.flush()

  def _tell_decisions(self, now: float) -> None:
    told = 0
    decisions = self._view.take_decisions()
    for line in decisions:
      kind = line['kind']
      behind = self._limiter.admit(kind, line.get('island'), now)
      if behind is None:
        continue
      if told == LINES_MAX:
        self._write(f'... and more, of {len(decisions)} in a short time')
        return
      told += 1
      sentence = SENTENCES[kind](line)
      self._write(f'[{duration_text(line["t_s"]):>6}] {sentence}{behind}')

  def _write_status(self) -> None:
    line = self.status_line()
    if line != self._drawn:  # a run that stands still does not fill a log
      self._write(line)
    self._drawn = line

  def status_line(self) -> str:
    """The state of the run in at most 80 columns."""
    view, info = self._view, self._info
    losses = [
      row['loss']
      for row in view.islands.values()
      if row.get('loss') is not None
    ]
    loss = sum(losses) / len(losses) if losses else None
    standing = list(view.standing.values())
    parts = (
      f'[{duration_text(view.now_s):>6}]',
      f'step {view.global_step or 0}/{info.steps}',
      f'loss {_number(loss, ".3f")}',
      f'{count_text(self._tokens_per_s())} tok/s',
      f'live {standing.count("live")}/{info.islands}',
      f'goodput {_number(self._goodput(), ".2f")}',
      f'left {duration_text(view.left_s(info.steps))}',
    )
    return ' '.join(parts)[:WIDTH]

  def _goodput(self) -> float | None:
    return self._view.goodput(self._info.islands, self._info.step_floor_s)

  def _tokens_per_s(self) -> float | None:
    view = self._view
    rates = [
      row['tokens_per_s']
      for island, row in view.islands.items()
      if row.get('tokens_per_s') is not None
      and view.standing.get(island) == 'live'
    ]
    return sum(rates) if rates else None

  # The table.

  def render(self) -> table.Table:
    """The table: the run, then a row an island."""
    grid = table.Table.grid(expand=False)
    grid.add_column(no_wrap=True, overflow='ellipsis')
    for line in self._run_lines():
      grid.add_row(text.Text(line))
    grid.add_row(self._islands_table())
    return grid

  def _run_lines(self) -> tuple[str, str]:
    view, info = self._view, self._info
    syncer = view.syncer or {}
    reached = _number(syncer.get('period_steps'), '.1f')
    first = (
      f'{info.preset or "run"}: step {view.global_step or 0}/{info.steps}'
      f' | merges {view.merges} | period {reached} of {info.period}'
      f' | left {duration_text(view.left_s(info.steps))}'
    )
    second = (
      f'goodput {_number(self._goodput(), ".3f")}'
      f' | up {bytes_text(view.bytes_up)} | down {bytes_text(view.bytes_down)}'
      f' | refused {view.refused}'
    )
    if view.evaluation is not None:
      second += f' | eval {view.evaluation["eval_loss"]:.4f}'
    return first, second

  def _islands_table(self) -> table.Table:
    view = self._view
    islands = sorted(view.islands.keys() | view.standing.keys())
    # Two lines about the run, a header, two rules and a line for the prompt.
    room = max(1, self._console.height - 7)
    shown = islands if len(islands) <= room else islands[: room - 1]
    made = table.Table(box=None, padding=(0, 1), pad_edge=False)
    for name in ('island', 'step', 'loss', 'tok/s', 'anchors'):
      made.add_column(name, justify='right', no_wrap=True)
    made.add_column(
      'state', no_wrap=True, overflow='ellipsis', max_width=STATE_WIDTH
    )
    for island in shown:
      row = view.islands.get(island, {})
      standing = view.standing.get(island, 'joining')
      state = row.get('state', '') if standing == 'live' else standing
      made.add_row(
        str(island),
        _number(row.get('step'), 'd'),
        _number(row.get('loss'), '.4f'),
        count_text(row.get('tokens_per_s')),
        duration_text(row.get('anchors_age_s')),
        text.Text(state, style='' if standing == 'live' else 'bold red'),
      )
    if len(shown) < len(islands):
      made.add_row('...', '', '', '', '', f'{len(islands) - len(shown)} more')
    return made
