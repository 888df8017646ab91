"""Write the tables of experiments/bench/README.md from the raw results.

  python experiments/bench/tables.py

Uses the last row of each kind in experiments/bench/results/.
"""

import json
import pathlib

HERE = pathlib.Path(__file__).parent
README = HERE / 'README.md'
MARKER = '<!-- tables -->'


def rows(name: str) -> list[dict]:
  text = (HERE / 'results' / f'{name}.jsonl').read_text()
  return [json.loads(line) for line in text.splitlines()]


def table(header: tuple[str, ...], body: list[tuple]) -> str:
  lines = ['| ' + ' | '.join(header) + ' |', '|' + '---|' * len(header)]
  lines += ['| ' + ' | '.join(str(x) for x in row) + ' |' for row in body]
  return '\n'.join(lines)


def step_overhead() -> str:
  # Rows of before there was a choice were all taken on one core.
  last = {
    (row['size'], row.get('exchange_on', 'one')): row
    for row in rows('step_overhead')
  }
  return table(
    ('parameters', 'exchange on', 'inner step, ms', 'with / without exchange, median',
     '95 % interval', 'in `island.step`, p99, ms', 'aim'),
    [
      (
        row['parameters'],
        {'any': 'any core', 'one': 'the same core'}[placement],
        row['step_ms'],
        row['median_ratio'],
        f'{row["low"]} to {row["high"]}',
        row['exchange_p99_ms'],
        'upper end ≤ 1.02' if row['parameters'] > 500_000 else '',
      )
      for (_, placement), row in last.items()
    ],
  )  # fmt: skip


def transport() -> str:
  last = rows('transport')[-1]
  aims = {16: 0.3, 64: 0.4, 256: 0.4}
  body = []
  for row in last['summary']:
    if row['way'] == 'tcp':
      continue
    body.append(
      (
        row['mib'],
        {'ours': 'gRPC, checksum', 'ours_tls': 'the same, TLS'}[row['way']],
        f'{row["gib_s"]:.2f}',
        f'{row["cpu_s_gib"]:.2f}',
        (
          f'{row["ratio"]:.2f} ({row["ratio_min"]:.2f} to '
          f'{row["ratio_max"]:.2f})'
        ),
        f'≥ {aims[row["mib"]]}' if row['way'] == 'ours' else '',
      )
    )
  return table(
    ('MiB', 'way', 'GiB/s', 'CPU-s per GiB', 'of raw TCP (range)', 'aim'),
    body,
  )


def merge() -> str:
  last = {row['layout']: row for row in rows('merge')}
  return table(
    ('tensors', 'of copy bandwidth, median', 'range', 'aim'),
    [
      (
        row['layout'],
        f'{row["ratio_median"]:.2f}',
        f'{row["ratio_range"][0]:.2f} to {row["ratio_range"][1]:.2f}',
        '≥ 0.8',
      )
      for row in last.values()
    ],
  )


def simulator() -> str:
  found = rows('simulator')
  rates = sorted(row['events_per_s'] for row in found)
  loops = sorted(row['loop_s'] for row in found)
  middle = len(found) // 2
  return table(
    ('events a second on one core, median', 'range', 'aim',
     'a plain loop of a million rounds, s, median and range'),
    [
      (
        f'{rates[middle]:,}',
        f'{rates[0]:,} to {rates[-1]:,}',
        '≥ 30,000',
        f'{loops[middle]:.2f} ({loops[0]:.2f} to {loops[-1]:.2f})',
      )
    ],
  )  # fmt: skip


def main() -> None:
  """Put the tables between the markers."""
  before, _, after = README.read_text(encoding='utf-8').split(MARKER)
  text = '\n\n'.join(
    (
      "## The exchange on the step's path (`step_overhead.py`)",
      step_overhead(),
      '## The wire (`transport.py`)',
      transport(),
      '## The merge, eight contributions of 64 MiB (`merge.py`)',
      merge(),
      '## The simulator with all checkers, 4 islands (`simulator.py`)',
      simulator(),
    )
  )
  README.write_text(
    f'{before}{MARKER}\n\n{text}\n\n{MARKER}{after}', encoding='utf-8'
  )


if __name__ == '__main__':
  main()
