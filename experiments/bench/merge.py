"""How fast a merge moves memory, against a plain copy.

Eight contributions of 64 MiB are merged by RDA and the Nesterov step as the
syncer does it: one compiled function that donates Θ and the momentum. The
least it could move is two reads of each contribution, one for its norm and
one for its direction, and a read and a write of Θ and of the momentum:
(2 M + 4) x 64 MiB. That over its time is its rate. NumPy copies as many bytes,
counting those read and those written, just before each merge. Their ratio
should be at least 0.8, both for a few tensors of unlike size and for 16 equal
ones.

The same is counted in processor time, of all threads together: a rate per core
that is used. Other programs disturb it less than the ratio, which on a machine
whose load is near or above its number of cores says little.

A sixth of the merge's processor time goes to page faults: the merged direction
is a temporary array, whose memory XLA asks the system for anew each time. With
GLIBC_TUNABLES=glibc.malloc.hugetlb=1 set before the start it comes in large
pages, and that time is gone.

A row of raw results for each layout is added to --out.
"""

import argparse
import json
import math
import os
import pathlib
import statistics
import sys
import time
from typing import Any

# Before jax is imported, which reads it.
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import numpy as np  # noqa: E402

from diloco_jax import algorithm as A  # noqa: E402

TARGET = 0.8
CONTRIBUTIONS = 8
WIDTH = 2048


def even(mebibytes: int) -> dict[str, tuple[int, ...]]:
  """Sixteen equal tensors."""
  return {
    f'tensor{k:02d}': (mebibytes * 2**20 // (4 * 16 * 1024), 1024)
    for k in range(16)
  }


def uneven(mebibytes: int) -> dict[str, tuple[int, ...]]:
  """Tensors as a transformer has them: large, middling and small ones."""
  rows = mebibytes * 2**20 // (4 * WIDTH)
  return {
    'up': (rows // 2, WIDTH),
    'down': (WIDTH, rows // 4),
    'attention': (rows // 8, WIDTH),
    'out': (rows // 8 - 1, WIDTH),
    'norm': (WIDTH,),
  }


LAYOUTS = {'uneven': uneven, 'even': even}


def fragment(
  rng: np.random.Generator, shapes: dict[str, tuple[int, ...]], scale: float
) -> dict[str, jax.Array]:
  return {
    name: jax.device_put(scale * rng.standard_normal(shape, np.float32))
    for name, shape in shapes.items()
  }


def measure(
  layout: str, mebibytes: int, repeats: int
) -> dict[str, list[float]]:
  """Seconds of each copy and of each merge, taken in turn."""
  size = mebibytes * 2**20
  shapes = LAYOUTS[layout](mebibytes)
  assert 4 * sum(math.prod(shape) for shape in shapes.values()) == size
  rng = np.random.default_rng(0)
  deltas = tuple(fragment(rng, shapes, 1e-3) for _ in range(CONTRIBUTIONS))
  theta = fragment(rng, shapes, 1.0)
  weights = jax.device_put(rng.uniform(0.5, 1.5, CONTRIBUTIONS).astype('f4'))
  tx = A.outer_optimizer(lr=1.0, momentum=0.5)
  state = tx.init(theta)
  merge = A.make_merge(tx, is_embedding={})
  theta, state = jax.block_until_ready(merge(theta, state, deltas, weights))

  source = rng.standard_normal(size // 4, np.float32)
  target = np.zeros_like(source)  # Touched, so that no page is new.
  copies = CONTRIBUTIONS + 2  # As many bytes as the merge.
  taken: dict[str, list[float]] = {
    'copy_s': [], 'merge_s': [], 'copy_cpu_s': [], 'merge_cpu_s': []
  }  # fmt: skip

  def note(what: str, since: tuple[float, float]) -> None:
    taken[f'{what}_s'].append(time.perf_counter() - since[0])
    taken[f'{what}_cpu_s'].append(time.process_time() - since[1])

  for _ in range(repeats):
    start = time.perf_counter(), time.process_time()
    for _ in range(copies):
      np.copyto(target, source)
    note('copy', start)
    start = time.perf_counter(), time.process_time()
    theta, state = jax.block_until_ready(merge(theta, state, deltas, weights))
    note('merge', start)
  assert all(np.isfinite(x).all() for x in theta.values())
  return taken


def report(
  layout: str, mebibytes: int, load: float, taken: dict[str, list[float]]
) -> dict[str, Any]:
  """Print a table of one layout and return its row of raw results."""
  moved = (2 * CONTRIBUTIONS + 4) * mebibytes * 2**20
  ratios = {}
  print(f'{layout}, {mebibytes} MiB x {CONTRIBUTIONS}, load {load:.1f}')
  print(f'  {"":22}{"median":>8}{"least":>8}{"most":>8}')
  for title, suffix in (('GB/s', '_s'), ('GB per core second', '_cpu_s')):
    copies, merges = taken[f'copy{suffix}'], taken[f'merge{suffix}']
    ratios[suffix] = [
      copy / merge for copy, merge in zip(copies, merges, strict=True)
    ]
    for name, values in (
      (f'copy {title}', [moved / x / 1e9 for x in copies]),
      (f'merge {title}', [moved / x / 1e9 for x in merges]),
      ('ratio', ratios[suffix]),
    ):
      middle = statistics.median(values)
      least, most = min(values), max(values)
      print(f'  {name:22}{middle:8.2f}{least:8.2f}{most:8.2f}')
  return {
    'layout': layout,
    'contributions': CONTRIBUTIONS,
    'mebibytes': mebibytes,
    'backend': jax.default_backend(),
    'jax': jax.__version__,
    'numpy': np.__version__,
    'cores': len(os.sched_getaffinity(0)),
    'load': load,
    'glibc_tunables': os.environ.get('GLIBC_TUNABLES', ''),
    'ratio_median': statistics.median(ratios['_s']),
    'ratio_range': [min(ratios['_s']), max(ratios['_s'])],
    'ratio_cpu_median': statistics.median(ratios['_cpu_s']),
    **taken,
  }


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    '--out',
    type=pathlib.Path,
    default=ROOT / 'experiments/bench/results/merge.jsonl',
  )
  parser.add_argument('--repeats', type=int, default=15)
  parser.add_argument('--note', default='', help='kept in the row')
  parser.add_argument(
    '--smoke', action='store_true', help='1 MiB, to see that it runs'
  )
  args = parser.parse_args()
  if args.repeats < 1:
    parser.error(f'--repeats={args.repeats}, expected at least 1')
  mebibytes = 1 if args.smoke else 64
  args.out.parent.mkdir(parents=True, exist_ok=True)
  ratios = []
  for layout in LAYOUTS:
    load = os.getloadavg()[0]
    taken = measure(layout, mebibytes, args.repeats)
    row = report(layout, mebibytes, load, taken) | {'note': args.note}
    ratios.append(row['ratio_median'])
    with args.out.open('a', encoding='utf-8') as file:
      file.write(json.dumps(row) + '\n')
  reached = all(ratio >= TARGET for ratio in ratios)
  print(f'ratio of {TARGET}: {"reached" if reached else "missed"}')
  # A smoke run is too small to say anything.
  return 0 if args.smoke or reached else 1


if __name__ == '__main__':
  sys.exit(main())
