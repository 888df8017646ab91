"""A scenario as JSON, so that a failure can be kept and run again."""

import dataclasses
import json
from typing import Any

from diloco_jax.chaos.plan import Fault
from diloco_jax.protocol.settings import Limits
from diloco_jax.protocol.settings import Settings
from diloco_jax.simulation.compute import ComputeSettings
from diloco_jax.simulation.network import NetworkSettings
from diloco_jax.simulation.scenario import Scenario
from diloco_jax.simulation.storage import DiskSettings


def to_json(scenario: Scenario) -> str:
  """One line; what has its default is left out of the parts."""
  plain = {
    'seed': scenario.seed,
    'jitter': scenario.jitter,
    'has_task': scenario.has_task,
    'clocks_differ_s': scenario.clocks_differ_s,
    'settings': _changed(scenario.settings, ('limits',)),
    'limits': _changed(scenario.settings.limits),
    'compute': _changed(scenario.compute),
    'network': _changed(scenario.network),
    'disk': _changed(scenario.disk),
    'faults': [list(x) for x in scenario.faults],
  }
  return json.dumps(plain)


def _changed(part: Any, without: tuple[str, ...] = ()) -> dict[str, Any]:
  return {
    field.name: value
    for field in dataclasses.fields(part)
    if field.name not in without
    and (value := getattr(part, field.name)) != field.default
  }


def from_json(text: str) -> Scenario:
  """Raises ValueError, KeyError or TypeError where it is not one."""
  plain = json.loads(text)
  settings = dict(plain['settings'])
  settings['sizes'] = tuple(settings['sizes'])
  compute = dict(plain['compute'])
  compute['speeds'] = tuple(compute.get('speeds', ()))
  return Scenario(
    seed=plain['seed'],
    settings=Settings(**settings, limits=Limits(**plain['limits'])),
    compute=ComputeSettings(**compute),
    network=NetworkSettings(**plain['network']),
    disk=DiskSettings(**plain['disk']),
    faults=tuple(Fault(*x) for x in plain['faults']),
    jitter=plain['jitter'],
    has_task=plain['has_task'],
    clocks_differ_s=plain['clocks_differ_s'],
  )
