r"""Parity: four islands against data-parallel training at equal total tokens.

Question: how much held-out loss does it cost to train four islands of batch 8
that exchange fragments asynchronously, instead of one program with batch 32?

  python experiments/parity/run.py                the whole study, about 45
                                                  minutes on two cores; it
                                                  resumes where it was stopped
  python experiments/parity/run.py --smoke        four islands against one
                                                  island alone; about 3 minutes
  python experiments/parity/run.py --table        only the tables, from
                                                  results.jsonl

Every run is `python -m diloco_jax train` with the quickstart configuration
and the flags of its arm; one line a run goes to results.jsonl.
"""

import argparse
from collections.abc import Iterable
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = HERE / 'results.jsonl'
README = HERE / 'README.md'
TABLES = '<!-- tables -->'

DECOUPLED = 'decoupled'
DATA_PARALLEL = 'data_parallel'
ALONE = 'alone'
ARMS = {
  # Flags beside the quickstart's.
  DECOUPLED: (),
  'momentum 0.5': ('--config.outer.momentum=0.5',),
  'momentum 0.5, overwrite': (
    '--config.outer.momentum=0.5', '--config.sync.adopt=overwrite',
  ),
  'momentum 0.5, plain mean': (
    '--config.outer.momentum=0.5', '--config.sync.merge=mean',
  ),
  'lr 0.7, momentum 0.9': (
    '--config.outer.lr=0.7', '--config.outer.momentum=0.9',
  ),
  'overwrite': ('--config.sync.adopt=overwrite',),
  'plain mean': ('--config.sync.merge=mean',),
  DATA_PARALLEL: ('--config.preset=data_parallel',),
  ALONE: ('--config.preset=data_parallel', '--config.islands=1'),
}  # fmt: skip
SETTINGS = tuple(x for x in ARMS if x not in (DATA_PARALLEL, ALONE))
RATES = (3e-3, 6e-3, 1.2e-2)
SEEDS = (0, 1, 2)
STEPS = (600, 1500)
KEPT = (
  'eval_loss', 'eval_accuracy', 'merges', 'effective_h', 'islands_committed',
  'inner_steps_total', 'tokens_trained', 'tokens_merged', 'wall_s',
)  # fmt: skip
GAIN_MIN = 0.02  # of the smoke test
SMOKE_RATE = 1.2e-2  # the quickstart's


def run_one(arm: str, seed: int, steps: int, rate: float) -> dict:
  """One run in a process of its own; returns its line."""
  with tempfile.TemporaryDirectory() as folder:
    workdir = pathlib.Path(folder) / 'run'
    command = [
      sys.executable, '-m', 'diloco_jax', 'train',
      '--config=experiments/configs/quickstart.py', f'--workdir={workdir}',
      f'--config.seed={seed}', f'--config.steps={steps}',
      f'--config.inner.lr={rate}', '--config.metrics.eval_every_s=0.0',
      '--config.metrics.tensorboard=False', *ARMS[arm],
    ]  # fmt: skip
    done = subprocess.run(
      command, cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
      sys.exit(f'{" ".join(command)}\n{done.stdout}{done.stderr}')
    summary = json.loads((workdir / 'summary.json').read_text())
  line = {'arm': arm, 'seed': seed, 'steps': steps, 'lr': rate}
  return line | {name: summary[name] for name in KEPT}


def read() -> list[dict]:
  if not RESULTS.exists():
    return []
  return [json.loads(x) for x in RESULTS.read_text().splitlines()]


def find(rows: Iterable[dict], **wanted: object) -> list[dict]:
  return [row for row in rows if all(row[k] == v for k, v in wanted.items())]


def ensure(arm: str, seed: int, steps: int, rate: float) -> dict:
  """The line of a run, which is made if it is not there."""
  there = find(read(), arm=arm, seed=seed, steps=steps, lr=rate)
  if there:
    return there[0]
  began = time.monotonic()
  line = run_one(arm, seed, steps, rate)
  with RESULTS.open('a') as stream:
    stream.write(json.dumps(line) + '\n')
  print(
    f'{arm}, seed {seed}, {steps} steps, lr {rate:g}: '
    f'{line["eval_loss"]:.4f} ({time.monotonic() - began:.0f} s)',
    flush=True,
  )
  return line


def best_rate(rows: list[dict], arm: str) -> float:
  tried = find(rows, arm=arm, seed=0, steps=STEPS[0])
  return min(tried, key=lambda row: row['eval_loss'])['lr']


def study() -> None:
  for arm in (DECOUPLED, DATA_PARALLEL):
    for rate in RATES:
      ensure(arm, 0, STEPS[0], rate)
  rates = {arm: best_rate(read(), arm) for arm in (DECOUPLED, DATA_PARALLEL)}
  for arm in SETTINGS:
    ensure(arm, 0, STEPS[0], rates[DECOUPLED])
  for steps in STEPS:
    for seed in SEEDS:
      for arm in (DATA_PARALLEL, DECOUPLED):
        ensure(arm, seed, steps, rates[arm])


def table(header: tuple[str, ...], rows: Iterable[tuple]) -> str:
  lines = ['| ' + ' | '.join(header) + ' |', '|' + '---|' * len(header)]
  lines += ['| ' + ' | '.join(str(x) for x in row) + ' |' for row in rows]
  return '\n'.join(lines)


def spread(values: list[float]) -> str:
  mean = statistics.mean(values)
  return f'{mean:.4f} ({min(values):.4f} to {max(values):.4f})'


def parity_rows(rows: list[dict]) -> Iterable[tuple]:
  for steps in STEPS:
    losses = {}
    for arm in (DATA_PARALLEL, DECOUPLED):
      rate = best_rate(rows, arm)
      found = find(rows, arm=arm, steps=steps, lr=rate)
      losses[arm] = {row['seed']: row['eval_loss'] for row in found}
    both = sorted(losses[DATA_PARALLEL].keys() & losses[DECOUPLED].keys())
    if not both:
      continue
    costs = [
      100 * (losses[DECOUPLED][x] / losses[DATA_PARALLEL][x] - 1) for x in both
    ]
    yield (
      steps,
      len(both),
      spread([losses[DATA_PARALLEL][x] for x in both]),
      spread([losses[DECOUPLED][x] for x in both]),
      (
        f'{statistics.mean(costs):+.1f} % ({min(costs):+.1f} to '
        f'{max(costs):+.1f})'
      ),
    )


def tables() -> str:
  """All tables of the study, from the raw lines."""
  rows = read()
  tried = [
    (arm, f'{row["lr"]:g}', f'{row["eval_loss"]:.4f}')
    for arm in (DATA_PARALLEL, DECOUPLED, 'momentum 0.5')
    for row in sorted(
      find(rows, arm=arm, seed=0, steps=STEPS[0]), key=lambda row: row['lr']
    )
  ]
  rate = best_rate(rows, DECOUPLED)
  settings = [
    (arm, f'{row["eval_loss"]:.4f}')
    for arm in SETTINGS
    for row in find(rows, arm=arm, seed=0, steps=STEPS[0], lr=rate)
  ]
  return '\n\n'.join(
    (
      'Held-out loss (nats a byte) at equal total tokens, mean and range:',
      table(
        ('steps', 'seeds', 'data-parallel, batch 32', 'four islands, batch 8',
         'cost'),
        parity_rows(rows),
      ),
      'Inner learning rates tried, one seed, 600 steps:',
      table(('arm', 'inner lr', 'loss'), tried),
      f'Settings of the exchange, one seed, 600 steps, inner lr {rate:g}:',
      table(('setting', 'loss'), settings),
    )
  )  # fmt: skip


def write_tables() -> None:
  """Put the tables between the markers of README.md."""
  before, _, after = README.read_text().split(TABLES)
  README.write_text(f'{before}{TABLES}\n\n{tables()}\n\n{TABLES}{after}')


def smoke(steps: int) -> None:
  """Four islands must beat one that is alone, at the same steps and seed."""
  losses = {
    arm: run_one(arm, 0, steps, SMOKE_RATE)['eval_loss']
    for arm in (ALONE, DECOUPLED)
  }
  gain = 1 - losses[DECOUPLED] / losses[ALONE]
  print(
    f'alone {losses[ALONE]:.4f}, four islands {losses[DECOUPLED]:.4f}: '
    f'{100 * gain:.1f} % lower, at least {100 * GAIN_MIN:.0f} % wanted'
  )
  if gain < GAIN_MIN:
    sys.exit(1)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--smoke', action='store_true')
  parser.add_argument('--steps', type=int, default=600, help='of --smoke')
  parser.add_argument('--table', action='store_true')
  args = parser.parse_args()
  if args.smoke:
    smoke(args.steps)
    return
  if not args.table:
    study()
  write_tables()
  print(tables())


if __name__ == '__main__':
  main()
