"""Plants known bugs in the protocol and counts the seeds until one is caught.

For each bug of `planted.py` the simulator runs seed after seed, with all
checkers on, until one of them fails. A row of raw results for each bug goes to
mutations.jsonl, and the table made of them into README.md, both beside this
file. Exit code 1: a bug was not caught within --seeds.
"""

import argparse
from collections.abc import Callable
import json
import pathlib
import sys
import time
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]

import planted  # noqa: E402

from diloco_jax.protocol.invariants import InvariantError  # noqa: E402
from diloco_jax.simulation.checking import CheckFailure  # noqa: E402
from tests.simulation import watched_chaos  # noqa: E402

BEGIN, END = '<!-- table of planted bugs -->', '<!-- end of table -->'


def failure(run: Callable[[int], Any], seed: int) -> tuple[str, str] | None:
  """Who fails on this seed, and what is said; None: all is well."""
  try:
    run(seed)
  except CheckFailure as e:
    return e.checker, e.sentence
  except InvariantError as e:
    return 'invariants', str(e)
  except (AssertionError, KeyError, TypeError, ValueError) as e:
    return f'crash ({type(e).__name__})', str(e)
  return None


def hunt(
  name: str, seeds: range, run: Callable[[int], Any] = watched_chaos.run_checked
) -> dict[str, Any]:
  """Who found the bug, and after how many seeds.

  A seed that fails without the bug as well says nothing of it.
  """
  began = time.monotonic()
  row = {'bug': name, 'seeds': None, 'checker': None, 'sentence': None}
  for count, seed in enumerate(seeds, 1):
    with planted.BUGS[name]():
      found = failure(run, seed)
    if found is not None and failure(run, seed) is None:
      row.update(
        seeds=count, seed=seed, checker=found[0], sentence=found[1][:300]
      )
      break
  row['wall_s'] = round(time.monotonic() - began, 1)
  return row


def _words(name: str) -> str:
  return name.replace('_', ' ')


def table(rows: list[dict[str, Any]]) -> str:
  lines = ['| planted bug | seeds needed | found by |', '|---|---|---|']
  for row in rows:
    seeds = row['seeds'] if row['seeds'] is not None else 'not found'
    lines.append(f'| {_words(row["bug"])} | {seeds} | {row["checker"]} |')
  return '\n'.join(lines)


def write_table(rows: list[dict[str, Any]]) -> None:
  readme = HERE / 'README.md'
  text = readme.read_text()
  before, _, rest = text.partition(BEGIN)
  _, _, after = rest.partition(END)
  readme.write_text(f'{before}{BEGIN}\n{table(rows)}\n{END}{after}')


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--seeds', type=int, default=500, help='at most')
  parser.add_argument('--only', nargs='*', default=[], help='these bugs')
  args = parser.parse_args()
  rows = []
  for name in args.only or planted.BUGS:
    row = hunt(name, range(args.seeds))
    rows.append(row)
    print(f'{_words(name):45} {row["seeds"]} {row["checker"]}', flush=True)
  if not args.only:
    raw = HERE / 'mutations.jsonl'
    raw.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    write_table(rows)
  return int(any(row['seeds'] is None for row in rows))


if __name__ == '__main__':
  sys.exit(main())
