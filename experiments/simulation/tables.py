"""Tables of README.md, made of raw rows."""

from collections import Counter
import json
import pathlib
from typing import Any

from diloco_jax.chaos import plan
from diloco_jax.simulation.coverage import PHASES


def read(path: pathlib.Path) -> list[dict[str, Any]]:
  if not path.exists():
    return []
  return [json.loads(x) for x in path.read_text().splitlines()]


def write(readme: pathlib.Path, name: str, table: str) -> None:
  """Put a table between its two marks."""
  begin, end = f'<!-- table: {name} -->', '<!-- end of table -->'
  before, found, rest = readme.read_text().partition(begin)
  assert found, begin
  _, _, after = rest.partition(end)
  readme.write_text(f'{before}{begin}\n{table}\n{end}{after}')


def _words(name: str) -> str:
  return name.replace('_', ' ')


def of_planted(rows: list[dict[str, Any]]) -> str:
  lines = ['| planted bug | seeds needed | found by |', '|---|---|---|']
  for row in rows:
    seeds = row['seeds'] if row['seeds'] is not None else 'not found'
    lines.append(f'| {_words(row["bug"])} | {seeds} | {row["checker"]} |')
  return '\n'.join(lines)


def of_swarm(rows: list[dict[str, Any]]) -> str:
  """What all seeds together have exercised."""
  faults: Counter[str] = Counter()
  kinds: Counter[str] = Counter()
  closes: Counter[str] = Counter()
  refusals: Counter[str] = Counter()
  for row in rows:
    faults.update(row['faults'])
    kinds.update(row['kinds'])
    closes.update(row['closes'])
    refusals.update(row['refusals'])
  seeds = sum(row['end'] - row['begin'] for row in rows)
  free = sum(row['fault_free'] for row in rows)
  few = sum(len(row['too_few']) for row in rows)
  failures = sum(len(row['failures']) for row in rows)
  head = (
    f'{seeds:,} seeds, {sum(row["events"] for row in rows):,} events, '
    f'{sum(kinds.values()):,} faults; {free} seeds without any; {failures} '
    f'failures; {few} seeds with fewer events, merges or faults than wanted.'
  )
  lines = [
    head,
    '',
    '| fault | in all | ' + ' | '.join(PHASES) + ' |',
    '|---|---|' + '---|' * len(PHASES),
  ]
  for kind in plan.KINDS:
    counts = [f'{faults[f"{kind} / {phase}"]:,}' for phase in PHASES]
    lines.append(f'| {_words(kind)} | {kinds[kind]:,} | {" | ".join(counts)} |')
  for name, counter in (
    ('Rounds closed', closes), ('Contributions refused', refusals),
  ):  # fmt: skip
    told = ', '.join(f'{_words(k)} {n:,}' for k, n in counter.most_common())
    lines += ['', f'{name}: {told}.']
  return '\n'.join(lines)
