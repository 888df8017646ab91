"""Θ again, from the kept arrays of a run: every merge, bit for bit."""

import pathlib

from diloco_jax import config_json
from diloco_jax.launch import assembly
from diloco_jax.simulation.replay import DifferenceError
from diloco_jax.storage import payloads
from diloco_jax.telemetry import lines


def reproduce(workdir: pathlib.Path) -> int:
  """Do the merges of the tape again; returns how many.

  Raises:
    DifferenceError: a merge gives other bits than it gave in the run.
    OSError, ValueError: what was kept is not whole.
  """
  run = config_json.load(workdir)
  task = assembly.make_task(run)
  planned = assembly.layout(run, assembly.param_shapes(task, run.seed))
  store = assembly.make_store(planned)
  store.seed(payloads.load(workdir, payloads.START))
  path = workdir / 'tape' / 'syncer.jsonl'
  merges = 0
  for number, line in lines.read_lines(path):
    if line['kind'] == 'merge':
      merges += 1
      digest = _merged(workdir, store, line)
      if digest != line['digest_f32']:
        raise DifferenceError(path, number, digest, line['digest_f32'])
    elif line['kind'] == 'exported':
      digest = store.params_digest()
      if digest != line['params_digest']:
        raise DifferenceError(path, number, digest, line['params_digest'])
  return merges


def _merged(workdir: pathlib.Path, store: assembly.Store, line: dict) -> str:
  name = payloads.of_merge(*line['round'])
  deltas = payloads.load(workdir, name)
  weights = [x[5] for x in line['inputs']]
  if len(deltas) != len(weights):
    raise ValueError(f'{name}: {len(deltas)} members, not {len(weights)}')
  fragment = line['fragment']
  store.merge(fragment, deltas, weights)
  return store.digest(fragment)
