"""Events a second of the simulator, on one core, with all checkers on.

4 islands and 24 fragments, free running, without faults: what is timed is the
machines, the invariants, the world and every checker. Prints one JSON line for
each repeat, and appends them to --out.
"""

import argparse
import json
import pathlib
import statistics
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from diloco_jax.protocol.settings import Settings  # noqa: E402
from diloco_jax.simulation.checkers import Checkers  # noqa: E402
from diloco_jax.simulation.compute import ComputeSettings  # noqa: E402
from diloco_jax.simulation.liveness import EveryFragmentAdvances  # noqa: E402
from diloco_jax.simulation.network import NetworkSettings  # noqa: E402
from diloco_jax.simulation.scenario import Scenario  # noqa: E402
from diloco_jax.simulation.world import World  # noqa: E402


def scenario(seed: int, steps: int) -> Scenario:
  settings = Settings(
    islands=4, sizes=(5,) * 24, fingerprint='f', config_hash='c', period=24,
    overlap=2, steps=steps,
  )  # fmt: skip
  return Scenario(
    seed=seed,
    settings=settings,
    compute=ComputeSettings(step_cv=0.3),
    network=NetworkSettings(latency_s=0.05, latency_cv=0.5),
  )


def loop_s() -> float:
  """What a million rounds of a plain loop take: how fast this core is now."""
  began = time.perf_counter()
  total = 0
  for number in range(1_000_000):
    total += number * number % 7
  return time.perf_counter() - began


def one(seed: int, steps: int) -> dict[str, float]:
  plan = scenario(seed, steps)
  alive = EveryFragmentAdvances(plan.settings, plan.bound_s)
  alive.heal(0.0)
  world = World(plan, (Checkers(plan.settings, alive),))
  began = time.perf_counter()
  world.run_to_end()
  took = time.perf_counter() - began
  assert world.finished
  return {
    'seed': seed,
    'events': world.events,
    'wall_s': round(took, 3),
    'events_per_s': round(world.events / took),
    'loop_s': round(loop_s(), 3),
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--repeats', type=int, default=10)
  parser.add_argument('--steps', type=int, default=1000)
  parser.add_argument('--out', type=pathlib.Path)
  args = parser.parse_args()
  rows = [one(seed, args.steps) for seed in range(args.repeats)]
  for row in rows:
    print(json.dumps(row), flush=True)
  rates = sorted(row['events_per_s'] for row in rows)
  print(f'median {statistics.median(rates):.0f}, {rates[0]} to {rates[-1]}')
  if args.out:
    with args.out.open('a', encoding='utf-8') as out:
      out.writelines(json.dumps(row) + '\n' for row in rows)


if __name__ == '__main__':
  main()
