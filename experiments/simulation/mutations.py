"""Plants known bugs in the protocol and counts the seeds until one is caught.

For each bug of `planted.py` the simulator runs seed after seed, with all
checkers on, until one of them fails. A row of raw results for each bug goes to
mutations.jsonl, and the table made of them into README.md, both beside this
file. Exit code 1: a bug was not caught within --seeds.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import sys
import time
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]

import planted  # noqa: E402
import tables  # noqa: E402

from diloco_jax.simulation import checking  # noqa: E402
from diloco_jax.simulation import swarm  # noqa: E402


def failure(seed: int) -> swarm.Failure | None:
  """What fails on this seed; None: all is well."""
  return swarm.run_seed(seed).failure


def hunt(name: str, seeds: range) -> dict[str, Any]:
  """Who found the bug, and after how many seeds.

  A seed that fails without the bug as well says nothing of it.
  """
  began = time.monotonic()
  row = {'bug': name, 'seeds': None, 'checker': None, 'sentence': None}
  for count, seed in enumerate(seeds, 1):
    with planted.BUGS[name]():
      found = failure(seed)
    if found is not None and failure(seed) is None:
      row.update(
        seeds=count,
        seed=seed,
        checker=_told_by(found),
        sentence=found.sentence[:300],
      )
      break
  row['wall_s'] = round(time.monotonic() - began, 1)
  return row


def _told_by(found: swarm.Failure) -> str:
  crash = found.code == checking.CRASH
  return f'crash ({found.checker})' if crash else found.checker


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--seeds', type=int, default=500, help='at most')
  parser.add_argument('--only', nargs='*', default=[], help='these bugs')
  parser.add_argument('--jobs', type=int, default=os.cpu_count())
  args = parser.parse_args()
  names = args.only or list(planted.BUGS)
  rows = []
  with concurrent.futures.ProcessPoolExecutor(args.jobs) as pool:
    for row in pool.map(hunt, names, [range(args.seeds)] * len(names)):
      rows.append(row)
      print(f'{row["bug"]:45} {row["seeds"]} {row["checker"]}', flush=True)
  if not args.only:
    raw = HERE / 'mutations.jsonl'
    raw.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    tables.write(HERE / 'README.md', 'planted bugs', tables.of_planted(rows))
  return int(any(row['seeds'] is None for row in rows))


if __name__ == '__main__':
  sys.exit(main())
