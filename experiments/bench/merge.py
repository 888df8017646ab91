"""How fast a merge moves memory, against a plain copy.

Eight contributions of 64 MiB are merged by RDA and the Nesterov step as the
syncer does it: one compiled function that donates Θ and the momentum. The
least it could move is two reads of each contribution, one for its norm and
one for its direction, and a read and a write of Θ and of the momentum:
(2 M + 4) x 64 MiB. That over its time is its rate. NumPy copies as many bytes,
counting those read and those written, just before each merge. Their ratio
should be at least 0.8.

A row of raw results is added to --out.
"""

import argparse
import json
import os
import pathlib
import statistics
import sys
import time

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


def shapes_of(mebibytes: int) -> dict[str, tuple[int, ...]]:
  """Tensors as a transformer has them: large, middling and small ones."""
  rows = mebibytes * 2**20 // (4 * WIDTH)
  shapes = {
    'up': (rows // 2, WIDTH),
    'down': (WIDTH, rows // 4),
    'attention': (rows // 8, WIDTH),
    'out': (rows // 8 - 1, WIDTH),
    'norm': (WIDTH,),
  }
  assert sum(np.prod(s) for s in shapes.values()) == rows * WIDTH
  return shapes


def fragment(
  rng: np.random.Generator, shapes: dict[str, tuple[int, ...]], scale: float
) -> dict[str, jax.Array]:
  return {
    name: jax.device_put(scale * rng.standard_normal(shape, np.float32))
    for name, shape in shapes.items()
  }


def measure(mebibytes: int, repeats: int) -> dict[str, list[float]]:
  """Seconds of each copy and of each merge, taken in turn."""
  size = mebibytes * 2**20
  shapes = shapes_of(mebibytes)
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
  seconds: dict[str, list[float]] = {'copy_s': [], 'merge_s': []}
  for _ in range(repeats):
    start = time.perf_counter()
    for _ in range(copies):
      np.copyto(target, source)
    seconds['copy_s'].append(time.perf_counter() - start)
    start = time.perf_counter()
    theta, state = jax.block_until_ready(merge(theta, state, deltas, weights))
    seconds['merge_s'].append(time.perf_counter() - start)
  assert all(np.isfinite(x).all() for x in theta.values())
  return seconds


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    '--out',
    type=pathlib.Path,
    default=ROOT / 'experiments/bench/results/merge.jsonl',
  )
  parser.add_argument('--repeats', type=int, default=15)
  parser.add_argument(
    '--smoke', action='store_true', help='1 MiB, to see that it runs'
  )
  args = parser.parse_args()
  if args.repeats < 1:
    parser.error(f'--repeats={args.repeats}, expected at least 1')
  mebibytes = 1 if args.smoke else 64
  load = os.getloadavg()[0]
  seconds = measure(mebibytes, args.repeats)

  moved = (2 * CONTRIBUTIONS + 4) * mebibytes * 2**20
  rates = {
    name: [moved / s / 1e9 for s in values] for name, values in seconds.items()
  }
  ratios = [
    copy / merge
    for copy, merge in zip(seconds['copy_s'], seconds['merge_s'], strict=True)
  ]
  print(f'{"":12}{"median":>9}{"least":>9}{"most":>9}')
  for title, values in (
    ('copy, GB/s', rates['copy_s']),
    ('merge, GB/s', rates['merge_s']),
    ('ratio', ratios),
  ):
    middle = statistics.median(values)
    print(f'{title:12}{middle:9.2f}{min(values):9.2f}{max(values):9.2f}')
  ratio = statistics.median(ratios)
  verdict = 'reached' if ratio >= TARGET else 'missed'
  print(f'{TARGET} {verdict}; load of the machine before: {load:.1f}')

  row = {
    'contributions': CONTRIBUTIONS,
    'mebibytes': mebibytes,
    'backend': jax.default_backend(),
    'jax': jax.__version__,
    'numpy': np.__version__,
    'cores': len(os.sched_getaffinity(0)),
    'load': load,
    'ratio_median': ratio,
    'ratio_range': [min(ratios), max(ratios)],
    **seconds,
  }
  args.out.parent.mkdir(parents=True, exist_ok=True)
  with args.out.open('a', encoding='utf-8') as file:
    file.write(json.dumps(row) + '\n')
  # A smoke run is too small to say anything.
  return 0 if args.smoke or ratio >= TARGET else 1


if __name__ == '__main__':
  sys.exit(main())
