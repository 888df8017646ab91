"""Runs in a process of its own with four forced host devices.

Prints one JSON object: for every mesh, the losses of five steps and what was
seen of the shardings. `trainer_devices_test.py` starts it and judges.
"""

import dataclasses
import json
import os
import re

os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=4'
# Compiling is nearly all of the time.
os.environ['JAX_DISABLE_MOST_OPTIMIZATIONS'] = '1'

import jax
import numpy as np

from diloco_jax.data.samples import DataOptions
from diloco_jax.island.sharding import MeshOptions
from diloco_jax.island.trainer import InnerOptions
from diloco_jax.island.trainer import Trainer
from diloco_jax.models.transformer import ModelOptions
from diloco_jax.tasks.language_model import LanguageModelTask

MESHES = {
  'fsdp=2 tensor=2': MeshOptions(data=1, fsdp=2, tensor=2),
  'fsdp=4': MeshOptions(data=1, fsdp=4),
  'tensor=4': MeshOptions(data=1, tensor=4),
  'data=2 fsdp=2': MeshOptions(data=2, fsdp=2),
}
STEPS = 5
BATCH = 8
LENGTH = 12  # no dimension of a parameter
INNER = InnerOptions(lr=3e-2, warmup_steps=2, total_steps=STEPS)


def layout(tree):
  """Which part of every array each device holds."""
  return [
    sorted(
      (device.id, str(part))
      for device, part in x.sharding.devices_indices_map(x.shape).items()
    )
    for x in jax.tree.leaves(tree)
  ]


def batches():
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, 32, (STEPS, BATCH, LENGTH + 1)).astype(np.int32)
  return [{'tokens': t} for t in tokens]


compiled = []


def count_compiled(event, duration_s, **kwargs):
  del duration_s, kwargs
  if event == '/jax/core/compile/backend_compile_duration':
    compiled.append(event)


def exchanged_activations(program):
  """Collectives of a compiled step on arrays with a dimension of positions."""
  found = []
  for line in program.as_text().splitlines():
    match = re.search(
      r'= (.*) (all-\w+|reduce-scatter|collective-permute)(-start)?\(', line
    )
    if match and re.search(rf'[\[,]{LENGTH}[,\]]', match[1]):
      found.append(f'{match[2]} {match[1]}')
  return found


def run(mesh_options, devices, accumulate=1):
  inner = dataclasses.replace(INNER, accumulate=accumulate)
  task = LanguageModelTask(
    ModelOptions(vocab=32, width=16, depth=1, heads=4, mlp_ratio=2.0),
    DataOptions(),
    seed=0,
  )
  trainer = Trainer(
    task, inner, mesh_options, seed=0, batch_size=BATCH, devices=devices
  )
  params = trainer.init()
  start = layout(params), layout(trainer.extra['optimizer'])
  losses, compiles, program = [], [], None
  for batch in batches():
    before = len(compiled)
    program = program or trainer.compile(batch)
    params, loss = trainer.step(params, batch)
    losses.append(float(loss))
    compiles.append(len(compiled) - before)
  adam = next(s for s in trainer.extra['optimizer'] if hasattr(s, 'mu'))
  placed = trainer.put(jax.device_get(params))
  evaluated = trainer.evaluate(placed, batches()[:2])
  query = params['layers']['0']['attention']['query']
  return {
    'losses': losses,
    'exchanged': exchanged_activations(program),
    'evaluated': evaluated['loss'],
    'still': start == (layout(params), layout(trainer.extra['optimizer'])),
    'moments': layout(adam.mu) == layout(params) == layout(adam.nu),
    'put': layout(placed) == layout(params),
    'compiles': compiles,
    'query_shard': query.sharding.shard_shape(query.shape),
    'query_devices': len(query.sharding.device_set),
  }


def main():
  devices = jax.devices()
  assert len(devices) == 4, devices
  jax.monitoring.register_event_duration_secs_listener(count_compiled)
  # On the mesh with two data axes the batch is taken in parts, too.
  results = {
    name: run(mesh, devices, accumulate=2 if mesh.data == 2 else 1)
    for name, mesh in MESHES.items()
  }
  results['one'] = run(MeshOptions(), devices[:1])
  print(json.dumps(results))


if __name__ == '__main__':
  main()
