"""report.html: one self-contained page about a run.

It works on the folder of a run that was interrupted: what is missing is said,
and left out.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
import html
import os
import pathlib
from typing import Any

import numpy as np

from diloco_jax.telemetry import accounting
from diloco_jax.telemetry import folder
from diloco_jax.telemetry import lines
from diloco_jax.telemetry import page
from diloco_jax.telemetry import summary as summary_lib
from diloco_jax.telemetry import svg

FILE_NAME = 'report.html'
ROUNDS_MAX = 200  # rounds listed one by one


# Sections.


def _notices(run: folder.RunFolder) -> str:
  items = [f'{name} is missing' for name in run.missing]
  items += [f'not readable: {problem}' for problem in run.problems]
  items += [
    f'the books do not add up: {problem}'
    for problem in accounting.accounting_problems(run.tape)
  ]
  if not run.kind('finished'):
    items.append('the run has not finished, or was interrupted')
  if not items:
    return ''
  shown = ''.join(f'<li>{html.escape(item)}</li>' for item in items)
  return f'<div class="notice" role="note"><ul>{shown}</ul></div>'


def _curves(run: folder.RunFolder, x: str, y: str) -> list[svg.Series]:
  """One line an island, of two fields of its rows."""
  curves = []
  for island, rows in run.islands.items():
    used = [
      row for row in rows if row.get(x) is not None and accounting.steps_of(row)
    ]
    curves.append(
      svg.Series(
        f'island {island}',
        [row[x] for row in used],
        [row.get(y) for row in used],
      )
    )
  return curves


def _held_out(run: folder.RunFolder, x: str) -> list[svg.Series]:
  rows = [row for row in run.evaluator if row.get(x) is not None]
  if not rows:
    return []
  return [
    svg.Series(
      'held out',
      [row[x] for row in rows],
      [row.get('eval_loss') for row in rows],
      strong=True,
    )
  ]


def _loss(run: folder.RunFolder, marks: Sequence[svg.Mark]) -> str:
  return page.section(
    'Loss',
    page.charts(
      svg.line_chart(
        'Loss by step',
        _curves(run, 'step', 'loss') + _held_out(run, 'global_step'),
        'step (inner; global for held out)',
        'loss',
      ),
      svg.line_chart(
        'Loss by time',
        _curves(run, 't_s', 'loss') + _held_out(run, 't_s'),
        'time, s',
        'loss',
        marks,
      ),
    ),
  )


def _rounds(run: folder.RunFolder) -> str:
  closed = run.kind('round_closed')
  reasons = Counter(line['reason'] for line in closed)
  left_out = Counter(
    (island, why) for line in closed for island, why in line['left_out']
  )
  return page.section(
    'Rounds and merges',
    _contributions(run),
    page.charts(
      svg.line_chart(
        'Contributions in each merge',
        [
          svg.Series(
            'contributions',
            [line['t_s'] for line in run.kind('merge')],
            [len(line['inputs']) for line in run.kind('merge')],
          ),
          svg.Series(
            'live islands',
            [line['t_s'] for line in closed],
            [line['live'] for line in closed],
          ),
        ],
        'time, s',
        'islands',
        from_zero=True,
      ),
      svg.line_chart(
        'How long rounds took',
        [
          svg.Series(
            'round',
            [line['t_s'] for line in closed],
            [line.get('duration_s') for line in closed],
          ),
          svg.Series(
            'grace window',
            [line['t_s'] for line in closed],
            [line.get('grace_s') for line in closed],
          ),
        ],
        'time, s',
        'seconds',
        from_zero=True,
      ),
    ),
    page.headed(
      'Why rounds closed', ('reason', 'rounds'), sorted(reasons.items())
    ),
    page.headed(
      'Who was left out, and why',
      ('island', 'why', 'rounds'),
      [(*key, count) for key, count in sorted(left_out.items())],
    ),
    page.folded(
      f'The last {min(len(closed), ROUNDS_MAX)} rounds of {len(closed)}',
      _round_table(run, closed[-ROUNDS_MAX:]),
    ),
  )


def _contributions(run: folder.RunFolder) -> str:
  """Who is in which merge, as a grid."""
  merges = run.kind('merge')
  inside = [{x[0] for x in line['inputs']} for line in merges]
  islands = sorted(
    set().union(*inside) | {line['island'] for line in run.kind('joined')}
  )
  islands = [island for island in islands if island >= 0]
  happened = np.array(
    [[float(island in one) for one in inside] for island in islands]
  ).reshape(len(islands), len(inside))
  grid = svg.share_grid(
    'Which merges each island contributed to',
    [f'island {island}' for island in islands],
    happened,
    'merges, in order; the darker, the more often it contributed',
  )
  return f'<h3>Who contributed</h3>{grid}' if grid else ''


def _round_table(
  run: folder.RunFolder, closed: Sequence[Mapping[str, Any]]
) -> str:
  inputs = {tuple(line['round']): line['inputs'] for line in run.kind('merge')}
  rows = []
  for line in closed:
    merged = inputs.get(tuple(line['round']), ())
    rows.append(
      (
        round(line['t_s'], 2),
        '.'.join(str(part) for part in line['round']),
        line['fragment'],
        line['reason'],
        ' '.join(str(x[0]) for x in merged),
        ', '.join(f'{island}: {why}' for island, why in line['left_out']),
        line.get('duration_s'),
        line.get('grace_s'),
      )
    )
  return page.table(
    ('t, s', 'round', 'fragment', 'closed', 'contributed', 'left out',
     'took, s', 'grace, s'),
    rows,
  )  # fmt: skip


def _traffic(run: folder.RunFolder, marks: Sequence[svg.Mark]) -> str:
  curves = []
  for name, label in (('bytes_up', 'up'), ('bytes_down', 'down')):
    counter = accounting.Counter()
    totals = []
    for row in run.syncer:
      counter.add(row.get(name))
      totals.append(counter.total)
    curves.append(svg.Series(label, [row['t_s'] for row in run.syncer], totals))
  return page.section(
    'Traffic',
    page.charts(
      svg.line_chart(
        'Bytes to and from the syncer',
        curves,
        'time, s',
        'bytes',
        marks,
        fold='max',
        from_zero=True,
      )
    ),
  )


def _throughput(run: folder.RunFolder, marks: Sequence[svg.Mark]) -> str:
  rows = []
  for island, of_island in run.islands.items():
    times = accounting.step_times_s(of_island)
    exchange = [
      row['exchange_s']
      for row in of_island
      if row.get('exchange_s') is not None
    ]
    rows.append(
      (
        island,
        sum(accounting.steps_of(row) for row in of_island),
        1e3 * float(np.median(times)) if times.size else None,
        1e3 * float(np.percentile(exchange, 99)) if exchange else None,
        1e3 * max(exchange) if exchange else None,
      )
    )
  return page.section(
    'Throughput',
    page.charts(
      svg.line_chart(
        'Tokens per second',
        _curves(run, 't_s', 'tokens_per_s'),
        'time, s',
        'tokens/s',
        marks,
        from_zero=True,
      ),
      svg.line_chart(
        'Time in the exchange',
        _curves(run, 't_s', 'exchange_s'),
        'time, s',
        'seconds, longest of a row',
        marks,
        fold='max',
        from_zero=True,
      ),
    ),
    page.table(
      ('island', 'steps', 'median step, ms', 'exchange p99, ms',
       'exchange max, ms'),
      rows,
    ),
  )  # fmt: skip


def _faults(run: folder.RunFolder, faults: Sequence[Mapping[str, Any]]) -> str:
  return page.section(
    'Faults',
    page.table(
      ('t, s', 'kind', 'target', 'back after, s', 'first merge after, s'),
      [
        (x['t_s'], x['kind'], x['target'], x['back_s'], x['first_merge_s'])
        for x in faults
      ],
    )
    or '<p>None was noticed.</p>',
    page.folded(
      'Processes',
      page.table(
        ('role', 'index', 'incarnation', 'started, s', 'ended, s', 'exit'),
        [
          (x.get('role'), x.get('index'), x.get('incarnation'),
           x.get('started_s'), x.get('ended_s'), x.get('exit'))
          for x in run.processes
        ],
      ),
    ),
  )  # fmt: skip


def _settings(tree: Any, prefix: str = '') -> list[tuple[str, Any]]:
  """A nested configuration as (dotted path, value)."""
  if not isinstance(tree, dict):
    return [(prefix, tree)]
  found = []
  for name, value in tree.items():
    found.extend(_settings(value, f'{prefix}.{name}' if prefix else str(name)))
  return found


def render(run: folder.RunFolder) -> str:
  """The page of a folder that has been read."""
  summary = summary_lib.summary_of(run)
  marks = [
    svg.Mark(x['t_s'], f'{x["kind"]} of {x["target"]}')
    for x in summary['faults']
  ]
  flat = {key: value for key, value in summary.items() if key != 'faults'}
  name = run.workdir.resolve().name
  title = f'{summary["preset"] or "run"} · {name}'
  settings = sorted(_settings(run.config)) if run.config else []
  sections = (
    _notices(run),
    page.section(
      'Summary', page.table(('figure', 'value'), list(flat.items()))
    ),
    _loss(run, marks),
    _rounds(run),
    _faults(run, summary['faults']),
    _throughput(run, marks),
    _traffic(run, marks),
    page.section(
      'Configuration',
      f'<p>Hash {html.escape(run.config_hash[:16])}</p>'
      if run.config_hash
      else '',
      page.folded('Every setting', page.table(('setting', 'value'), settings)),
    ),
  )
  return page.document(title, sections)


def write_report(workdir: str | os.PathLike) -> pathlib.Path:
  """Writes report.html of a run folder, atomically, and returns its path.

  Raises:
    UserError: it is not the folder of a run.
  """
  path = pathlib.Path(workdir) / FILE_NAME
  lines.write_atomic(path, render(folder.load(workdir, strict=False)))
  return path
