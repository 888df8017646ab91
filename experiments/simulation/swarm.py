"""Runs many seeds of the swarm and keeps what they exercised.

Resumes: a row for each chunk of seeds is appended to swarm_MODE.jsonl beside
this file as soon as it is done, and chunks that are there are not run again.
The tables of README.md are made of all rows. Rows of an older protocol say
nothing of the present one: delete them after a change.

Exit code 1: a seed failed; it is in the rows, and printed.
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

import tables  # noqa: E402

from diloco_jax.simulation import command  # noqa: E402

CHUNK = 100


def chunk(mode: str, begin: int, end: int) -> dict[str, Any]:
  """One row: what these seeds did."""
  began = time.monotonic()
  part = command.run_part(mode, begin, end)
  return {
    'begin': begin,
    'end': end,
    'events': part.events,
    'fault_free': part.fault_free,
    'too_few': list(part.too_few),
    'failures': [
      [x.seed, x.code, x.checker, x.sentence] for x in part.failures
    ],
    **part.tally.to_plain(),
    'wall_s': round(time.monotonic() - began, 1),
  }


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--mode', choices=command.MODES, default=command.TIMING)
  parser.add_argument('--seeds', type=int, default=20_000, help='from 0 on')
  parser.add_argument('--jobs', type=int, default=os.cpu_count())
  args = parser.parse_args()
  path = HERE / f'swarm_{args.mode}.jsonl'
  rows = tables.read(path)
  done = {row['begin'] for row in rows}
  begins = [x for x in range(0, args.seeds, CHUNK) if x not in done]
  print(f'{len(rows)} chunks are there, {len(begins)} to run', flush=True)
  with concurrent.futures.ProcessPoolExecutor(args.jobs) as pool:
    waiting = [
      pool.submit(chunk, args.mode, x, min(x + CHUNK, args.seeds))
      for x in begins
    ]
    for future in concurrent.futures.as_completed(waiting):
      row = future.result()
      with path.open('a', encoding='utf-8') as out:
        out.write(json.dumps(row) + '\n')
      print(
        f'seeds {row["begin"]} to {row["end"]}: {row["events"]:,} events, '
        f'{len(row["failures"])} failures, {row["wall_s"]} s',
        flush=True,
      )
  rows = tables.read(path)
  tables.write(HERE / 'README.md', args.mode, tables.of_swarm(rows))
  failures = [x for row in rows for x in row['failures']]
  for failure in failures:
    print('FAILED', *failure)
  return int(bool(failures))


if __name__ == '__main__':
  sys.exit(main())
