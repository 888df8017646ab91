"""summary.json: the totals of a run, from its folder alone."""

import json
import os
import pathlib
from typing import Any

import numpy as np

from diloco_jax.telemetry import accounting
from diloco_jax.telemetry import faults
from diloco_jax.telemetry import folder
from diloco_jax.telemetry import lines

FILE_NAME = 'summary.json'
OK = 'ok'
INTERRUPTED = 'interrupted'
FAILED = 'failed'
# Reasons of the tape's `finished` line with which a run has done its work.
DONE = ('steps', 'token_budget')


class AccountingError(Exception):
  """The token books of a run do not add up."""


def summarize(
  workdir: str | os.PathLike, status: str | None = None, strict: bool = True
) -> dict[str, Any]:
  """The totals of a run; None where unknown.

  Args:
    workdir: the run folder.
    status: ok, interrupted or failed, where the caller knows; otherwise it is
      told from the folder.
    strict: raise where the books do not add up, or a file is malformed.

  Raises:
    UserError: it is not the folder of a run.
    AccountingError: trained != merged + lost + pending, or merges and totals
      differ.
    MalformedLineError: with file and line.
  """
  run = folder.load(workdir, strict)
  problems = accounting.accounting_problems(run.tape)
  if strict and problems:
    raise AccountingError('\n'.join(problems))
  return summary_of(run, status)


def summary_of(
  run: folder.RunFolder, status: str | None = None
) -> dict[str, Any]:
  """The same of a folder that has been read, without checks."""
  counts = accounting.participation(run.tape)
  finished = run.kind('finished')
  closing = _last_evaluation(run)
  return {
    'status': status or _status(run),
    'preset': run.setting('preset'),
    'islands': run.setting('islands'),
    'steps': run.setting('steps'),
    **_work(run),
    'merges': len(run.kind('merge')) if run.tape else None,
    'effective_h': accounting.effective_h(run.tape, _is_each(run)),
    'eval_loss': closing.get('eval_loss'),
    'eval_loss_reference': run.setting('metrics.reference'),
    'eval_accuracy': closing.get('eval_accuracy'),
    'wall_s': _wall_s(run),
    **_time(run),
    'bytes_up': accounting.counter_total(
      row.get('bytes_up') for row in run.syncer
    ),
    'bytes_down': accounting.counter_total(
      row.get('bytes_down') for row in run.syncer
    ),
    'islands_live': counts.live,
    'islands_participating': counts.participating,
    'islands_committed': counts.committed,
    'refusals': _count(run, 'refused'),
    'rounds_closed': _count(run, 'round_closed'),
    'faults': [fault._asdict() for fault in faults.find(run)],
    'params_digest': finished[-1].get('params_digest') or None
    if finished
    else None,
  }


def _status(run: folder.RunFolder) -> str | None:
  finished = run.kind('finished')
  if finished:
    reason = finished[-1]['reason']
    if reason in DONE:
      return OK
    return FAILED if faults.is_bad_leave(reason) else INTERRUPTED
  syncers = [row for row in run.processes if row['role'] == 'syncer']
  if syncers and syncers[-1]['ended_s'] is not None:
    return FAILED
  return None


def _is_each(run: folder.RunFolder) -> bool:
  return any(line['mode'] == 'each' for line in run.kind('run_started'))


def _last_evaluation(run: folder.RunFolder) -> folder.Row:
  """The final evaluation, or the last one there is."""
  rows = [row for row in run.evaluator if row.get('eval_loss') is not None]
  final = [row for row in rows if row.get('final')]
  return (final or rows or [{}])[-1]


def inner_steps(run: folder.RunFolder) -> int | None:
  """Inner steps of all islands, those done again after a restart included.

  Metrics rows count every step; an incarnation without rows counts by what
  it reported.
  """
  steps: dict[tuple[int, int], int] = {}
  for key, line in accounting.island_totals(run.tape).items():
    steps[key] = line['steps']
  counted: dict[tuple[int, int], int] = {}
  for island, rows in run.islands.items():
    for row in rows:
      key = (island, row.get('incarnation'))
      counted[key] = counted.get(key, 0) + accounting.steps_of(row)
  steps.update(counted)
  return sum(steps.values()) if steps else None


def _work(run: folder.RunFolder) -> dict[str, Any]:
  parameters = sum(accounting.sizes_of(run.tape))
  books = accounting.token_params(run.tape)
  trained: Any = None
  merged: Any = None
  if books is None:
    # Not finished: rows and merges are there, the closing of the books not.
    tokens = [
      row['row_tokens'] for row in run.rows if row.get('row_tokens') is not None
    ]
    trained = sum(tokens) if tokens else None
    merged = sum(accounting.merged_token_params(run.tape).values())
  else:
    trained = accounting.per_parameter(books.trained, parameters)
    merged = books.merged

  def tokens_of(name: str) -> float | None:
    amount = None if books is None else getattr(books, name)
    return accounting.per_parameter(amount, parameters)

  return {
    'inner_steps_total': inner_steps(run),
    'tokens_trained': trained,
    'tokens_merged': accounting.per_parameter(merged, parameters),
    'tokens_lost': tokens_of('lost'),
    'tokens_pending': tokens_of('pending'),
    'tokens_repeated': None,  # no ledger tells yet
    'tokens_overlap_discarded': tokens_of('overlap_discarded'),
  }


def _time(run: folder.RunFolder) -> dict[str, Any]:
  """Training time and what it was used for; None without metrics rows."""
  median_s = accounting.median_step_s(run.rows)
  finished_s = np.sort(
    np.concatenate(
      [
        np.zeros(0),
        *(accounting.finish_times_s(rows) for rows in run.islands.values()),
      ]
    )
  )
  if median_s is None or not finished_s.size:
    return dict.fromkeys(
      ('train_s', 'tokens_per_s', 'goodput', 'global_downtime_s')
    )
  train_s = accounting.train_s(finished_s, median_s)
  tokens = _work(run)['tokens_trained']
  islands = run.setting('islands')
  # The only preset whose islands share one process and one step.
  if run.setting('preset') == 'data_parallel':
    islands = 1
  floor_s = (run.setting('launch.step_floor_ms') or 0.0) / 1000
  goodput = None
  if islands:
    goodput = accounting.goodput(
      inner_steps(run) or 0, islands, train_s, floor_s or median_s
    )
  return {
    'train_s': train_s,
    'tokens_per_s': None if tokens is None else tokens / train_s,
    'goodput': goodput,
    'global_downtime_s': accounting.downtime_s(finished_s, median_s),
  }


def _wall_s(run: folder.RunFolder) -> float | None:
  """From the run's start to the last thing known of it."""
  times = [x['t_s'] for x in (*run.tape, *run.rows, *run.syncer)]
  times += [x['t_s'] for x in run.evaluator]
  times += [x['ended_s'] for x in run.processes if x['ended_s'] is not None]
  return max(times) if times else None


def _count(run: folder.RunFolder, kind: str) -> dict[str, int]:
  """How many lines of this kind there are, by reason, sorted."""
  counts: dict[str, int] = {}
  for line in run.kind(kind):
    counts[line['reason']] = counts.get(line['reason'], 0) + 1
  return dict(sorted(counts.items()))


def write_summary(
  workdir: str | os.PathLike, summary: dict[str, Any]
) -> pathlib.Path:
  """Writes summary.json atomically."""
  path = pathlib.Path(workdir) / FILE_NAME
  text = json.dumps(lines.finite(summary), indent=2, allow_nan=False)
  lines.write_atomic(path, text + '\n')
  return path
