r"""What the exchange costs an inner step.

  python experiments/bench/step_overhead.py [--out=FILE] [--pairs=40]

One island trains against a syncer in another process (on the other core where
there are two). The training thread and XLA's threads have one core. The
threads of the exchange (encoding, staging, transport) may run on any, as on a
host that keeps a core beside those that feed its accelerators; with
`--placements=one` they share the training's core. Blocks of 20 steps with the exchange on (`island.step` after
every step) and off (the bare jitted loop) take turns, in random order within
a pair. The ratio of a pair is its time with exchange divided by its time
without; reported are the median ratio and a bootstrap 95 % interval. The aim
is an upper end of at most 1.02 at 1 M parameters.
"""

import argparse
import itertools
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
BLOCK = 20
ANY, ONE = 'any', 'one'  # cores for the exchange's threads
SIZES = {
  # name -> flags; parameters are counted and printed.
  '1M': ('--config.model.width=192', '--config.model.heads=6'),
  '0.13M': (),
}


# Before anything is pinned: a child would only see its parent's core.
CORES = (
  sorted(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else []
)


def pin(core: int) -> None:
  if CORES:
    os.sched_setaffinity(0, {CORES[core % len(CORES)]})


def unpin() -> None:
  """Threads that this one starts from here on may run anywhere."""
  if CORES:
    os.sched_setaffinity(0, CORES)


def start_syncer(workdir: pathlib.Path, flags: tuple[str, ...]):
  return subprocess.Popen(
    [
      sys.executable, '-m', 'diloco_jax', 'syncer',
      '--config=experiments/configs/quickstart.py', f'--workdir={workdir}',
      '--config.islands=1', '--config.steps=100000000',
      '--config.inner.total_steps=100000', *flags,
    ],
    cwd=ROOT,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
    preexec_fn=lambda: pin(1),
  )  # fmt: skip


def bootstrap(ratios: list[float], draws: int = 10_000) -> tuple[float, float]:
  """95 % interval of the median."""
  rng = random.Random(0)
  medians = sorted(
    statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(draws)
  )
  return medians[int(0.025 * draws)], medians[int(0.975 * draws) - 1]


def measure(
  name: str, flags: tuple[str, ...], pairs: int, placement: str
) -> dict:
  """Ratios of one model size."""
  import jax

  from diloco_jax import config_json
  from diloco_jax.data.samples import Lease
  from diloco_jax.launch import assembly
  from diloco_jax.launch import connecting

  with tempfile.TemporaryDirectory() as folder:
    workdir = pathlib.Path(folder) / 'run'
    syncer = start_syncer(workdir, flags)
    try:
      address = workdir / 'syncer.address'
      while not address.exists():
        if syncer.poll() is not None:
          sys.exit('the syncer did not start')
        time.sleep(0.1)
      run = config_json.load(workdir)
      task = assembly.make_task(run)
      trainer = assembly.make_trainer(run, task)
      params = trainer.init()
      batches = task.batches('train', Lease(0, 1, 0, -1))
      trainer.compile(next(batches))
      # A first step, so that XLA's threads are there and stay on this core.
      params, _ = trainer.step(params, next(batches))
      if placement == ANY:
        unpin()
      island = connecting.make_island(
        assembly.layout(run, trainer.param_shapes),
        connecting.open_endpoint(
          address.read_text(),
          connecting.read_token(workdir / 'token'),
          run.launch.transport,
        ),
        params,
        put=trainer.put,
        shardings=trainer.param_shardings,
      )
      island.warm_up(params)
      island.join(120)
      pin(0)
      params, ratios, exchanges, step_s = blocks(
        island, trainer, task, island.params, batches, pairs
      )
      island.leave('measured')
    finally:
      syncer.terminate()
      syncer.wait(60)
  low, high = bootstrap(ratios)
  exchanges.sort()
  return {
    'size': name,
    'parameters': sum(x.size for x in jax.tree.leaves(trainer.param_shapes)),
    'exchange_on': placement,
    'pairs': pairs,
    'step_ms': round(1000 * step_s, 2),
    'median_ratio': round(statistics.median(ratios), 4),
    'low': round(low, 4),
    'high': round(high, 4),
    'exchange_p99_ms': round(1000 * exchanges[int(0.99 * len(exchanges))], 3),
    'ratios': [round(x, 4) for x in ratios],
  }


def blocks(island, trainer, task, params, batches, pairs):
  """Pairs of blocks in random order; times with and without exchange."""
  rng = random.Random(0)
  ratios, exchanges, bare = [], [], []
  for pair in range(-2, pairs):  # the first two only warm up
    times = {}
    for on in rng.sample((True, False), 2):
      began = time.perf_counter()
      for _ in range(BLOCK):
        batch = next(batches)
        params, loss = trainer.step(params, batch)
        if on:
          params = island.step(
            params, tokens=task.batch_tokens(batch), loss=loss
          )
          if pair >= 0:
            exchanges.append(island.exchange_s)
      loss.block_until_ready()
      times[on] = time.perf_counter() - began
    if pair >= 0:
      ratios.append(times[True] / times[False])
      bare.append(times[False] / BLOCK)
  return params, ratios, exchanges, statistics.median(bare)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--pairs', type=int, default=40)
  parser.add_argument('--sizes', default=','.join(SIZES))
  parser.add_argument('--placements', default=f'{ANY},{ONE}')
  parser.add_argument('--out', type=pathlib.Path)
  args = parser.parse_args()
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')
  pin(0)
  sys.setswitchinterval(0.0005)
  cases = itertools.product(args.placements.split(','), args.sizes.split(','))
  for placement, name in cases:
    row = measure(name, SIZES[name], args.pairs, placement)
    print(
      f'{name}: {row["parameters"]} parameters, exchange on {placement} core, '
      f'step {row["step_ms"]} ms, with / without exchange '
      f'{row["median_ratio"]} [{row["low"]}, {row["high"]}], exchange p99 '
      f'{row["exchange_p99_ms"]} ms',
      flush=True,
    )
    if args.out:
      args.out.parent.mkdir(parents=True, exist_ok=True)
      with args.out.open('a') as stream:
        stream.write(json.dumps(row) + '\n')


if __name__ == '__main__':
  main()
